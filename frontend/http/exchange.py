"""A request over HTTP and its answer: whose it is, and what logs and limits need to know of it."""

import itertools
import secrets
import time
from collections.abc import Callable, Mapping
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

from starlette.requests import Request

from frontend.http.api_errors import ApiError
from frontend.http.api_keys import ApiKey

_numbers = itertools.count()


@dataclass(slots=True)
class Exchange:
    """
    Args:
        request_id: the client's own (X-Request-Id), or a random one.
        caller: the key's name, or the remote address: its share of the engine, which a `user` of
            its requests divides.
        is_endless: its answer goes on until the reader leaves, or the server stops.
    """

    request_id: str = field(default_factory=lambda: secrets.token_hex(12))
    key: ApiKey | None = None
    caller: str = "local"
    started_s: float = field(default_factory=time.monotonic)
    path: str = ""
    headers: Mapping[str, str] = field(default_factory=dict)
    model: str = ""
    """The model's name, as it was asked for."""
    adapter: str | None = None
    """The adapter's name, if the request named one as its model."""
    is_batch: bool = False
    """Whether it is a line of a batch, which was let in when the batch was made."""
    default_priority: int = 0
    """The priority of its requests to the engine that name none."""
    num_prompt_tokens: int = 0
    num_output_tokens: int = 0
    status: int = 0
    is_endless: bool = False
    wants_stream: bool = False
    """Whether a stream was asked for, and may be given."""
    waits_for: Callable[[], str] | None = None
    """The reason why it is not answered yet, if that may take long."""
    at_end: list[Callable[[], None]] = field(default_factory=list)
    """Called when its answer is over."""

    @property
    def owner(self) -> str | None:
        """Whose what it stores is. None without keys: then all callers are one."""
        return None if self.key is None else self.caller

    @property
    def is_admin(self) -> bool:
        """Whether it may see the requests of others: without keys everybody."""
        return self.key is None or self.key.is_admin

    def owns(self, tenant: str | None) -> bool:
        return tenant is not None and tenant.partition("/")[0] == self.caller

    def sent_as(self, user: str | None = None, priority: int | None = None) -> dict[str, Any]:
        """Arguments of `AsyncLLM.generate` for one of its requests to the engine. A client may send
        the same id twice at once: the engine's is a new one that begins with it.

        Raises:
            ApiError: its key may not ask for a priority as urgent.
        """
        return {
            "request_id": f"{self.request_id}-{next(_numbers)}",
            "priority": self._priority(priority),
            "tenant": self.caller if not user else f"{self.caller}/{user:.64}",
            "adapter": self.adapter,
        }

    def generates_as(
        self, user: str | None = None, priority: int | None = None, session: str | None = None
    ) -> dict[str, Any]:
        """As `sent_as`, for tokens: of several engines that of its session is preferred. The header
        X-Session-Id goes before `session`, that before `user`."""
        session_id = self.headers.get("x-session-id") or session or user
        return self.sent_as(user, priority) | {"session_id": session_id}

    def _priority(self, asked: int | None) -> int:
        floor = None if self.key is None else self.key.min_priority
        if floor is None:
            return self.default_priority if asked is None else asked
        if asked is not None and asked < floor:
            raise ApiError(
                403,
                f"priority is {asked}, key {self.caller!r} may ask for {floor} and above",
                param="priority",
            )
        return max(floor, self.default_priority) if asked is None else asked


def exchange_of(request: Request) -> Exchange:
    found: Exchange = request.scope["exchange"]
    return found


current_exchange: ContextVar[Exchange | None] = ContextVar("current_exchange", default=None)
"""The exchange of the request that is being answered."""
