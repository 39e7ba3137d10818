"""What those who watch see of a real scheduler."""

from driving import Drive, make_request, make_scheduler

from engine_core.observers.scheduler_view import scheduler_view
from engine_core.scheduler import RequestStatus
from protocol.codec import encode
from protocol.snapshots import FIRST_PREFIX, FIRST_REQUEST, MAX_CHUNKS, MAX_REQUESTS


def view_of(scheduler, *plans):
    return scheduler_view(scheduler, [(plan, 0.25) for plan in plans])


def owners_of(view):
    return memoryview(view.blocks.owners).cast("H").tolist()


def test_a_step_is_shown_as_its_prefill_chunks_and_decodes():
    drive = Drive(make_scheduler(budget=16), make_request("a", 5), make_request("b", 20))
    first = drive.step(a=[7])
    second = drive.step(a=[8], b=[9])
    view = view_of(drive.scheduler, first, second)
    a, b = (request.number for request in view.requests)
    assert [step.prefill_chunks for step in view.steps] == [[(a, 5), (b, 11)], [(b, 9)]]
    assert [step.num_decode_tokens for step in view.steps] == [0, 1]
    assert [step.token_budget for step in view.steps] == [16, 16]
    assert [step.duration_s for step in view.steps] == [0.25, 0.25]


def test_a_request_that_has_ended_keeps_its_number_in_steps():
    drive = Drive(make_scheduler(), make_request("a", 6), make_request("b", 6))
    plan = drive.step(a=[7], b=[7])
    numbers = [request.number for request in view_of(drive.scheduler).requests]
    drive.scheduler.finish_requests("a", RequestStatus.FINISHED_ABORTED)
    view = view_of(drive.scheduler, plan)
    assert [request.request_id for request in view.requests] == ["b"]
    assert [number for number, _ in view.steps[0].prefill_chunks] == numbers


def test_preempted_and_waiting_requests_follow_the_running_ones_and_the_first_says_why():
    scheduler = make_scheduler(num_blocks=4, max_num_seqs=2, budget=64)
    drive = Drive(scheduler, make_request("a", 7), make_request("b", 7), make_request("c", 7))
    plans = [drive.step(a=[1], b=[1]), drive.step(a=[2], b=[2]), drive.step(a=[3])]
    view = view_of(scheduler, *plans)
    shown = {request.request_id: request for request in view.requests}
    assert list(shown) == ["a", "b", "c"]
    assert [request.status for request in shown.values()] == ["running", "preempted", "waiting"]
    assert [step.num_preempted for step in view.steps] == [0, 0, 1]
    assert (shown["b"].num_preemptions, shown["b"].num_blocks) == (1, 0)
    assert shown["a"].num_blocks == owners_of(view).count(FIRST_REQUEST) == 3
    assert shown["b"].why and shown["c"].why is None


def test_a_prefix_of_two_requests_is_shown_as_shared():
    prompt = list(range(100, 108))
    drive = Drive(make_scheduler(), make_request("a", prompt), make_request("b", [*prompt, 9]))
    drive.step(a=[1], b=[1])
    view = view_of(drive.scheduler)
    assert view.blocks.prefixes == [(2, 2)]
    assert owners_of(view).count(FIRST_PREFIX) == 2


def test_a_snapshot_is_bounded_and_holds_no_tokens():
    scheduler = make_scheduler(budget=4096, max_num_seqs=300, num_blocks=3000, max_model_len=64)
    secret = 1_234_567_890
    requests = [make_request(f"r{n}", [secret, n, n + 1]) for n in range(1000)]
    drive = Drive(scheduler, *requests)
    plan = drive.step(**{f"r{n}": [secret] for n in range(300)})
    view = view_of(scheduler, plan)
    assert len(view.requests) == 2 * MAX_REQUESTS
    (step,) = view.steps
    assert len(step.prefill_chunks) == MAX_CHUNKS
    assert step.prefill_chunks[-1] == (0, 3 * (300 - MAX_CHUNKS + 1))
    assert len(encode(view)) < 100_000
    assert secret.to_bytes(4, "big") not in encode(view)
