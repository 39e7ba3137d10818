"""Virtual time, checked by hand; conservation; what happens when memory or patience runs out."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from frontend.fleet.router import ROUTING_POLICIES, Choice
from frontend.load.traces.trace import Turn, shared_segment
from frontend.simulator import SimulationError
from frontend.simulator.fleet import Fleet, make_router
from frontend.simulator.metrics import SLO
from protocol.cache_events import load_of
from tests.frontend.simulator.simulation_parts import LinearStepModel, request, serve
from tests.profiles import examples


def test_two_requests_take_the_times_that_a_pencil_gives():
    """
    0.0   a arrives, 50 prompt tokens, 3 out
    0.0 - 1.5    a's prompt                                 1 + 50 * 0.01
    1.0   b arrives, 60 prompt tokens, 2 out; waits
    1.5 - 3.11   a's 2nd token and b's prompt               1 + 61 * 0.01
    3.11 - 4.13  a's 3rd and b's 2nd                        1 + 2 * 0.01
    """
    run = serve(request(0, 0.0, 50, 3), request(1, 1.0, 60, 2))

    assert run.fleet.finished_s == pytest.approx(4.13)
    assert run.metrics.latencies("ttft") == pytest.approx([1.5, 2.11])
    assert run.metrics.latencies("end_to_end") == pytest.approx([3.13, 4.13])
    assert run.metrics.latencies("tpot") == pytest.approx([1.02, 1.315])  # b: 1.02 / 1, a: 2.63 / 2
    assert run.metrics.latencies("longest_gap") == pytest.approx([1.02, 1.61])
    counters = run.engines[0].counters
    assert (counters.num_steps, counters.num_step_tokens) == (3, 50 + 61 + 2)
    assert counters.busy_s == pytest.approx(4.13)


def test_requests_that_arrive_at_once_are_planned_in_one_step():
    run = serve(*(request(index, 5.0, 10, 1) for index in range(4)))

    assert run.engines[0].counters.num_steps == 1
    assert run.metrics.latencies("ttft") == pytest.approx([1.4] * 4)


def test_an_idle_engine_waits_for_the_next_arrival():
    run = serve(request(0, 0.0, 10, 1), request(1, 100.0, 10, 1))

    assert run.fleet.finished_s == pytest.approx(101.1)
    assert run.engines[0].counters.busy_s == pytest.approx(2.2)


def test_the_next_turn_of_a_chat_arrives_after_its_think_time_and_finds_the_last_one_cached():
    first = request(0, 0.0, 48, 17, later_turns=(Turn(7.0, 10, 1),))

    run = serve(first)

    answered_s = 1.48 + 16 * 1.01
    # of 48 + 17 + 10 tokens, 64 were computed: 4 whole blocks
    assert run.fleet.finished_s == pytest.approx(answered_s + 7.0 + 1.0 + 0.01 * (75 - 64))
    assert run.engines[0].statistics().num_cached_prompt_tokens == 64


def test_a_shared_prefix_is_computed_once():
    prefix = (shared_segment(3, 64),)
    run = serve(
        request(0, 0.0, 10, 1, context=prefix),
        request(1, 10.0, 10, 1, context=prefix),
        request(2, 20.0, 10, 1, context=(shared_segment(4, 64),)),
    )

    assert run.engines[0].statistics().num_cached_prompt_tokens == 64


def test_preempted_requests_finish_with_every_token_and_their_gap_is_seen():
    run = serve(
        *(request(index, 0.0, 32, 60) for index in range(3)),
        num_blocks=12,
        max_num_batched_tokens=200,
    )

    assert run.metrics.num_finished == 3
    assert run.engines[0].statistics().num_preemptions > 0
    assert run.metrics.latencies("longest_gap")[-1] > 10
    assert run.metrics.summary(1.0, SLO())["num_output_tokens"] == 180


def test_a_request_that_can_never_fit_is_counted_and_its_later_turns_are_dropped():
    run = serve(
        request(0, 0.0, 500, 1, later_turns=(Turn(1.0, 5, 1),)),
        request(2, 1.0, 10, 1),
        num_blocks=20,
    )

    assert run.metrics.num_finished == 1
    assert run.metrics.refused == {"can never fit": 1}
    assert run.fleet.num_turns_dropped == 1


def test_requests_beyond_the_queue_limit_are_refused_and_counted():
    run = serve(
        *(request(index, 0.0, 10, 5) for index in range(9)), max_num_seqs=2, max_queued_requests=3
    )

    assert run.metrics.num_finished + sum(run.metrics.refused.values()) == 9
    assert run.metrics.refused["queue full"] > 0


def test_an_answer_ends_at_the_longest_length_of_the_model():
    run = serve(request(0, 0.0, 90, 500), max_model_len=100)

    assert run.metrics.summary(1.0, SLO())["num_output_tokens"] == 10


def test_goodput_counts_requests_within_both_limits():
    run = serve(request(0, 0.0, 50, 3), request(1, 1.0, 60, 2))

    goodput = run.metrics.summary(4.0, SLO(ttft_s=2.0, tpot_s=1.5))["goodput"]

    assert (goodput["num_attained"], goodput["slo_attainment"]) == (1, 0.5)
    assert goodput["requests_per_s"] == 0.25


def test_a_run_that_does_not_end_in_time_is_broken_off():
    run = serve(request(0, 0.0, 10, 1))
    fleet = Fleet(run.engines, make_router("round-robin", 0), max_duration_s=3.0)
    with pytest.raises(SimulationError, match=r"not over after 3.0 s .* 1 requests live"):
        fleet.run([request(0, 0.0, 10, 50)])


@settings(max_examples=examples(25), deadline=None)
@given(
    lengths=st.lists(
        st.tuples(st.integers(1, 150), st.integers(1, 40), st.integers(0, 3), st.floats(0, 3)),
        min_size=1,
        max_size=25,
    ),
    num_engines=st.integers(1, 3),
    router=st.sampled_from(("round-robin", "random", *ROUTING_POLICIES)),
    num_blocks=st.integers(14, 60),
    budget=st.integers(1, 200),
)
def test_every_request_ends_exactly_once_and_no_block_is_lost(
    lengths, num_engines, router, num_blocks, budget
):
    arrival_s, requests = 0.0, []
    for index, (num_prompt, num_output, num_turns, gap_s) in enumerate(lengths):
        arrival_s += gap_s
        turns = tuple(Turn(gap_s, 1 + num_prompt // 8, num_output) for _ in range(num_turns))
        requests.append(request(10 * index, arrival_s, num_prompt, num_output, later_turns=turns))
    run = serve(
        *requests,
        num_engines=num_engines,
        router=make_router(router, 1),
        num_blocks=num_blocks,
        max_num_batched_tokens=budget,
        model=LinearStepModel(0.1, 0.001),
    )

    num_planned = sum(1 + num_turns for _, _, num_turns, _ in lengths)
    num_over = run.metrics.num_finished + sum(run.metrics.refused.values())
    assert num_over + run.fleet.num_turns_dropped == num_planned
    assert run.fleet.num_requests == num_over
    assert sum(engine.counters.num_received for engine in run.engines) == num_over
    for engine in run.engines:
        assert engine.statistics().num_blocks_in_use == 0
    assert (run.metrics.latencies("ttft") > 0).all()


def test_a_router_knows_what_it_sent_and_what_it_saw_when_it_looked_last():
    """Steps take 1 s and 0.01 s a token; the router looks every 2 s."""
    seen = []

    def spy(request, loads):
        seen.append(list(loads))
        return Choice(request.index % 2, 0)

    def load_when_asked(view_s):
        seen.clear()
        engines = serve(num_engines=2).engines
        arrivals = enumerate((0.0, 0.5, 1.9, 2.0, 7.5))
        requests = tuple(request(index, time_s, 10 + index, 1) for index, time_s in arrivals)
        Fleet(engines, spy, view_s=view_s).run(requests)
        return list(seen)

    first, second, third = load_of(10), load_of(11), load_of(12)
    assert load_when_asked(2.0) == [[0, 0], [first, 0], [first, second], [third, 0], [0, 0]]
    assert load_when_asked(0.0) == [[0, 0], [first, 0], [0, 0], [third, 0], [0, 0]]


def test_stages_have_a_step_each_and_a_round_takes_as_long_as_before():
    """
    A step takes 1 s, half of it in each stage.

    0.0   a and b arrive; both prompts are in one step
    1.0   their first tokens are there: a's step begins, and b's in the first stage at 1.5
    2.0   a's 2nd token, 2.5 b's, 3.0 a's 3rd, 3.5 b's
    """
    run = serve(
        request(0, 0.0, 5, 3),
        request(1, 0.0, 5, 3),
        model=LinearStepModel(1.0),
        max_steps_in_flight=2,
        pipeline_parallel_size=2,
    )

    assert run.metrics.latencies("ttft") == pytest.approx([1.0, 1.0])
    assert run.metrics.latencies("end_to_end") == pytest.approx([3.0, 3.5])
    assert run.engines[0].counters.busy_s == pytest.approx(2.5)


def test_many_requests_keep_all_stages_at_work():
    requests = [request(number, 0.0, 5, 40) for number in range(8)]
    ends = []
    for num_stages in (1, 4):
        run = serve(
            *requests,
            model=LinearStepModel(1.0),
            max_steps_in_flight=num_stages,
            pipeline_parallel_size=num_stages,
        )
        ends.append(run.fleet.finished_s)
        assert len(run.metrics.latencies("tpot")) == 8

    assert ends[0] == pytest.approx(40.0)
    assert ends[1] == pytest.approx(40.0, rel=0.05), "a step takes as long, whatever it computes"
