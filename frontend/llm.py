"""`LLM`: the synchronous API for batches, with vLLM's names and calls. It runs `AsyncLLM` on an
event loop in a thread of its own."""

import asyncio
import logging
import weakref
from collections.abc import Callable, Coroutine, Mapping, Sequence
from functools import partial, update_wrapper
from os import PathLike
from typing import Any, Concatenate, ParamSpec, Self, TypeVar, Unpack

from frontend.adapters import LoRARequest
from frontend.async_llm import AsyncLLM
from frontend.batched_requests import final_output, progress_bar, run_all, warn_of_errors
from frontend.errors import ClientClosed, InvalidInput
from frontend.event_loop import LoopThread
from frontend.inputs.prompts import ChatMessage, PromptsInput, has_data, split_prompts
from frontend.outputs import BeamSearchOutput, RequestOutput, beam_search_output
from frontend.pooling import (
    ClassificationRequestOutput,
    EmbeddingRequestOutput,
    PoolingRequestOutput,
    ScoringRequestOutput,
)
from frontend.pooling_params import PoolingParams
from frontend.request_options import RequestOptions, SharedOptions, adapter_of
from frontend.sampling_params import BeamSearchParams, RequestOutputKind, SamplingParams
from frontend.text.tokenizer import Tokenizer
from protocol.outputs import ModelInfo

logger = logging.getLogger(__name__)

Params = SamplingParams | BeamSearchParams
T = TypeVar("T")
P = ParamSpec("P")
AdapterInput = LoRARequest | Sequence[LoRARequest | None] | None


def _waiting(
    call: Callable[Concatenate[AsyncLLM, P], Coroutine[Any, Any, T]],
) -> Callable[Concatenate["LLM", P], T]:
    """A call of `AsyncLLM` that is waited for."""

    def method(self: "LLM", /, *args: P.args, **kwargs: P.kwargs) -> T:
        client = self._open_client()
        return self._thread.run_and_wait(call(client, *args, **kwargs))

    update_wrapper(method, call)
    return method


class LLM:
    """Generate, embed, classify and score batches of prompts.

    With `model`, an engine is started as a child process and ends with this object. Without, this
    is a client of the engine at `address` (default: where `engine-core` listens).

    Args:
        model: a folder, a .gguf file, a known name or a hub id.
        keys: the file made by `engine-core keys add`, for an engine at a TCP address with keys.
        seed: of the seeds drawn for requests that have none.
        startup_timeout_s: for an engine started here to get ready.
        reconnect_timeout_s: for a lost engine at `address` to come back.
        structured_outputs_config: vLLM's, see docs/structured_output.md.
        allowed_local_media_path: see `AsyncLLM`.
        engine_options: those of `engine-core` with underscores (docs/daemon.md), also by vLLM's
            names. vLLM's other engine arguments are accepted as long as they ask for nothing, such
            as `task="auto"`, and refused by name otherwise. With `data_parallel_size` so many
            engines share the machine.

    Raises:
        InvalidInput, EngineStartError: see `AsyncLLM.launch`.
        EngineUnavailable: no engine answers at `address`.
    """

    def __init__(
        self,
        model: str | None = None,
        *,
        address: str | Sequence[str] | None = None,
        keys: str | PathLike[str] | None = None,
        seed: int | None = None,
        startup_timeout_s: float = 600.0,
        reconnect_timeout_s: float = 60.0,
        structured_outputs_config: Mapping[str, Any] | None = None,
        allowed_local_media_path: str | PathLike[str] | None = None,
        **engine_options: Any,
    ) -> None:
        if model is None and engine_options:
            raise InvalidInput(
                f"{sorted(engine_options)} are options of an engine that is started here; give a "
                "model, or set them where the engine is started"
            )
        if model is not None and (address is not None or keys is not None):
            raise InvalidInput(
                "model was given with address or keys; a model starts an engine, an address names "
                "a running one: give one of them"
            )
        client_options: dict[str, Any] = {
            "seed": seed,
            "structured_outputs_config": structured_outputs_config,
            "allowed_local_media_path": allowed_local_media_path,
        }
        self._thread = LoopThread("engine-client")
        try:
            self._client = self._thread.run_and_wait(
                AsyncLLM.connect(
                    address, reconnect_timeout_s=reconnect_timeout_s, keys=keys, **client_options
                )
                if model is None
                else AsyncLLM.launch(
                    model, startup_timeout_s=startup_timeout_s, **client_options, **engine_options
                )
            )
        except BaseException:
            self._thread.close()
            raise
        self._close = weakref.finalize(self, _close, self._thread, self._client)

    def close(self) -> None:
        """Disconnect; an engine that was started here ends. Also done at exit."""
        self._close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_error: object) -> None:
        self.close()

    @property
    def address(self) -> str:
        return self._client.address

    @property
    def model(self) -> ModelInfo:
        """The model that the engine serves."""
        return self._client.model

    def get_tokenizer(self) -> Tokenizer:
        """Raises InvalidInput if the model came without one."""
        return self._client.get_tokenizer()

    def get_default_sampling_params(self) -> SamplingParams:
        """The sampling that the model's authors recommend, as a new object."""
        return self._client.get_default_sampling_params()

    def generate(
        self,
        prompts: PromptsInput,
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool | Callable[..., Any] = True,
        lora_request: AdapterInput = None,
        priority: Sequence[int] | None = None,
        **options: Unpack[SharedOptions],
    ) -> list[RequestOutput]:
        """Complete every prompt. An interrupt aborts them all.

        Args:
            prompts: text, token ids, a dictionary with `prompt` or `prompt_token_ids`, or a list
                of those.
            sampling_params: for all, or one per prompt; default: the model's own.
            use_tqdm: show a progress bar, or make one by calling this.
            lora_request: for all, or one per prompt; as `adapter`, see `AsyncLLM.generate`.
            priority: one per prompt. For this, `tenant`, `cache_salt` and `timeout_s` see
                `AsyncLLM.generate`.

        Returns:
            One output per prompt, in order. A request that the engine refused or could not finish
            has finish reason "error", and says why in `detail`.

        Raises:
            InvalidInput: a prompt or parameter that cannot be served; nothing was sent.
            EngineDied: the engine was lost and did not come back.
        """
        return self._run_batch(
            split_prompts(prompts), sampling_params, priority, lora_request, use_tqdm, options
        )

    def chat(
        self,
        messages: Sequence[ChatMessage] | Sequence[Sequence[ChatMessage]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool | Callable[..., Any] = True,
        lora_request: AdapterInput = None,
        chat_template: str | None = None,
        chat_template_content_format: str = "auto",
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: list[dict[str, Any]] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        *,
        priority: Sequence[int] | None = None,
        **options: Unpack[SharedOptions],
    ) -> list[RequestOutput]:
        """Answer one conversation or several: `generate` behind the model's chat template.
        Raises InvalidInput, EngineDied: see `generate`; also a template that fails."""
        if chat_template_content_format != "auto":
            raise InvalidInput(
                "this engine does not support chat_template_content_format="
                f"{chat_template_content_format!r}; omit it"
            )
        is_one = bool(messages) and isinstance(messages[0], Mapping)
        conversations: Sequence[Any] = [messages] if is_one else messages
        prompts = [
            self._client.input_processor.chat_prompt(
                conversation,
                is_cut=True,
                chat_template=chat_template,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=continue_final_message,
                tools=tools,
                **(chat_template_kwargs or {}),
            )
            for conversation in conversations
        ]
        return self._run_batch(prompts, sampling_params, priority, lora_request, use_tqdm, options)

    def beam_search(
        self,
        prompts: PromptsInput,
        params: BeamSearchParams,
        lora_request: AdapterInput = None,
        use_tqdm: bool | Callable[..., Any] = False,
        *,
        priority: Sequence[int] | None = None,
        **options: Unpack[SharedOptions],
    ) -> list[BeamSearchOutput]:
        """The likeliest continuations of each prompt. An interrupt aborts them all.
        Raises InvalidInput, EngineDied: see `generate`.

        Returns:
            One output per prompt, in order, each with its beams best first; or with none, and the
            reason, where the engine refused the prompt.
        """
        if not isinstance(params, BeamSearchParams):
            raise InvalidInput(
                f"params is of type {type(params).__name__}, it must be BeamSearchParams"
            )
        outputs = self._run_batch(
            split_prompts(prompts), params, priority, lora_request, use_tqdm, options
        )
        tokenizer = self._client.input_processor.optional_tokenizer
        return [beam_search_output(output, tokenizer) for output in outputs]

    def embed(
        self,
        prompts: PromptsInput,
        pooling_params: PoolingParams | None = None,
        use_tqdm: bool | Callable[..., Any] = True,
        **more: Any,
    ) -> list[EmbeddingRequestOutput]:
        """A vector for each prompt. This and the next four: one output per prompt, in order; see
        `AsyncLLM.embed` and its neighbours, also for `more` (`prompt_name`, `lora_request`,
        `priority` ...). An interrupt aborts them all.
        Raises InvalidInput, RequestRejected, RequestFailed, EngineDied: see `PoolingCalls`."""
        return self._pool(self._client.embed, prompts, pooling_params, use_tqdm, more)

    def classify(
        self,
        prompts: PromptsInput,
        pooling_params: PoolingParams | None = None,
        use_tqdm: bool | Callable[..., Any] = True,
        **more: Any,
    ) -> list[ClassificationRequestOutput]:
        """Probabilities of the labels."""
        return self._pool(self._client.classify, prompts, pooling_params, use_tqdm, more)

    def reward(
        self,
        prompts: PromptsInput,
        pooling_params: PoolingParams | None = None,
        use_tqdm: bool | Callable[..., Any] = True,
        **more: Any,
    ) -> list[PoolingRequestOutput]:
        """The labels of each token, or of each step."""
        return self._pool(self._client.reward, prompts, pooling_params, use_tqdm, more)

    def encode(
        self,
        prompts: PromptsInput,
        pooling_params: PoolingParams | None = None,
        use_tqdm: bool | Callable[..., Any] = True,
        *,
        pooling_task: str | None = None,
        **more: Any,
    ) -> list[PoolingRequestOutput]:
        """The tensors that `pooling_task` names, as they come."""
        more["pooling_task"] = pooling_task
        return self._pool(self._client.encode, prompts, pooling_params, use_tqdm, more)

    def score(
        self,
        data_1: str | Sequence[str],
        data_2: str | Sequence[str],
        pooling_params: PoolingParams | None = None,
        use_tqdm: bool | Callable[..., Any] = True,
        **more: Any,
    ) -> list[ScoringRequestOutput]:
        """Of each text of `data_2` with that of `data_1`, or with its only one."""
        first, second = (
            [each] if isinstance(each, str) else list(each) for each in (data_1, data_2)
        )
        run = partial(self._client.score, first)
        return self._pool(run, second, pooling_params, use_tqdm, more)

    def _pool(
        self,
        run: Callable[..., Coroutine[Any, Any, T]],
        prompts: PromptsInput,
        pooling_params: PoolingParams | None,
        use_tqdm: bool | Callable[..., Any],
        more: dict[str, Any],
    ) -> T:
        self._open_client()
        if not use_tqdm:
            return self._thread.run_and_wait(run(prompts, pooling_params, **more))
        with progress_bar(len(split_prompts(prompts)), use_tqdm) as done:
            return self._thread.run_and_wait(run(prompts, pooling_params, on_finished=done, **more))

    request_info = _waiting(AsyncLLM.request_info)
    statistics = _waiting(AsyncLLM.statistics)
    pause_generation = _waiting(AsyncLLM.pause_generation)
    resume_generation = _waiting(AsyncLLM.resume_generation)
    sleep = _waiting(AsyncLLM.sleep)
    wake_up = _waiting(AsyncLLM.wake_up)
    is_sleeping = _waiting(AsyncLLM.is_sleeping)
    update_weights = _waiting(AsyncLLM.update_weights)
    load_adapter = _waiting(AsyncLLM.load_adapter)
    unload_adapter = _waiting(AsyncLLM.unload_adapter)

    def reset_prefix_cache(self) -> bool:
        """Evict all cached blocks that no request uses. Returns True, as vLLM's."""
        self._thread.run_and_wait(self._open_client().reset_prefix_cache())
        return True

    @property
    def adapters(self) -> list[str]:
        """Names that requests may give as `adapter`."""
        return self._client.adapters

    def _run_batch(
        self,
        prompts: Sequence[object],
        params: Params | Sequence[Params] | None,
        priorities: Sequence[int] | None,
        lora_request: AdapterInput,
        use_tqdm: bool | Callable[..., Any],
        shared: SharedOptions,
    ) -> list[RequestOutput]:
        """All prompts are checked before any is sent; outputs are in the prompts' order."""
        client = self._open_client()
        each_params = params if isinstance(params, Sequence) else [params] * len(prompts)
        _check_one_per_prompt("sampling_params", each_params, len(prompts))
        priorities = [0] * len(prompts) if priorities is None else priorities
        _check_one_per_prompt("priority", priorities, len(prompts))
        each_lora = (
            lora_request if isinstance(lora_request, Sequence) else [lora_request] * len(prompts)
        )
        _check_one_per_prompt("lora_request", each_lora, len(prompts))
        options = [
            RequestOptions(**shared, priority=own, lora_request=lora)
            for own, lora in zip(priorities, each_lora, strict=True)
        ]

        async def run(done: Callable[[], None] | None) -> list[RequestOutput]:
            await client.ready()
            for wanted in dict.fromkeys(map(adapter_of, options)):
                await client.know_adapter(wanted)
            decoded = prompts
            if any(map(has_data, prompts)):
                decoded = await asyncio.gather(*map(client.with_media, prompts))
            requests = [
                client.input_processor.make_request(
                    prompt,
                    params,
                    client.session.requests.new_request_id(),
                    output_kind=RequestOutputKind.FINAL_ONLY,
                    name=f"prompt {index}" if len(prompts) > 1 else "prompt",
                    on_finished=done,
                    **own,
                )
                for index, (prompt, params, own) in enumerate(
                    zip(decoded, each_params, options, strict=True)
                )
            ]
            outputs = await run_all(client.session, requests, final_output)
            warn_of_errors(outputs)
            return outputs

        with progress_bar(len(prompts), use_tqdm) as done:
            return self._thread.run_and_wait(run(done))

    def _open_client(self) -> AsyncLLM:
        if not self._close.alive:
            raise ClientClosed("this LLM is closed; make a new one")
        return self._client


def _close(thread: LoopThread, client: AsyncLLM) -> None:
    thread.run_and_wait(client.close())
    thread.close()


def _check_one_per_prompt(name: str, values: object, num_prompts: int) -> None:
    if not isinstance(values, Sequence):
        raise InvalidInput(f"{name} is of type {type(values).__name__}; give one per prompt")
    if len(values) != num_prompts:
        raise InvalidInput(
            f"there are {num_prompts} prompts and {len(values)} {name}; give one per prompt"
        )
