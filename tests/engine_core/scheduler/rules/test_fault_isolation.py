"""A step fails because of one request: it alone ends, after few steps; all others get the tokens
that they would have had."""

import math

import numpy as np
import pytest
from driving import make_request, make_scheduler

from engine_core.scheduler import DeviceFault, ModelRunnerOutput, RequestStatus
from protocol.outputs import FinishReason
from tests.protocol.all_outputs import all_outputs

EMPTY = ModelRunnerOutput(req_ids=[], sampled_token_ids=[])


class FaultyDrive:
    """The token behind n tokens is n. A step fails that computes position p of a request in
    `poison` (request: p), and those whose number among the steps with tokens is in `fails`."""

    def __init__(self, *requests, depth=1, poison=(), fails=(), **options):
        self.scheduler = make_scheduler(max_steps_in_flight=depth, **options)
        self.requests = {request.request_id: request for request in requests}
        self.poison = dict(poison)
        self.fails = set(fails)
        self.num_steps = self.num_faults = 0
        self.plans = []
        self.numbers = {}
        self.steps = []
        """Requests of each step with tokens."""
        self.tokens = {name: [] for name in self.requests}
        self.ends = {}
        for request in requests:
            self.scheduler.add_request(request)

    def run(self, num_steps=10_000):
        plans = self.plans
        while self.scheduler.has_work() and self.num_steps < num_steps:
            plans.append(self.scheduler.schedule())
            self.scheduler.check()
            if plans[-1].total_num_scheduled_tokens:
                self.num_steps += 1
                self.numbers[plans[-1].step_id] = self.num_steps
                self.steps.append(sorted({name.split("#")[0] for name in plans[-1].batch.req_ids}))
            while plans and (
                len(plans) == self.scheduler.max_steps_in_flight
                or not plans[-1].total_num_scheduled_tokens
            ):
                if not self.collect(plans):
                    for plan in plans:
                        self.update(plan, EMPTY)
                    plans.clear()
        return self

    def collect(self, plans):
        batch = plans[0].batch
        stops = batch.num_computed_tokens + batch.num_scheduled_tokens
        if self.numbers.get(plans[0].step_id) in self.fails or any(
            start <= self.poison.get(name.split("#")[0], 10_000) < stop
            for name, start, stop in zip(
                batch.req_ids, batch.num_computed_tokens, stops, strict=True
            )
        ):
            self.num_faults += 1
            self.scheduler.discard_step(plans[0], "it is poison")
            return False
        sampled = stops.astype(np.int32)
        plan = plans.pop(0)
        self.update(plan, ModelRunnerOutput(req_ids=batch.req_ids, sampled_token_ids=sampled))
        return True

    def update(self, plan, output):
        for one in self.scheduler.update_from_output(plan, output).values():
            for each in all_outputs(one):
                assert each.request_id in self.requests, "nobody asked for a probe"
                if each.index == 0:
                    self.tokens[each.request_id] += each.new_token_ids
                if each.finish_reason is not None:
                    self.ends[each.request_id] = each.finish_reason, each.detail
        self.scheduler.check()


def asked(count, num_prompt=3, **options):
    return [
        make_request(
            f"r{n}", [100 * n + at for at in range(num_prompt + n)], max_tokens=6, **options
        )
        for n in range(count)
    ]


def check_all_but(drive, culprits):
    for name, request in drive.requests.items():
        if name in culprits:
            assert drive.ends[name] == (FinishReason.ERROR, "it is poison")
        else:
            first = request.num_prompt_tokens
            assert drive.tokens[name] == list(range(first, first + 6))
            assert drive.ends[name] == (FinishReason.LENGTH, None)


@pytest.fixture(params=[1, 2])
def depth(request):
    return request.param


@pytest.mark.parametrize("culprit", range(8))
@pytest.mark.parametrize("position", [0, 2, 13])
def test_only_the_culprit_ends_and_every_token_is_delivered_once(depth, culprit, position):
    name = f"r{culprit}"
    is_reached = position < 3 + culprit + 5
    drive = FaultyDrive(*asked(8), depth=depth, poison={name: position}).run()
    check_all_but(drive, {name} if is_reached else ())


@pytest.mark.parametrize("count", [3, 31])
def test_the_culprit_is_found_in_logarithmically_many_steps(depth, count):
    """Less those that everybody needs, and the first."""
    options = {"budget": 5000, "max_num_seqs": 64, "num_blocks": 3000}
    peaceful = FaultyDrive(*asked(count), depth=depth, **options).run()
    for culprit in (0, count // 2, count - 1):
        drive = FaultyDrive(*asked(count), depth=depth, poison={f"r{culprit}": 1}, **options).run()
        check_all_but(drive, {f"r{culprit}"})
        num_more = drive.num_steps - peaceful.num_steps
        assert num_more <= 2 * math.ceil(math.log2(count)) + 3
        assert drive.num_faults <= math.ceil(math.log2(count)) + 2


def test_several_culprits_are_all_found(depth):
    culprits = {"r1": 0, "r2": 4, "r6": 10, "r7": 3}
    drive = FaultyDrive(*asked(9), depth=depth, poison=culprits).run()
    check_all_but(drive, culprits)


def test_a_fault_that_does_not_come_again_ends_nobody(depth):
    for step in range(1, 7):
        drive = FaultyDrive(*asked(5), depth=depth, fails={step}).run()
        assert drive.num_faults
        check_all_but(drive, ())


def test_a_lone_request_gets_a_second_chance_and_a_probe_decides(depth):
    check_all_but(FaultyDrive(*asked(1), depth=depth, fails={2}).run(), ())
    drive = FaultyDrive(*asked(1), depth=depth, poison={"r0": 4}).run()
    check_all_but(drive, {"r0"})
    assert drive.steps[-2:] == [["r0"], ["probe"]]


def test_steps_that_all_fail_are_the_devices_fault_and_end_no_request(depth):
    drive = FaultyDrive(*asked(8), depth=depth, fails=range(3, 1000))
    with pytest.raises(DeviceFault, match=r"steps fail whatever they hold; .* it is poison"):
        drive.run()
    assert not drive.ends
    assert drive.num_faults <= 7


def test_groups_run_apart_while_others_wait_and_say_why():
    first, last = asked(4), make_request("last", 3, max_tokens=6)
    drive = FaultyDrive(*first, poison={"r2": 4}).run(2)
    drive.requests["last"] = last
    drive.tokens["last"] = []
    drive.scheduler.add_request(last)
    drive.run(4)
    info = drive.scheduler.explain("last")
    assert info.waits_for.value == "queue"
    assert "its requests run in groups until the one that makes it fail is found" in info.why
    drive.run()
    check_all_but(drive, {"r2"})
    groups = drive.steps[drive.steps.index(["r0", "r1"]) :]
    assert groups[:5] == [["r0", "r1"], ["r2", "r3"], ["r2"], ["probe"], ["r3"]]
    assert groups[5] == ["last", "r0", "r1", "r3"]


def test_an_abort_or_a_timeout_while_suspected_leaves_the_others_to_be_tried(depth):
    for name in ("r0", "r2", "r3"):
        drive = FaultyDrive(*asked(4), depth=depth, poison={"r2": 4}).run(5)
        drive.scheduler.finish_requests(name, RequestStatus.FINISHED_ABORTED)
        drive.run()
        assert drive.ends.pop(name)[0] is FinishReason.ABORT
        del drive.requests[name]
        check_all_but(drive, {"r2"} - {name})


def test_who_shared_a_step_with_a_culprit_that_was_aborted_in_it_is_not_blamed():
    drive = FaultyDrive(*asked(4), poison={"r2": 4}).run(2)
    while (plan := drive.scheduler.schedule()).batch.req_ids != ["r2", "r3"]:
        drive.update(plan, EMPTY)
    drive.scheduler.finish_requests("r2", RequestStatus.FINISHED_ABORTED)
    assert not drive.collect([plan])
    drive.update(plan, EMPTY)
    drive.run()
    assert drive.ends.pop("r2")[0] is FinishReason.ABORT
    del drive.requests["r2"]
    check_all_but(drive, set())


def test_samples_stay_together_and_all_of_the_culprits_end(depth):
    requests = asked(4, num_sequences=2)
    drive = FaultyDrive(*requests, depth=depth, poison={"r1": 6}, max_num_seqs=8).run()
    check_all_but(drive, {"r1"})


def test_a_request_that_was_not_in_the_step_is_not_suspected():
    """It has a row, and the budget left nothing for it."""
    drive = FaultyDrive(*asked(3, num_prompt=20), budget=20, poison={"r0": 3})
    drive.run()
    check_all_but(drive, {"r0"})
    assert drive.steps[:4] == [["r0"], ["r0"], ["probe"], ["r1"]]


def test_the_runner_hears_again_what_a_failed_plan_said():
    drive = FaultyDrive(*asked(2)).run(1)
    drive.scheduler.finish_requests("r0", RequestStatus.FINISHED_ABORTED)
    drive.scheduler.add_request(make_request("r9", 5))
    plan = drive.scheduler.schedule()
    assert plan.finished_req_ids == ["r0"]
    drive.scheduler.discard_step(plan, "it failed")
    drive.scheduler.update_from_output(plan, EMPTY)
    again = drive.scheduler.schedule()
    assert (again.finished_req_ids, again.preempted_req_ids) == (["r0", "r9"], ["r1"])


def test_a_plan_without_requests_that_fails_twice_is_no_requests_fault():
    drive = FaultyDrive(*asked(1)).run(1)
    drive.scheduler.finish_requests("r0", RequestStatus.FINISHED_ABORTED)
    for _ in range(2):
        plan = drive.scheduler.schedule()
        drive.scheduler.discard_step(plan, "no device")
        drive.scheduler.update_from_output(plan, EMPTY)
    plan = drive.scheduler.schedule()
    with pytest.raises(DeviceFault):
        drive.scheduler.discard_step(plan, "no device")
