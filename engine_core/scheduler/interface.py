"""What a scheduler is, on one page. Single-threaded: all calls come from the engine's loop.

scheduler.add_request(request)
plan = scheduler.schedule()
outputs = scheduler.update_from_output(plan, runner.execute(plan))"""

import abc
import enum
from collections.abc import Callable, Iterable

from engine_core.scheduler.in_flight import InFlightStep
from engine_core.scheduler.plan import DraftTokenIds, ModelRunnerOutput, SchedulerOutput
from engine_core.scheduler.request import Request, RequestStatus
from protocol.outputs import EngineCoreOutputs


class PauseState(enum.Enum):
    UNPAUSED = enum.auto()
    PAUSED_NEW = enum.auto()
    """No request is started; those that were go on. When they have ended it is PAUSED_ALL."""
    PAUSED_ALL = enum.auto()
    """Plans are empty; requests come, wait, and end by abort or timeout."""


class SchedulerInterface(abc.ABC):
    """The calls of the engine's loop; `Scheduler` has others beside it."""

    pause_state = PauseState.UNPAUSED

    @abc.abstractmethod
    def add_request(self, request: Request) -> None:
        """Put a request at the tail of the waiting queue. One that can never fit, or that has all
        its tokens already, ends at once: its terminal output comes with the next update.

        Raises:
            DuplicateRequestId: the id belongs to an unfinished request, which is not affected.
            QueueFull: the waiting queue is at its limit.
            ValueError: the request asks for what this scheduler does not do.
        """

    @abc.abstractmethod
    def schedule(self, now: float = 0.0) -> SchedulerOutput:
        """Plan the next step. Requests whose `timeout_s` is over end first. Never fails for lack of
        memory: the plan is smaller then. Tokens of steps in flight count as computed; what they
        sample is scheduled too. `now`: seconds, on the clock of the requests' `arrival_time`. Only
        what depends on time (timeouts, prefill delay, ageing, SLOs) needs it. Raises
        StepOrderError: as many steps as may be in flight have not been updated."""

    @abc.abstractmethod
    def update_from_output(
        self,
        scheduler_output: SchedulerOutput,
        model_runner_output: ModelRunnerOutput,
        now: float = 0.0,
        send: Callable[[dict[int, EngineCoreOutputs]], None] = lambda outputs: None,
    ) -> dict[int, EngineCoreOutputs]:
        """Append what a step sampled, at `now`, in seconds. Returns each client's outputs, by
        client index; terminal outputs of requests that ended otherwise since the last update come
        first. `send` gets them before what only later steps need is done.
        Raises StepOrderError: not the first of the steps in flight."""

    @abc.abstractmethod
    def finish_requests(
        self, ids: str | Iterable[str], finished_status: RequestStatus, detail: str | None = None
    ) -> None:
        """End requests at once; ids that are unknown or finished are ignored. The terminal outputs
        come with the next update. Raises ValueError: `finished_status` is not a final one."""

    @abc.abstractmethod
    def finish_sample(self, request_id: str, index: int, finished_status: RequestStatus) -> None:
        """End one sample of a request; the others go on. At once, or if it does not exist yet or
        the others are to fork from it, once they have. Unknown and finished ones and beams are
        ignored."""

    @abc.abstractmethod
    def update_draft_token_ids(self, draft_token_ids: DraftTokenIds) -> None:
        """Drafts to verify in the next step, in place of earlier ones. Dropped for requests that
        are not running, whose prompt is not computed, or whose next token is in flight."""

    @property
    @abc.abstractmethod
    def max_steps_in_flight(self) -> int:
        """Most steps planned and not updated."""

    @property
    @abc.abstractmethod
    def in_flight(self) -> list[InFlightStep]:
        """Steps planned and not updated, in order."""

    @property
    @abc.abstractmethod
    def next_step_id(self) -> int:
        """Of the next plan."""

    @abc.abstractmethod
    def get_request_counts(self) -> tuple[int, int]:
        """(running, waiting); preempted requests wait."""

    @abc.abstractmethod
    def has_work(self) -> bool:
        """Whether a request is unfinished or a terminal output has not been handed out. Steps in
        flight whose requests have all ended do not count, and are still to be updated."""

    @abc.abstractmethod
    def discard_step(self, scheduler_output: SchedulerOutput, detail: str) -> None:
        """The step failed. A fault voids what is behind it: all running requests wait again, with
        the tokens that they have, and the blocks that those steps should have filled leave the
        prefix cache. The requests of this step then run apart from all others, in groups; the one
        that fails alone ends with FINISHED_ERROR and this detail (`fault_isolation.py`). Each
        voided step (`is_discarded`) is still to be updated, in order, with an empty
        ModelRunnerOutput.

        Raises:
            StepOrderError: not the first of the steps in flight.
            DeviceFault: steps fail whatever they hold.
        """
