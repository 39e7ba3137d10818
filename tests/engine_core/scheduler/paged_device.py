"""A device that does one step after the other, some of them before anybody asks for their result.

Stands where an executor stands: what a step computes is there before the next one begins, whenever
the scheduler sees it.
"""

from collections import deque
from collections.abc import Iterator

from paged_model import PagedModel, as_column

from engine_core.scheduler import ModelRunnerOutput, SchedulerOutput


class PagedDevice:
    """
    Args:
        depth: most steps launched and not collected.
        has_columns: results are arrays, and lists of verified drafts beside them.
        is_pipeline: the token that a step in flight samples is not there for another step.
    """

    def __init__(
        self,
        model: PagedModel,
        depth: int,
        *,
        has_columns: bool = False,
        is_pipeline: bool = False,
    ) -> None:
        self._model = model
        self._depth = depth
        self._has_columns = has_columns
        self._steps: deque[tuple[SchedulerOutput, ModelRunnerOutput | None]] = deque()
        self._has_read = True
        self._is_pipeline = is_pipeline
        self._sampled: deque[set[str]] = deque()
        """Of each step in flight, sequences that it samples and that have had their rows since."""

    def __bool__(self) -> bool:
        """Whether a step is in flight."""
        return bool(self._steps)

    def launch(
        self,
        plan: SchedulerOutput,
        *,
        fails: bool = False,
        has_copied: bool = True,
        has_read: bool = True,
    ) -> None:
        """A step that fails has computed nothing, and nor have those behind it; it has changed the
        rows or not even that (`has_read`); copies were made or not."""
        again = (each.req_id for each in (*plan.scheduled_new_reqs, *plan.resumed_reqs))
        gone = {*plan.finished_req_ids, *plan.preempted_req_ids, *again}
        for names in self._sampled:
            names -= gone
            assert not self._is_pipeline or names.isdisjoint(plan.batch.req_ids)
        self._sampled.append(set())
        is_behind = any(sampled is None for _, sampled in self._steps)
        if fails or is_behind:
            self._has_read = self._has_read if is_behind else has_read
            if self._has_read:
                self._model.follow(plan, with_copies=has_copied)
            self._steps.append((plan, None))
        else:
            sampled = self._model.execute(plan)
            if plan.num_decode_steps == 1:
                columns = zip(sampled.req_ids, sampled.sampled_token_ids, strict=True)
                self._sampled[-1] |= {name for name, token_ids in columns if token_ids}
            if self._has_columns and plan.num_decode_steps == 1:
                sampled = as_column(sampled, plan.scheduled_spec_decode_tokens)
            self._steps.append((plan, sampled))

    def collect(
        self, *, wait: bool = False
    ) -> Iterator[tuple[list[SchedulerOutput], ModelRunnerOutput | None]]:
        """The results that are needed before the next step is planned, or all: of a plan, or None
        for one that failed and all plans behind it."""
        while self._steps and (
            wait
            or len(self._steps) >= self._depth
            or not self._steps[-1][0].total_num_scheduled_tokens
        ):
            plan, sampled = self._steps.popleft()
            self._sampled.popleft()
            if sampled is None:
                plans = [plan, *(behind for behind, _ in self._steps)]
                self._steps.clear()
                self._sampled.clear()
                yield plans, None
            else:
                yield [plan], sampled
