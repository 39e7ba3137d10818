"""Log-probabilities of the native library against torch's in float64."""

import numpy as np
import pytest
import torch

from kernels.cpu.operations import CpuOperations
from tests.kernels.cpu.instruction_sets import covering_sets


@pytest.fixture
def ops(library, isa):
    return CpuOperations(library)


@covering_sets(sizes=[(1, 1), (5, 5), (63, 3), (2051, 20), (700, 0)], spread=[0.0, 3.0, 60.0])
def test_they_are_those_of_torch_in_any_batch(ops, sizes, spread):
    vocab_size, num_top = sizes
    generator = torch.Generator().manual_seed(vocab_size)
    logits = torch.randn(9, vocab_size, generator=generator) * spread + 5
    logits[3, 0] = -torch.inf if vocab_size > 1 else 1.0
    ids = torch.randint(vocab_size, (9, 2), generator=generator)
    before = logits.clone()
    found = ops.token_logprobs(logits, ids, num_top)
    assert torch.equal(logits, before)
    expected = logits.double().log_softmax(dim=1)
    torch.testing.assert_close(found.own_RN.double(), expected.gather(1, ids), atol=2e-5, rtol=1e-6)
    above = (logits > logits.gather(1, ids[:, :1])).sum(dim=1)
    assert torch.equal(found.ranks_R, above + 1)
    likeliest = logits.sort(dim=1, descending=True, stable=True).indices[:, :num_top]
    assert torch.equal(found.top_ids_RK, likeliest)
    torch.testing.assert_close(
        found.top_RK.double(), expected.gather(1, likeliest), atol=2e-5, rtol=1e-6
    )
    alone = ops.token_logprobs(logits[4:5], ids[4:5], num_top)
    assert torch.equal(alone.top_RK[0], found.top_RK[4])
    assert torch.equal(alone.own_RN[0], found.own_RN[4])


def test_many_that_tie_and_far_tails_are_found(ops):
    logits = torch.zeros(2, 49_152)
    logits[1] = -torch.arange(49_152) * 0.01
    found = ops.token_logprobs(logits, torch.tensor([[7], [40_000]]), 3000)
    assert found.top_ids_RK.tolist() == [list(range(3000))] * 2
    assert found.ranks_R.tolist() == [1, 40_001]
    assert float(found.top_RK[0, 0]) == pytest.approx(-np.log(49_152), rel=1e-6)


def test_rows_without_numbers_stay_alone(ops):
    logits = torch.randn(3, 100)
    logits[1, 50] = torch.nan
    found = ops.token_logprobs(logits, torch.zeros(3, 1, dtype=torch.int64), 4)
    assert found.own_RN[1].isnan().all()
    assert found.top_RK[1].isnan().all()
    assert found.own_RN[[0, 2]].isfinite().all()


def test_what_does_not_fit_is_refused(ops):
    logits = torch.randn(2, 10)
    for ids, num_top, text in (
        ([[10], [0]], 1, "token 10 is not in"),
        ([[0], [-1]], 1, "token -1 is not in"),
        ([[0], [1]], 11, "the 11 likeliest of 10"),
    ):
        with pytest.raises(ValueError, match=text):
            ops.token_logprobs(logits, torch.tensor(ids), num_top)
