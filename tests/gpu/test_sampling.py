"""Masks and penalties of logits, sampling, and log-probabilities."""

import pytest

from tests.gpu.checks import logits, logprobs, sampling
from tests.gpu.device import on_gpu


@pytest.mark.parametrize(("rows", "vocab_size"), [(5, 1000), on_gpu(33, 151936), on_gpu(33, 50257)])
def test_masks_and_penalties_are_exact(rows, vocab_size, device):
    assert logits.check_masks(rows, vocab_size, device=device) == 0
    assert logits.check_penalties(rows, vocab_size, device=device) == 0


@pytest.mark.parametrize("limits", [False, True])
@pytest.mark.parametrize(
    ("rows", "vocab_size", "most_different"),
    [(12, 1000, 0), *(on_gpu(96, size, 1) for size in sampling.VOCABULARIES)],
)
def test_sampled_tokens_are_those_of_the_cpu(rows, vocab_size, most_different, limits, device):
    differing = sampling.check(rows, vocab_size, limits=limits, device=device)
    assert differing <= most_different


@pytest.mark.parametrize(("rows", "vocab_size"), [(4, 1000), on_gpu(63, 151936), on_gpu(63, 50257)])
def test_logprobs_and_ranks_are_those_of_float64(rows, vocab_size, device):
    assert logprobs.check(rows, vocab_size, device=device) <= 1e-5
