"""Beam search against transformers' generate() on a tiny random Llama, and its own rules."""

import itertools

import numpy as np
import pytest
from beam_reference import PROMPT, VOCAB_SIZE, likeliest, reference, tiny_llama
from hypothesis import given, settings
from hypothesis import strategies as st

from engine_core.scheduler.records.beam_search import BeamCandidates, BeamHypothesis, BeamSearch
from protocol.outputs import FinishReason, Logprobs
from protocol.sampling import BeamSearchParams
from tests.covering import covering_pairs


@pytest.fixture(scope="module")
def model():
    return tiny_llama()


def search(model, beam_search: BeamSearch) -> list[BeamHypothesis]:
    """Run to the end; each beam is a list of tokens that follows the survivors' parents."""
    beams: list[list[int]] = [[]]
    while not beam_search.is_over:
        rows = likeliest(model, [PROMPT + beam for beam in beams], beam_search.num_candidates)
        survivors = beam_search.advance(BeamCandidates.from_logprobs(rows))
        beams = [[*beams[new.parent], new.token_id] for new in survivors]
        assert beam_search.is_over == (not beams)
    return beam_search.results


def check_equal(model, params: BeamSearchParams, max_tokens: int, eos: list[int], **options):
    min_tokens = options.get("min_new_tokens", 0)
    found = search(
        model,
        BeamSearch(params, max_tokens=max_tokens, eos_token_ids=eos, min_tokens=min_tokens),
    )
    tokens, scores = reference(model, params, max_tokens, eos, **options)
    assert [hypothesis.token_ids for hypothesis in found] == tokens
    if scores:
        assert [hypothesis.score for hypothesis in found] == pytest.approx(scores, abs=1e-4)
    return found


@covering_pairs(
    early_stopping=[True, False, "never"], length_penalty=[-1.0, 0.0, 1.0, 2.0], width=[1, 2, 4, 5]
)
def test_tokens_and_scores_are_those_of_transformers(model, width, length_penalty, early_stopping):
    """With end-of-sequence ignored, of one kind, and of two kinds. Proves S182."""
    params = BeamSearchParams(width, length_penalty=length_penalty, early_stopping=early_stopping)
    likely = check_equal(model, params, 12, [])[0].token_ids
    assert len(likely) == 12
    reasons = set()
    for eos in ([likely[3]], [likely[4], likely[1]], [likely[8], 17]):
        reasons |= {h.finish_reason for h in check_equal(model, params, 12, eos)}
    assert FinishReason.STOP in reasons


@pytest.mark.parametrize("early_stopping", [True, False, "never"])
def test_no_beam_ends_before_min_tokens(model, early_stopping):
    params = BeamSearchParams(3, early_stopping=early_stopping)
    eos = check_equal(model, params, 10, [])[0].token_ids[1]
    found = check_equal(model, params, 10, [eos], min_new_tokens=4)
    assert min(len(hypothesis.token_ids) for hypothesis in found) > 4


@pytest.mark.parametrize("max_tokens", [1, 2, 3])
def test_a_search_of_few_tokens_is_that_of_transformers(model, max_tokens):
    check_equal(model, BeamSearchParams(5), max_tokens, [])
    check_equal(model, BeamSearchParams(5), max_tokens, list(range(20)))


@settings(max_examples=settings().max_examples // 4, deadline=None)
@given(
    width=st.integers(2, 8),
    length_penalty=st.floats(-3.0, 4.0),
    early_stopping=st.sampled_from([True, False, "never"]),
    max_tokens=st.integers(1, 9),
    eos=st.lists(st.integers(0, VOCAB_SIZE - 2), max_size=4, unique=True),
)
def test_any_search_is_that_of_transformers(
    model, width, length_penalty, early_stopping, max_tokens, eos
):
    """Proves S182."""
    params = BeamSearchParams(width, length_penalty=length_penalty, early_stopping=early_stopping)
    check_equal(model, params, max_tokens, eos)


def candidates(*rows: dict[int, float]) -> BeamCandidates:
    """One {token: log-probability} a beam."""
    return BeamCandidates(
        np.array([list(row) for row in rows], dtype=np.int32),
        np.array([list(row.values()) for row in rows], dtype=np.float32),
    )


def test_the_sampled_token_in_front_is_not_taken_twice():
    rows = candidates({4: -0.1, 6: -2.0})
    report = Logprobs(
        num_positions=1,
        width=3,
        token_ids=np.array([4, 4, 6], dtype="<i4").tobytes(),
        logprobs=np.array([-0.1, -0.1, -2.0], dtype="<f4").tobytes(),
        ranks=[1],
    )
    taken = BeamCandidates.from_logprobs([report])
    assert taken.token_ids.tolist() == rows.token_ids.tolist()
    assert taken.logprobs.tolist() == rows.logprobs.tolist()


def test_a_surviving_beam_stays_in_its_parents_place():
    beam_search = BeamSearch(BeamSearchParams(3), max_tokens=9)
    beam_search.advance(candidates({1: -1.0, 2: -2.0, 3: -3.0}))
    survivors = beam_search.advance(
        candidates(
            {4: -9.0, 5: -9.5, 6: -9.9}, {4: -1.0, 5: -6.0, 6: -9.0}, {4: -0.1, 5: -1.0, 6: -9}
        )
    )
    # totals: beam 2 with 4 -> -3.1, beam 1 with 4 -> -3, beam 2 with 5 -> -4: beam 0 is replaced
    assert [(new.parent, new.token_id) for new in survivors] == [(2, 5), (1, 4), (2, 4)]


def test_a_stop_token_is_named_and_an_end_of_sequence_is_not():
    params = BeamSearchParams(2, early_stopping=True)
    beam_search = BeamSearch(params, max_tokens=9, eos_token_ids=[1], stop_token_ids=[2])
    assert beam_search.num_candidates == 4
    survivors = beam_search.advance(candidates({1: -0.5, 2: -0.6, 3: -4.0, 4: -5.0}))
    assert beam_search.is_over
    assert not survivors
    assert [(h.token_ids, h.finish_reason, h.stop_reason) for h in beam_search.results] == [
        ([1], FinishReason.STOP, None),
        ([2], FinishReason.STOP, 2),
    ]


def test_an_end_that_is_not_among_the_best_is_not_kept():
    beam_search = BeamSearch(BeamSearchParams(2), max_tokens=9, eos_token_ids=[9])
    survivors = beam_search.advance(candidates({1: -0.5, 2: -0.6, 9: -0.7}))
    assert not beam_search.results
    assert [new.token_id for new in survivors] == [1, 2]


@pytest.mark.parametrize("length_penalty", [-100.0, 100.0])
def test_extreme_length_penalties_give_finite_scores(length_penalty):
    beam_search = BeamSearch(BeamSearchParams(1, length_penalty=length_penalty), max_tokens=40)
    while not beam_search.is_over:
        beam_search.advance(candidates({1: -1.0}))
    (hypothesis,) = beam_search.results
    assert np.isfinite(hypothesis.score)
    assert hypothesis.cumulative_logprob == -40.0


def test_rows_that_do_not_match_the_running_beams_are_refused():
    beam_search = BeamSearch(BeamSearchParams(2), max_tokens=2)
    with pytest.raises(ValueError, match="candidates of 2 beams, 1 are running"):
        beam_search.advance(candidates({1: -1.0}, {1: -1.0}))
    with pytest.raises(ValueError, match="max_tokens is 0"):
        BeamSearch(BeamSearchParams(2), max_tokens=0)


def test_every_continuation_is_considered_when_the_width_covers_them_all():
    """Width 27 over 3 tokens and 3 steps is exhaustive search; the sums are of the whole paths."""
    table = np.log(np.random.default_rng(0).dirichlet(np.ones(3), size=40)).astype(np.float32)

    def row(path: tuple[int, ...]) -> dict[int, float]:
        return dict(enumerate(table[hash(path) % 40].tolist()))

    def total(path: tuple[int, ...]) -> float:
        return sum(row(path[:index])[token] for index, token in enumerate(path))

    beam_search, beams = BeamSearch(BeamSearchParams(27), max_tokens=3), [()]
    while not beam_search.is_over:
        survivors = beam_search.advance(candidates(*[row(beam) for beam in beams]))
        beams = [(*beams[new.parent], new.token_id) for new in survivors]
    paths = sorted(itertools.product(range(3), repeat=3), key=lambda path: -total(path))
    found = beam_search.results
    assert sorted(tuple(h.token_ids) for h in found) == sorted(paths)
    assert [h.cumulative_logprob for h in found] == pytest.approx([total(p) for p in paths])
