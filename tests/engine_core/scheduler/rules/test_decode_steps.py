"""Several decode steps in one plan: when they are planned, and what becomes of their tokens.

Proves S091.
"""

import numpy as np
import pytest
from driving import make_request, make_scheduler

from engine_core.scheduler import DraftTokenIds, ModelRunnerOutput, RequestStatus
from protocol.outputs import FinishReason
from protocol.sampling import BeamSearchParams, SamplingParams
from tests.engine_core.new_request import new_request
from tests.protocol.all_outputs import all_outputs

STOP = 9


class Steps:
    """A scheduler of up to four decode steps; the runner gives tokens as the test says."""

    def __init__(self, *requests, **options):
        options = {"num_decode_steps": 4, "num_lookahead_slots": 3, **options}
        self.scheduler = make_scheduler(**options)
        self.add(*requests)

    def add(self, *requests):
        for request in requests:
            self.scheduler.add_request(request)

    def plan(self):
        plan = self.scheduler.schedule()
        self.scheduler.check()
        return plan

    def step(self, **tokens):
        """Plans, and gives each sequence its tokens, 7 where none are named. Returns the plan and
        the outputs by request."""
        plan = self.plan()
        batch = plan.batch
        column = np.full((len(batch.req_ids), plan.num_decode_steps), 7, np.int32)
        for name, given in tokens.items():
            column[batch.req_ids.index(name), : len(given)] = given
        if plan.num_decode_steps == 1:
            column = column[:, 0]
        return plan, self.update(plan, column)

    def update(self, plan, sampled, failures=None):
        output = ModelRunnerOutput(plan.batch.req_ids, sampled, failures=failures or {})
        outputs = self.scheduler.update_from_output(plan, output)
        self.scheduler.check()
        return {each.request_id: each for one in outputs.values() for each in all_outputs(one)}


def request(name, prompt=3, **params):
    return new_request(
        request_id=name,
        prompt_token_ids=[100 + index for index in range(prompt)],
        sampling_params=SamplingParams(max_tokens=20, stop_token_ids=(STOP,), **params),
    )


def test_a_first_token_comes_alone_and_the_next_ones_four_a_plan():
    steps = Steps(a := request("a"), b := request("b"))
    first, _ = steps.step()
    assert first.num_decode_steps == 1
    plan, outputs = steps.step(a=[1, 2, 3, 4])
    assert plan.num_decode_steps == 4
    assert plan.num_scheduled_tokens == {"a": 4, "b": 4}
    assert plan.total_num_scheduled_tokens == 8
    assert a.output_token_ids == [7, 1, 2, 3, 4]
    assert b.output_token_ids == [7] * 5
    assert outputs["a"].new_token_ids == [1, 2, 3, 4]
    # all but the last one sampled are computed
    assert a.num_computed_tokens == a.num_tokens - 1
    counted = steps.scheduler.statistics()
    assert (counted.num_decode_tokens, counted.num_draft_tokens) == (8, 0)


def test_a_sequence_that_stops_on_the_way_keeps_nothing_of_what_is_behind():
    steps = Steps(a := request("a", 4), b := request("b"))
    steps.step()
    _, outputs = steps.step(a=[1, STOP, 3, 4])
    assert outputs["a"].new_token_ids == [1, STOP]
    assert outputs["a"].finish_reason is FinishReason.STOP
    assert steps.scheduler.statistics().num_draft_tokens == 0
    assert a.output_token_ids == [7, 1, STOP]
    assert b.output_token_ids == [7] * 5
    # 4 prompt tokens fill a block; 7 1 9 and what followed do not fill one that could be found
    behind = new_request(
        request_id="c",
        prompt_token_ids=[*a.prompt_token_ids, 7, 1, STOP, 3, 4, 5],
        sampling_params=SamplingParams(max_tokens=2),
    )
    steps.add(behind)
    steps.step()
    assert behind.account.num_cached_tokens == 4


def test_no_sequence_is_taken_beyond_its_length():
    short = request("a")
    short.sampling_params = SamplingParams(max_tokens=3)
    steps = Steps(short, b := request("b"))
    steps.step()
    plan, outputs = steps.step(a=[1, 2], b=[1, 2, 3, 4])
    assert plan.num_scheduled_tokens == {"a": 2, "b": 4}
    assert outputs["a"].new_token_ids == [1, 2]
    assert outputs["a"].finish_reason is FinishReason.LENGTH
    assert b.output_token_ids == [7, 1, 2, 3, 4]


def test_fewer_tokens_than_steps_are_computed_again_from_there():
    """What a runner returns of a sequence whose third step failed."""
    steps = Steps(a := request("a"), b := request("b"))
    steps.step()
    plan = steps.plan()
    steps.update(plan, [[1, 2], [1, 2, 3, 4]])
    assert a.output_token_ids == [7, 1, 2]
    assert a.num_computed_tokens == a.num_tokens - 1
    plan = steps.plan()
    assert plan.num_scheduled_tokens == {"a": 4, "b": 4}
    outputs = steps.update(plan, [[], [1, 2, 3, 4]], {"a": "not finite"})
    assert outputs["a"].finish_reason is FinishReason.ERROR
    assert len(b.output_token_ids) == 9


ALONE = {
    "stop strings": [request("x", has_stop_strings=True)],
    "log-probabilities": [request("x", logprobs=0)],
    "a beam search": [
        new_request(
            request_id="x",
            prompt_token_ids=[1, 2],
            sampling_params=SamplingParams(max_tokens=9, temperature=0.0),
            num_sequences=2,
            beam_search=BeamSearchParams(2),
        )
    ],
    "a prompt of several chunks": [make_request("x", 60)],
    "one that waits": [make_request("x", 90), make_request("y", 90)],
}


@pytest.mark.parametrize("others", ALONE.values(), ids=ALONE)
def test_a_plan_has_one_step_beside(others):
    steps = Steps(request("a"), num_blocks=30, budget=16)
    steps.step()
    assert steps.step()[0].num_decode_steps == 4
    steps.add(*others)
    assert steps.plan().num_decode_steps == 1


@pytest.mark.parametrize("lack", [{"max_num_seqs": 1}, {"num_blocks": 8}], ids=["row", "blocks"])
def test_decodes_alone_go_one_step_while_a_request_waits(lack):
    """For a place, or for blocks: it may come with the next plan. Proves S091."""
    steps = Steps(request("a"), **lack)
    steps.step()
    assert steps.step()[0].num_decode_steps == 4
    steps.add(make_request("x", 28))
    plan = steps.plan()
    assert (plan.num_scheduled_tokens, plan.num_decode_steps) == ({"a": 1}, 1)


def test_drafts_are_verified_in_a_plan_of_one_step():
    steps = Steps(request("a"))
    steps.step()
    steps.scheduler.update_draft_token_ids(DraftTokenIds(["a"], [[7, 7]]))
    plan = steps.plan()
    assert plan.scheduled_spec_decode_tokens == {"a": [7, 7]}
    assert plan.num_decode_steps == 1


def test_as_many_steps_as_there_are_slots():
    """Without lookahead slots the rest of the block that a sequence has."""
    steps = Steps(a := request("a", 4), num_lookahead_slots=0)
    steps.step()
    assert [steps.step()[0].num_decode_steps for _ in range(3)] == [4, 4, 4]
    assert a.num_tokens == 17
    steps = Steps(request("a", 5), num_lookahead_slots=0)
    steps.step()
    assert [steps.step()[0].num_decode_steps for _ in range(3)] == [3, 4, 4]


def test_an_abort_between_two_plans_gives_all_blocks_back():
    steps = Steps(request("a"), request("b"))
    steps.step()
    steps.step()
    steps.scheduler.finish_requests(["a", "b"], RequestStatus.FINISHED_ABORTED)
    _, outputs = steps.step()
    assert {each.finish_reason for each in outputs.values()} == {FinishReason.ABORT}
    assert steps.scheduler.statistics().num_blocks_in_use == 0
