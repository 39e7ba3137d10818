"""A client of one engine, or of several that serve one model: opened, ready, closed. What is asked
of them is `AsyncLLM`'s."""

import asyncio
import dataclasses
import random
import weakref
from collections.abc import Awaitable, Callable, Mapping, Sequence
from os import PathLike
from pathlib import Path
from typing import Any, Self

from frontend.engine.connection import ConnectionOptions
from frontend.engine.daemon import ChildDaemon, start_daemons
from frontend.engine.engine_options import daemon_arguments
from frontend.engine.session import EngineSession, Neighbours
from frontend.engine.transport import ZmqTransport
from frontend.engine_calls import Engine, EngineCalls
from frontend.errors import EngineRefused, EngineUnavailable, InvalidInput
from frontend.event_loop import Clock, Pause
from frontend.fleet.engine_group import EngineGroup
from frontend.fleet.router import ROUTING_POLICIES, RoutingPolicy
from frontend.input_processor import InputProcessor
from frontend.multimodal.media import MediaSources
from frontend.multimodal.media_process import media_processes
from frontend.output_processor import OutputProcessor
from frontend.outputs import RequestOutput
from frontend.request_state import RequestState
from frontend.sampling_params import SamplingParams, as_invalid_input
from frontend.structured_outputs import reasoning_of_config
from frontend.text.chat_template import close_renderers
from frontend.text.tokenizer import Tokenizer
from protocol.addresses import check_address, default_address
from protocol.codec import binary_frame
from protocol.errors import MalformedMessage
from protocol.keys import ClientKey, read_client_key
from protocol.outputs import ModelInfo

_MOST_IN_FLIGHT = 32_768
"""Most requests of one call that are sent at a time: fewer than the engine lets wait by default."""
_open_clients: "weakref.WeakSet[EngineClient]" = weakref.WeakSet()
"""Of this process. With the last one the processes for templates and files end."""
_NOT_CONNECTED = "not connected yet; use `async with AsyncLLM() as llm:`"


class EngineClient(EngineCalls):
    """Arguments and errors: see `AsyncLLM`."""

    preset_sampling: Mapping[str, Any] = {}
    """Sampling parameters of requests that set none, before the model's: of a `PresetLLM`."""

    def __init__(
        self,
        address: str | Sequence[str] | None = None,
        *,
        client_name: str = "",
        connect_timeout_s: float = 60.0,
        reconnect_timeout_s: float = 60.0,
        silence_timeout_s: float = 300.0,
        seed: int | None = None,
        keys: str | PathLike[str] | None = None,
        structured_outputs_config: Mapping[str, Any] | None = None,
        allowed_local_media_path: str | PathLike[str] | None = None,
        allow_media_url: str | Sequence[str] = (),
        routing_policy: RoutingPolicy = "cache-aware",
        **engine_options: Any,
    ) -> None:
        super().__init__()
        self._reasoning = reasoning_of_config(structured_outputs_config)
        if engine_options:
            raise InvalidInput(
                f"AsyncLLM() does not take {', '.join(engine_options)}: it joins the engine at "
                "`address`; to start one use `await AsyncLLM.launch(model, ...)`"
            )
        given = (address,) if isinstance(address, str) else tuple(address or ())
        with as_invalid_input():
            self.addresses = given or (default_address(),)
        if len(set(self.addresses)) < len(self.addresses):
            raise InvalidInput(f"an address is given twice: {', '.join(self.addresses)}; omit one")
        key_file = None if keys is None else Path(keys)
        self._key: ClientKey | None = None
        with as_invalid_input():
            for each in self.addresses:
                check_address(each)
                if key_file is not None:
                    self._key = read_client_key(key_file, each)
        self._options = ConnectionOptions(
            address=self.addresses[0],
            client_name=client_name,
            connect_timeout_s=connect_timeout_s,
            reconnect_timeout_s=reconnect_timeout_s,
            silence_timeout_s=silence_timeout_s,
        )
        if routing_policy not in ROUTING_POLICIES:
            raise InvalidInput(
                f"routing_policy is {routing_policy!r}, it must be one of "
                f"{', '.join(ROUTING_POLICIES)}"
            )
        self._routing_policy = routing_policy
        self._random = random.SystemRandom() if seed is None else random.Random(seed)
        self._clock = Clock()
        self._children: dict[str, ChildDaemon] = {}
        """Engines that end with this client, by address."""
        self._session: EngineSession | EngineGroup | None = None
        self._input_processor: InputProcessor | None = None
        self.media_sources = MediaSources.of(allowed_local_media_path, allow_media_url)

    # opening and closing

    @classmethod
    async def connect(cls, address: str | Sequence[str] | None = None, **options: Any) -> Self:
        """A connected client. Options are the constructor's. Close it in the end.

        Raises:
            EngineUnavailable: no engine answers there.
            EngineRefused: the engine speaks another wire version, or does not take the key.
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
        structured_outputs_config: Mapping[str, Any] | None = None,
        allowed_local_media_path: str | PathLike[str] | None = None,
        allow_media_url: str | Sequence[str] = (),
        **engine_options: Any,
    ) -> Self:
        """Start an engine for this client alone, and connect. It ends with the client.

        With `supervise=True` an engine that dies is started again, and streams go on.

        Args:
            startup_timeout_s: for the engine to get ready, also when it is started again.
            engine_options: those of `LLM`; with `data_parallel_size` so many engines share the
                machine, each with the other options.

        Raises:
            InvalidInput: an option that this engine does not support.
            EngineStartError: the engine did not get ready; the text holds its last lines.
        """
        reasoning_of_config(structured_outputs_config)
        MediaSources.of(allowed_local_media_path, allow_media_url)
        number = engine_options.pop("data_parallel_size", 1)
        return await cls.launched(
            *start_daemons(daemon_arguments(model, engine_options), number),
            startup_timeout_s=startup_timeout_s,
            client_name=client_name,
            seed=seed,
            structured_outputs_config=structured_outputs_config,
            allowed_local_media_path=allowed_local_media_path,
            allow_media_url=allow_media_url,
        )

    @classmethod
    async def launched(
        cls, *children: ChildDaemon, startup_timeout_s: float = 600.0, **options: Any
    ) -> Self:
        """A client of engines that are starting, and end with the client; options are its own.
        Raises EngineStartError: see `launch`."""
        try:
            await asyncio.gather(*(each.ready(startup_timeout_s) for each in children))
            client = cls(
                [each.address for each in children],
                reconnect_timeout_s=startup_timeout_s,
                **options,
            )
            client._children = {each.address: each for each in children}
            await client.open()
        except BaseException:
            await asyncio.gather(*(each.close() for each in children))
            raise
        return client

    async def open(self) -> None:
        """Connect. Done by `async with`, `connect` and `launch`.
        Raises EngineUnavailable, EngineRefused: see `connect`."""
        if self._session is None:
            self._session = self._make_client_session()
        _open_clients.add(self)
        try:
            await self.ready()
        except BaseException:
            await self.close()
            raise

    def _make_client_session(self) -> EngineSession | EngineGroup:
        if len(self.addresses) == 1:
            return self._make_session(self.address)
        return self._make_group()

    def _make_group(self) -> EngineGroup:
        return EngineGroup(
            self.addresses,
            self._make_session,
            clock=self._clock,
            routing_policy=self._routing_policy,
        )

    def _make_session(
        self,
        address: str,
        requests: OutputProcessor | None = None,
        neighbours: Neighbours | None = None,
    ) -> EngineSession:
        return EngineSession(
            transport=ZmqTransport(address, self._key),
            options=dataclasses.replace(self._options, address=address),
            clock=self._clock,
            child=self._children.get(address),
            requests=requests,
            neighbours=neighbours,
        )

    async def ready(self) -> None:
        """Return once an engine accepts requests: at once, or when it is back.
        Raises EngineUnavailable, EngineRefused, EngineDied, ClientClosed."""
        session = self.session
        await session.ready()
        welcome = session.welcome
        assert welcome is not None
        if self._input_processor is None or welcome.model != self._input_processor.model:
            before, info = self._input_processor, welcome.model.tokenizer
            tokenizer = None
            if before is not None and info == before.model.tokenizer:
                tokenizer = before.optional_tokenizer
            elif info is not None and info.tokenizer_json is not None:
                try:
                    document = binary_frame(info.tokenizer_json, session.welcome_frames)
                    tokenizer = Tokenizer.from_welcome(info, document)
                except (MalformedMessage, ValueError) as error:
                    raise EngineRefused(f"its tokenizer cannot be used: {error}") from error
            own = weakref.ref(self)  # no circle: a client that was closed is freed at once
            self._input_processor = InputProcessor(
                welcome.model,
                tokenizer,
                seeds=self._random,
                now=self._clock.now,
                reasoning=self._reasoning,
                media_sources=lambda: it.media_sources if (it := own()) else MediaSources(),
            )
        session.welcome_frames = ()  # megabytes that are not read again

    async def close(self) -> None:
        """Abort what runs, disconnect, and stop an engine that `launch` started."""
        if self._session is not None:
            await self._session.close()
        await asyncio.gather(*(each.close() for each in self._children.values()))
        _open_clients.discard(self)
        if not _open_clients:
            close_renderers()
            media_processes.close()

    async def __aenter__(self) -> Self:
        await self.open()
        return self

    async def __aexit__(self, *_error: object) -> None:
        await self.close()

    @property
    def address(self) -> str:
        return ", ".join(self.addresses)

    @property
    def engines(self) -> list[Engine]:
        """Each engine by itself, in the order of their addresses."""
        session = self.session
        sessions = session.sessions if isinstance(session, EngineGroup) else [session]
        return [Engine(*each) for each in zip(self.addresses, sessions, strict=True)]

    @property
    def session(self) -> EngineSession | EngineGroup:
        if self._session is None:
            raise EngineUnavailable(_NOT_CONNECTED)
        return self._session

    # the model

    @property
    def input_processor(self) -> InputProcessor:
        """Makes requests without sending them."""
        if self._input_processor is None:
            raise EngineUnavailable(_NOT_CONNECTED)
        return self._input_processor

    @property
    def model(self) -> ModelInfo:
        """The model that the engine serves."""
        return self.input_processor.model

    def get_tokenizer(self) -> Tokenizer:
        """Raises InvalidInput if the model came without one."""
        return self.input_processor.tokenizer

    def get_default_sampling_params(self) -> SamplingParams:
        """The sampling that the model's authors recommend, as a new object."""
        return SamplingParams.from_defaults(self.model.default_sampling)

    # requests of one call

    async def run_all(
        self,
        requests: Sequence[RequestState],
        answer: Callable[[RequestState], Awaitable[RequestOutput]],
    ) -> list[RequestOutput]:
        """What `answer` gives of each, in their order; they may be more than an engine takes at
        once. An error of one aborts all."""
        session, outputs, pause = self.session, list[RequestOutput](), Pause()
        try:
            for index, request in enumerate(requests):
                # the first ones, then another one for each that has ended
                first = index + _MOST_IN_FLIGHT - 1 if index else 0
                for each in requests[first : index + _MOST_IN_FLIGHT]:
                    session.submit(each)
                    await pause.between()
                outputs.append(await answer(request))
            return outputs
        finally:
            for request in requests:
                session.release(request)
