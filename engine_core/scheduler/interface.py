"""What a scheduler is, on one page. Single-threaded: all calls come from the engine's loop.

scheduler.add_request(request)
plan = scheduler.schedule()
outputs = scheduler.update_from_output(plan, runner.execute(plan))"""

import abc
import enum
from collections.abc import Iterable

from engine_core.scheduler.in_flight import InFlightStep
from engine_core.scheduler.plan import DraftTokenIds, ModelRunnerOutput, SchedulerOutput
from engine_core.scheduler.request import Request, RequestStatus
from protocol.calls import EngineStatistics, RequestInfos
from protocol.explanations import RequestInfo
from protocol.outputs import EngineCoreOutputs
from protocol.snapshots import SchedulerView


class PauseState(enum.Enum):
    UNPAUSED = enum.auto()
    PAUSED_NEW = enum.auto()
    """No request is started; those that were go on. When they have ended it is PAUSED_ALL."""
    PAUSED_ALL = enum.auto()
    """Plans are empty; requests come, wait, and end by abort or timeout."""


class SchedulerInterface(abc.ABC):
    """The seven calls of the loop come first."""

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
    ) -> dict[int, EngineCoreOutputs]:
        """Append what a step sampled, at `now`, in seconds. Returns each client's outputs, by
        client index; terminal outputs of requests that ended otherwise since the last update come
        first. Raises StepOrderError: not the first of the steps in flight."""

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

    @abc.abstractmethod
    def set_pause_state(self, state: PauseState, why: str = "") -> None:
        """`why` is for explanations."""

    @abc.abstractmethod
    def may_progress(self) -> bool:
        """`has_work`, less requests that wait for the end of a pause."""

    @abc.abstractmethod
    def preempt_all(self, why: str) -> None:
        """The next plan, of a paused scheduler, preempts every running request to be recomputed,
        swapped ones with them; after it no sequence holds blocks."""

    @abc.abstractmethod
    def forget_runner(self) -> None:
        """After the plan of `preempt_all`: the next runner knows no request, and its cache is
        empty."""

    @abc.abstractmethod
    def take_adapters_to_load(self) -> list[tuple[str, int]]:
        """Adapters that requests wait for, and the slots that their weights go to, whatever was
        there before; each once. `on_adapter_loaded` says that they are there."""

    @abc.abstractmethod
    def on_adapter_loaded(self, adapter: str) -> None:
        """Its weights are in its slot: its requests may start."""

    @abc.abstractmethod
    def reserve_adapter_slot(self, adapter: str) -> int | None:
        """As if a request waited for it; None: it has a slot, or there is none for it."""

    @abc.abstractmethod
    def drop_adapter(self, adapter: str) -> int | None:
        """Take its slot back, if it has one; no running request may have it."""

    @abc.abstractmethod
    def adapter_slot(self, adapter: str) -> int | None:
        """That it has, loaded or not."""

    @abc.abstractmethod
    def requests_with_adapter(self, adapter: str) -> list[str]:
        """Ids of the unfinished ones."""

    @abc.abstractmethod
    def use_weights(self, name: str, version: int) -> None:
        """After the plan of `preempt_all`: a runner of other weights follows, which has this cache
        and knows no request. Blocks of those before are not found under this name; outputs carry
        the version."""

    @abc.abstractmethod
    def explain(self, request_id: str) -> RequestInfo | None:
        """Why a request is where it is; None if it is unknown, or finished long ago."""

    @abc.abstractmethod
    def explain_all(self, tenant: str | None) -> RequestInfos:
        """Why each unfinished request is where it is; only those of `tenant`, if given."""

    @abc.abstractmethod
    def reset_prefix_cache(self) -> int:
        """Drop every cached block that no request holds. Returns how many."""

    @abc.abstractmethod
    def statistics(self) -> EngineStatistics:
        """The numbers of this moment; those of the engine around the scheduler are 0."""

    @abc.abstractmethod
    def view(self, steps: Iterable[tuple[SchedulerOutput, float]]) -> SchedulerView:
        """Requests and blocks of this moment, and these steps, with the seconds that they took."""

    @abc.abstractmethod
    def num_common_prefix_blocks(self) -> list[int]:
        """For each group, leading blocks that all running sequences share."""
