"""Pipeline parallelism: every stage has a micro-batch, and none waits for a token that another
stage computes. Proves S202."""

import itertools
import random

import numpy as np
import pytest
from driving import make_request
from steps_driver import Flight, batch_of

from engine_core.scheduler import ModelRunnerOutput, RequestStatus
from protocol.outputs import Logprobs
from protocol.sampling import BeamSearchParams, SamplingParams
from tests.engine_core.new_request import new_request
from tests.profiles import examples


def pipeline(*requests, num_stages, **options):
    options = {"num_blocks": 400, "max_model_len": 400, "min_micro_batch_tokens": 1} | options
    return Flight(
        *requests,
        max_steps_in_flight=num_stages,
        pipeline_parallel_size=num_stages,
        **options,
    )


def rounds(flight, num_plans):
    """As the engine's loop: a plan, and a result when as many are in flight as there are stages.
    Returns what each plan computed."""
    plans = []
    for _ in range(num_plans):
        plans.append(flight.plan())
        if len(flight.scheduler.in_flight) == flight.scheduler.max_steps_in_flight:
            flight.update(flight.scheduler.in_flight[0].plan)
    return [batch_of(plan) for plan in plans]


@pytest.mark.parametrize("num_stages", [2, 3, 4])
def test_a_sequence_is_not_planned_again_while_another_stage_computes_its_token(num_stages):
    flight = pipeline(make_request("a", 3), num_stages=num_stages, budget=64)
    plans = [flight.plan() for _ in range(num_stages)]
    assert [batch_of(plan) for plan in plans] == [{"a": (0, 3)}] + [{}] * (num_stages - 1)
    flight.update(plans[0], a=5)
    assert batch_of(flight.plan()) == {"a": (3, 1)}


@pytest.mark.parametrize(("num_requests", "num_stages"), [(2, 2), (7, 2), (3, 3), (8, 3), (9, 4)])
def test_decodes_are_shared_out_evenly_also_where_they_are_few(num_requests, num_stages):
    requests = [make_request(f"r{number}", 3) for number in range(num_requests)]
    flight = pipeline(*requests, num_stages=num_stages, min_micro_batch_tokens=256, max_num_seqs=16)
    batches = rounds(flight, 12 * num_stages)[-2 * num_stages :]
    most = -(-num_requests // num_stages)
    assert all(0 < len(batch) <= most for batch in batches), "each stage has work"
    for start in range(num_stages):
        names = [name for batch in batches[start : start + num_stages] for name in batch]
        assert sorted(names) == sorted(set(names)), "in one stage at a time"
        assert len(names) == num_requests, "in each round"


def test_fewer_requests_than_stages_keep_as_many_stages_at_work():
    flight = pipeline(make_request("a", 3), make_request("b", 3), num_stages=4)
    batches = rounds(flight, 40)
    assert all(len(batch) <= 1 for batch in batches[8:])
    assert sum(map(len, batches[20:])) == 10


def test_chunks_of_a_prompt_follow_each_other_without_waiting_for_a_result():
    flight = pipeline(make_request("a", 300), num_stages=3, budget=64)
    plans = [flight.plan() for _ in range(3)]
    assert [batch_of(plan)["a"] for plan in plans] == [(0, 50), (50, 50), (100, 50)]


def test_a_prompt_is_cut_for_the_stages_but_into_no_shorter_chunks_than_are_worth_it():
    for least, chunks in ((1, [40, 40]), (90, [90, 70]), (256, [160])):
        prompt = make_request("a", 160)
        flight = pipeline(prompt, num_stages=2, budget=256, min_micro_batch_tokens=least)
        plans = [flight.plan() for _ in chunks]
        assert [plan.total_num_scheduled_tokens for plan in plans] == chunks


def test_a_long_prompt_leaves_decodes_their_places():
    flight = pipeline(
        *(make_request(f"r{number}", 2) for number in range(4)), num_stages=2, budget=32
    )
    rounds(flight, 8)
    flight.add(make_request("long", 300))
    batches = rounds(flight, 12)
    for batch, following in itertools.pairwise(batches):
        decodes = [name for name in batch if name != "long"]
        assert len(decodes) == 2
        assert not set(decodes) & set(following)
        assert sum(count for _, count in batch.values()) <= 32


def test_the_beams_of_a_request_stay_in_one_micro_batch():
    beams = BeamSearchParams(beam_width=4)
    request = new_request(
        request_id="beams",
        prompt_token_ids=[1, 2, 3],
        sampling_params=SamplingParams(max_tokens=20),
        num_sequences=4,
        beam_search=beams,
    )
    flight = pipeline(request, make_request("a", 3), num_stages=2, budget=32, max_num_seqs=8)
    seen = []
    for _ in range(30):
        plan = flight.plan()
        seen.append(sorted(plan.batch.req_ids))
        if len(flight.scheduler.in_flight) == 2:
            update_beams(flight, flight.scheduler.in_flight[0].plan)
    of_beams = [[name for name in names if name.startswith("beams")] for names in seen[8:]]
    assert {len(names) for names in of_beams} == {0, 4}
    assert [name for names in seen[8:] for name in names].count("a") > 8


def update_beams(flight, plan):
    """The likeliest tokens are 20, 21, 22 ... of every beam."""
    names = plan.batch.req_ids
    likeliest = np.arange(20, 29, dtype="<i4")
    columns = Logprobs(
        num_positions=1,
        width=9,
        token_ids=likeliest.tobytes(),
        logprobs=np.linspace(-1.0, -5.0, 9, dtype="<f4").tobytes(),
        ranks=[1],
    )
    logprobs = {name: columns for name in names if name.startswith("beams")}
    output = ModelRunnerOutput(
        req_ids=names,
        sampled_token_ids=np.full(len(names), 7, np.int32),
        logprobs=logprobs,
    )
    flight.collect(flight.scheduler.update_from_output(plan, output))


def test_what_a_preempted_request_had_in_flight_is_dropped_and_sampled_again():
    a, b = make_request("a", 6), make_request("b", 6)
    flight = pipeline(a, b, num_stages=2, num_blocks=5, block_size=4, preemption_mode="recompute")
    plans = []
    for _ in range(60):
        plans.append(flight.plan())
        if len(flight.scheduler.in_flight) == 2:
            flight.update(flight.scheduler.in_flight[0].plan)
        if a.num_output_tokens > 4 and b.num_output_tokens > 4:
            break
    assert flight.scheduler.statistics().num_preemptions > 0
    assert a.output_token_ids[:4] == b.output_token_ids[:4] == [7] * 4


def test_an_abort_in_flight_frees_a_place_for_the_next_one():
    a, b = make_request("a", 3), make_request("b", 3)
    flight = pipeline(a, b, num_stages=2, max_num_seqs=2)
    rounds(flight, 6)
    flight.add(make_request("c", 3))
    in_flight = flight.scheduler.in_flight[0].plan.batch.req_ids[0]
    flight.scheduler.finish_requests(in_flight, RequestStatus.FINISHED_ABORTED)
    batches = rounds(flight, 6)
    assert not any(in_flight in batch for batch in batches)
    assert sum("c" in batch for batch in batches) >= 3


def test_a_round_takes_the_time_from_plan_to_result_not_from_result_to_result():
    """What the token budget for SLOs learns: a sequence gets a token a round."""
    seen = []
    flight = pipeline(
        make_request("a", 3),
        make_request("b", 3),
        num_stages=2,
        slo_tpot_ms=50.0,
        budget=64,
    )
    budget = flight.scheduler.feedback._budget
    budget.observe = lambda load, duration_s: seen.append(duration_s)
    now = 0.0
    for _ in range(12):
        now += 1.0
        flight.plan(now)
        if len(flight.scheduler.in_flight) == 2:
            now += 1.0
            flight.update(flight.scheduler.in_flight[0].plan, now)
    assert seen[4:] == [3.0] * len(seen[4:])


def test_no_request_waits_for_ever_in_random_loads():
    """Requests of all lengths come and go; nobody's turn is ever further away than a round of
    plans while it decodes."""
    for seed in range(examples(10)):
        draw = random.Random(seed)
        num_stages = draw.randint(2, 4)
        flight = pipeline(num_stages=num_stages, max_num_seqs=12, budget=24, num_blocks=300)
        waited: dict[str, int] = {}
        for step in range(80):
            if step < 40 and draw.random() < 0.3:
                name = f"r{step}"
                flight.add(make_request(name, draw.randint(1, 60), max_tokens=draw.randint(1, 30)))
            flight.plan()
            batch = flight.scheduler.pool.batch
            for row in batch.order.tolist():
                name = batch.request_ids[row]
                is_decode = batch.num_tokens[row] > batch.num_prompt_tokens[row]
                is_idle = is_decode and not batch.is_blocked[row]
                waited[name] = waited.get(name, 0) + 1 if is_idle else 0
                assert waited[name] <= 2 * num_stages
            if len(flight.scheduler.in_flight) == num_stages:
                flight.update(flight.scheduler.in_flight[0].plan)


def test_a_pipeline_of_another_depth_than_its_steps_is_refused():
    with pytest.raises(ValueError, match="--pipeline-parallel-size is 2, and 3 steps"):
        Flight(max_steps_in_flight=3, pipeline_parallel_size=2)
