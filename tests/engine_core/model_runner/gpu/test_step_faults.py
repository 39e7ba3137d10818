"""Steps of the device runner that fail, at the launch or when they are collected, with another one
in flight: the others go on as if nothing had happened."""

import pytest
from engine_loop import EngineLoop, make_scheduler
from fake_device import LateQueue

from engine_core.executor import InProcessExecutor
from engine_core.scheduler import DeviceFault, ModelRunnerOutput
from protocol.outputs import FinishReason
from protocol.sampling import SamplingParams

NAMES = "abcdefg"
EMPTY = ModelRunnerOutput(req_ids=[], sampled_token_ids=[])


class FaultyLoop(EngineLoop):
    """As the engine's loop treats a step that holds a poisoned request."""

    def __init__(self, runner, *, poison=(), fails="nowhere"):
        options = {"max_num_batched_tokens": 96, "max_num_seqs": 8, "max_model_len": 64}
        scheduler = make_scheduler(
            runner.config.layout, num_blocks=150, num_host_blocks=0, swap=False, depth=2, **options
        )
        super().__init__(scheduler, runner, depth=2)
        self.poison, self.fails = set(poison), fails
        for place, name in enumerate(NAMES):
            params = SamplingParams(max_tokens=9, temperature=1.0, seed=place, ignore_eos=True)
            self.add(name, [place + 1] * (3 + place), params)
        self.was_launched = []

    def step(self):
        plan = self.scheduler.schedule()
        launch = self.runner._launch
        if self.fails == "at the launch" and self.poison.intersection(plan.batch.req_ids):
            self.runner._launch = self._refuse
        try:
            self.runner.submit(plan)
            self.was_launched.append(True)
        except MemoryError:
            self.was_launched.append(False)
        self.runner._launch = launch
        self.open.append(plan)
        while self.open and (
            len(self.open) == 2 or not plan.total_num_scheduled_tokens or not self.was_launched[-1]
        ):
            self.take_in()

    def take_in(self):
        first = self.open[0]
        fails = self.poison.intersection(first.batch.req_ids)
        if not fails or self.scheduler.in_flight[0].is_discarded:
            if not self.was_launched.pop(0):
                return self._void()
            return super().take_in()
        self.scheduler.discard_step(first, "out of memory")
        while self.open:
            self._void()
        return None

    def _void(self):
        plan = self.open.popleft()
        if self.was_launched and self.was_launched.pop(0):
            self.runner.collect()
        for outputs in self.scheduler.update_from_output(plan, EMPTY).values():
            self.ends |= {(o.request_id, 0): o.finish_reason for o in outputs.other_outputs}
        self.scheduler.check()

    def _refuse(self, *_):
        raise MemoryError


@pytest.mark.parametrize("fails", ["at the launch", "when it is collected"])
@pytest.mark.parametrize("poison", ["a", "d", "bg"])
def test_only_poisoned_requests_end_and_the_others_have_their_tokens(
    make_device_runner, poison, fails
):
    peaceful = FaultyLoop(make_device_runner())
    peaceful.finish()
    loop = FaultyLoop(make_device_runner(), poison=poison, fails=fails)
    loop.finish()
    for name in NAMES:
        if name in poison:
            assert loop.ends[name, 0] is FinishReason.ERROR
            assert not loop.tokens[name, 0]
        else:
            assert loop.tokens[name, 0] == peaceful.tokens[name, 0]
            assert len(loop.tokens[name, 0]) == 9


def test_a_device_that_reports_its_loss_to_every_call_is_told_from_one_that_is_well(
    make_device_runner,
):
    queue = LateQueue()
    executor = InProcessExecutor(make_device_runner(queue=queue))
    executor.check_device()

    def lost():
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    queue.synchronize = lost
    with pytest.raises(DeviceFault, match="the device is lost: RuntimeError: CUDA error"):
        executor.check_device()
