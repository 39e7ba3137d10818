"""Sampling against plain definitions, transformers' logits processors and the distribution."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels.backends import select_operations
from kernels.interface.sampling import Penalties, SamplingLimits
from kernels.torch.sampling import (
    apply_penalties,
    noise_of_vocabulary,
    sample_from_all,
    sample_truncated,
    truncate_by_sorting,
)
from tests.profiles import examples


def seeds(*values):
    return torch.from_numpy(np.array(values, np.uint64).astype(np.int64))


def test_the_noise_has_the_gumbel_distribution():
    noise = noise_of_vocabulary(1, 2, 400_000).double()
    assert noise.mean() == pytest.approx(0.57722, abs=0.01)
    assert noise.var() == pytest.approx(np.pi**2 / 6, abs=0.03)
    assert torch.quantile(noise[:100_000], 0.5) == pytest.approx(-np.log(np.log(2)), abs=0.02)


def test_extreme_bits_give_finite_noise():
    from kernels.torch.sampling import to_gumbel

    words = torch.tensor([0, 1, 2**32 - 1, 2**31])
    assert to_gumbel((words >> 9).float()).isfinite().all()


def test_tokens_come_as_often_as_softmax_says():
    """Chi-square over 5,000 draws; 13 degrees of freedom, 1 in 10,000 exceeds 41."""
    logits = torch.randn(14, generator=torch.Generator().manual_seed(3)) * 1.5
    draws = 5_000
    rows = logits[None].expand(draws, -1).contiguous()
    chosen = sample_from_all(rows, torch.arange(draws), torch.arange(draws) % 97)
    expected = logits.double().softmax(0) * draws
    counts = torch.bincount(chosen, minlength=14)
    assert float(((counts - expected) ** 2 / expected).sum()) < 41


@given(
    st.integers(1, 700),
    st.integers(0, 300),
    st.sampled_from([0.05, 0.5, 0.9, 0.999, 1.0]),
    st.sampled_from([0.0, 0.01, 0.3, 1.0]),
    st.sampled_from([0.01, 1.0, 6.0]),
    st.integers(0, 2**32),
)
@settings(deadline=None, max_examples=examples(150))
def test_truncated_sampling_equals_masking_and_sampling_from_all(
    vocab_size, top_k, top_p, min_p, spread, seed
):
    logits = torch.randn(3, vocab_size, generator=torch.Generator().manual_seed(seed)) * spread
    top_k = min(top_k, vocab_size)
    seeds_R, positions_R = seeds(seed, seed + 1, 5), torch.tensor([0, 9, 1000])
    chosen = sample_truncated(
        logits,
        seeds_R,
        positions_R,
        SamplingLimits(
            top_k_R=torch.full((3,), top_k),
            top_p_R=torch.full((3,), top_p),
            min_p_R=torch.full((3,), min_p),
        ),
    )
    masked = torch.stack(
        [truncate_by_sorting(row, top_k=top_k, top_p=top_p, min_p=min_p) for row in logits]
    )
    expected = sample_from_all(masked, seeds_R, positions_R)
    for row in range(3):
        if chosen[row] != expected[row]:  # only where the cut itself is within rounding
            own = logits[row].double().softmax(0)
            assert vocab_size > 1
            assert own[chosen[row]] == pytest.approx(own[expected[row]], abs=1e-4)


def test_flat_distributions_beyond_the_first_candidates_are_right():
    logits = torch.zeros(2, 5000)
    logits[1] = torch.linspace(0, 0.01, 5000)
    chosen = [
        sample_truncated(
            logits,
            seeds(seed, seed),
            torch.tensor([1, 2]),
            SamplingLimits(
                top_k_R=torch.tensor([0, 3000]),
                top_p_R=torch.tensor([0.99, 1.0]),
                min_p_R=torch.tensor([0.0, 0.5]),
            ),
        ).tolist()
        for seed in range(40)
    ]
    assert len({first for first, _ in chosen}) > 35
    assert all(second >= 2000 for _, second in chosen)
    assert min(second for _, second in chosen) < 3000


@pytest.mark.parametrize(("top_k", "min_p"), [(1500, 0.0), (0, 0.5), (1500, 0.5), (300, 0.01)])
@pytest.mark.parametrize("code", ["torch", "native"])
def test_top_p_is_a_share_of_what_top_k_and_min_p_leave_of_many_hundred_tokens(code, top_k, min_p):
    """Of the whole vocabulary's total it would keep up to five times as many."""
    sample = sample_truncated
    if code == "native":
        sample = select_operations(torch.device("cpu")).sample
    top_p, draws = 0.1, 300
    logits = torch.linspace(0, -1, 2000)
    expected = truncate_by_sorting(logits, top_k=top_k, top_p=top_p, min_p=min_p)
    rows, seeds_R = logits[None].repeat(draws, 1), seeds(*range(draws))
    limits = SamplingLimits(
        top_k_R=torch.full((draws,), top_k),
        top_p_R=torch.full((draws,), top_p),
        min_p_R=torch.full((draws,), min_p),
    )
    positions_R = torch.arange(draws)
    chosen = sample(rows, seeds_R, positions_R, limits)
    assert torch.equal(
        chosen, sample_from_all(expected[None].repeat(draws, 1), seeds_R, positions_R)
    )


@pytest.mark.parametrize(
    ("top_k", "top_p", "min_p"), [(5, 1.0, 0.0), (0, 0.7, 0.0), (0, 1.0, 0.1), (20, 0.8, 0.0)]
)
def test_the_kept_set_is_that_of_transformers(top_k, top_p, min_p):
    from transformers import (
        LogitsProcessorList,
        MinPLogitsWarper,
        TopKLogitsWarper,
        TopPLogitsWarper,
    )

    logits = torch.randn(1, 200, generator=torch.Generator().manual_seed(0)) * 2
    warpers = LogitsProcessorList()
    if min_p:
        warpers.append(MinPLogitsWarper(min_p))
    if top_k:
        warpers.append(TopKLogitsWarper(top_k))
    if top_p < 1:
        warpers.append(TopPLogitsWarper(top_p))
    kept = warpers(torch.tensor([[0]]), logits.clone())[0].isfinite().nonzero()[:, 0].tolist()
    draws = 4000
    chosen = sample_truncated(
        logits.expand(draws, -1).contiguous(),
        seeds(*range(draws)),
        torch.arange(draws),
        SamplingLimits(
            top_k_R=torch.full((draws,), top_k),
            top_p_R=torch.full((draws,), top_p),
            min_p_R=torch.full((draws,), min_p),
        ),
    )
    assert set(chosen.tolist()) <= set(kept)
    likely = [i for i in kept if logits[0, kept].softmax(0)[kept.index(i)] > 0.01]
    assert set(likely) <= set(chosen.tolist())


def test_repetition_penalty_is_that_of_transformers():
    from transformers import RepetitionPenaltyLogitsProcessor

    logits = torch.randn(1, 50, generator=torch.Generator().manual_seed(1))
    seen = torch.tensor([[3, 4, 4, 17, 49]])
    expected = RepetitionPenaltyLogitsProcessor(1.3)(seen, logits.clone())[0]
    prompt = torch.zeros(50, dtype=torch.bool)
    prompt[[3, 4]] = True
    counts = torch.zeros(50)
    counts[[4, 17, 49]] = 1.0
    own = logits[0].clone()
    apply_penalties(
        own,
        prompt,
        counts,
        Penalties(repetition_penalty=1.3, presence_penalty=0.0, frequency_penalty=0.0),
    )
    torch.testing.assert_close(own, expected)


def test_presence_counts_once_and_frequency_each_time_and_the_prompt_not_at_all():
    logits = torch.zeros(5)
    prompt = torch.tensor([True, False, False, False, False])
    counts = torch.tensor([0.0, 1.0, 3.0, 0.0, 0.0])
    apply_penalties(
        logits,
        prompt,
        counts,
        Penalties(repetition_penalty=1.0, presence_penalty=0.5, frequency_penalty=0.25),
    )
    assert logits.tolist() == [0.0, -0.75, -1.25, 0.0, 0.0]
