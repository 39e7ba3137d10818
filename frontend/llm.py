"""`LLM`: the synchronous API for batches, with vLLM's names and calls. It runs `AsyncLLM` on an
event loop in a thread of its own."""

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence
from os import PathLike
from typing import Any, Unpack

from frontend.async_llm import AsyncLLM
from frontend.blocking_client import BlockingClient, progress_bar
from frontend.errors import InvalidInput, RequestRejected
from frontend.inputs.prompts import ChatMessage, PromptsInput, has_data, split_prompts
from frontend.outputs import BeamSearchOutput, RequestOutput, beam_search_output, best_of
from frontend.request_options import LoRARequest, RequestOptions, SharedOptions, adapter_of
from frontend.request_state import RequestState
from frontend.sampling_params import BeamSearchParams, RequestOutputKind, SamplingParams

logger = logging.getLogger(__name__)

Params = SamplingParams | BeamSearchParams
AdapterInput = LoRARequest | Sequence[LoRARequest | None] | None


class LLM(BlockingClient):
    """Generate, embed, classify and score batches of prompts.

    With `model`, an engine is started as a child process and ends with this object. Without, this
    is a client of the engine at `address` (default: where `engine-core` listens).

    Args:
        model: a folder, a .gguf file, a known name or a hub id.
        keys: the file made by `engine-core keys add`, for an engine at a TCP address with keys.
        seed: of the seeds drawn for requests that have none.
        startup_timeout_s: for an engine started here to get ready.
        reconnect_timeout_s: for a lost engine at `address` to come back.
        structured_outputs_config: vLLM's, see docs/guides/structured_output.md.
        allowed_local_media_path, allow_media_url: see `AsyncLLM`.
        engine_options: those of `engine-core` with underscores (docs/guides/daemon.md), also by
            vLLM's names. Its other engine arguments are accepted as long as they ask for nothing,
            such as `task="auto"`, and refused by name otherwise. With `data_parallel_size` so many
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
        allow_media_url: str | Sequence[str] = (),
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
            "allow_media_url": allow_media_url,
        }
        super().__init__(
            AsyncLLM.connect(
                address, reconnect_timeout_s=reconnect_timeout_s, keys=keys, **client_options
            )
            if model is None
            else AsyncLLM.launch(
                model, startup_timeout_s=startup_timeout_s, **client_options, **engine_options
            )
        )

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
            outputs = await client.run_all(requests, _final_output)
            _warn_of_errors(outputs)
            return [
                best_of(output, params) if isinstance(params, SamplingParams) else output
                for output, params in zip(outputs, each_params, strict=True)
            ]

        with progress_bar(len(prompts), use_tqdm) as done:
            return self._thread.run_and_wait(run(done))


async def _final_output(request: RequestState) -> RequestOutput:
    """A refusal ends this request only, not the others of the batch."""
    try:
        return await request.next_output()
    except RequestRejected as rejection:
        return request.failed_output(str(rejection))


def _warn_of_errors(outputs: Sequence[RequestOutput]) -> None:
    """One line, however many: their text is empty or cut, and a caller may not look at reasons."""
    failed = [
        completion
        for output in outputs
        for completion in output.outputs
        if completion.finish_reason == "error"
    ]
    if failed:
        logger.warning(
            "%d of %d completions ended with finish_reason 'error'; the first: %s",
            len(failed),
            sum(len(output.outputs) for output in outputs),
            failed[0].detail,
        )


def _check_one_per_prompt(name: str, values: object, num_prompts: int) -> None:
    if not isinstance(values, Sequence):
        raise InvalidInput(f"{name} is of type {type(values).__name__}; give one per prompt")
    if len(values) != num_prompts:
        raise InvalidInput(
            f"there are {num_prompts} prompts and {len(values)} {name}; give one per prompt"
        )
