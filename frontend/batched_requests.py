"""Requests of one call, which may be more than an engine takes at once."""

import contextlib
import logging
from collections.abc import Awaitable, Callable, Iterator, Sequence
from typing import Any

from frontend.engine.session import EngineSession
from frontend.errors import RequestRejected
from frontend.event_loop import Pause
from frontend.fleet.engine_group import EngineGroup
from frontend.outputs import RequestOutput
from frontend.request_state import RequestState

logger = logging.getLogger(__name__)

_MOST_IN_FLIGHT = 32_768
"""Fewer than the engine lets wait by default."""


async def run_all(
    session: EngineSession | EngineGroup,
    requests: Sequence[RequestState],
    answer: Callable[[RequestState], Awaitable[RequestOutput]],
) -> list[RequestOutput]:
    """What `answer` gives of each, in their order. An error of one aborts all."""
    outputs, pause = [], Pause()
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


async def final_output(request: RequestState) -> RequestOutput:
    """A refusal ends this request only, not the others of the batch."""
    try:
        return await request.next_output()
    except RequestRejected as rejection:
        return request.failed_output(str(rejection))


def warn_of_errors(outputs: Sequence[RequestOutput]) -> None:
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
