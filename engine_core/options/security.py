"""Options for who may use the engine, and what its users can learn of each other."""

import dataclasses
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from engine_core.options.values import FLAG, SERVING


@Parameter(name="*", group=SERVING.group)
@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class SecurityOptions:
    keys: Path | None = None
    """The folder with the keys of clients that may connect over TCP (`engine-core keys`)."""
    insecure: Annotated[bool, FLAG] = False
    """Listen on a TCP address beyond this machine without keys and encryption."""
    isolate_tenants: Annotated[bool, FLAG] = False
    """Tenants share no cached prefixes, so none can tell from times what others sent; without a
    key or a tenant each client is one of its own."""
