"""One request over HTTP and its answer: what logs and limits need to know of it."""

import itertools
import secrets
import time
from collections.abc import Callable, Mapping
from contextvars import ContextVar
from dataclasses import dataclass, field

from frontend.http.api_keys import ApiKey

_numbers = itertools.count()


@dataclass(slots=True)
class Exchange:
    """
    Args:
        request_id: the client's own (X-Request-Id), or a random one.
        caller: the key's name, or the remote address.
        is_endless: its answer goes on until the reader leaves, or the server stops.
    """

    request_id: str = field(default_factory=lambda: secrets.token_hex(12))
    key: ApiKey | None = None
    caller: str = "local"
    started_s: float = field(default_factory=time.monotonic)
    path: str = ""
    headers: Mapping[str, str] = field(default_factory=dict)
    model: str = ""
    """By the name that was asked for."""
    num_prompt_tokens: int = 0
    num_output_tokens: int = 0
    status: int = 0
    is_endless: bool = False
    waits_for: Callable[[], str] | None = None
    """What keeps it from being answered, if that may take long."""
    at_end: list[Callable[[], None]] = field(default_factory=list)
    """Called when its answer is over."""

    def engine_request_id(self) -> str:
        """For one of its requests to the engine. A client may send the same id twice at once."""
        return f"{self.request_id}-{next(_numbers)}"


current_exchange: ContextVar[Exchange | None] = ContextVar("current_exchange", default=None)
"""Of the request that is being answered."""
