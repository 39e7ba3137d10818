"""`AsyncLLM`: prompts in, streams of outputs out, on an engine in another process."""

import asyncio
import contextlib
import dataclasses
import functools
import random
import weakref
from collections.abc import AsyncGenerator, Mapping, Sequence
from os import PathLike
from pathlib import Path
from typing import Any, Self, Unpack

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
from frontend.inputs.prompts import ChatMessage, PromptInput, TokensPrompt, chars_of, has_data
from frontend.multimodal.media import allowed_folder, has_media, in_thread
from frontend.multimodal.media_process import media_processes
from frontend.output_processor import OutputProcessor
from frontend.outputs import BeamSearchOutput, RequestOutput, beam_search_output
from frontend.pooling import PoolingCalls
from frontend.request_options import RequestOptions, adapter_of
from frontend.sampling_params import BeamSearchParams, SamplingParams
from frontend.shared_threads import OWN_TEMPLATES, REQUEST_TEMPLATES
from frontend.structured_outputs import reasoning_of_config
from frontend.text.chat_template import close_renderers
from frontend.text.long_texts import LONG_CHARS, read_texts
from frontend.text.tokenizer import Tokenizer
from protocol.addresses import check_address, default_address
from protocol.codec import binary_frame
from protocol.errors import InvalidParameter, MalformedMessage
from protocol.keys import ClientKey, read_client_key
from protocol.outputs import ModelInfo

_open_clients: "weakref.WeakSet[AsyncLLM]" = weakref.WeakSet()
"""Of this process. With the last one the processes for templates and files end."""
_NOT_CONNECTED = "not connected yet; use `async with AsyncLLM() as llm:`"


class AsyncLLM(EngineCalls, PoolingCalls):
    """A client of one engine, or of several that serve one model.

    ```python
    async with AsyncLLM() as llm:
        async for output in llm.generate("The capital of France is"):
            print(output.outputs[0].text)
    ```

    A stream continues when the engine is lost and comes back, with the same model at the same
    address, within `reconnect_timeout_s`; otherwise it ends with EngineDied. Leaving a stream early
    aborts its request. Raises InvalidInput: an option that is not one of a client, an address of
    neither kind, or a key that cannot be read.

    With several addresses a request goes to the engine with most of its prompt's prefix and the
    least to do; a stream whose engine is lost continues at another one of equal weights, dtype and
    instruction set, or waits for its own. Calls such as `statistics` are made on one of `engines`.

    Args:
        address: `ipc://PATH` or `tcp://HOST:PORT`, or several of them; default: the default address
            of `engine-core`.
        client_name: for the engine's log.
        connect_timeout_s: for the engine to answer HELLO, which it does between two steps.
        reconnect_timeout_s: for a lost engine to come back.
        silence_timeout_s: an engine that sends nothing for longer is considered lost. It sends
            nothing during a step; the end of its process or machine is noticed much sooner.
        seed: of the seeds drawn for requests that have none; default: unpredictable.
        keys: the file made by `engine-core keys add`, for an engine that listens on TCP with keys.
        structured_outputs_config: vLLM's, see docs/structured_output.md.
        allowed_local_media_path: a folder; prompts may name files below it as images and sounds.
        routing_policy: of several engines, which one gets a request; see docs/router.md.
        engine_options: none; `launch` takes them.
    """

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
        self.addresses = given or (default_address(),)
        if len(set(self.addresses)) < len(self.addresses):
            raise InvalidInput(f"an address is given twice: {', '.join(self.addresses)}; omit one")
        self._key: ClientKey | None = None
        try:
            for each in self.addresses:
                check_address(each)
                if keys is not None:
                    self._key = read_client_key(Path(keys), each)
        except InvalidParameter as error:
            raise InvalidInput(str(error)) from None
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
        self.allowed_local_media_path = allowed_folder(allowed_local_media_path)

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
        allowed_folder(allowed_local_media_path)
        number = engine_options.pop("data_parallel_size", 1)
        return await cls.launched(
            *start_daemons(daemon_arguments(model, engine_options), number),
            startup_timeout_s=startup_timeout_s,
            client_name=client_name,
            seed=seed,
            structured_outputs_config=structured_outputs_config,
            allowed_local_media_path=allowed_local_media_path,
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
            ZmqTransport(address, self._key),
            dataclasses.replace(self._options, address=address),
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
                clock=self._clock,
                reasoning=self._reasoning,
                media_path=lambda: None if (it := own()) is None else it.allowed_local_media_path,
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

    # requests

    def generate(
        self,
        prompt: PromptInput,
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
        *,
        session_id: str | None = None,
        **options: Unpack[RequestOptions],
    ) -> AsyncGenerator[RequestOutput, None]:
        """Complete one prompt, as a stream that ends with the output whose `finished` is True.

        A slow consumer gets several outputs merged into one.

        Args:
            sampling_params: default: the model's own.
            request_id: default: a number. Free again when the request ends.
            priority: smaller is more urgent: of all requests under policy priority, of a tenant's
                under fair; 0 under fcfs.
            tenant: whose share of the engine it uses, under policy fair; default: this client's.
                What stands behind a slash divides the share: "lab/ann", "lab/bob".
            cache_salt: only requests with the same salt share cached prompts.
            timeout_s: seconds, from this call on and also across a loss of the engine, after which
                it ends with what it has and finish reason "timeout".
            adapter: the name of one of the engine's adapters; `lora_request`: vLLM's way to say it,
                which also loads one that the engine does not know.
            session_id: requests with the same one are best served by the same one of several
                engines; see docs/router.md.

        Raises:
            InvalidInput: the prompt or the parameters cannot be served, or `request_id` is in use.
            QueueFull: the engine's queue is full; try again later.
            RequestRejected: the engine refused it for another reason.
            EngineDied: the engine was lost and did not come back.
        """
        return self._stream(prompt, sampling_params, request_id, options, session_id)

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
        session_id: str | None = None,
        **options: Unpack[RequestOptions],
    ) -> AsyncGenerator[RequestOutput, None]:
        """Answer a conversation: `generate` behind the model's chat template.
        Raises InvalidInput, QueueFull, RequestRejected, EngineDied: see `generate`; also a template
        that fails, or passes its limits of time and memory."""
        prompt = await self.chat_prompt(
            messages,
            is_cut=_is_cut(sampling_params),
            chat_template=chat_template,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            tools=tools,
            **(chat_template_kwargs or {}),
        )
        stream = self._stream(prompt, sampling_params, request_id, options, session_id)
        async with contextlib.aclosing(stream) as outputs:
            async for output in outputs:
                yield output

    async def chat_prompt(
        self, messages: Sequence[ChatMessage], **template_options: Any
    ) -> TokensPrompt:
        """The prompt of a conversation: see `InputProcessor.chat_prompt`."""
        await self.ready()
        make, processor = functools.partial, self.input_processor
        template = template_options.get("chat_template")
        is_own = isinstance(template, str | None) and processor.tokenizer.is_own(template)
        threads = OWN_TEMPLATES if is_own else REQUEST_TEMPLATES
        if not has_media(messages):
            return await threads.run(make(processor.chat_prompt, messages, **template_options))
        text, items = await threads.run(make(processor.chat_text, messages, **template_options))
        return await in_thread(make(processor.chat_tokens, text, items), decodes=True)

    async def with_media(self, prompt: object) -> object:
        """See `InputProcessor.with_media`."""
        is_long = chars_of(prompt) > LONG_CHARS and self.input_processor.encoder_prompts is not None
        if not (has_data(prompt) or is_long):
            return prompt
        await self.ready()
        call = functools.partial(self.input_processor.with_media, prompt)
        return await in_thread(call, decodes=True)

    async def tokenized(self, prompts: Sequence[object], **options: Any) -> list[object]:
        """Prompts of which those that are texts have their tokens, too, without stopping what else
        runs on this event loop. Options: see `InputProcessor.encode`."""
        await self.ready()
        found, pause, one = list[object](), Pause(), len(prompts) == 1
        for index, prompt in enumerate(prompts):
            name = "prompt" if one else f"prompt {index}"
            read = functools.partial(self.input_processor.tokenized, prompt, name, **options)
            found.append(await read_texts(read, chars_of(prompt)))
            await pause.between()
        return found

    async def beam_search(
        self,
        prompt: PromptInput,
        params: BeamSearchParams,
        request_id: str | None = None,
        **options: Unpack[RequestOptions],
    ) -> BeamSearchOutput:
        """The likeliest continuations of one prompt, best first. Nothing comes before the end; if
        the engine is lost, the search starts again.
        Raises InvalidInput, QueueFull, RequestRejected, EngineDied: see `generate`."""
        stream = self._stream(prompt, params, request_id, options)
        async with contextlib.aclosing(stream) as outputs:
            final = [output async for output in outputs][-1]
        return beam_search_output(final, self.input_processor.optional_tokenizer)

    async def _stream(
        self,
        prompt: object,
        params: SamplingParams | BeamSearchParams | None,
        request_id: str | None,
        options: RequestOptions,
        session_id: str | None = None,
    ) -> AsyncGenerator[RequestOutput, None]:
        await self.ready()
        await self.know_adapter(adapter_of(options))
        prompt = await self.with_media(prompt)
        if chars_of(prompt) > LONG_CHARS and self.input_processor.encoder_prompts is None:
            (prompt,) = await self.tokenized([prompt], is_cut=_is_cut(params))
        request = self.input_processor.make_request(
            prompt, params, self.session.requests.new_request_id(request_id), **options
        )
        request.session_id = session_id
        try:
            self.session.submit(request)
            finished = False
            while not finished:
                output = await request.next_output()
                finished = output.finished
                yield output
        finally:
            self.session.release(request)

    async def abort(self, request_id: str | Sequence[str]) -> None:
        """End requests: their streams get a last output with finish reason "abort". Unknown ids
        are ignored, as their requests may just have ended."""
        for each in (request_id,) if isinstance(request_id, str) else tuple(request_id):
            request = self.session.requests.get(each)
            if request is not None:
                request.finish("abort")
                self.session.release(request)


def _is_cut(params: SamplingParams | BeamSearchParams | None) -> bool:
    return isinstance(params, SamplingParams) and params.truncate_prompt_tokens is not None
