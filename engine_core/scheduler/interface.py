"""What the engine's loop may ask of a scheduler. A public example of one step:

scheduler.add_request(request)
plan = scheduler.schedule()
outputs = scheduler.update_from_output(plan, runner.execute(plan))
"""

import abc
from collections.abc import Iterable

from engine_core.scheduler.plan import DraftTokenIds, ModelRunnerOutput, SchedulerOutput
from engine_core.scheduler.request import Request
from engine_core.scheduler.request_status import RequestStatus
from engine_core.scheduler.statistics import SchedulerStatistics
from protocol.explanations import RequestInfo
from protocol.outputs import EngineCoreOutputs


class SchedulerInterface(abc.ABC):
    """Single-threaded, without locks: all calls come from the loop."""

    @abc.abstractmethod
    def add_request(self, request: Request) -> None:
        """Put a request at the tail of the waiting queue. One that can never fit, or that has all
        its tokens already, ends at once: its terminal output comes with the next update.

        Raises:
            DuplicateRequestId: the id is live; that request goes on unharmed.
            QueueFull: the waiting queue is at its limit.
            ValueError: the request asks for what this scheduler does not do.
        """

    @abc.abstractmethod
    def schedule(self, now: float = 0.0) -> SchedulerOutput:
        """Plan the next step. Never fails for lack of memory: the plan is smaller then. With steps
        in flight it takes their tokens as computed, and plans for those that they sample.

        Args:
            now: seconds, on the clock of the requests' `arrival_time`. What depends on time (delay,
                ageing, targets) needs it; nothing else does.

        Raises:
            StepOrderError: as many steps as may be in flight have not been updated.
        """

    @abc.abstractmethod
    def update_from_output(
        self,
        scheduler_output: SchedulerOutput,
        model_runner_output: ModelRunnerOutput,
        now: float = 0.0,
    ) -> dict[int, EngineCoreOutputs]:
        """Take in what a step brought, at `now`, in seconds. Returns each client's
        outputs, by client index; terminal outputs of requests that ended otherwise since the last
        update come first.

        Raises:
            StepOrderError: not the first of the steps that were planned and not updated.
        """

    @abc.abstractmethod
    def finish_requests(
        self,
        ids: str | Iterable[str],
        finished_status: RequestStatus,
        detail: str | None = None,
    ) -> None:
        """End requests from outside, at once; ids that are unknown or finished are ignored. Each
        one's terminal output comes with the next update.

        Raises:
            ValueError: `finished_status` is not a final one.
        """

    @abc.abstractmethod
    def update_draft_token_ids(self, draft_token_ids: DraftTokenIds) -> None:
        """Drafts to verify in the next step, in place of earlier ones. They are dropped for
        requests that are not running, whose prompt is not computed, or whose next token a step in
        flight samples."""

    @abc.abstractmethod
    def get_request_counts(self) -> tuple[int, int]:
        """(running, waiting); preempted requests wait."""

    @abc.abstractmethod
    def has_work(self) -> bool:
        """Whether a request is unfinished or a terminal output has not been handed out. Of a step
        in flight whose requests have all ended nothing can come; it is still to be updated."""

    @abc.abstractmethod
    def discard_step(self, scheduler_output: SchedulerOutput, detail: str) -> None:
        """The step could not be run: its requests end with FINISHED_ERROR and this detail, and
        nobody finds the blocks that it should have filled. So do those of the steps planned behind
        it. All of them are still to be updated, in order (with an empty ModelRunnerOutput), which
        hands out the terminal outputs.

        Raises:
            StepOrderError: not the first of the steps that were planned and not updated.
        """

    @abc.abstractmethod
    def explain(self, request_id: str) -> RequestInfo | None:
        """Why a request is where it is; None if it is neither live nor among the last finished."""

    @abc.abstractmethod
    def reset_prefix_cache(self) -> int:
        """Forget every cached block that no request holds. Returns how many."""

    @abc.abstractmethod
    def statistics(self) -> SchedulerStatistics:
        """The numbers of this moment."""
