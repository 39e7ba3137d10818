"""The options that runs of chaos and soak share, of the driver and of its client processes."""

import dataclasses
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter


@Parameter(name="*")
@dataclasses.dataclass(frozen=True, kw_only=True)
class Options:
    model: str = "smollm2-135m-instruct"
    dtype: Annotated[str, Parameter(help="auto: the file's own blocks; float32.")] = "auto"
    seed: Annotated[int, Parameter(help="Of the work and of the faults.")] = 0
    time_s: Annotated[float, Parameter(name="--time", help="Seconds, but for the end.")] = 300.0
    num_processes: Annotated[int, Parameter(name="--processes")] = 10
    clients_per_process: int = 3
    num_cases: Annotated[int, Parameter(name="--cases")] = 180
    reconnect_timeout_s: Annotated[
        float, Parameter(name="--reconnect-timeout", help="Seconds for a lost engine.")
    ] = 300.0
    requests_at_once: Annotated[int, Parameter(help="Of each client.")] = 1
    requests_per_client: Annotated[
        int | None, Parameter(help="Then a client leaves and another joins; default: it stays.")
    ] = None
    is_tcp: Annotated[bool, Parameter(name="--tcp", help="On 127.0.0.1, no Unix socket.")] = False
    num_blocks: int = 3000
    json: Annotated[Path | None, Parameter(help="Write the document there, too.")] = None
