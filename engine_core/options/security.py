"""Options for who may use the engine, and what its users can learn of each other."""

import dataclasses
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from engine_core.options.values import SERVING, option


@Parameter(name="*")
@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class SecurityOptions:
    keys: Annotated[
        Path | None,
        option(
            "The folder with the keys of clients that may connect over TCP (`engine-core keys`).",
            SERVING,
        ),
    ] = None
    insecure: Annotated[
        bool,
        option(
            "Listen on a TCP address beyond this machine without keys and encryption.",
            SERVING,
            negative="",
        ),
    ] = False
    isolate_tenants: Annotated[
        bool,
        option(
            "Tenants share no cached prefixes, so none can tell from times what others sent; "
            "without a key or a tenant each client is one of its own.",
            SERVING,
            negative="",
        ),
    ] = False
