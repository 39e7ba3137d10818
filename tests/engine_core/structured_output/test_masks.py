"""Masks of sequences as they are made for a step: they depend on the sequence's tokens alone."""

import numpy as np
import pytest

from engine_core.scheduler.constraints import ConstrainedSequence
from engine_core.structured_output.masks import MaskFiller
from protocol.sampling import SamplingParams
from protocol.structured_output import StructuredOutput, StructuredOutputKind
from tests.engine_core.new_request import new_request
from tests.engine_core.structured_output.vocabularies import EOS, VOCAB_SIZE, compiler, tokenizer

TEXT = "abcabd"


@pytest.fixture
def filler():
    return MaskFiller(VOCAB_SIZE)


def grammar(pattern="(abc)*abd"):
    asked = StructuredOutput(kind=StructuredOutputKind.REGEX, text=pattern)
    return compiler().compile(asked)


def ids(text):
    return tokenizer().encode(text, add_special_tokens=False).ids


def sequence(request_id, output=""):
    request = new_request(
        request_id=request_id,
        prompt_token_ids=[5, 6],
        sampling_params=SamplingParams(max_tokens=99),
        output_token_ids=ids(output),
    )
    return request.sequences[0]


def masks_of(filler, matcher, *sequences):
    """Each is (sequence, drafts). Returns the texts that may come next, a set a row."""
    constrained = [
        (ConstrainedSequence(place, each, each.num_output_tokens, ids(drafts)), matcher)
        for place, (each, drafts) in enumerate(sequences)
    ]
    made = filler.begin(constrained)
    rows = made.wait()
    places = [(place, i) for place, (_, d) in enumerate(sequences) for i in range(len(ids(d)) + 1)]
    assert list(zip(rows.place_M.tolist(), rows.offset_M.tolist(), strict=True)) == places
    bits = np.unpackbits(rows.bits_MW.view(np.uint8), axis=1, bitorder="little")[:, :VOCAB_SIZE]
    texts = [{_text(int(t)) for t in np.flatnonzero(row)} for row in bits]
    assert made.refused() == made.failures().keys(), "a grammar is its request's own"
    return texts, made.failures()


def forced_of(filler, sequence):
    num_tokens = sequence.num_output_tokens
    last = sequence.output_from(max(0, num_tokens - 1))
    found = dict(filler.forced_tokens([(sequence, num_tokens, last[0] if last else -1)]))
    return found.get(sequence, [])


def _text(token_id):
    return "<end>" if token_id == EOS else tokenizer().decode([token_id])


def test_a_mask_follows_the_sequences_tokens(filler):
    matcher, one = grammar(), sequence("one")
    expected = ["a", "b", "cd", "a", "b", "cd"]
    for token_id, letters in zip(ids(TEXT), expected, strict=True):
        assert masks_of(filler, matcher, (one, "")) == ([set(letters)], {})
        one.append_output_token(token_id)
    assert masks_of(filler, matcher, (one, "")) == ([{"<end>"}], {})


def test_masks_along_drafts_are_those_of_a_sequence_that_has_them(filler):
    matcher, one = grammar(), sequence("one", "ab")
    for _ in range(2):  # the grammar comes back
        assert masks_of(filler, matcher, (one, "cab"))[0] == [{"c", "d"}, {"a"}, {"b"}, {"c", "d"}]
    one.append_output_token(*ids("d"))  # no draft was accepted
    assert masks_of(filler, matcher, (one, ""))[0] == [{"<end>"}]


def test_nothing_is_masked_behind_a_draft_that_the_grammar_forbids(filler):
    texts, failures = masks_of(filler, grammar(), (sequence("one"), "axb"), (sequence("two"), ""))
    assert texts[:2] == [{"a"}, {"b"}]
    assert texts[4] == {"a"}
    assert not failures


def test_sequences_of_one_grammar_have_matchers_of_their_own(filler):
    matcher = grammar()
    texts, _ = masks_of(filler, matcher, (sequence("r"), ""), (sequence("r2", "ab"), ""))
    assert texts == [{"a"}, {"c", "d"}]


def test_a_sequence_that_comes_back_with_its_tokens_goes_on(filler):
    """As after the daemon's death."""
    matcher = grammar()
    assert masks_of(filler, matcher, (sequence("one", "abca"), ""))[0] == [{"b"}]
    filler.drop(["one"])
    assert masks_of(filler, matcher, (sequence("one", "ab"), ""))[0] == [{"c", "d"}]


def test_a_sequence_that_does_not_follow_its_grammar_fails_alone(filler):
    good, bad = sequence("good"), sequence("bad", "x")
    texts, failures = masks_of(filler, grammar(), (bad, ""), (good, ""))
    assert texts[1] == {"a"}
    assert failures.keys() == {"bad"}
    assert "structured_outputs cannot go on" in failures["bad"]


def test_forced_tokens_are_each_the_only_one_that_is_allowed(filler):
    one = sequence("one")
    matcher = grammar('\\{"name": "(Ann|Bob)", "at": [0-9]\\}')
    masks_of(filler, matcher, (one, ""))
    forced = forced_of(filler, one)
    assert tokenizer().decode(forced).startswith('{"name')
    along, _ = masks_of(filler, matcher, (one, tokenizer().decode(forced)))
    assert [len(texts) for texts in along[:-1]] == [1] * len(forced)
    for token_id in ids('{"name": "A'):
        one.append_output_token(token_id)
    assert tokenizer().decode(forced_of(filler, one)).startswith('nn", "at": ')
    assert forced_of(filler, sequence("unknown", "a")) == []
