"""Penalties, biases and counts on the device are those of the CPU sampler, bit for bit."""

import pytest
import torch

from kernels.interface.sampling import Penalties
from kernels.interface.sampling_rows import TokenList, pack_token_mask
from kernels.torch import sampling as torch_sampling
from kernels.triton.sampling.logits_processors import (
    adjust_tokens,
    adjust_tokens_reference,
    apply_penalties,
    count_tokens,
)
from kernels.triton.sampling.row_maxima import TILE
from tests.kernels.triton.columns import columns_of

PENALTIES = [
    (1.3, 0.0, 0.0),
    (1.0, 0.7, 0.0),
    (1.0, 0.0, 0.3),
    (0.8, -1.1, 0.37),
    (1.0, 0.0, 0.0),
    (1.17, 2.0, -0.13),
]


def lists(min_tokens_ids, bias_ids, bias):
    """The three tables, as wide as the widest."""
    tables = torch.zeros(3, len(bias), bias.shape[1], dtype=torch.int32)
    tables[TokenList.MIN_TOKENS_IDS, :, : min_tokens_ids.shape[1]] = min_tokens_ids
    tables[TokenList.BIAS_IDS] = bias_ids
    tables[TokenList.BIAS_VALUES] = bias.view(torch.int32)
    return tables


def history(states, vocab_size):
    generator = torch.Generator().manual_seed(vocab_size)
    prompt = torch.rand(states, vocab_size, generator=generator) < 0.2
    counts = torch.randint(-3, 9, (states, vocab_size), generator=generator).clamp(min=0).int()
    return prompt, counts


def penalise(logits, prompt, counts, state_rows, penalties, num_rows):
    repetition, presence, frequency = (torch.tensor(c) for c in zip(*penalties, strict=True))
    columns = columns_of(
        len(logits),
        num_rows=num_rows,
        state_row_N=torch.tensor(state_rows),
        repetition_N=repetition,
        presence_N=presence,
        frequency_N=frequency,
    )
    bits_NW = torch.stack([pack_token_mask(mask_V) for mask_V in prompt])
    apply_penalties(logits, columns, prompt_bits_NW=bits_NW, output_counts_NV=counts)


@pytest.mark.parametrize("vocab_size", [1, 63, 257, 1000, TILE - 1, TILE, TILE + 1, 49152])
def test_penalties_are_those_of_the_cpu(vocab_size):
    rows = len(PENALTIES)
    prompt, counts = history(rows + 2, vocab_size)
    logits = torch.randn(rows, vocab_size) * 5
    logits[:, ::7] = -torch.inf
    state_rows = [7, 0, 3, 5, 1, 2]
    expected = logits.to("cpu", copy=True)
    for row, state in enumerate(state_rows):
        penalties = dict(zip(Penalties.__slots__, PENALTIES[row], strict=True))
        history_of_row = prompt[state].cpu(), counts[state].cpu().float()
        torch_sampling.apply_penalties(expected[row], *history_of_row, Penalties(**penalties))
    penalise(logits, prompt, counts, state_rows, PENALTIES, rows)
    assert torch.equal(logits.cpu(), expected)


def test_rows_beyond_the_count_and_rows_without_penalties_stay():
    prompt, counts = history(3, 100)
    counts += 1
    logits = torch.randn(3, 100)
    before = logits.clone()
    penalise(logits, prompt, counts, [0, 1, 2], [(1.0, 0.0, 0.0), *PENALTIES[:2]], 2)
    assert torch.equal(logits[0], before[0])
    assert not torch.equal(logits[1], before[1])
    assert torch.equal(logits[2], before[2])


@pytest.mark.parametrize("num_biases", [0, 1, 127, 128, 129])
def test_biases_and_min_tokens_ids_are_those_of_the_cpu(num_biases):
    vocab_size, slots = 500, 200
    generator = torch.Generator().manual_seed(num_biases)
    logits = torch.randn(3, vocab_size)
    min_tokens_ids = torch.tensor([[5, 9, 499], [1, 2, 3], [7, 8, 0]], dtype=torch.int32)
    num_min_tokens_ids = torch.tensor([2, 0, 3], dtype=torch.int32)
    bias_ids = torch.stack([torch.randperm(vocab_size, generator=generator) for _ in range(3)])
    bias_ids = bias_ids[:, :slots].int().contiguous()
    bias = torch.randn(3, slots, generator=generator) * 50
    biases = torch.tensor([num_biases, 200, num_biases], dtype=torch.int32)
    state_rows = [2, 1, 0]
    expected = torch.stack(
        [
            adjust_tokens_reference(
                logits[row],
                min_tokens_ids[state, : int(num_min_tokens_ids[row])].long(),
                bias_ids[state, : int(biases[row])].long(),
                bias[state, : int(biases[row])],
            )
            for row, state in enumerate(state_rows)
        ]
    )
    last = logits[2].clone()
    columns = columns_of(
        3,
        num_rows=2,
        state_row_N=torch.tensor(state_rows),
        num_min_tokens_ids_N=num_min_tokens_ids,
        num_biases_N=biases,
    )
    adjust_tokens(logits, columns, lists(min_tokens_ids, bias_ids, bias))
    assert torch.equal(logits[:2], expected[:2])
    assert torch.equal(logits[2], last)


def test_a_token_both_biased_and_below_min_tokens_is_impossible():
    logits = torch.zeros(1, 8)
    columns = columns_of(
        1,
        num_min_tokens_ids_N=torch.tensor([1], dtype=torch.int32),
        num_biases_N=torch.tensor([2], dtype=torch.int32),
    )
    tables = lists(torch.tensor([[3]]), torch.tensor([[3, 8]]), torch.tensor([[100.0, 5.0]]))
    adjust_tokens(logits, columns, tables)
    assert logits.tolist() == [[0.0, 0.0, 0.0, -torch.inf, 0.0, 0.0, 0.0, 0.0]]


def test_sampled_tokens_are_counted_once_each():
    rows = 130  # across a block's edge
    tokens = torch.arange(rows) % 5
    tokens[1] = 99  # no such token
    counts = torch.zeros(2, 6, dtype=torch.int32)
    counted = torch.ones(rows, dtype=torch.bool)
    counted[2] = False
    state_rows = torch.ones(rows, dtype=torch.int64)
    columns = columns_of(rows, num_rows=129, state_row_N=state_rows, is_counted_N=counted)
    count_tokens(tokens, columns, counts)
    expected = torch.bincount(torch.arange(129) % 5, minlength=6).int()
    expected[1] -= 1
    expected[2] -= 1
    assert counts[0].tolist() == [0] * 6
    assert torch.equal(counts[1], expected)


def test_counts_of_another_type_are_refused():
    prompt, counts = history(1, 40)
    with pytest.raises(ValueError, match="output_counts is"):
        penalise(torch.zeros(1, 40), prompt, counts.float(), [0], PENALTIES[:1], 1)
