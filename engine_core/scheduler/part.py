"""What a feature of the scheduler is made of: the moments at which it is called."""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from engine_core.scheduler.in_flight import InFlightStep
from engine_core.scheduler.plan import SchedulerOutput
from engine_core.scheduler.plan_builder import PlanBuilder
from engine_core.scheduler.request import Request


class SchedulerPart:
    """Nothing happens in a call that a part does not override, and it costs nothing. Parts are
    called in the order of their list (`startup/scheduler.py`)."""

    def check_request(self, request: Request) -> None:
        """The request is about to be taken. Raises SchedulerError, ValueError: it is not."""

    def on_arrival(self, request: Request) -> None:
        """The request was taken and waits."""

    def begin_step(self, step_id: int, now: float) -> None:
        """A step is to be planned, at `now`, in seconds."""

    def on_filled(self, plan: PlanBuilder) -> None:
        """The passes are over; their tokens do not count as computed yet."""

    def on_plan(self, plan: SchedulerOutput) -> None:
        """The plan is complete but for what this part adds."""

    def on_update(self, step: InFlightStep, duration_s: float) -> None:
        """The step's outputs have been sent; what is done now is for later steps."""

    def on_discard(self, steps: Iterable[InFlightStep]) -> None:
        """These have failed; nothing runs."""

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
        self.check_request: list[Callable[[Request], None]] = []
        self.on_arrival: list[Callable[[Request], None]] = []
        self.begin_step: list[Callable[[int, float], None]] = []
        self.on_filled: list[Callable[[PlanBuilder], None]] = []
        self.on_plan: list[Callable[[SchedulerOutput], None]] = []
        self.on_update: list[Callable[[InFlightStep, float], None]] = []
        self.on_discard: list[Callable[[Iterable[InFlightStep]], None]] = []
        self.on_finish: list[Callable[[Request, str | None, float], None]] = []
        self.on_new_runner: list[Callable[[], None]] = []
        self.statistics: list[Callable[[], Mapping[str, Any]]] = []
        self.check: list[Callable[[], None]] = []

    def join(self, parts: Iterable[SchedulerPart]) -> None:
        """Add the calls of these parts behind those that are there."""
        for part in parts:
            for moment, calls in vars(self).items():
                if getattr(type(part), moment) is not getattr(SchedulerPart, moment):
                    calls.append(getattr(part, moment))
