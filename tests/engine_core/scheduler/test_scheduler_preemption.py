"""No block for a running request: the newest gives way, and loses nothing but time."""

from driving import Drive, make_request, make_scheduler

from engine_core.kv_cache import KVCacheGroupSpec
from engine_core.scheduler import DraftTokenIds, RequestStatus
from protocol.outputs import FinishReason
from tests.engine_core.scheduler.vllm_names import cached_requests, num_tokens_with_spec


def crowded() -> Drive:
    """Three requests that fill six blocks of four; the next token needs a seventh."""
    drive = Drive(make_scheduler(num_blocks=6), *[make_request(name, 7) for name in "abc"])
    drive.step()
    drive.step()
    assert drive.scheduler.statistics().num_blocks_in_use == 6
    return drive


def test_a_resumed_request_gets_its_whole_tables_and_all_its_tokens():
    """Proves S012, S126, S224."""
    drive = crowded()
    drive.step()
    c = drive.requests[2]
    drive.scheduler.finish_requests("a", RequestStatus.FINISHED_ABORTED)
    cached = cached_requests(drive.step(c=[9]))["c"]
    assert cached.resumed_from_preemption
    assert cached.resumed_token_ids == [*c.prompt_token_ids, 7, 7]
    # a and b have taken both of the blocks that it lost
    assert cached.num_computed_tokens == 0
    assert len(cached.new_block_ids[0]) == 3
    assert cached.num_output_tokens == 2
    assert c.output_token_ids == [7, 7, 9]
    assert not cached_requests(drive.step())["c"].resumed_from_preemption


def test_several_victims_return_in_their_order():
    """Proves S047."""
    drive = Drive(
        make_scheduler(num_blocks=8, block_size=1), *[make_request(name, 2) for name in "abcd"]
    )
    drive.step()
    preempted = [drive.step().preempted_req_ids, drive.step().preempted_req_ids]
    assert preempted == [["d", "c"], []]
    drive.scheduler.finish_requests(["a", "b"], RequestStatus.FINISHED_ABORTED)
    assert list(drive.step().num_scheduled_tokens) == ["c", "d"]


def test_a_request_that_outgrows_the_cache_alone_ends_with_the_numbers():
    """Proves S011, S107, S121."""
    drive = Drive(make_scheduler(num_blocks=2), make_request("a", 6))
    while drive.scheduler.has_work():
        drive.step()
    (output,) = drive.outputs
    assert output.finish_reason is FinishReason.LENGTH
    assert "9 tokens" in output.detail
    assert "3 KV blocks of 4 tokens, the cache has 2" in output.detail
    assert "--num-blocks" in output.detail
    assert drive.requests[0].status is RequestStatus.FINISHED_IGNORED
    assert drive.requests[0].num_output_tokens == 3


def test_a_prompt_longer_than_the_model_allows_is_ignored_with_the_limit():
    """Proves S064, S065."""
    drive = Drive(make_scheduler(max_model_len=8), make_request("a", 8), make_request("b", 7))
    drive.step()
    assert "8 tokens, the limit is 7" in drive.outputs[0].detail
    assert drive.outputs[1].finish_reason is FinishReason.LENGTH
    assert drive.outputs[1].new_token_ids == [7]


def test_a_sliding_window_holds_a_long_prompt_in_few_blocks():
    """Window 4, blocks of 2, chunks of 4: at most 4 blocks in use, for any length. Proves S146,
    S175."""
    drive = Drive(
        make_scheduler(num_blocks=4, block_size=2, budget=4, groups=(KVCacheGroupSpec(reach=4),)),
        make_request("a", 60),
    )
    while drive.scheduler.has_work():
        drive.step()
        assert drive.scheduler.statistics().num_blocks_in_use <= 4
    assert drive.outputs[0].finish_reason is FinishReason.LENGTH
    assert drive.outputs[0].detail is None
    assert drive.requests[0].num_output_tokens == 50


def test_what_is_out_of_the_window_is_free_before_the_step_and_no_request_gives_way():
    """Window 8, blocks of 4: of the nine blocks of its prompt the second needs three from the next
    step on. The first, which comes before it, takes one of the other six. Proves S146, S175."""
    drive = Drive(
        make_scheduler(num_blocks=10, groups=(KVCacheGroupSpec(reach=8),)),
        make_request("a", 4),
        make_request("b", 33),
    )
    drive.step()
    assert drive.scheduler.statistics().num_blocks_in_use == 10
    plan = drive.step()
    assert plan.preempted_req_ids == []
    assert plan.num_scheduled_tokens == {"a": 1, "b": 1}
    assert drive.scheduler.statistics().num_blocks_in_use == 2 + 3
    for _ in range(20):
        drive.step()
        assert drive.scheduler.statistics().num_blocks_in_use <= 3 + 3


def test_the_newest_preempts_itself_when_it_is_the_one_without_room():
    """Proves S121."""
    drive = Drive(make_scheduler(num_blocks=2), make_request("a", 1), make_request("b", 4))
    drive.step()
    plan = drive.step()
    assert plan.preempted_req_ids == ["b"]
    assert plan.num_scheduled_tokens == {"a": 1}
    assert drive.requests[1].status is RequestStatus.PREEMPTED


def test_a_preempted_request_forgets_its_drafts():
    drive = crowded()
    c = drive.requests[2]
    drive.scheduler.update_draft_token_ids(DraftTokenIds(["c"], [[1, 2]]))
    assert drive.step().preempted_req_ids == ["c"]
    assert c.sequences[0].spec_token_ids == []
    assert num_tokens_with_spec(c) == c.num_tokens == 9
