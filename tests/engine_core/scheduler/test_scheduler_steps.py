"""Who runs in a step, and how much of it."""

from driving import Drive, make_request, make_scheduler

from engine_core.scheduler import RequestStatus
from tests.engine_core.scheduler.vllm_names import cached_requests


def test_the_worked_example_of_three_prompts_and_a_budget_of_ten():
    """R1 = 3, R2 = 5, R3 = 12 tokens. Proves S074, S075, S076."""
    drive = Drive(
        make_scheduler(budget=10, scheduling_policy="fcfs"),
        make_request("R1", 3),
        make_request("R2", 5),
        make_request("R3", 12),
    )
    counts = [dict(drive.step().num_scheduled_tokens) for _ in range(4)]
    assert counts == [
        {"R1": 3, "R2": 5, "R3": 2},
        {"R1": 1, "R2": 1, "R3": 8},
        {"R1": 1, "R2": 1, "R3": 2},
        {"R1": 1, "R2": 1, "R3": 1},
    ]
    assert [request.num_output_tokens for request in drive.requests] == [4, 4, 2]


def test_a_budget_too_small_for_a_running_request_clips_it():
    """Proves S060, S101."""
    drive = Drive(make_scheduler(budget=4), make_request("a", 3), make_request("b", 9))
    assert drive.step().num_scheduled_tokens == {"a": 3, "b": 1}
    assert drive.step().num_scheduled_tokens == {"a": 1, "b": 3}


def test_no_prompt_gets_more_than_max_chunk_size_a_step():
    """Proves S063, S102."""
    drive = Drive(
        make_scheduler(budget=20, max_chunk_size=4), make_request("a", 10), make_request("b", 3)
    )
    assert drive.step().num_scheduled_tokens == {"a": 4, "b": 3}
    assert drive.step().num_scheduled_tokens == {"a": 4, "b": 1}
    assert drive.step().num_scheduled_tokens == {"a": 2, "b": 1}


def test_max_num_seqs_bounds_the_running_and_a_finished_one_makes_room_in_the_next_step():
    """Proves S061, S103."""
    names = ["a", "b", "c"]
    drive = Drive(make_scheduler(max_num_seqs=2), *[make_request(n, 2) for n in names])
    drive.scheduler.finish_requests("unknown", RequestStatus.FINISHED_ABORTED)
    assert list(drive.step().num_scheduled_tokens) == ["a", "b"]
    drive.scheduler.finish_requests("a", RequestStatus.FINISHED_ABORTED)
    plan = drive.step()
    assert list(plan.num_scheduled_tokens) == ["b", "c"]
    assert plan.finished_req_ids == ["a"]


def test_a_request_that_has_no_room_is_not_overtaken():
    """Proves S077, S081."""
    scheduler = make_scheduler(num_blocks=10, scheduling_policy="fcfs")
    drive = Drive(scheduler, make_request("a", 24))
    drive.step()
    drive.add(make_request("big", 30), make_request("small", 1, client_index=1))
    assert list(drive.step().num_scheduled_tokens) == ["a"]
    assert drive.scheduler.get_request_counts() == (1, 2)


def test_blocks_are_taken_only_when_the_last_is_full():
    """Proves S139, S178, S218."""
    drive = Drive(make_scheduler(block_size=4), make_request("a", 3))
    assert [len(ids) for ids in drive.step().scheduled_new_reqs[0].block_ids] == [1]
    new_blocks = [cached_requests(drive.step())["a"].new_block_ids for _ in range(6)]
    assert [blocks and len(blocks[0]) for blocks in new_blocks] == [None, 1, None, None, None, 1]


def test_an_empty_step_plans_nothing():
    """Proves S219."""
    scheduler = make_scheduler()
    assert not scheduler.has_work()
    plan = scheduler.schedule()
    assert plan.total_num_scheduled_tokens == 0
    assert not plan.num_scheduled_tokens
    assert scheduler.statistics().num_steps == 0
