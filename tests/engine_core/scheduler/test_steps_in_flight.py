"""One step in flight: what is planned before a result is known, and what becomes of that result.

Proves S092.
"""

import sys
from collections import deque

import numpy as np
import pytest
from driving import make_request
from steps_driver import EOS, Flight, batch_of

from engine_core.scheduler import (
    DraftTokenIds,
    ModelRunnerOutput,
    RequestStatus,
    StepOrderError,
)
from engine_core.scheduler.policies.fair import Fair
from engine_core.scheduler.preemption import PreemptionMode, PreemptionRule
from protocol.outputs import FinishReason
from protocol.sampling import BeamSearchParams, SamplingParams
from tests.engine_core.new_request import new_request


def test_the_next_token_is_planned_for_before_it_is_known():
    flight = Flight(a := make_request("a", 3))
    first, second = flight.plan(), flight.plan()
    assert batch_of(second) == {"a": (3, 1)}
    assert second.num_output_tokens.tolist() == [1]
    flight.update(first, a=4)
    third = flight.plan()
    assert batch_of(third) == {"a": (4, 1)}
    # the slot behind the first block: its id is received before the token is known
    assert [(update.start, len(update.block_ids[0])) for update in third.block_updates] == [(1, 1)]
    flight.update(second, a=5)
    flight.update(third, a=6)
    assert a.output_token_ids == [4, 5, 6]


def test_steps_are_updated_in_order_and_no_third_one_is_planned():
    flight = Flight(make_request("a", 3))
    first, second = flight.plan(), flight.plan()
    with pytest.raises(StepOrderError, match="step 0 has not been updated"):
        flight.scheduler.schedule()
    with pytest.raises(StepOrderError, match=r"step 1 .* step 0 is next"):
        flight.update(second)
    with pytest.raises(StepOrderError, match=r"step 1 .* step 0 is next"):
        flight.scheduler.discard_step(second, "late")
    flight.update(first)
    flight.update(second)
    with pytest.raises(StepOrderError, match="none is in flight"):
        flight.update(second)


def test_a_plan_never_changes_once_it_is_handed_out():
    """Copies of a fork, blocks, drafts, swaps and aborts of later steps are in later plans only."""
    pair = new_request(
        request_id="pair",
        prompt_token_ids=[1, 2, 3, 4, 5],
        sampling_params=SamplingParams(max_tokens=20, seed=1),
        num_sequences=2,
    )
    flight = Flight(
        pair, make_request("a", 6), make_request("b", 9), num_blocks=9, num_host_blocks=20
    )
    plans, texts, seen = [], [], set()
    for number in range(40):
        plans.append(plan := flight.plan())
        texts.append(repr(plan))
        seen |= {name for name in ("swap_in", "swap_out", "copy") if getattr(plan.copies, name)}
        if number == 6:
            flight.add(make_request("c", 3))
            flight.scheduler.finish_requests("a", RequestStatus.FINISHED_ABORTED)
        if number:
            flight.update(plans[-2])
    assert seen == {"swap_in", "swap_out", "copy"}
    assert [repr(plan) for plan in plans] == texts


@pytest.mark.parametrize("limits", [{"max_tokens": 2}, {"max_model_len": 5}])
def test_nothing_is_planned_behind_a_token_that_is_the_last_by_length(limits):
    flight_limits = {name: limits[name] for name in limits if name == "max_model_len"}
    request = make_request("a", 3, max_tokens=limits.get("max_tokens", 50))
    flight = Flight(request, **flight_limits)
    first, second = flight.plan(), flight.plan()
    flight.update(first)
    third = flight.plan()
    assert batch_of(third) == {}
    flight.update(second)
    assert request.status is RequestStatus.FINISHED_LENGTH
    assert request.output_token_ids == [7, 7]


@pytest.mark.parametrize("as_lists", [False, True])
def test_what_ends_in_flight_ends_once_and_its_last_row_comes_to_nothing(as_lists):
    """Proves S232."""
    request = make_request("a", 3, eos_token_ids=[EOS])
    flight = Flight(request, make_request("b", 3))
    first, second = flight.plan(), flight.plan()
    flight.update(first, a=EOS)
    assert [(o.request_id, o.finish_reason) for o in flight.outputs] == [
        ("a", FinishReason.STOP),
        ("b", None),
    ]
    assert flight.scheduler.statistics().num_blocks_in_use == 1
    if as_lists:
        flight.update_with_lists(second, a=[5], b=[6])
    else:
        flight.update(second, a=5, b=6)
    assert [(o.request_id, o.new_token_ids) for o in flight.outputs] == [("b", [6])]
    assert request.output_token_ids == [EOS]
    numbers = flight.scheduler.statistics()
    assert (numbers.num_generated_tokens, numbers.num_finished["stop"]) == (3, 1)
    assert flight.plan().finished_req_ids == ["a"]


def test_a_name_used_again_gets_nothing_of_the_row_that_ran_in_vain():
    """Proves S232."""
    flight = Flight(make_request("a", 3, eos_token_ids=[EOS]), make_request("b", 3))
    first, second = flight.plan(), flight.plan()
    flight.update(first, a=EOS)
    flight.add(again := make_request("a", 6))
    third = flight.plan()
    assert third.finished_req_ids == ["a"]
    assert batch_of(third) == {"b": (4, 1), "a": (0, 6)}
    flight.update_with_lists(second, a=[5], b=[6])
    assert again.output_token_ids == []
    flight.update(third, a=8)
    assert again.output_token_ids == [8]


@pytest.mark.parametrize("as_lists", [False, True])
def test_a_prompt_that_goes_on_waits_for_nothing(as_lists):
    flight = Flight(a := make_request("a", 11), budget=6)
    first, second = flight.plan(), flight.plan()
    assert (batch_of(first), batch_of(second)) == ({"a": (0, 6)}, {"a": (6, 5)})
    if as_lists:
        flight.update_with_lists(first)
    else:
        flight.update(first)
    assert a.output_token_ids == []  # the first step sampled nothing
    third = flight.plan()
    assert batch_of(third) == {"a": (11, 1)}
    flight.update(second, a=4)
    assert a.output_token_ids == [4]


def test_an_abort_in_flight_gives_back_everything_at_once():
    flight = Flight(make_request("a", 7), make_request("b", 3))
    first, second = flight.plan(), flight.plan()
    flight.scheduler.finish_requests("a", RequestStatus.FINISHED_ABORTED)
    assert flight.scheduler.statistics().num_blocks_in_use == 1
    flight.update(first)
    assert [(o.request_id, o.finish_reason) for o in flight.outputs] == [
        ("a", FinishReason.ABORT),
        ("b", None),
    ]
    flight.update(second)
    assert [o.request_id for o in flight.outputs] == ["b"]
    assert not flight.scheduler.statistics().num_finished["error"]


# ---------------------------------------------------------------------- who waits for results


def test_samples_run_ahead_once_they_have_branched_off():
    request = new_request(
        request_id="a",
        prompt_token_ids=[1, 2, 3],
        sampling_params=SamplingParams(max_tokens=9, seed=1),
        num_sequences=2,
    )
    flight = Flight(request, make_request("b", 3))
    first, second = flight.plan(), flight.plan()
    assert list(batch_of(second)) == ["b"]
    flight.update(first)
    third = flight.plan()
    assert batch_of(third) == {"a": (3, 1), "a#1": (2, 1), "b": (4, 1)}
    flight.update(second)
    assert batch_of(flight.plan()) == {"a": (4, 1), "a#1": (3, 1), "b": (5, 1)}


def test_beams_wait_for_every_result():
    request = new_request(
        request_id="a",
        prompt_token_ids=[1, 2, 3],
        sampling_params=SamplingParams(max_tokens=9, temperature=0.0),
        num_sequences=2,
        beam_search=BeamSearchParams(beam_width=2),
    )
    flight = Flight(request, make_request("b", 3))
    flight.plan()
    assert list(batch_of(flight.plan())) == ["b"]


def test_drafts_wait_for_their_result_and_those_for_a_token_in_flight_are_dropped():
    """Proves S215."""
    flight = Flight(a := make_request("a", 3, max_tokens=9))
    first, second = flight.plan(), flight.plan()
    flight.update(first, a=4)
    drafts = DraftTokenIds(req_ids=["a"], draft_token_ids=[[5, 6]])
    flight.scheduler.update_draft_token_ids(drafts)
    assert a.sequences[0].spec_token_ids == []
    flight.update(second, a=5)
    flight.scheduler.update_draft_token_ids(drafts)
    third, fourth = flight.plan(), flight.plan()
    assert batch_of(third) == {"a": (4, 3)}
    assert batch_of(fourth) == {}
    flight.update_with_lists(third, a=[5, 8])
    flight.update(fourth)
    assert batch_of(flight.plan()) == {"a": (6, 1)}


def test_what_a_step_in_flight_computes_of_an_ended_sample_is_not_found():
    """A fault may still void that step."""
    prompt = list(range(1, 10))
    flight = Flight(make_request("a", prompt))
    flight.plan()
    flight.scheduler.finish_sample("a", 0, RequestStatus.FINISHED_ABORTED)
    flight.add(behind := make_request("b", prompt))
    flight.plan()
    assert behind.account.num_cached_tokens == 0


# ---------------------------------------------------------------------- what is learnt


def test_a_step_lasts_from_the_end_of_the_one_before_it():
    durations = []

    class Rule(PreemptionRule):
        def observe(self, num_tokens, num_copied_blocks, duration_s):
            durations.append(duration_s)

    flight = Flight(make_request("a", 3), preemption_rule=Rule(PreemptionMode.RECOMPUTE))
    first, second = flight.plan(1.0), flight.plan(1.5)
    flight.update(first, 4.0)
    third = flight.plan(4.5)
    flight.update(second, 6.0)
    flight.update(third, 7.0)
    flight.update(flight.plan(10.0), 11.0)
    assert durations == [3.0, 2.0, 1.0, 1.0]


def test_service_is_counted_once_for_tokens_that_were_emitted():
    request = make_request("a", 3, eos_token_ids=[EOS])
    flight = Flight(request, make_request("b", 3), policy=Fair(output_weight=1.0))
    first, second = flight.plan(), flight.plan()
    flight.update(first, a=EOS)
    flight.update(second)
    # both prompts, and three tokens: all for the one client
    assert flight.scheduler.statistics().service_by_tenant == {"client 0": 9.0}


# ---------------------------------------------------------------------- cost


@pytest.mark.parametrize("depth", [1, 2])
def test_a_plain_decode_step_does_no_python_work_for_each_sequence(depth):
    """As many calls for 100 sequences as for 10."""
    num_calls = [_calls_of_a_step(num_running, depth) for num_running in (10, 100)]
    assert num_calls[0] == num_calls[1]


def _calls_of_a_step(num_running, depth):
    requests = [make_request(f"r{n}", 3) for n in range(num_running)]
    flight = Flight(
        *requests,
        budget=1000,
        num_blocks=500,
        block_size=64,
        max_num_seqs=num_running,
        max_steps_in_flight=depth,
    )
    plans, calls = deque(), []

    def watched(call, *arguments):
        sys.setprofile(lambda *event: calls.append(event))
        result = call(*arguments)
        sys.setprofile(None)
        return result

    for _ in range(8):
        calls.clear()
        plans.append(watched(flight.scheduler.schedule))
        if len(plans) == depth:
            plan = plans.popleft()
            names = plan.batch.req_ids
            output = ModelRunnerOutput(names, np.full(len(names), 7, np.int32))
            watched(flight.scheduler.update_from_output, plan, output)
    assert len(plan.batch.req_ids) == num_running
    return len(calls)
