"""What a feature of the scheduler is made of: the moments at which it is called."""

from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeVar

from engine_core.scheduler.in_flight import InFlightStep
from engine_core.scheduler.plan import SchedulerOutput
from engine_core.scheduler.plan_builder import PlanBuilder
from engine_core.scheduler.request import Request
from protocol.explanations import WaitReason

P = TypeVar("P", bound="SchedulerPart")
Why = tuple[WaitReason, str]


class SchedulerPart:
    """Nothing happens in a call that a part does not override, and it costs nothing. Parts are
    called in the order of their list (`startup/scheduler.py`)."""

    def check_request(self, request: Request) -> None:
        """The request is about to be taken. Raises SchedulerError, ValueError: it is not."""

    def on_arrival(self, request: Request) -> None:
        """The request was taken and waits."""

    def begin_step(self, step_id: int, now: float) -> None:
        """A step is to be planned, at `now`, in seconds."""

    def holds_up(self, plan: PlanBuilder) -> bool:
        """Whether no request may run in this step. May preempt some that do."""
        return False

    def begin_pass(self, plan: PlanBuilder) -> None:
        """Waiting requests are looked at next; running ones have their tokens."""

    def why_wait(self, request: Request) -> Why | None:
        """Why the request at the head of the queue may not start; others may pass it."""
        return None

    def why_not_in_part(self) -> Why | None:
        """Why no prompt may start that takes more than this step."""
        return None

    def limit_start(self, plan: PlanBuilder, num_tokens: int) -> int:
        """Of the tokens that a waiting request would compute in this step those that it may."""
        return num_tokens

    def on_admitted(self, request: Request, num_left: int, skipped: Iterable[Request]) -> None:
        """It starts, before those that were skipped; `num_left` of its tokens are computed in later
        steps."""

    def on_filled(self, plan: PlanBuilder) -> None:
        """The passes are over; their tokens do not count as computed yet."""

    def on_plan(self, plan: SchedulerOutput) -> None:
        """The plan is complete but for what this part adds."""

    def on_update(self, step: InFlightStep, duration_s: float) -> None:
        """The step's outputs have been sent; what is done now is for later steps."""

    def on_drafts(self, row: int, num_drafts: int, num_accepted: int) -> None:
        """Drafts of the sequence in this row have been verified."""

    def on_discard(self, steps: list[InFlightStep], detail: str) -> None:
        """These have failed, all that are in flight. Raises DeviceFault: there is no point in going
        on."""

    def on_finish(self, request: Request, detail: str | None, now: float) -> None:
        """It is over, at `now`, in no queue any more; `detail` says why, if it needs words."""

    def on_new_runner(self) -> None:
        """Nothing runs, and the next model runner knows no request."""

    def statistics(self) -> Mapping[str, Any]:
        """The part's fields of EngineStatistics."""
        return {}

    def check(self) -> None:
        """Assert the part's invariants."""


class SchedulerParts:
    """For each moment the calls of the parts that override it, in their order."""

    def __init__(self) -> None:
        self._by_class: dict[type, Any] = {}
        self.check_request: list[Callable[[Request], None]] = []
        self.on_arrival: list[Callable[[Request], None]] = []
        self.begin_step: list[Callable[[int, float], None]] = []
        self.holds_up: list[Callable[[PlanBuilder], bool]] = []
        self.begin_pass: list[Callable[[PlanBuilder], None]] = []
        self.why_wait: list[Callable[[Request], Why | None]] = []
        self.why_not_in_part: list[Callable[[], Why | None]] = []
        self.limit_start: list[Callable[[PlanBuilder, int], int]] = []
        self.on_admitted: list[Callable[[Request, int, Iterable[Request]], None]] = []
        self.on_filled: list[Callable[[PlanBuilder], None]] = []
        self.on_plan: list[Callable[[SchedulerOutput], None]] = []
        self.on_update: list[Callable[[InFlightStep, float], None]] = []
        self.on_drafts: list[Callable[[int, int, int], None]] = []
        self.on_discard: list[Callable[[list[InFlightStep], str], None]] = []
        self.on_finish: list[Callable[[Request, str | None, float], None]] = []
        self.on_new_runner: list[Callable[[], None]] = []
        self.statistics: list[Callable[[], Mapping[str, Any]]] = []
        self.check: list[Callable[[], None]] = []

    def join(self, parts: Iterable[SchedulerPart]) -> None:
        """Add the calls of these parts behind those that are there."""
        for part in parts:
            self._by_class[type(part)] = part
            for moment, calls in self._moments():
                if getattr(type(part), moment) is not getattr(SchedulerPart, moment):
                    calls.append(getattr(part, moment))

    def _moments(self) -> Iterable[tuple[str, list[Any]]]:
        return [each for each in vars(self).items() if each[0] != "_by_class"]

    def find(self, kind: type[P]) -> P:
        """The part of this class."""
        found: P = self._by_class[kind]
        return found
