"""When graphs are captured: the common ones before the first request, the others while idle."""

import numpy as np
import pytest
import torch
from fake_device import LateQueue
from test_steps_in_flight import KINDS, PROMPTS, Plans, in_flight

from engine_core.model_runner.gpu.graphs import GraphKey, StepGraphs
from engine_core.model_runner.gpu.queue import CudaQueue
from engine_core.model_runner.gpu.step_buckets import MAX_LONG_PREFILLS, StepBucket, StepBuckets
from kernels.interface.device_steps import SamplingMode
from kernels.interface.long_prefills import is_long_prefill

DECODES = (StepBucket(1, 1), StepBucket(2, 2), StepBucket(4, 4))
MIXED = (StepBucket(16, 4), StepBucket(24, 4))


def capturing(decodes, *, mixed=MIXED, has_parts=False):
    """Graphs, and the keys in the order in which they are captured."""
    order = []

    def capture(key):
        order.append(key)
        return lambda: None

    return StepGraphs(StepBuckets(decodes, mixed), has_parts=has_parts, capture=capture), order


def is_mixed_step(bucket):
    return bucket.num_tokens != bucket.num_sequences


@pytest.mark.parametrize("has_parts", [False, True])
def test_the_largest_with_all_sampling_comes_first_so_that_the_others_fit_into_its_memory(
    has_parts,
):
    graphs, order = capturing(DECODES, has_parts=has_parts)
    graphs.capture(graphs.all)
    assert order == graphs.all
    assert order[0] == GraphKey(StepBucket(4, 4), SamplingMode.FULL)
    assert len(set(order)) == len(order) == 3 * 4 * (1 + has_parts) + 2 * len(MIXED)
    assert {key.bucket for key in graphs.largest} == {StepBucket(4, 4), MIXED[-1]}
    assert not any(is_mixed_step(key.bucket) and key.has_parts for key in order)
    for is_mixed in (False, True):
        later = [key.bucket for key in graphs.at_start if key not in graphs.largest]
        sizes = [bucket for bucket in later if is_mixed_step(bucket) == is_mixed]
        assert sizes == sorted(sizes, reverse=True)


def test_without_buckets_there_is_nothing_to_capture():
    graphs, order = capturing((), mixed=())
    graphs.capture(graphs.all)
    assert graphs.next_missing() is None
    assert not order


@pytest.mark.parametrize("reference", ["one group"], indirect=True)
def test_what_warm_up_leaves_is_captured_one_at_a_time_while_nothing_runs(make_device_runner):
    queue = LateQueue()
    runner = make_device_runner(queue=queue)
    runner.warm_up()
    graphs, num_at_start = runner.graphs, queue.num_captured
    sampled = (SamplingMode.PLAIN, SamplingMode.TRUNCATED)
    assert all(key in graphs for key in graphs.all if key.mode in sampled)
    assert num_at_start == len(graphs) == len(graphs.at_start) < len(graphs.all)
    in_flight(runner, ["greedy", "random", "truncated"], 3)
    assert queue.num_captured == num_at_start

    plans = Plans(num_groups=runner.config.num_groups)
    plans.add("penalised", PROMPTS["penalised"], KINDS["penalised"])
    fresh = make_device_runner(queue=LateQueue())
    fresh.submit(plans.plan({"penalised": len(PROMPTS["penalised"])}))
    assert not fresh.capture_next_graph()
    assert len(fresh.graphs) == 0
    fresh.collect()

    while runner.capture_next_graph():
        num_at_start += 1
        assert queue.num_captured == num_at_start
    assert len(graphs) == len(graphs.all)


@pytest.mark.parametrize("reference", ["one group"], indirect=True)
def test_captures_between_steps_change_no_token(make_device_runner):
    names = ["greedy", "truncated", "penalised", "min tokens"]
    expected, _ = in_flight(make_device_runner(), names, 6)
    runner = make_device_runner()
    plans = Plans(num_groups=runner.config.num_groups)
    for name in names:
        plans.add(name, PROMPTS[name], KINDS[name])
    tokens = {name: list(PROMPTS[name]) for name in names}
    counts = {name: len(PROMPTS[name]) for name in names}
    for _ in range(7):
        runner.submit(plans.plan(counts))
        answer = runner.collect()
        for name, token_id in zip(answer.req_ids, answer.sampled_token_ids, strict=True):
            tokens[name].append(int(token_id))
        counts = dict.fromkeys(names, 1)
        assert runner.capture_next_graph()
    assert tokens == expected


def test_a_capture_ahead_that_fails_ends_nothing_and_is_not_tried_again(make_device_runner, caplog):
    class FullQueue(LateQueue):
        def capture(self, work):
            raise torch.OutOfMemoryError("CUDA out of memory")

    runner = make_device_runner(queue=FullQueue())
    assert runner.capture_next_graph()
    assert not runner.capture_next_graph()
    assert "CUDA out of memory" in caplog.text


class FakeGraph:
    calls = []

    def capture_begin(self, *, pool, capture_error_mode):
        self.calls.append(("begin", pool, capture_error_mode))

    def capture_end(self):
        self.calls.append("end")

    def replay(self):
        self.calls.append("replay")


def test_a_capture_gives_no_cached_memory_back_and_waits_for_nothing(monkeypatch):
    def refuse(*_):
        raise AssertionError("a capture stops the engine")

    for name in ("empty_cache", "synchronize"):
        monkeypatch.setattr(torch.cuda, name, refuse)
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: None)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: "pool")
    monkeypatch.setattr(torch.cuda, "CUDAGraph", FakeGraph)
    monkeypatch.setattr(FakeGraph, "calls", [])
    queue = CudaQueue(torch.device("cuda", 0))
    queue.capture(lambda: FakeGraph.calls.append("work"))()
    begin = ("begin", "pool", "thread_local")
    assert FakeGraph.calls == [begin, "work", "end", "replay"]

    with pytest.raises(AssertionError, match="stops the engine"):
        queue.capture(refuse)
    assert FakeGraph.calls[-2:] == [begin, "end"], "the stream captures no longer"


def test_a_prompt_beside_decodes_is_replayed_if_its_sampling_needs_no_more(make_device_runner):
    queue = LateQueue()
    runner = make_device_runner(queue=queue)
    plans = Plans(num_groups=runner.config.num_groups)
    num_replayed = []
    for name in ("greedy", "truncated", "penalised"):
        plans.add(name, PROMPTS[name], KINDS[name])
        others = [other for other in plans.lines if other != name]
        counts = dict.fromkeys(others, 1) | {name: len(PROMPTS[name])}
        runner.execute(plans.plan(counts))
        num_replayed.append(queue.num_replayed)
    assert num_replayed == [1, 2, 2]
    assert {key.bucket.num_tokens for key in runner.graphs.all if key in runner.graphs} == {16}


def test_a_step_of_many_short_chunks_behind_long_prefixes_has_no_graph():
    few, more = ([(6000, 9)] * number + [(9000, 4000)] for number in (2, 3))
    assert count_long(few) == 2 <= MAX_LONG_PREFILLS
    assert count_long(more) == 3 > MAX_LONG_PREFILLS
    assert count_long([(9000, 1), (1024, 9), (1025, 256)]) == 1


def count_long(requests):
    lengths, queries = np.array(requests).T
    return int(is_long_prefill(queries, lengths, num_query_heads=32).sum())
