"""Ids that stand for hidden states in a prompt are no tokens: to drafts, to budgets of thinking."""

from types import SimpleNamespace

import pytest

from engine_core.kv_cache import KVCacheManager
from engine_core.scheduler import SchedulerConfig
from engine_core.scheduler.constraints import ConstrainedSequence
from engine_core.scheduler.records.prompt_content import EmbeddedRows
from engine_core.scheduler.rules.token_rules import TokenRules
from engine_core.scheduler.runner_output import ModelRunnerOutput
from engine_core.startup.scheduler import build_scheduler
from protocol.sampling import SamplingParams, ThinkingBudget
from tests.engine_core.new_request import new_request

START, END = 7, 8


def request(*spans, **params):
    return new_request(
        request_id="r",
        prompt_token_ids=[START] * 12,
        sampling_params=SamplingParams(max_tokens=9, temperature=0.0, **params),
        prompt_embeds=tuple(EmbeddedRows(*span, "float32", memoryview(b"")) for span in spans),
    )


class Proposer:
    name = "recording"

    def __init__(self):
        self.seen = []

    def propose(self, tokens, scope, most):
        self.seen.append(tokens.tolist())
        return []

    def learn(self, output, scope):
        """Nothing."""


@pytest.mark.parametrize(
    ("spans", "known"), [([], [7] * 12), ([(0, 12)], []), ([(2, 4), (5, 9)], [7] * 3)]
)
def test_drafts_are_made_of_what_stands_behind_the_rows(spans, known):
    """Proves S020."""
    proposer = Proposer()
    config = SchedulerConfig(
        max_num_seqs=2,
        max_num_batched_tokens=64,
        max_model_len=64,
        num_speculative_tokens=2,
        num_lookahead_slots=2,
    )
    cache = KVCacheManager(num_blocks=20, block_size=4)
    scheduler = build_scheduler(config, cache, proposer=proposer)
    scheduler.add_request(request(*spans))
    for token in (20, 21, 22):
        plan = scheduler.schedule()
        output = ModelRunnerOutput(req_ids=["r"], sampled_token_ids=[[token]])
        scheduler.update_from_output(plan, output)
    scheduler.schedule()
    assert proposer.seen
    for tokens in proposer.seen:
        assert tokens[: len(known)] == known
        assert set(tokens[len(known) :]) <= {20, 21, 22}
        assert len(tokens) > len(known)


@pytest.mark.parametrize(
    ("spans", "is_forced"), [([], True), ([(0, 12)], False), ([(3, 12)], True)]
)
def test_a_marker_among_them_begins_no_block_of_reasoning(spans, is_forced):
    budget = ThinkingBudget(max_tokens=0, start_token_id=START, end_token_id=END)
    sequence = request(*spans, thinking=budget).sequences[0]
    rules = TokenRules(SimpleNamespace(begin_masks=lambda constrained: None), vocab_size=32)
    masks = rules.begin_masks([ConstrainedSequence(0, sequence, 0, [])])
    assert (masks is not None) == is_forced
