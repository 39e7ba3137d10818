"""`LLM`: the synchronous face of `AsyncLLM`, for batches. vLLM's names and calls.

Owns the thread that the client's event loop runs in. Whatever it does, AsyncLLM does.
"""

import weakref
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import Any, Self

from frontend.async_llm import AsyncLLM
from frontend.batch import Batch, ProgressBar, progress_bar
from frontend.beam_search import BeamSearchOutput, BeamSearchParams, beam_search_output
from frontend.errors import ClientClosed, InvalidInput
from frontend.event_loop import LoopThread
from frontend.outputs import RequestOutput
from frontend.prompts import PromptsInput, split_prompts
from frontend.request_factory import ChatMessage
from frontend.sampling_params import SamplingParams
from frontend.tokenizer import Tokenizer
from protocol.explanations import RequestInfo
from protocol.outputs import ModelInfo
from protocol.statistics import EngineStatistics


class LLM:
    """Generate for batches of prompts.

    With `model`, an engine is started as a child process and ends with this object. Without, this
    is a client of the engine at `address` (default: where `engine-core` listens).

    Args:
        model: a folder, a .gguf file, a known name or a hub id.
        seed: of the seeds drawn for requests that have none.
        startup_timeout_s: for an engine started here to get ready.
        reconnect_timeout_s: for a lost engine at `address` to come back.
        engine_options: `tokenizer`, `dtype`, `max_model_len`, `max_num_seqs`,
            `max_num_batched_tokens`, `max_chunk_size`, `block_size`, `num_blocks`,
            `kv_cache_memory`, `memory_fraction` (vLLM's `gpu_memory_utilization`: the share of free
            memory that the KV cache may take), `enable_prefix_caching`, `max_logprobs`,
            `num_threads`, `log_level`; of the scheduler `scheduling_policy`, `preemption_mode`,
            `host_cache_memory` and the others of docs/daemon.md. Other engine arguments of vLLM are
            taken as long as they ask for nothing, such as `tensor_parallel_size=1`, and refused by
            name otherwise.

    Raises:
        InvalidInput: an option that this engine does not support.
        EngineStartError: the engine did not get ready; the text holds its last lines.
        EngineUnavailable: nobody answers at `address`.
    """

    def __init__(
        self,
        model: str | None = None,
        *,
        address: str | None = None,
        seed: int | None = None,
        startup_timeout_s: float = 600.0,
        reconnect_timeout_s: float = 10.0,
        **engine_options: Any,
    ) -> None:
        if model is None and engine_options:
            raise InvalidInput(
                f"{sorted(engine_options)} are options of an engine that is started here; give a "
                "model, or set them where the engine is started"
            )
        if model is not None and address is not None:
            raise InvalidInput(
                "model and address were both given; a model starts an engine, an address names a "
                "running one: give one of them"
            )
        self._thread = LoopThread("engine-client")
        try:
            self._client = self._thread.run(
                AsyncLLM.connect(address, seed=seed, reconnect_timeout_s=reconnect_timeout_s)
                if model is None
                else AsyncLLM.launch(
                    model, seed=seed, startup_timeout_s=startup_timeout_s, **engine_options
                )
            )
        except BaseException:
            self._thread.close()
            raise
        self._close = weakref.finalize(self, _close, self._thread, self._client)

    def close(self) -> None:
        """Leave the engine; one that was started here ends. Also done at exit."""
        self._close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    @property
    def address(self) -> str:
        return self._client.address

    @property
    def model(self) -> ModelInfo:
        """What the engine serves."""
        return self._client.model

    def get_tokenizer(self) -> Tokenizer:
        """
        Raises:
            InvalidInput: the model came without one.
        """
        return self._client.get_tokenizer()

    def get_default_sampling_params(self) -> SamplingParams:
        """What the model's authors recommend, as a new object."""
        return self._client.get_default_sampling_params()

    def generate(
        self,
        prompts: PromptsInput,
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool | Callable[..., ProgressBar] = True,
        lora_request: None = None,
        priority: Sequence[int] | None = None,
        *,
        tenant: str | None = None,
        cache_salt: str | None = None,
    ) -> list[RequestOutput]:
        """Complete every prompt. An interrupt aborts them all.

        Args:
            prompts: text, token ids, a dictionary with `prompt` or `prompt_token_ids`, or a list
                of those.
            sampling_params: for all, or one a prompt; default: the model's own.
            use_tqdm: show a progress bar, or make one by calling this.
            priority: one a prompt; smaller is more urgent. 0 unless the engine's policy is
                priority.
            tenant: whose share of the engine they use, under policy fair; default: this client's.
            cache_salt: only requests with the same salt share cached prompts.

        Returns:
            One output a prompt, in order. A request that the engine refused or could not finish
            has finish reason "error", and says why in `detail`.

        Raises:
            InvalidInput: a prompt or parameter that cannot be served; nothing was sent.
            EngineDied: the engine was lost and did not come back.
        """
        if lora_request is not None:
            raise InvalidInput("this engine does not support lora_request; omit it")
        batch = Batch(
            split_prompts(prompts), sampling_params, priority, tenant=tenant, cache_salt=cache_salt
        )
        return self._run(batch, use_tqdm)

    def chat(
        self,
        messages: Sequence[ChatMessage] | Sequence[Sequence[ChatMessage]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool | Callable[..., ProgressBar] = True,
        lora_request: None = None,
        chat_template: str | None = None,
        chat_template_content_format: str = "auto",
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: list[dict[str, Any]] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        *,
        priority: Sequence[int] | None = None,
        tenant: str | None = None,
        cache_salt: str | None = None,
    ) -> list[RequestOutput]:
        """Answer one conversation or several: `generate` behind the model's chat template.

        Raises:
            InvalidInput, EngineDied: see `generate`; also a template that fails.
        """
        if lora_request is not None:
            raise InvalidInput("this engine does not support lora_request; omit it")
        if chat_template_content_format != "auto":
            raise InvalidInput(
                "this engine does not support chat_template_content_format="
                f"{chat_template_content_format!r}; omit it"
            )
        is_one = bool(messages) and isinstance(messages[0], Mapping)
        conversations: Sequence[Any] = [messages] if is_one else messages
        prompts = [
            self._client.factory.chat_prompt(
                conversation,
                chat_template=chat_template,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=continue_final_message,
                tools=tools,
                template_variables=chat_template_kwargs,
            )
            for conversation in conversations
        ]
        batch = Batch(prompts, sampling_params, priority, tenant=tenant, cache_salt=cache_salt)
        return self._run(batch, use_tqdm)

    def beam_search(
        self,
        prompts: PromptsInput,
        params: BeamSearchParams,
        lora_request: None = None,
        use_tqdm: bool | Callable[..., ProgressBar] = False,
        *,
        priority: Sequence[int] | None = None,
        tenant: str | None = None,
        cache_salt: str | None = None,
    ) -> list[BeamSearchOutput]:
        """The likeliest continuations of each prompt. An interrupt aborts them all.

        Returns:
            One output a prompt, in order, each with its beams best first; or with none, and why,
            where the engine refused the prompt.

        Raises:
            InvalidInput, EngineDied: see `generate`.
        """
        if lora_request is not None:
            raise InvalidInput("this engine does not support lora_request; omit it")
        if not isinstance(params, BeamSearchParams):
            raise InvalidInput(
                f"params is of type {type(params).__name__}, it must be BeamSearchParams"
            )
        batch = Batch(
            split_prompts(prompts), params, priority, tenant=tenant, cache_salt=cache_salt
        )
        tokenizer = self._open_client().factory.optional_tokenizer
        return [beam_search_output(output, tokenizer) for output in self._run(batch, use_tqdm)]

    def request_info(self, request_id: str) -> RequestInfo:
        """Where a request is and why, by the id that the engine knows it by."""
        return self._thread.run(self._open_client().request_info(request_id))

    def statistics(self) -> EngineStatistics:
        """The engine's numbers, over all its clients."""
        return self._thread.run(self._open_client().statistics())

    def reset_prefix_cache(self) -> bool:
        """Make the engine forget cached prompts that nobody uses. True, as vLLM's."""
        self._thread.run(self._open_client().reset_prefix_cache())
        return True

    def _run(
        self, batch: Batch, use_tqdm: bool | Callable[..., ProgressBar]
    ) -> list[RequestOutput]:
        client = self._open_client()
        with progress_bar(len(batch), use_tqdm) as progress:
            return self._thread.run(batch.run(client, progress))

    def _open_client(self) -> AsyncLLM:
        if not self._close.alive:
            raise ClientClosed("this LLM is closed; make a new one")
        return self._client


def _close(thread: LoopThread, client: AsyncLLM) -> None:
    thread.run(client.close())
    thread.close()
