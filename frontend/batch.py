"""Many prompts at once: all checked before any is sent, all answered in order.

Owns the fate of a batch and its progress bar. Must not know threads: it runs on the client's
loop, and whoever waits for it waits elsewhere.
"""

import contextlib
import copy
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

from frontend.beam_search import BeamSearchParams
from frontend.engine_client import EngineClient
from frontend.errors import InvalidInput, RequestRejected
from frontend.live_request import LiveRequest, Turn
from frontend.outputs import RequestOutput
from frontend.sampling_params import RequestOutputKind, SamplingParams

Params = SamplingParams | BeamSearchParams


class ProgressBar(Protocol):
    def update(self, n: int) -> Any: ...

    def close(self) -> Any: ...


class Batch:
    """
    Args:
        params: for all prompts, or one a prompt; None is the model's own.
        priorities: one a prompt; None is 0 for all.
        tenant: of all of them.
        cache_salt: of prompts that have none of their own.

    Raises:
        InvalidInput: as many parameters or priorities as prompts are needed.
    """

    def __init__(
        self,
        prompts: Sequence[object],
        params: Params | Sequence[Params] | None,
        priorities: Sequence[int] | None = None,
        *,
        tenant: str | None = None,
        cache_salt: str | None = None,
    ) -> None:
        self._prompts = prompts
        self._tenant = tenant
        self._cache_salt = cache_salt
        self._params: Sequence[Params | None]
        if params is None or isinstance(params, SamplingParams | BeamSearchParams):
            self._params = [params] * len(prompts)
        else:
            self._params = _one_a_prompt("sampling_params", params, len(prompts))
        self._priorities = (
            [0] * len(prompts)
            if priorities is None
            else _one_a_prompt("priority", priorities, len(prompts))
        )

    def __len__(self) -> int:
        return len(self._prompts)

    async def run(self, client: EngineClient, progress: ProgressBar | None) -> list[RequestOutput]:
        """Outputs in the prompts' order. Cancelling aborts what still runs.

        Raises:
            InvalidInput: says which prompt; nothing was sent.
            EngineDied: the engine was lost and did not come back.
        """
        await client.ready()
        requests = self._make_requests(client, progress)
        try:
            for request in requests:
                client.send(request)
            return [await _final_output(request) for request in requests]
        finally:
            for request in requests:
                client.release(request)

    def _make_requests(
        self, client: EngineClient, progress: ProgressBar | None
    ) -> list[LiveRequest]:
        def on_finished(_request: LiveRequest) -> None:
            if progress is not None:
                progress.update(1)

        default = client.get_default_sampling_params()
        return [
            client.factory.make(
                prompt,
                _final_only(default if params is None else params),
                client.requests.free_id(),
                turn=Turn(priority, self._tenant),
                cache_salt=self._cache_salt,
                name=f"prompt {index}" if len(self) > 1 else "prompt",
                on_finished=on_finished,
            )
            for index, (prompt, params, priority) in enumerate(
                zip(self._prompts, self._params, self._priorities, strict=True)
            )
        ]


@contextlib.contextmanager
def progress_bar(
    num_prompts: int, use_tqdm: bool | Callable[..., ProgressBar]
) -> Iterator[ProgressBar | None]:
    """A bar over the prompts of a batch, or none."""
    if not use_tqdm:
        yield None
        return
    make: Callable[..., ProgressBar]
    if callable(use_tqdm):
        make = use_tqdm
    else:
        from tqdm.auto import tqdm

        make = tqdm
    bar = make(total=num_prompts, desc="Processed prompts", dynamic_ncols=True)
    with contextlib.closing(bar):
        yield bar


async def _final_output(request: LiveRequest) -> RequestOutput:
    """A refusal ends this request only: the others of the batch keep their answers."""
    try:
        return await request.next_output()
    except RequestRejected as rejection:
        return request.failed_output(str(rejection))


def _final_only(params: Params) -> Params:
    if not isinstance(params, SamplingParams) or (
        params.output_kind is RequestOutputKind.FINAL_ONLY
    ):
        return params
    params = copy.copy(params)
    params.output_kind = RequestOutputKind.FINAL_ONLY
    return params


def _one_a_prompt(name: str, values: Sequence[Any], num_prompts: int) -> Sequence[Any]:
    if not isinstance(values, Sequence):
        raise InvalidInput(f"{name} is of type {type(values).__name__}; give one a prompt")
    if len(values) != num_prompts:
        raise InvalidInput(
            f"there are {num_prompts} prompts and {len(values)} {name}; give one a prompt"
        )
    return values
