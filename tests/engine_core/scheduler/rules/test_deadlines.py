"""`timeout_s`: a request that is not done in time ends, wherever it is, and no other does."""

from types import SimpleNamespace

import pytest
from driving import make_request, make_scheduler, result

from engine_core.scheduler.request import RequestStatus
from engine_core.scheduler.rules.deadlines import Deadlines
from protocol.outputs import FinishReason
from protocol.sampling import BeamSearchParams
from tests.protocol.all_outputs import all_outputs


class Clock:
    """A scheduler whose steps happen at given times."""

    def __init__(self, *requests, **options):
        self.scheduler = make_scheduler(**options)
        self.requests = list(requests)
        self.ends = {}
        for request in requests:
            self.scheduler.add_request(request)

    def step(self, now):
        """Returns the ids of the sequences in the step."""
        plan = self.scheduler.schedule(now=now)
        outputs = self.scheduler.update_from_output(plan, result(plan, {}, self.requests), now=now)
        for per_client in outputs.values():
            for output in all_outputs(per_client):
                if output.finished:
                    self.ends.setdefault(output.request_id, []).append(output)
        self.scheduler.check()
        return plan.batch.req_ids


def test_a_running_request_ends_at_its_deadline_and_its_memory_is_free():
    clock = Clock(make_request("a", 9, timeout_s=2.0, arrival_time=1.0), make_request("b", 5))
    assert clock.step(1.0) == clock.step(2.9) == ["a", "b"]
    in_use = clock.scheduler.statistics().num_blocks_in_use
    assert clock.step(3.0) == ["b"]
    [end] = clock.ends["a"]
    assert end.finish_reason is FinishReason.TIMEOUT
    assert end.detail.startswith(
        "timeout_s is 2, and the request arrived 2.000 s ago and has 2 tokens; raise timeout_s"
    )
    assert clock.scheduler.statistics().num_blocks_in_use < in_use
    assert clock.scheduler.statistics().num_finished["timeout"] == 1
    assert clock.scheduler.explain("a").finish_reason == "timeout"
    assert clock.step(4.0) == ["b"]


def test_a_waiting_request_ends_too_and_the_next_one_runs():
    clock = Clock(
        make_request("a", 5), make_request("b", 5, timeout_s=1.0), make_request("c", 5),
        max_num_seqs=1,
    )  # fmt: skip
    clock.step(0.0)
    clock.step(1.0)
    [end] = clock.ends["b"]
    assert "has 0 tokens" in end.detail
    clock.scheduler.finish_requests("a", RequestStatus.FINISHED_ABORTED)
    assert clock.step(2.0) == ["c"]


@pytest.mark.parametrize("beams", [False, True])
def test_all_sequences_of_a_request_end_each_with_one_output(beams):
    search = BeamSearchParams(beam_width=3) if beams else None
    request = make_request("a", 5, timeout_s=1.0, num_sequences=3, beam_search=search)
    clock = Clock(request)
    if not beams:
        assert len(clock.step(0.0)) == 1
        assert len(clock.step(0.5)) == 3
    clock.step(1.5)
    assert sorted(end.index for end in clock.ends["a"]) == [0, 1, 2]
    assert {end.finish_reason for end in clock.ends["a"]} == {FinishReason.TIMEOUT}
    assert not clock.scheduler.has_work()


def test_what_ends_in_time_hears_nothing_of_its_deadline():
    clock = Clock(make_request("a", 5, timeout_s=1.0, max_tokens=1), make_request("b", 5))
    for now in (0.0, 0.5, 1.0, 2.0):
        clock.step(now)
    [end] = clock.ends["a"]
    assert end.finish_reason is FinishReason.LENGTH


def test_a_new_request_under_an_old_id_has_a_deadline_of_its_own():
    clock = Clock(make_request("a", 5, timeout_s=1.0, max_tokens=1))
    clock.step(0.0)
    again = make_request("a", 5, timeout_s=5.0, arrival_time=0.5)
    clock.requests = [again]
    clock.scheduler.add_request(again)
    assert clock.step(1.0) == ["a"]
    assert clock.step(5.5) == []


def test_a_deadline_passes_while_a_step_is_in_flight():
    """The step's token of a request that has ended is dropped."""
    a, b = make_request("a", 5, timeout_s=1.0), make_request("b", 5)
    scheduler = make_scheduler(max_steps_in_flight=2)
    scheduler.add_request(a)
    scheduler.add_request(b)
    first = scheduler.schedule(now=0.0)
    output = result(first, {}, [a, b])
    second = scheduler.schedule(now=1.0)
    assert second.batch.req_ids == ["b"]
    outputs = [
        output
        for per_client in scheduler.update_from_output(first, output, now=1.1).values()
        for output in all_outputs(per_client)
    ]
    [end] = [output for output in outputs if output.request_id == "a"]
    assert (end.finish_reason, end.new_token_ids) == (FinishReason.TIMEOUT, [])
    scheduler.check()


def test_finished_requests_do_not_pile_up():
    expired = []
    aborts = SimpleNamespace(finish_requests=lambda name, status, why: expired.append(name))
    deadlines = Deadlines(aborts)
    alive = [make_request(f"alive{n}", 1, timeout_s=50.0 + n) for n in range(10)]
    for request in alive:
        deadlines.on_arrival(request)
    for _ in range(10_000):
        request = make_request("r", [1], timeout_s=1e6)
        deadlines.on_arrival(request)
        request.status = RequestStatus.FINISHED_STOPPED
        assert len(deadlines) <= 64
    deadlines.on_arrival(make_request("none", 1))
    deadlines.begin_step(0, 54.0)
    assert expired == [request.request_id for request in alive[:5]]
    deadlines.begin_step(1, 1e9)
    assert expired == [request.request_id for request in alive]
