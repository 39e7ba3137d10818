"""An `AsyncLLM` on an event loop in a thread of its own, and its calls, waited for."""

import contextlib
import weakref
from collections.abc import Callable, Coroutine, Iterator, Sequence
from functools import partial, update_wrapper
from typing import Any, Concatenate, ParamSpec, Self, TypeVar

from frontend.async_llm import AsyncLLM
from frontend.errors import ClientClosed
from frontend.event_loop import LoopThread
from frontend.inputs.prompts import PromptsInput, split_prompts
from frontend.pooling import (
    ClassificationRequestOutput,
    EmbeddingRequestOutput,
    PoolingRequestOutput,
    ScoringRequestOutput,
)
from frontend.pooling_params import PoolingParamsInput
from frontend.sampling_params import SamplingParams
from frontend.text.tokenizer import Tokenizer
from protocol.outputs import ModelInfo

T = TypeVar("T")
P = ParamSpec("P")


def _waiting(
    call: Callable[Concatenate[AsyncLLM, P], Coroutine[Any, Any, T]],
) -> Callable[Concatenate["BlockingClient", P], T]:
    """A call of `AsyncLLM` that is waited for."""

    def method(self: "BlockingClient", /, *args: P.args, **kwargs: P.kwargs) -> T:
        client = self._open_client()
        return self._thread.run_and_wait(call(client, *args, **kwargs))

    update_wrapper(method, call)
    return method


class BlockingClient:
    """
    Args:
        opening: gives the client; its error is raised.
    """

    def __init__(self, opening: Coroutine[Any, Any, AsyncLLM]) -> None:
        self._thread = LoopThread("engine-client")
        try:
            self._client = self._thread.run_and_wait(opening)
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

    def _open_client(self) -> AsyncLLM:
        if not self._close.alive:
            raise ClientClosed("this LLM is closed; make a new one")
        return self._client

    # calls of the engine

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

    # vectors, classes and scores

    def embed(
        self,
        prompts: PromptsInput,
        pooling_params: PoolingParamsInput = None,
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
        pooling_params: PoolingParamsInput = None,
        use_tqdm: bool | Callable[..., Any] = True,
        **more: Any,
    ) -> list[ClassificationRequestOutput]:
        """Probabilities of the labels."""
        return self._pool(self._client.classify, prompts, pooling_params, use_tqdm, more)

    def reward(
        self,
        prompts: PromptsInput,
        pooling_params: PoolingParamsInput = None,
        use_tqdm: bool | Callable[..., Any] = True,
        **more: Any,
    ) -> list[PoolingRequestOutput]:
        """The labels of each token, or of each step."""
        return self._pool(self._client.reward, prompts, pooling_params, use_tqdm, more)

    def encode(
        self,
        prompts: PromptsInput,
        pooling_params: PoolingParamsInput = None,
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
        pooling_params: PoolingParamsInput = None,
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
        pooling_params: PoolingParamsInput,
        use_tqdm: bool | Callable[..., Any],
        more: dict[str, Any],
    ) -> T:
        self._open_client()
        if not use_tqdm:
            return self._thread.run_and_wait(run(prompts, pooling_params, **more))
        with progress_bar(len(split_prompts(prompts)), use_tqdm) as done:
            return self._thread.run_and_wait(run(prompts, pooling_params, on_finished=done, **more))


def _close(thread: LoopThread, client: AsyncLLM) -> None:
    thread.run_and_wait(client.close())
    thread.close()


@contextlib.contextmanager
def progress_bar(
    num_prompts: int, use_tqdm: bool | Callable[..., Any]
) -> Iterator[Callable[[], None] | None]:
    """A function to be called for each prompt that is done."""
    if not use_tqdm:
        yield None
        return
    from tqdm.auto import tqdm

    make = use_tqdm if callable(use_tqdm) else tqdm
    bar = make(total=num_prompts, desc="Processed prompts", dynamic_ncols=True)
    with contextlib.closing(bar):
        yield lambda: bar.update(1)
