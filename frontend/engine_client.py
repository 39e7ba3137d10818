"""One client of one engine: its connection, its live requests, what the engine is.

Owns opening and closing, also of an engine started for this client alone. Must not know what
streams and batches look like: they are built on it.
"""

import random
from collections.abc import Sequence
from types import TracebackType
from typing import Any, Self

from frontend.daemon import ChildDaemon
from frontend.engine_calls import EngineCalls
from frontend.engine_options import daemon_arguments
from frontend.errors import EngineUnavailable
from frontend.live_request import LiveRequest
from frontend.request_factory import RequestFactory
from frontend.request_registry import RequestRegistry
from frontend.sampling_params import SamplingParams
from frontend.session import EngineSession, SessionOptions
from frontend.tokenizer import Tokenizer
from protocol.addresses import default_address
from protocol.calls import AnyCall, AnyResult
from protocol.codec import binary_frame
from protocol.explanations import RequestInfo
from protocol.outputs import ModelInfo


class EngineClient(EngineCalls):
    """What `AsyncLLM` is but for its streams; its arguments are described there."""

    def __init__(
        self,
        address: str | None = None,
        *,
        client_name: str = "",
        connect_timeout_s: float = 60.0,
        reconnect_timeout_s: float = 10.0,
        silence_timeout_s: float = 300.0,
        seed: int | None = None,
    ) -> None:
        self._address = address or default_address()
        self._options = SessionOptions(
            client_name=client_name,
            wants_tokenizer=True,
            connect_timeout_s=connect_timeout_s,
            reconnect_timeout_s=reconnect_timeout_s,
            silence_timeout_s=silence_timeout_s,
        )
        self._random = random.SystemRandom() if seed is None else random.Random(seed)
        self._child: ChildDaemon | None = None
        self._session: EngineSession | None = None
        self._factory: RequestFactory | None = None
        self.requests = RequestRegistry()

    @classmethod
    async def connect(cls, address: str | None = None, **options: Any) -> Self:
        """A connected client. Options are the constructor's. Close it in the end.

        Raises:
            EngineUnavailable: nobody answers there.
            EngineRefused: the engine speaks another wire version.
        """
        client = cls(address, **options)
        await client.open()
        return client

    @classmethod
    async def launch(
        cls,
        model: str,
        *,
        client_name: str = "",
        seed: int | None = None,
        startup_timeout_s: float = 600.0,
        **engine_options: Any,
    ) -> Self:
        """Start an engine for this client alone, and connect. It ends with the client.

        Args:
            engine_options: those of `LLM`.

        Raises:
            InvalidInput: an option that this engine does not support.
            EngineStartError: the engine did not get ready; the text holds its last lines.
        """
        child = ChildDaemon(daemon_arguments(model, engine_options))
        try:
            await child.ready(startup_timeout_s)
            client = cls(child.address, client_name=client_name, seed=seed)
            client._child = child
            await client.open()
        except BaseException:
            await child.close()
            raise
        return client

    async def open(self) -> None:
        """Connect. Done by `async with`, `connect` and `launch`.

        Raises:
            EngineUnavailable, EngineRefused: see `connect`.
        """
        if self._session is None:
            self._session = EngineSession(self._address, self._options, child=self._child)
        try:
            await self.ready()
        except BaseException:
            await self.close()
            raise

    async def close(self) -> None:
        """Abort what runs, leave, and stop an engine that `launch` started."""
        if self._session is not None:
            await self._session.close()
        if self._child is not None:
            await self._child.close()

    async def __aenter__(self) -> Self:
        await self.open()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self.close()

    @property
    def address(self) -> str:
        return self._address

    @property
    def model(self) -> ModelInfo:
        """What the engine serves."""
        return self.factory.model

    def get_tokenizer(self) -> Tokenizer:
        """
        Raises:
            InvalidInput: the model came without one.
        """
        return self.factory.tokenizer

    def get_default_sampling_params(self) -> SamplingParams:
        """What the model's authors recommend, as a new object."""
        return self.factory.default_sampling_params()

    def send(self, request: LiveRequest) -> None:
        """Send what `factory` made. It must be given to `release` in the end."""
        self.requests.add(request)
        self._connected_session().submit(request)

    def release(self, request: LiveRequest) -> None:
        """Forget a request, and stop what still runs of it."""
        self.requests.remove(request)
        self._connected_session().release(request)

    async def abort(self, request_id: str | Sequence[str]) -> None:
        """End live requests: their streams get a last output with finish reason "abort". Unknown
        ids are ignored, as their requests may just have ended."""
        for each in (request_id,) if isinstance(request_id, str) else tuple(request_id):
            request = self.requests.get(each)
            if request is not None:
                request.end("abort")
                self.release(request)

    async def request_info(self, request_id: str) -> RequestInfo:
        """Where a request is and why: a live one of this client by the id that `generate` was
        given, any other by the id that the engine knows (`LiveRequest.wire_ids`)."""
        request = self.requests.get(request_id)
        if request is not None and request.wire_ids:
            request_id = request.wire_ids[0]
        return await super().request_info(request_id)

    async def call(self, call: AnyCall) -> AnyResult:
        return await self._connected_session().call(call)

    async def ready(self) -> None:
        """Return once there is an engine to send to: at once, or when it is back.

        Raises:
            EngineUnavailable, EngineRefused, EngineDied, ClientClosed.
        """
        session = self._connected_session()
        await session.ready()
        welcome = session.welcome
        assert welcome is not None
        if self._factory is None or welcome.model != self._factory.model:
            tokenizer = None
            info = welcome.model.tokenizer
            if info is not None and info.tokenizer_json is not None:
                document = binary_frame(info.tokenizer_json, session.welcome_frames)
                tokenizer = Tokenizer.from_welcome(info, document)
            self._factory = RequestFactory(welcome.model, tokenizer, seeds=self._random)

    @property
    def factory(self) -> RequestFactory:
        """Makes requests without sending them, for callers that handle many at once."""
        if self._factory is None:
            raise EngineUnavailable("not connected yet; use `async with AsyncLLM() as llm:`")
        return self._factory

    def _connected_session(self) -> EngineSession:
        if self._session is None:
            raise EngineUnavailable("not connected yet; use `async with AsyncLLM() as llm:`")
        return self._session
