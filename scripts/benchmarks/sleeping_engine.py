"""`engine-core` whose model runner sleeps: all is real but the model, so that several of them serve
on two cores as if each had a device of its own. Not a user's feature."""

import os
import sys
import time
from collections import deque
from pathlib import Path
from typing import Any

import numpy as np

sys.path.pop(0)  # beside this file lies an http.py
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from engine_core.cli import main
from engine_core.executor import InProcessExecutor, StepRunner
from engine_core.scheduler import ModelRunnerOutput, SchedulerOutput
from frontend.simulator.step_times import work_of

_TOKEN_ID = 300


class SleepingRunner:
    """Every sequence samples the same token. A step takes STEP_S: seconds of each step, token,
    sequence, token of context ... (`FEATURES` of the simulator)."""

    max_steps_in_flight = 1

    def __init__(self) -> None:
        self._step_s = [float(text) for text in os.environ["STEP_S"].split(",")]
        self._steps: deque[tuple[SchedulerOutput, float]] = deque()

    def submit(self, plan: SchedulerOutput) -> None:
        duration_s = 0.0
        if plan.total_num_scheduled_tokens:
            features = work_of(plan, num_sampled=0).features
            duration_s = sum(a * b for a, b in zip(self._step_s, features, strict=False))
        self._steps.append((plan, time.monotonic() + duration_s))

    def collect(self) -> ModelRunnerOutput:
        plan, end_s = self._steps.popleft()
        time.sleep(max(0.0, end_s - time.monotonic()))
        ids = plan.batch.req_ids
        return ModelRunnerOutput(
            req_ids=ids, sampled_token_ids=np.full(len(ids), _TOKEN_ID, np.int32)
        )

    def check_device(self) -> None:
        pass


_init = InProcessExecutor.__init__


def _init_asleep(self: InProcessExecutor, runner: StepRunner, **options: Any) -> None:
    _init(self, SleepingRunner(), **options)


if __name__ == "__main__":
    InProcessExecutor.__init__ = _init_asleep  # type: ignore[method-assign]
    main()
