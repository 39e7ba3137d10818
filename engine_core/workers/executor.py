"""Runs every plan here and in all workers; sleep and new weights likewise, in the same order."""

from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor

from engine_core.control import ModelHost
from engine_core.errors import RequestRefused, WorkerLost
from engine_core.executor import InProcessExecutor, StepRunner
from engine_core.model_runner.cpu.runner import CPUModelRunner
from engine_core.model_runner.sampled_tokens import SampledTokens
from engine_core.scheduler import DeviceFault, ModelRunnerOutput, SchedulerOutput
from engine_core.workers.codec import is_empty
from engine_core.workers.group import WorkerGroup
from engine_core.workers.messages import Change
from protocol.errors import ErrorCode


class GroupExecutor(InProcessExecutor):
    """A `StepRunner` of all ranks: `runner` is rank 0's. It ends the workers when it is closed."""

    def __init__(self, runner: StepRunner, group: WorkerGroup) -> None:
        super().__init__(runner)
        self._group = group
        self._submitted: list[int] = []
        self._failed_step: int | None = None
        """The step that rank 0 failed in."""

    def submit(self, plan: SchedulerOutput) -> None:
        """Raises Exception: a worker is lost, among others."""
        self._group.check()
        if not is_empty(plan):
            self._group.send_plan(plan)
        super().submit(plan)
        self._submitted.append(plan.step_id)

    def collect(self) -> ModelRunnerOutput:
        step_id = self._submitted.pop(0)
        try:
            output = super().collect()
        except Exception:
            self._failed_step = step_id
            raise
        self._group.check()
        return output

    def check_device(self) -> None:
        """A step that failed alike at every rank leaves all as they were. Raises DeviceFault."""
        super().check_device()
        step_id, self._failed_step = self._failed_step, None
        try:
            self._group.check_all_failed_in(step_id if self.max_steps_in_flight == 1 else None)
        except WorkerLost as error:
            raise DeviceFault(f"a worker is lost: {error}") from error

    def close(self) -> None:
        super().close()
        self._group.close()


class PipelineExecutor(GroupExecutor):
    """With several stages. `runner` is the first one's and runs on a thread, so that the loop plans
    on; what a step brought comes from the last stage, and what it sampled goes to all stages with
    the next plan."""

    def __init__(self, runner: StepRunner, group: WorkerGroup, *, num_stages: int) -> None:
        super().__init__(runner, group)
        self.max_steps_in_flight = num_stages
        self._thread = ThreadPoolExecutor(1, "first-stage")
        self._in_flight: deque[tuple[SchedulerOutput, Future[ModelRunnerOutput]]] = deque()
        self._sampled: list[SampledTokens] = []
        """Tokens of steps that were collected since the last plan."""

    def submit(self, plan: SchedulerOutput) -> None:
        self._group.check()
        if not self._num_in_flight:
            self._busy_since_s = self._clock()
        sampled: list[SampledTokens] = []
        if not is_empty(plan):
            sampled, self._sampled = self._sampled, []
            self._group.send_plan(plan, sampled)
        self._in_flight.append((plan, self._thread.submit(run_step, self.runner, plan, sampled)))
        self._num_in_flight += 1

    def collect(self) -> ModelRunnerOutput:
        plan, here = self._in_flight.popleft()
        self._num_in_flight -= 1
        output = here.result()
        if plan.total_num_scheduled_tokens:
            output = self._group.output_of(plan.step_id)
            sampled = SampledTokens.of(plan, output)
            if sampled is not None:
                self._sampled.append(sampled)
            now_s = self._clock()
            self.model_time_s += now_s - self._busy_since_s
            self._busy_since_s = now_s
        return output

    def check_device(self) -> None:
        """Raises DeviceFault, always: stages are at different steps."""
        try:
            self._group.check_after_fault()
        except WorkerLost as error:
            raise DeviceFault(f"a worker is lost: {error}") from error
        raise DeviceFault("the first stage failed; the others have gone on")

    def close(self) -> None:
        self._group.close()  # first, for a step here may wait for another stage
        super().close()
        self._thread.shutdown()


def run_step(
    runner: StepRunner | None, plan: SchedulerOutput, sampled: Sequence[SampledTokens]
) -> ModelRunnerOutput:
    """A stage's part of a step. `sampled`: by earlier ones, whose tokens it may read."""
    if runner is None:  # asleep
        return ModelRunnerOutput(req_ids=[], sampled_token_ids=[])
    assert isinstance(runner, CPUModelRunner), "plan_runner refuses stages on a GPU"
    for tokens in sampled:
        runner.batch.take_sampled(tokens)
    runner.submit(plan)
    return runner.collect()


class GroupModelHost:
    """`ModelHost`: `host`, which is rank 0's, and those of all workers."""

    def __init__(self, host: ModelHost, group: WorkerGroup, model: str | None) -> None:
        self._host = host
        self._group = group
        self._model = model
        """The model whose weights are served; None: of no files."""
        self._opened: str | None = None
        self._fingerprint = ""

    @property
    def fingerprint(self) -> str:
        return self._host.fingerprint

    @property
    def keeps_cache(self) -> bool:
        return self._host.keeps_cache

    def check_sleep(self, level: int) -> None:
        self._host.check_sleep(level)

    def release(self, *, weights: bool) -> None:
        self._group.change(Change(what="release", argument="weights" if weights else ""))
        self._host.release(weights=weights)
        self._group.answers_to_change()

    def restore(self) -> None:
        refusals = self._everywhere(Change(what="restore"))
        if any(refusals):
            if not all(refusals):  # those that woke up sleep on
                self.release(weights=False)
            raise _first(refusals)

    def open(self, model: str) -> str:
        refusals = self._everywhere(Change(what="open", argument=model))
        if any(refusals):
            raise _first(refusals)
        self._opened = model
        return self._fingerprint

    def update(self) -> None:
        refusals = self._everywhere(Change(what="update"))
        if not any(refusals):
            self._model = self._opened
            return
        if not all(refusals):
            self._go_back()
        raise _first(refusals)

    def _go_back(self) -> None:
        """Some ranks have the new weights, others could not load them."""
        if self._model is None:
            raise DeviceFault("ranks have different weights, and the old ones came from no files")
        for what in (Change(what="open", argument=self._model), Change(what="update")):
            refusals = self._everywhere(what)
            if any(refusals):
                raise DeviceFault(f"ranks have different weights: {_first(refusals)}")

    def _everywhere(self, change: Change) -> list[RequestRefused | None]:
        """Carry the change out on all ranks; the refusals by rank."""
        self._group.change(change)
        refusals: list[RequestRefused | None] = []
        try:
            self._fingerprint = carry_out(self._host, change)
            refusals.append(None)
        except RequestRefused as error:
            refusals.append(error)
        for rank, answer in enumerate(self._group.answers_to_change(), start=1):
            code, why = answer.refused or (None, "")
            refusals.append(None if code is None else RequestRefused(code, f"rank {rank}: {why}"))
            if code is None and not any(refusals) and answer.text != self._fingerprint:
                refusals[-1] = RequestRefused(
                    ErrorCode.WEIGHTS_REFUSED,
                    f"rank {rank} has other files there; give all machines the same",
                )
        return refusals


def carry_out(host: ModelHost, change: Change) -> str:
    """At any rank. Returns the fingerprint of opened files, else an empty text.
    Raises RequestRefused."""
    match change.what:
        case "release":
            host.release(weights=change.argument == "weights")
        case "restore":
            host.restore()
        case "open":
            return host.open(change.argument)
        case "update":
            host.update()
    return ""


def _first(refusals: list[RequestRefused | None]) -> RequestRefused:
    return next(refusal for refusal in refusals if refusal is not None)
