"""The fast noise against its definition, and what is built on it against plain masking."""

import numpy as np
import pytest
import torch

from kernels.cpu.operations import CpuOperations
from kernels.interface.sampling import SamplingLimits
from kernels.torch.operations import TorchOperations
from kernels.torch.sampling import (
    LARGEST_NOISE,
    gumbel_noise,
    noise_of_vocabulary,
    sample_from_all,
    sample_truncated,
    truncate_by_sorting,
)
from tests.covering import covering_pairs
from tests.native_kernels import native_library_or_skip

SEEDS_AND_POSITIONS = [(0, 0), (1, 7), (-1, 2**31 + 5), (2**63 - 1, 2**40), (-(2**63), 1)]


def defined_noise(seed, position, vocab_size):
    ids_1V = torch.arange(vocab_size)[None]
    return gumbel_noise(torch.tensor([seed]), torch.tensor([position]), ids_1V)[0]


@pytest.mark.parametrize(("seed", "position"), SEEDS_AND_POSITIONS)
@pytest.mark.parametrize("vocab_size", [1, 63, 4 * 4096, 4 * 4096 + 5, 49_153])
def test_the_noise_of_a_row_is_that_of_the_definition(seed, position, vocab_size):
    noise = noise_of_vocabulary(seed, position, vocab_size)
    torch.testing.assert_close(noise, defined_noise(seed, position, vocab_size))
    assert float(noise.max()) < LARGEST_NOISE


@pytest.mark.parametrize(("seed", "position"), SEEDS_AND_POSITIONS)
def test_the_noise_of_single_tokens_in_any_order_is_that_of_the_row(seed, position):
    ids_C = torch.from_numpy(np.random.default_rng(0).permutation(20_000)[:9_001])
    noise = gumbel_noise(torch.tensor([seed]), torch.tensor([position]), ids_C[None])[0]
    torch.testing.assert_close(noise, noise_of_vocabulary(seed, position, 20_000)[ids_C])
    none = gumbel_noise(torch.tensor([seed]), torch.tensor([position]), ids_C[None, :0])
    assert none.shape == (1, 0)


def test_no_noise_exceeds_the_bound_that_rules_tokens_out():
    largest = torch.tensor([2**23 - 1], dtype=torch.float32).add_(0.5).mul_(2.0**-23)
    noise = float(-torch.log(-torch.log(largest)))
    assert LARGEST_NOISE - 0.01 < noise < LARGEST_NOISE


@pytest.mark.parametrize("scale", [0.01, 1.0, 3.0, 10.0, 1e6])
def test_tokens_ruled_out_without_noise_could_not_have_won(scale):
    generator = torch.Generator().manual_seed(2)
    logits_RV = torch.randn(40, 5_003, generator=generator) * scale
    logits_RV[3, 100:] = -torch.inf
    seeds_R = torch.arange(40) * 7_919
    positions_R = torch.arange(40)
    noise_RV = gumbel_noise(seeds_R, positions_R, torch.arange(5_003).expand(40, -1))
    expected_R = (logits_RV - logits_RV.amax(dim=1, keepdim=True) + noise_RV).argmax(dim=1)
    assert torch.equal(sample_from_all(logits_RV, seeds_R, positions_R), expected_R)
    assert scale > 1 or len(set(expected_R.tolist())) > 20


def plain_mask(logits_V, top_k, top_p, min_p):
    """Which tokens stay, one by one in falling order (lower ids first among equals)."""
    order = sorted(range(len(logits_V)), key=lambda i: (-logits_V[i], i))
    best = logits_V[order[0]]
    kept = [i for i in order if min_p == 0 or np.exp(logits_V[i] - best) >= min_p]
    if top_k:
        kept = [i for i in kept if logits_V[i] >= logits_V[order[top_k - 1]]]
    weights = np.exp(np.array([logits_V[i] for i in kept]) - best)
    stay, total = set(), 0.0
    for token, weight in zip(kept, weights / weights.sum(), strict=True):
        if top_p >= 1 or total < top_p or not stay:
            stay.add(token)
        total += weight
    return stay


@covering_pairs(top_k=[0, 1, 17, 300], top_p=[1e-6, 0.3, 0.95, 1.0], min_p=[0.0, 0.2])
def test_truncation_by_sorting_keeps_what_the_plain_rule_keeps(top_k, top_p, min_p):
    generator = torch.Generator().manual_seed(3)
    # whole halves, so that ties are everywhere
    logits_V = (torch.randn(700, generator=generator) * 4).round() / 2
    kept_V = truncate_by_sorting(logits_V, top_k=top_k, top_p=top_p, min_p=min_p)
    stay = set(torch.isfinite(kept_V).nonzero()[:, 0].tolist())
    assert stay == plain_mask(logits_V.double().numpy(), top_k, top_p, min_p)
    assert torch.equal(kept_V[list(stay)], logits_V[list(stay)])


def test_a_truncated_row_gets_the_same_token_whatever_its_neighbours_ask_for():
    generator = torch.Generator().manual_seed(4)
    logits_RV = torch.randn(6, 3_000, generator=generator) * 2
    settings = {
        "top_k_R": torch.tensor([5, 2_000, 0, 0, 256, 255]),
        "top_p_R": torch.tensor([1.0, 1.0, 0.99, 0.2, 0.9, 1.0]),
        "min_p_R": torch.tensor([0.0, 0.0, 0.0, 0.1, 0.0, 0.001]),
    }
    for position in range(20):
        seeds_R, positions_R = torch.arange(6), torch.full((6,), position)
        together = sample_truncated(logits_RV, seeds_R, positions_R, SamplingLimits(**settings))
        for row in range(6):
            one = slice(row, row + 1)
            mine = {name: values[one] for name, values in settings.items()}
            alone = sample_truncated(
                logits_RV[one], seeds_R[one], positions_R[one], SamplingLimits(**mine)
            )
            assert int(alone[0]) == int(together[row])


def best_of_shards(logits_V, seed, position, *, num_shards):
    """Each shard gives its largest logit, then its best (score, id) with its own noise alone."""
    parts = list(
        zip(logits_V.chunk(num_shards), torch.arange(len(logits_V)).chunk(num_shards), strict=True)
    )
    largest = max(float(part.max()) for part, _ in parts)
    found = []
    for part, ids in parts:
        noise = gumbel_noise(torch.tensor([seed]), torch.tensor([position]), ids[None])[0]
        scores = (part - largest) + noise
        found.append((float(scores.max()), -int(ids[scores.argmax()])))
    return -max(found)[1]


@pytest.mark.parametrize("backend", ["torch", "native"])
@pytest.mark.parametrize("num_shards", [2, 3, 8])
def test_the_token_of_the_vocabulary_is_that_of_its_shards(backend, num_shards):
    ops = TorchOperations() if backend == "torch" else CpuOperations(native_library_or_skip())
    generator = torch.Generator().manual_seed(num_shards)
    logits_RV = torch.randn(60, 1_003, generator=generator) * 3
    logits_RV[5] = 0.0
    logits_RV[6, 1:] = -torch.inf
    seeds_R, positions_R = torch.arange(60) * 7_919 - 99, torch.arange(60) * 31
    chosen = ops.sample(logits_RV, seeds_R, positions_R).tolist()
    assert len(set(chosen)) > 20
    for row, (seed, position) in enumerate(
        zip(seeds_R.tolist(), positions_R.tolist(), strict=True)
    ):
        assert best_of_shards(logits_RV[row], seed, position, num_shards=num_shards) == chosen[row]
