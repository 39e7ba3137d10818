"""Bad words and thinking budgets as masks: which tokens are left behind which tokens."""

from array import array

import numpy as np
import pytest

from engine_core.scheduler.constraints import ConstrainedSequence
from engine_core.scheduler.plan import MaskRows
from engine_core.scheduler.rules.token_rules import TokenRules
from protocol.sampling import GenerationRules, SamplingParams, ThinkingBudget
from tests.engine_core.new_request import new_request

V = 70
START, END = 40, 65
WORDS = ((9,), (5, 6), (1, 2, 69))


class Grammars:
    """Allows even tokens, at every place that it is asked about."""

    def begin_masks(self, constrained):
        places = [(each.place, at) for each in constrained for at in range(len(each.drafts) + 1)]
        self.rows = MaskRows(
            *(np.array(column, np.int64) for column in zip(*places, strict=True)),
            np.full((len(places), 3), 0x55555555, np.int32),
        )
        return self

    def wait(self):
        return self.rows

    def failures(self):
        return {"a": "why"}

    def refused(self):
        return {"a"}


def constrained(output, *, place=0, drafts=(), grammar=None, prompt=(1, 2, 5), **params):
    request = new_request(
        request_id="a",
        prompt_token_ids=prompt,
        sampling_params=SamplingParams(max_tokens=20, **params),
    )
    request.grammar = grammar
    request.sequences[0].set_output(array("i", output))
    return ConstrainedSequence(place, request.sequences[0], len(output), drafts)


def left(*asked):
    """By place and offset the tokens that are left; not where all are."""
    masks = TokenRules(Grammars(), vocab_size=V).begin_masks(asked)
    if masks is None:
        return {}
    rows = masks.wait()
    assert len(set(zip(rows.place_M.tolist(), rows.offset_M.tolist(), strict=True))) == len(
        rows.place_M
    )
    bits = np.unpackbits(rows.bits_MW.view(np.uint8), axis=1, bitorder="little")[:, :V]
    return {
        (int(place), int(offset)): set(np.flatnonzero(row).tolist())
        for place, offset, row in zip(rows.place_M, rows.offset_M, bits, strict=True)
    }


EVERY = set(range(V))


@pytest.mark.parametrize(
    ("output", "forbidden"),
    [
        ([], {9}),  # the prompt's 1 2 and 5 are not the output's
        ([5], {9, 6}),
        ([1, 2, 5], {9, 6}),
        ([5, 1], {9}),
        ([7, 1, 2], {9, 69}),
        ([1, 2, 7], {9}),
    ],
)
def test_the_last_token_of_a_bad_word_is_impossible_where_the_others_stand_before_it(
    output, forbidden
):
    assert left(constrained(output, bad_words=WORDS)) == {(0, 0): EVERY - forbidden}
    # likewise where its last tokens are drafts
    for num_drafts in range(1, len(output) + 1):
        known, drafts = output[:-num_drafts], output[-num_drafts:]
        found = left(constrained(known, drafts=drafts, bad_words=WORDS))
        assert found[0, num_drafts] == EVERY - forbidden
        assert len(found) == num_drafts + 1


@pytest.mark.parametrize(
    ("prompt", "output", "is_forced"),
    [
        ([7, START], [8, 8], False),
        ([7, START], [8, 8, 8], True),
        ([7, START, 8], [8, 8], True),
        ([7, START], [8, 8, END, 8, 8], False),
        ([START, 8, 8, 8, 8, END], [8] * 5, False),
        ([7], [8] * 5, False),
        ([7], [START, 8, 8, 8], True),
        ([7], [START, 8, END, START, 8, 8], False),
    ],
)
def test_behind_the_budget_the_end_of_thinking_is_the_only_token(prompt, output, is_forced):
    thinking = ThinkingBudget(max_tokens=3, start_token_id=START, end_token_id=END)
    expected = {(0, 0): {END}} if is_forced else {}
    assert left(constrained(output, prompt=prompt, thinking=thinking)) == expected
    if is_forced:  # by drafts; those before are free
        found = left(constrained([], prompt=prompt, drafts=output, thinking=thinking))
        assert found == {(0, len(output)): {END}}


def test_a_mask_beside_a_grammars_leaves_what_both_leave():
    grammar, even = object(), {each for each in EVERY if each % 2 == 0}
    found = left(
        constrained([5], place=0, bad_words=((8,), (5, 6)), grammar=grammar),
        constrained([5], place=1, grammar=grammar, drafts=[4]),
        constrained([5], place=2, bad_words=((8,),)),
        constrained([5], place=3, bad_words=((5, 5, 8),)),
    )
    assert found == {
        (0, 0): even - {8, 6}, (1, 0): even, (1, 1): even, (2, 0): EVERY - {8},
    }  # fmt: skip


def test_a_models_rules_hold_for_first_and_last_tokens_and_for_all():
    """As transformers' processors of `suppress_tokens`, `begin_suppress_tokens`,
    `forced_bos_token_id` and `forced_eos_token_id`; 20 tokens are asked for."""
    rules = GenerationRules(suppressed=(7, 8), suppressed_first=(9,), forced_last=2)
    everything = set(range(V))
    assert left(constrained([], generation_rules=rules)) == {(0, 0): everything - {7, 8, 9}}
    assert left(constrained([1], generation_rules=rules)) == {(0, 0): everything - {7, 8}}
    found = left(constrained([1] * 17, drafts=[3, 4, 5], generation_rules=rules))
    assert found == {
        (0, 0): everything - {7, 8},
        (0, 1): everything - {7, 8},
        (0, 2): {2},
        (0, 3): everything - {7, 8},
    }
    first = GenerationRules(forced_first=30)
    assert left(constrained([], generation_rules=first)) == {(0, 0): {30}}
    assert left(constrained([30], generation_rules=first)) == {}


def test_rules_need_no_grammars():
    rules = GenerationRules(suppressed=(7,))
    masks = TokenRules(None, vocab_size=V).begin_masks([constrained([], generation_rules=rules)])
    assert masks.wait().bits_MW.shape == (1, 3)
    assert masks.failures() == {}
