"""`AsyncLLM`: prompts in, streams of outputs out, on an engine in another process.

Owns the public asynchronous API. Text and tokens meet here; the wire is the session's business.
"""

import contextlib
import random
from collections.abc import AsyncGenerator, Mapping, Sequence
from types import TracebackType
from typing import Any, Self

from frontend.daemon import ChildDaemon
from frontend.engine_calls import EngineCalls
from frontend.engine_options import daemon_arguments
from frontend.errors import EngineUnavailable
from frontend.live_request import LiveRequest
from frontend.outputs import RequestOutput
from frontend.prompts import PromptInput
from frontend.request_factory import ChatMessage, RequestFactory
from frontend.request_registry import RequestRegistry
from frontend.sampling_params import SamplingParams
from frontend.session import EngineSession, SessionOptions
from frontend.tokenizer import Tokenizer
from protocol.addresses import default_address
from protocol.calls import AnyCall, AnyResult
from protocol.codec import binary_frame
from protocol.outputs import ModelInfo


class AsyncLLM(EngineCalls):
    """A client of one engine.

    ```python
    async with AsyncLLM() as llm:
        async for output in llm.generate("The capital of France is"):
            print(output.outputs[0].text)
    ```

    A stream goes on when the engine is lost and comes back, with the same model at the same
    address, within `reconnect_timeout_s`; otherwise it ends with EngineDied. Leaving a stream
    early aborts its request.

    Args:
        address: `ipc://PATH` or `tcp://HOST:PORT`; default: where `engine-core` listens unless
            told otherwise.
        client_name: for the engine's log.
        connect_timeout_s: for the engine to answer the greeting, which it does between two steps.
        reconnect_timeout_s: for a lost engine to come back.
        silence_timeout_s: an engine that says nothing for longer is taken for lost. It says
            nothing during a step; that its process or its machine died shows much sooner.
        seed: of the seeds drawn for requests that have none; default: unpredictable.
    """

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

    async def generate(
        self,
        prompt: PromptInput,
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
        *,
        priority: int = 0,
    ) -> AsyncGenerator[RequestOutput, None]:
        """Complete one prompt, as a stream that ends with the output whose `finished` is True.

        Outputs that the consumer is too slow for are merged.

        Args:
            sampling_params: default: the model's own.
            request_id: to know it by; default: a number. Free again when the request ends.

        Raises:
            InvalidInput: the prompt or the parameters cannot be served, or `request_id` is live.
            RequestRejected: the engine refused it.
            EngineDied: the engine was lost and did not come back.
        """
        await self.ready()
        request = self.factory.make(
            prompt, sampling_params, self.requests.free_id(request_id), priority=priority
        )
        async with contextlib.aclosing(self._stream(request)) as outputs:
            async for output in outputs:
                yield output

    async def chat(
        self,
        messages: Sequence[ChatMessage],
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
        *,
        chat_template: str | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: list[dict[str, Any]] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        priority: int = 0,
    ) -> AsyncGenerator[RequestOutput, None]:
        """Answer a conversation: `generate` behind the model's chat template."""
        await self.ready()
        prompt = self.factory.chat_prompt(
            messages,
            chat_template=chat_template,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            tools=tools,
            template_variables=chat_template_kwargs,
        )
        outputs = self.generate(prompt, sampling_params, request_id, priority=priority)
        async with contextlib.aclosing(outputs):
            async for output in outputs:
                yield output

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

    async def _stream(self, request: LiveRequest) -> AsyncGenerator[RequestOutput, None]:
        try:
            self.send(request)
            finished = False
            while not finished:
                output = await request.next_output()
                finished = output.finished
                yield output
        finally:
            self.release(request)

    def _connected_session(self) -> EngineSession:
        if self._session is None:
            raise EngineUnavailable("not connected yet; use `async with AsyncLLM() as llm:`")
        return self._session
