"""`engine-client embed`: a vector for each text, as lines of JSON."""

import dataclasses
import json
import sys
from typing import Annotated

from cyclopts import Parameter

from frontend.cli.connected import connected
from frontend.cli.options import DAEMON, SCHEDULING, DaemonOptions, SchedulingOptions, UsageError
from frontend.event_loop import run
from frontend.pooling_params import PoolingParams


def embed(
    *texts: str,
    prompt_name: Annotated[str | None, Parameter(help="The model's, to go before texts.")] = None,
    dimensions: Annotated[int | None, Parameter(help="The vectors' first numbers only.")] = None,
    scheduling: SchedulingOptions = SCHEDULING,
    daemon: DaemonOptions = DAEMON,
) -> int:
    """Returns the exit code.

    Args:
        texts: Default: the lines of standard input.

    Raises:
        UsageError: there is no text.
        EngineClientError: no engine, or a text that cannot be served.
    """
    if not texts and sys.stdin.isatty():
        raise UsageError("there is no TEXT; give some, or pipe lines in")
    found = list(texts) or [line.rstrip("\n") for line in sys.stdin]
    return run(_embed(daemon, found, prompt_name, dimensions, scheduling))


async def _embed(
    daemon: DaemonOptions,
    texts: list[str],
    prompt_name: str | None,
    dimensions: int | None,
    scheduling: SchedulingOptions,
) -> int:
    params = PoolingParams(dimensions=dimensions)
    policy = dataclasses.asdict(scheduling)
    async with connected(daemon, "embed") as llm:
        for output in await llm.embed(texts, params, prompt_name=prompt_name, **policy):
            sys.stdout.write(f"{json.dumps(output.outputs.embedding)}\n")
    return 0
