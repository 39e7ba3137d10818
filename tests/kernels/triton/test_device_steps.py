"""Steps on the kernels, interpreted, against the torch specification: columns, tokens, reports."""

import numpy as np
import pytest
import torch

from kernels.interface.device_steps import SamplingMode
from kernels.interface.sampling_rows import SamplingRows, StateFlag, StateWord, TokenList
from kernels.interface.step_inputs import (
    TOKEN_TABLE,
    DeviceRows,
    PackedLayout,
    RowUpdate,
    pack_step,
)
from kernels.triton.device_steps import TritonDeviceSteps
from kernels.triton.sampling.columns import (
    SamplingColumns,
    gather_sampling_columns,
    gather_sampling_columns_reference,
)
from tests.kernels.torch_device_steps import TorchDeviceSteps

CPU = torch.device("cpu")
NUM_ROWS = 13
LAYOUT = PackedLayout(NUM_ROWS)


def packed_step(num_sequences, seed=0):
    """Rows in any order, about a third not sampled."""
    generator = np.random.default_rng(seed)
    words = np.full(LAYOUT.num_words() + 7, -77, np.int32)
    needs_sampling = generator.random(num_sequences) < 0.7
    pack_step(
        words,
        LAYOUT,
        rows=generator.permutation(NUM_ROWS)[:num_sequences].astype(np.int32),
        num_computed=generator.integers(0, 30, num_sequences).astype(np.int32),
        num_scheduled=generator.integers(1, 9, num_sequences).astype(np.int32),
        needs_sampling=needs_sampling,
    )
    return torch.from_numpy(words), int(needs_sampling.sum())


def step_with_drafts(drafts):
    """`drafts`: of each sequence, in rows 0, 1, ...; all are sampled."""
    entries = [
        (row, at, token) for row, own in enumerate(drafts) for at, token in enumerate((-1, *own))
    ]
    layout = PackedLayout(len(entries))
    words = np.zeros(layout.num_words(), np.int32)
    rows, offsets, before = np.array(entries, np.int32).T
    pack_step(
        words,
        layout,
        rows=rows,
        num_computed=17 + offsets,
        num_scheduled=np.ones(len(entries), np.int32),
        needs_sampling=np.ones(len(entries), bool),
        drafts=before,
    )
    return torch.from_numpy(words), layout


def fill(rows: SamplingRows, seed=0):
    """A state of every kind."""
    generator = torch.Generator().manual_seed(seed)

    def uniform(*shape):
        return torch.rand(shape, generator=generator)

    vocab_size, number = rows.vocab_size, len(rows.state_NX)
    reals, words = rows.state_NX.view(torch.float32), rows.state_NX
    reals[:, StateWord.TEMPERATURE] = 0.5 + uniform(number)
    reals[:, StateWord.TOP_P] = torch.where(uniform(number) < 0.5, 1.0, 0.8)
    reals[:, StateWord.MIN_P] = torch.where(uniform(number) < 0.5, 0.0, 0.05)
    reals[:, StateWord.REPETITION] = 0.5 + uniform(number)
    reals[:, StateWord.PRESENCE] = uniform(number)
    reals[:, StateWord.FREQUENCY] = uniform(number)
    words[:, StateWord.TOP_K] = torch.where(uniform(number) < 0.5, 0, 11)
    seeds = torch.randint(-(2**31), 2**31, (number, 2), generator=generator)
    words[:, StateWord.SEED_LOW : StateWord.SEED_HIGH + 1] = seeds
    words[:, StateWord.NUM_LOGPROBS] = torch.arange(number) % 5 - 1
    words[:, StateWord.MIN_LENGTH] = 20
    words[:, StateWord.NUM_MIN_TOKENS_IDS] = 3
    words[:, StateWord.NUM_BIASES] = 4
    flags = torch.arange(number) % 8
    words[:, StateWord.FLAGS] = flags
    masks = torch.randint(-(2**31), 2**31, (number, rows.prompt_bits_NW.shape[1]))
    words[:, rows.mask_words] = masks.int()
    for row in range(number):
        order = torch.randperm(vocab_size, generator=generator)
        rows.lists_3NM[TokenList.MIN_TOKENS_IDS, row, :3] = order[:3]
        rows.lists_3NM[TokenList.BIAS_IDS, row, :4] = order[3:7]
        rows.write_history(row, order[:9].int(), order[5:12].repeat(2).int())
    biases = 3 * uniform(number, 4)
    rows.lists_3NM[TokenList.BIAS_VALUES, :, :4] = biases.view(torch.int32)


def drop_penalties_of_the_uncounted(rows: SamplingRows):
    """The engine gives neutral penalties to rows that are not counted."""
    uncounted = (rows.state_NX[:, StateWord.FLAGS] & StateFlag.COUNTED) == 0
    reals = rows.state_NX.view(torch.float32)
    reals[uncounted, StateWord.REPETITION] = 1.0
    reals[uncounted, StateWord.PRESENCE] = 0.0
    reals[uncounted, StateWord.FREQUENCY] = 0.0


@pytest.mark.parametrize("num_sequences", [0, 1, 5, NUM_ROWS])
def test_columns_of_the_due_are_gathered_and_nothing_else_is_written(num_sequences):
    rows = SamplingRows.allocate(num_rows=NUM_ROWS, vocab_size=131, device=CPU)
    fill(rows)
    packed, num_sampled = packed_step(num_sequences)
    whole = SamplingColumns.allocate(NUM_ROWS + 3, CPU)
    for name in SamplingColumns.__slots__:
        getattr(whole, name).fill_(1 if getattr(whole, name).dtype is torch.bool else -9)
    out = whole.first(NUM_ROWS)
    gather_sampling_columns(packed, LAYOUT, rows, out, num_sequences=NUM_ROWS)
    expected = gather_sampling_columns_reference(packed, LAYOUT, rows)
    assert out.num_rows_1.tolist() == [num_sampled]
    for name in set(SamplingColumns.__slots__) - {"num_rows_1"}:
        column = getattr(out, name)
        assert column[:num_sampled].tolist() == expected[name].tolist(), name
        assert (
            getattr(whole, name)[num_sampled:] == (True if column.dtype is torch.bool else -9)
        ).all()


PROCESSED = {"reports_processed": True, "reports_logits": True}


@pytest.mark.parametrize("mode", SamplingMode)
@pytest.mark.parametrize(
    ("vocab_size", "dtype", "reports"),
    [
        (131, torch.float32, {}),
        (2050, torch.float32, {}),
        (2050, torch.float16, {}),
        (131, torch.bfloat16, PROCESSED),
    ],
)
def test_tokens_counts_and_reports_are_those_of_the_specification(mode, vocab_size, dtype, reports):
    packed, num_sampled = packed_step(NUM_ROWS, seed=3)
    samplers = [
        steps.make_sampler(
            num_rows=NUM_ROWS, num_logits=NUM_ROWS, vocab_size=vocab_size, device=CPU, **reports
        )
        for steps in (TorchDeviceSteps(), TritonDeviceSteps())
    ]
    logits_NV = 4 * torch.randn(NUM_ROWS, vocab_size, generator=torch.Generator().manual_seed(1))
    logits_NV = logits_NV.to(dtype)
    before_NV = logits_NV.clone()
    for sampler in samplers:
        torch.manual_seed(0)
        fill(sampler.rows)
        drop_penalties_of_the_uncounted(sampler.rows)
        if mode is SamplingMode.PLAIN:
            sampler.rows.state_NX[:, StateWord.TOP_K] = 0
            sampler.rows.state_NX.view(torch.float32)[:, StateWord.TOP_P] = 1.0
            sampler.rows.state_NX.view(torch.float32)[:, StateWord.MIN_P] = 0.0
        sampler.results.words.fill_(-9)
        given_NV = before_NV.clone() if sampler is samplers[0] else logits_NV
        sampler.sample(given_NV, packed, LAYOUT, num_sequences=NUM_ROWS, mode=mode)
    assert torch.equal(logits_NV, before_NV)
    expected, found = (sampler.results for sampler in samplers)
    assert found.token_ids_C[:num_sampled].tolist() == expected.token_ids_C[:num_sampled].tolist()
    assert len(set(expected.token_ids_C[:num_sampled].tolist())) > 3
    assert torch.equal(found.best_logits_C[:num_sampled], expected.best_logits_C[:num_sampled])
    counts = [sampler.rows.output_counts_NV for sampler in samplers]
    assert torch.equal(*counts)
    if mode is not SamplingMode.FULL:
        return
    assert torch.equal(
        found.raw_best_logits_C[:num_sampled], expected.raw_best_logits_C[:num_sampled]
    )
    columns = gather_sampling_columns_reference(packed, LAYOUT, samplers[0].rows)
    for index, number in enumerate(columns["num_logprobs_N"].tolist()):
        if number >= 0:
            ids, values = (
                [getattr(each, name)[index, : 1 + number] for each in (found, expected)]
                for name in ("logprob_ids_CN", "logprobs_CN")
            )
            assert torch.equal(*ids)
            torch.testing.assert_close(*values, atol=1e-5, rtol=1e-5)
            assert found.ranks_C[index] == expected.ranks_C[index]


def test_a_row_of_logits_counts_drafts_before_it_and_is_counted_behind_right_ones_only():
    vocab_size, num_rows = 131, 6
    drafts = [[], [5, 5, 9], [1], [130, 0], [], [7, 8, 7, 8]]
    packed, layout = step_with_drafts(drafts)
    logits_NV = 4 * torch.randn(layout.capacity, vocab_size)
    first = {1: 1, 2: 5, 3: 7, 5: 11}  # row -> its first row of logits
    for row, at in first.items():  # these sample their drafts, but for the last one
        for offset, token in enumerate(drafts[row]):
            logits_NV[at + offset, token] = 1e4 if offset + 1 < len(drafts[row]) else -1e4
    found = []
    for steps in (TorchDeviceSteps(), TritonDeviceSteps()):
        sampler = steps.make_sampler(
            num_rows=num_rows, num_logits=layout.capacity, vocab_size=vocab_size, device=CPU
        )
        torch.manual_seed(0)
        fill(sampler.rows)
        sampler.rows.state_NX[:, StateWord.FLAGS] |= int(StateFlag.COUNTED)
        sampler.rows.state_NX[:, StateWord.FLAGS] &= ~int(StateFlag.MASKED)
        before = sampler.rows.output_counts_NV.clone()
        sampler.sample(
            logits_NV.clone(), packed, layout, num_sequences=layout.capacity, mode=SamplingMode.FULL
        )
        counted = (sampler.rows.output_counts_NV - before).sum(dim=1).tolist()
        found.append((sampler.results.token_ids_C.tolist(), counted))
    assert found[0] == found[1]
    assert found[0][1] == [1, 3, 1, 2, 1, 4]


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("mode", SamplingMode)
def test_a_row_without_a_finite_best_says_so(mode, value):
    packed, num_sampled = packed_step(5, seed=3)
    for steps in (TorchDeviceSteps(), TritonDeviceSteps()):
        sampler = steps.make_sampler(
            num_rows=NUM_ROWS, num_logits=NUM_ROWS, vocab_size=131, device=CPU
        )
        logits_NV = torch.randn(num_sampled, 131)
        logits_NV[1, 100 if value != -torch.inf else slice(None)] = value
        sampler.sample(logits_NV, packed, LAYOUT, num_sequences=5, mode=mode)
        best_N = sampler.results.best_logits_C[:num_sampled]
        assert best_N.isfinite().tolist() == [at != 1 for at in range(num_sampled)]
        assert not best_N.isnan().any()
        if mode is SamplingMode.FULL:
            raw_N = sampler.results.raw_best_logits_C[:num_sampled]
            assert raw_N.isfinite().tolist() == [at != 1 for at in range(num_sampled)]


@pytest.mark.parametrize("vocab_size", [31, 32, 131])
def test_a_history_is_one_bit_a_prompt_token_and_a_count_an_output_token(vocab_size):
    rows = SamplingRows.allocate(num_rows=3, vocab_size=vocab_size, device=CPU)
    rows.write_history(1, torch.tensor([3, 3], dtype=torch.int32), torch.tensor([5]).int())
    prompt, output = [0, 2, 30, vocab_size - 1, 2], [4, 4, 7]
    rows.write_history(1, torch.tensor(prompt).int(), torch.tensor(output).int())
    bits = np.unpackbits(rows.prompt_bits_NW[1].numpy().view(np.uint8), bitorder="little")
    assert np.flatnonzero(bits).tolist() == sorted(set(prompt))
    expected = torch.bincount(torch.tensor(output), minlength=vocab_size)
    assert rows.output_counts_NV[1].tolist() == expected.tolist()
    assert not rows.prompt_bits_NW[[0, 2]].any()
    rows.write_history(1, torch.tensor([1], dtype=torch.int32), torch.zeros(0, dtype=torch.int32))
    assert not rows.output_counts_NV[1].any()


def test_sampling_state_is_written_by_the_updates_that_write_tokens():
    tables = []
    for steps in (TorchDeviceSteps(), TritonDeviceSteps()):
        rows = SamplingRows.allocate(num_rows=NUM_ROWS, vocab_size=2050, device=CPU)
        table = DeviceRows(token_ids=rows.state_NX, block_tables=rows.lists_3NM)
        updates = [
            RowUpdate(TOKEN_TABLE, 4, 0, list(range(81))),
            RowUpdate(TokenList.MIN_TOKENS_IDS, 4, 0, [5, 6]),
            RowUpdate(TokenList.BIAS_VALUES, 2, 0, np.array([0.5], np.float32).view(np.int32)),
        ]
        layout = PackedLayout(0)
        words = np.zeros(layout.num_words(updates), np.int32)
        no_rows = np.zeros(0, np.int32)
        pack_step(
            words,
            layout,
            rows=no_rows,
            num_computed=no_rows,
            num_scheduled=no_rows,
            needs_sampling=no_rows.astype(bool),
            updates=updates,
        )
        steps.apply_row_updates(torch.from_numpy(words), table)
        tables.append(rows)
    for rows in tables:
        assert rows.state_NX[4, :81].tolist() == list(range(81))
        assert float(rows.lists_3NM[TokenList.BIAS_VALUES].view(torch.float32)[2, 0]) == 0.5
    assert torch.equal(tables[0].state_NX, tables[1].state_NX)
    assert torch.equal(tables[0].lists_3NM, tables[1].lists_3NM)
