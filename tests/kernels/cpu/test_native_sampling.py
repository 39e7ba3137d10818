"""Native sampling chooses the tokens that torch's definition chooses."""

import itertools

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kernels.cpu.operations import CpuOperations
from kernels.interface.sampling import Penalties, SamplingLimits
from kernels.torch.operations import TorchOperations
from kernels.torch.sampling import truncate_by_sorting
from tests.kernels.cpu.instruction_sets import covering_sets
from tests.profiles import examples

pytestmark = pytest.mark.slow

TORCH = TorchOperations()


@pytest.fixture
def ops(library, isa):
    return CpuOperations(library)


def seeds(*values):
    return torch.from_numpy(np.array(values, np.uint64).astype(np.int64))


@covering_sets(vocab_size=[1, 3, 4, 5, 63, 511, 512, 513, 2051], spread=[0.0, 0.5, 3.0, 30.0])
def test_tokens_from_all_are_those_of_torch(ops, vocab_size, spread):
    generator = torch.Generator().manual_seed(vocab_size)
    rows = 300
    logits = torch.randn(rows, vocab_size, generator=generator) * spread + 5
    seeds_R = torch.randint(-(2**63), 2**63 - 1, (rows,), generator=generator)
    positions_R = torch.randint(0, 2**40, (rows,), generator=generator)
    chosen = ops.sample(logits, seeds_R, positions_R)
    assert torch.equal(chosen, TORCH.sample(logits, seeds_R, positions_R))


def test_tokens_of_a_whole_vocabulary_are_those_of_torch_in_any_batch(ops):
    logits = torch.randn(24, 49_152, generator=torch.Generator().manual_seed(0))
    logits *= torch.linspace(0, 8, 24)[:, None]
    seeds_R, positions_R = seeds(*range(24)), torch.arange(24) * 1000
    chosen = ops.sample(logits, seeds_R, positions_R)
    assert torch.equal(chosen, TORCH.sample(logits, seeds_R, positions_R))
    for row in (0, 11, 23):
        one = slice(row, row + 1)
        assert ops.sample(logits[one], seeds_R[one], positions_R[one]) == chosen[row]


@given(
    st.integers(1, 700),
    st.integers(0, 800),
    st.sampled_from([0.0, 0.05, 0.5, 0.9, 0.999, 1.0]),
    st.sampled_from([0.0, 0.01, 0.3, 1.0]),
    st.sampled_from([0.0, 0.01, 1.0, 6.0, 40.0]),
    st.booleans(),
    st.integers(0, 2**32),
)
@settings(
    deadline=None,
    max_examples=examples(200),
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
def test_truncated_tokens_are_those_of_masking_by_sorting(
    ops, vocab_size, top_k, top_p, min_p, spread, with_ties, seed
):
    logits = torch.randn(3, vocab_size, generator=torch.Generator().manual_seed(seed)) * spread
    if with_ties:
        logits = logits.round()
    logits[0, ::3] = -torch.inf
    logits[0, 1:2] = 0.0
    top_k = min(top_k, vocab_size)
    seeds_R, positions_R = seeds(seed, seed + 1, 5), torch.tensor([0, 9, 1000])
    chosen = ops.sample(
        logits,
        seeds_R,
        positions_R,
        SamplingLimits(
            top_k_R=torch.full((3,), top_k),
            top_p_R=torch.full((3,), top_p),
            min_p_R=torch.full((3,), min_p),
        ),
    )
    for row in range(3):
        if not logits[row].isfinite().any():
            assert 0 <= chosen[row] < vocab_size
            continue
        one = slice(row, row + 1)
        kept = truncate_by_sorting(logits[row], top_k=top_k, top_p=top_p, min_p=min_p)
        expected = TORCH.sample(kept[None], seeds_R[one], positions_R[one])
        if chosen[row] != expected:  # only where a cut falls within rounding of a token
            possible = {
                int(TORCH.sample(cut[None], seeds_R[one], positions_R[one]))
                for nudge, other in itertools.product((-1e-5, 1e-5), repeat=2)
                for cut in [
                    truncate_by_sorting(
                        logits[row],
                        top_k=top_k,
                        top_p=min(top_p + nudge, 1.0) if 0 < top_p < 1 else top_p,
                        min_p=max(min_p + other, 0.0) if min_p > 0 else min_p,
                    )
                ]
            }
            assert int(chosen[row]) in possible


def test_truncated_tokens_of_a_whole_vocabulary_are_those_of_torch(ops):
    generator = torch.Generator().manual_seed(1)
    logits = torch.randn(60, 49_152, generator=generator) * torch.linspace(0.1, 6, 60)[:, None]
    limits = {
        "top_k_R": torch.tensor([0, 1, 50, 5000, 49_152, 100_000] * 10),
        "top_p_R": torch.tensor([1.0, 0.9, 0.95, 0.5] * 15),
        "min_p_R": torch.tensor([0.0, 0.0, 0.05] * 20),
    }
    seeds_R, positions_R = torch.arange(60) * 77, torch.arange(60)
    chosen = ops.sample(logits, seeds_R, positions_R, SamplingLimits(**limits))
    limits["top_k_R"] = limits["top_k_R"].clamp(max=49_152)
    assert torch.equal(chosen, TORCH.sample(logits, seeds_R, positions_R, SamplingLimits(**limits)))


@pytest.mark.parametrize("vocab_size", [1, 3, 31, 64, 65, 1000, 49_152])
def test_the_best_of_each_row_is_the_first_of_equals(ops, vocab_size):
    generator = torch.Generator().manual_seed(vocab_size)
    logits = torch.randn(7, 2 * vocab_size, generator=generator)[:, :vocab_size]  # with gaps
    logits[1] = logits[1].round()  # ties
    logits[2] = 0.0
    logits[3, vocab_size // 2] = torch.inf
    logits[4] = -torch.inf
    ids, best = ops.best_of_rows(logits)
    expected = logits.max(dim=1)
    assert torch.equal(best, expected.values)
    first = [int((row == top).nonzero()[0]) for row, top in zip(logits, best, strict=True)]
    assert ids.tolist() == first


@pytest.mark.parametrize("at", [0, 15, 16, 63, 64, 99])
def test_a_row_with_nan_has_nan_for_its_best(ops, at):
    logits = torch.randn(3, 100)
    logits[1, at] = torch.nan
    ids, best = ops.best_of_rows(logits)
    assert best.isnan().tolist() == [False, True, False]
    assert ids[0] == logits[0].argmax()
    assert ids[2] == logits[2].argmax()


@pytest.mark.parametrize("vocab_size", [1, 3, 31, 32, 65, 1000])
def test_masks_and_the_best_that_they_leave_are_those_of_torch(ops, vocab_size):
    generator = torch.Generator().manual_seed(vocab_size)
    given = torch.randn(9, vocab_size + 5, generator=generator)[:, :vocab_size]  # with gaps
    given[2, vocab_size // 2] = torch.nan
    given[3, vocab_size // 2] = torch.inf
    given[4] = -torch.inf
    given[7] = given[7].round()  # ties
    index = torch.tensor([8, 2, 3, 4, 5, 7])  # rows without a mask stay
    words = (6, -(-vocab_size // 32))
    bits = torch.randint(-(2**31), 2**31, words, generator=generator, dtype=torch.int32)
    bits[4] = 0
    found, expected = [], []
    for backend, of in ((ops, found), (TORCH, expected)):
        logits = given.clone()
        of += [logits, *backend.best_of_masked_rows(logits, index, bits)]
    for mine, others in zip(found, expected, strict=True):
        is_meant = torch.ones(9, dtype=torch.bool)
        is_meant[2] = mine is found[0] or mine is found[3]
        torch.testing.assert_close(mine[is_meant], others[is_meant], rtol=0, atol=0, equal_nan=True)


def test_penalties_have_the_bits_of_torch(ops):
    generator = torch.Generator().manual_seed(2)
    for size, penalties in ((1, (1.3, 0.5, 0.25)), (1001, (1.3, 0.5, 0.25)), (77, (0.8, -1, 0))):
        logits = torch.randn(size, generator=generator) * 4
        prompt = torch.rand(size, generator=generator) < 0.3
        counts = torch.randint(0, 4, (size,), generator=generator).float()
        expected = logits.clone()
        names = ("repetition_penalty", "presence_penalty", "frequency_penalty")
        arguments = dict(zip(names, penalties, strict=True))
        TORCH.apply_penalties(expected, prompt, counts, Penalties(**arguments))
        ops.apply_penalties(logits, prompt, counts, Penalties(**arguments))
        assert torch.equal(logits, expected)


def test_wrong_columns_are_refused(ops):
    logits = torch.randn(2, 9)
    good = torch.zeros(2, dtype=torch.int64)
    with pytest.raises(ValueError, match=r"seeds is torch.int64 \(3,\).* \(2,\)"):
        ops.sample(logits, torch.zeros(3, dtype=torch.int64), good)
    with pytest.raises(ValueError, match=r"logits are torch.float64, they must be float32"):
        ops.sample(logits.double(), good, good)
    with pytest.raises(ValueError, match=r"top_k of row 1 is -1"):
        ops.sample(
            logits,
            good,
            good,
            SamplingLimits(
                top_k_R=torch.tensor([0, -1]), top_p_R=torch.ones(2), min_p_R=torch.zeros(2)
            ),
        )
    with pytest.raises(ValueError, match=r"output_counts is .* \(9,\)"):
        ops.apply_penalties(
            logits[0],
            torch.zeros(9, dtype=torch.bool),
            torch.zeros(8),
            Penalties(repetition_penalty=1.1, presence_penalty=0.0, frequency_penalty=0.0),
        )
