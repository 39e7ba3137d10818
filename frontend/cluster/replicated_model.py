"""A model of the HTTP server whose engines are a deployment's replicas: as many as the directory
says, none while it is scaled to zero. Knows nothing of Ray."""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from frontend.async_llm import AsyncLLM
from frontend.elastic_llm import ElasticLLM
from frontend.engine_calls import Engine
from frontend.errors import EngineClientError, EngineUnavailable
from frontend.http.api_errors import ApiError
from frontend.http.exchange import current_exchange
from frontend.http.served_models import ServedModel

logger = logging.getLogger(__name__)

_CHECK_S, _RETRY_S = 0.1, 1.0


class ReplicatedModel(ServedModel):
    """
    Args:
        start: asks for a replica where there may be none, and returns when there is one.
        may_rest: whether it may have no replica; a request starts one then.
        startup_timeout_s: for a request to wait for a replica.
        client_options: of `ElasticLLM`.
    """

    def __init__(
        self,
        name: str,
        *,
        start: Callable[[], Awaitable[object]],
        may_rest: bool,
        startup_timeout_s: float,
        client_options: Mapping[str, Any],
    ) -> None:
        super().__init__(self._make_llm, [name])
        self._start = start
        self._may_rest = may_rest
        self._startup_timeout_s = startup_timeout_s
        self._client_options = client_options
        self._addresses: tuple[str, ...] = ()
        self._starting: asyncio.Task[None] | None = None
        self._since_s = 0.0

    def set_addresses(self, addresses: tuple[str, ...]) -> None:
        """The replicas that there are now."""
        self._addresses = addresses
        if isinstance(self._client, ElasticLLM):
            self._client.set_addresses(addresses)

    @property
    def resting(self) -> str | None:
        if self._addresses or not self._may_rest:
            return None
        if self._starting is None:
            return "scaled to zero"
        return f"starting for {time.monotonic() - self._since_s:.0f} s"

    async def ready(self) -> AsyncLLM:
        if not self._addresses:
            raise EngineUnavailable(
                f"{self.names[0]} has no replica; see `ray status` and its logs"
            )
        llm = await super().ready()
        self.set_addresses(self._addresses)  # they may have changed meanwhile
        return llm

    async def engines(self) -> list[Engine]:
        return (await self.ready()).engines

    async def for_request(self) -> AsyncLLM:
        """Its client, once a replica is there. Raises ApiError: none is, within the limit."""
        exchange = current_exchange.get()
        deadline_s = time.monotonic() + self._startup_timeout_s
        reason = "no replica is there"
        while True:
            if self._addresses:
                try:
                    llm = await self.ready()
                    assert isinstance(llm, ElasticLLM)
                    if llm.is_served:
                        return llm
                    reason = "its replicas are away, or drain"
                except EngineClientError as error:
                    reason = str(error)
            if time.monotonic() > deadline_s:
                raise ApiError(
                    503,
                    f"{self.names[0]} does not serve: {reason}; see `ray status`, and raise its "
                    "startup_timeout_s if it needs longer",
                    code="engine_unavailable",
                    retry_after_s=5,
                )
            self._ask_for_a_replica()
            if exchange is not None:
                exchange.waits_for = lambda: f"{self.names[0]} is {self.resting or 'away'}"
            try:
                await asyncio.sleep(_CHECK_S)
            finally:
                if exchange is not None:
                    exchange.waits_for = None

    def _ask_for_a_replica(self) -> None:
        if self._starting is None:
            self._since_s = time.monotonic()
            self._starting = asyncio.create_task(self._start_one())

    async def _start_one(self) -> None:
        try:
            await self._start()
        except Exception as error:
            logger.warning("no replica of %s can be asked for: %s", self.names[0], error)
            await asyncio.sleep(_RETRY_S)
        finally:
            self._starting = None

    async def close(self) -> None:
        if self._starting is not None:
            self._starting.cancel()
        await super().close()

    def _make_llm(self) -> ElasticLLM:
        return ElasticLLM(self._addresses, client_name="on-ray", **self._client_options)
