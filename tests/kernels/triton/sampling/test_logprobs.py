"""Log-probabilities on the device against torch's log_softmax and a stable sort."""

import pytest
import torch

from kernels.triton.sampling.logprobs import (
    LogprobsMemory,
    report_logprobs,
    report_logprobs_reference,
)
from kernels.triton.sampling.row_maxima import TILE
from tests.kernels.triton.columns import columns_of


def report(logits, tokens, numbers, width, num_rows=None):
    rows, vocab_size = logits.shape
    memory = LogprobsMemory.allocate(rows, vocab_size, width, logits.device)
    for tensor in (memory.best_RS, memory.sum_RS, memory.top_RSK):
        tensor.fill_(torch.nan)
    ids = torch.full((rows, width + 1), -7, dtype=torch.int32)
    values = torch.full((rows, width + 1), torch.nan)
    ranks = torch.full((rows,), -7, dtype=torch.int32)
    report_logprobs(
        logits,
        torch.tensor(tokens),
        columns_of(
            rows, num_rows=num_rows, num_logprobs_N=torch.tensor(numbers, dtype=torch.int32)
        ),
        memory=memory,
        out_ids_RN=ids,
        out_logprobs_RN=values,
        out_ranks_R=ranks,
    )
    return ids, values, ranks


def check(logits, tokens, numbers, width):
    ids, values, ranks = report(logits, tokens, numbers, width)
    for row, (token, number) in enumerate(zip(tokens, numbers, strict=True)):
        filled = 1 + number
        expected_ids, expected, rank = report_logprobs_reference(logits[row], token, number)
        assert ids[row, :filled].tolist() == expected_ids.tolist()
        torch.testing.assert_close(values[row, :filled], expected, rtol=1e-5, atol=1e-5)
        assert ranks[row] == rank
        assert (ids[row, filled:] == -7).all()
        assert values[row, filled:].isnan().all()


def random_logits(rows, vocab_size, spread=3.0):
    generator = torch.Generator().manual_seed(vocab_size)
    return torch.randn(rows, vocab_size, generator=generator) * spread


@pytest.mark.parametrize("vocab_size", [1, 2, 63, 257, 1000, TILE - 1, TILE, TILE + 1, 49152])
def test_random_rows_equal_log_softmax_and_topk(vocab_size):
    logits = random_logits(4, vocab_size)
    tokens = [0, vocab_size - 1, vocab_size // 2, int(logits[3].argmax())]
    check(logits, tokens, [min(number, vocab_size) for number in (0, 1, 5, 20)], 20)


@pytest.mark.parametrize("kind", ["ties", "flat", "impossible", "steep", "far from zero"])
def test_adversarial_rows(kind):
    logits = random_logits(3, TILE + 300, 2.0)
    if kind == "ties":
        logits = logits.round()
    elif kind == "flat":
        logits = torch.zeros(3, TILE + 300)
    elif kind == "impossible":
        logits[:, 4:] = -torch.inf  # fewer than are asked for; one split has none
    elif kind == "steep":
        logits *= 1e4
    else:
        logits += 3e4
    check(logits, [0, 3, 2], [8, 1, 0], 8)


def test_rows_that_ask_for_nothing_and_rows_beyond_the_count_stay():
    logits = random_logits(3, 100)
    ids, values, ranks = report(logits, [1, 2, 3], [-1, 2, 2], 2, num_rows=2)
    for row in (0, 2):
        assert ids[row].tolist() == [-7] * 3
        assert values[row].isnan().all()
        assert ranks[row] == -7
    assert ranks[1] > 0


def test_a_report_does_not_depend_on_the_batch():
    logits = random_logits(4, TILE + 50)
    tokens, numbers = [5, 6, 7, 8], [4, 4, 4, 4]
    together = report(logits, tokens, numbers, 4)
    for row in range(4):
        alone = report(logits[row : row + 1], [tokens[row]], [4], 4)
        for one, many in zip(alone, together, strict=True):
            assert torch.equal(one[0], many[row])


def test_more_than_the_limit_is_refused():
    with pytest.raises(ValueError, match="max_logprobs is 129"):
        LogprobsMemory.allocate(1, 1000, 129, torch.device("cpu"))
