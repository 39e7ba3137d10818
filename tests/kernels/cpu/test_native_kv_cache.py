"""Caches in bfloat16 and in int8 with scales: what is written, what attention reads, copies."""

import pytest
import torch
from paged_steps import keys_in_panels, make_cache, make_planner

from kernels.cpu.operations import CpuOperations
from kernels.interface.kv_cache import KVCache, KVShape
from kernels.interface.operations import AttentionParams, RotaryParams
from kernels.torch.operations import TorchOperations
from tests.kernels.cpu.instruction_sets import covering_sets
from tests.kernels.paged_steps import reference_paged_attention

TORCH = TorchOperations()
HEADS, KV_HEADS, BLOCK = 9, 3, 4
STORED = [torch.bfloat16, torch.int8]


@pytest.fixture
def ops(library, isa):
    return CpuOperations(library)


def values_of_panels(cache, *, are_keys):
    """The same, byte by byte as `src/kv_cache.h` draws it."""
    num_blocks, panels, heads, lines, width = cache.shape
    assert width == 64
    head_size = 4 * (lines - 1)
    scales = cache[..., -1, :].contiguous().view(torch.float32)  # [B, P, K, 16]
    codes = cache[..., :-1, :].reshape(num_blocks, panels, heads, -1)
    element, token = torch.meshgrid(torch.arange(head_size), torch.arange(16), indexing="ij")
    if are_keys:
        at = (element // 4 * 16 + token) * 4 + element % 4
        numbers = codes[..., at].float() - 128
    else:
        at = (token // 4 * head_size + element) * 4 + token % 4
        numbers = codes.view(torch.int8)[..., at].float()
    exact = numbers * scales[..., None, :]  # [B, P, K, D, 16]
    return exact.permute(0, 1, 4, 2, 3).reshape(num_blocks, panels * 16, heads, head_size)


def values_of(cache, *, are_keys=False):
    """float32 [B, S, K, D] that a cache stands for."""
    if cache.dtype is torch.bfloat16:
        return cache.float()
    assert cache.dtype is torch.uint8
    if cache.dim() == 5:
        return values_of_panels(cache, are_keys=are_keys)
    scales = cache[..., -4:].contiguous().view(torch.float32)
    return cache[..., :-4].contiguous().view(torch.int8).float() * scales


def both_values(caches):
    return values_of(caches.keys, are_keys=True), values_of(caches.values)


def half_a_step(exact, dtype):
    """The most by which rounding to a form changes each value, with float32's own rounding."""
    if dtype is torch.bfloat16:
        return exact.abs() * 2.0**-8 + 1e-30
    return exact.abs().amax(dim=-1, keepdim=True) / 127 / 2 * 1.0001 + 1e-30


def written(ops, dtype, *, head_size, block_size=BLOCK, num_tokens=30, norms=False):
    """(cache of `dtype` after rotary_and_cache, keys and values that torch keeps in float32)."""
    generator = torch.Generator().manual_seed(head_size)
    qkv = torch.randn(num_tokens, (HEADS + 2 * KV_HEADS) * head_size, generator=generator) * 3
    qkv[3] = 0.0
    slots = torch.randperm(12 * block_size, generator=generator)[:num_tokens]
    norm = torch.randn(head_size, generator=generator) if norms else None
    caches, queries = [], []
    for backend, form in ((ops, dtype), (TORCH, torch.float32)):
        cache = make_cache(backend, 12, block_size, KV_HEADS, head_size, form)
        queries.append(
            backend.rotary_and_cache(
                qkv.clone(),
                torch.arange(num_tokens),
                slots,
                cache,
                RotaryParams(
                    num_query_heads=HEADS,
                    head_size=head_size,
                    cos_sin_PD=torch.randn(
                        64, head_size // 2 * 2, generator=generator.manual_seed(1)
                    ),
                    q_norm_weight_D=norm,
                    k_norm_weight_D=norm,
                    norm_eps=1e-6,
                ),
            )
        )
        caches.append(cache)
    torch.testing.assert_close(queries[0], queries[1], atol=2e-5, rtol=2e-5)
    return caches[0], caches[1], slots, qkv


@covering_sets(
    dtype=STORED, head_size=[2, 10, 64, 80, 256], block_size=[BLOCK, 16, 48], norms=[False, True]
)
def test_keys_and_values_are_written_within_half_a_step(ops, dtype, head_size, block_size, norms):
    cache, exact, slots, qkv = written(
        ops, dtype, head_size=head_size, block_size=block_size, norms=norms
    )
    for stored, wanted in zip(both_values(cache), exact.parts, strict=True):
        error = (stored - wanted).abs()
        assert bool((error <= half_a_step(wanted, dtype) + 2e-5 * wanted.abs()).all())
    # values are not computed with, so their bits are those of rounding them in torch
    values = qkv.view(len(qkv), -1, head_size)[:, HEADS + KV_HEADS :]
    kept = values_of(cache.values).flatten(0, 1)[slots]
    if dtype is torch.bfloat16:
        assert torch.equal(kept, values.to(torch.bfloat16).float())
    else:
        scales = values.abs().amax(dim=-1, keepdim=True) / 127
        codes = torch.round(values / torch.where(scales > 0, scales, 1.0)).to(torch.int8)
        assert torch.equal(kept, codes.float() * scales)


@pytest.mark.parametrize("dtype", STORED)
@pytest.mark.parametrize(("head_size", "block_size"), [(8, 4), (8, 16), (48, 16), (16, 64)])
def test_whole_writes_and_reads_have_the_same_form(ops, dtype, head_size, block_size):
    """What models outside of our own code do to a cache."""
    cache, _, slots, qkv = written(ops, dtype, head_size=head_size, block_size=block_size)
    values = qkv.view(len(qkv), -1, head_size)[:, HEADS + KV_HEADS :]
    other = make_cache(ops, 12, block_size, KV_HEADS, head_size, dtype)
    ops.write_kv_cache(values, values, slots, other)
    assert torch.equal(other.values, cache.values)
    keys, read = ops.read_kv_cache(other, slots)
    assert torch.equal(keys.float(), read.float())
    assert torch.equal(read.float(), values_of(cache.values).flatten(0, 1)[slots])
    assert torch.equal(*both_values(other))


@covering_sets(
    dtype=STORED, bad=[float("nan"), float("inf"), -float("inf")], sizes=[(8, 4), (32, 16)]
)
def test_a_value_that_is_no_number_is_read_as_none(ops, dtype, bad, sizes):
    head_size, block_size = sizes
    cache = make_cache(ops, 2, block_size, 1, head_size, dtype)
    qkv = torch.randn(1, 3 * head_size)
    qkv[0, 2 * head_size + 4] = bad
    ops.rotary_and_cache(
        qkv,
        torch.zeros(1, dtype=torch.int64),
        torch.tensor([5]),
        cache,
        RotaryParams(num_query_heads=1, head_size=head_size, cos_sin_PD=torch.ones(4, head_size)),
    )
    values = values_of(cache.values).flatten(0, 1)[5, 0]
    assert not values[4].isfinite()
    assert values_of(cache.keys, are_keys=True).isfinite().all()


class Sequences:
    """Random caches of `dtype` with a block table for each sequence, and planners."""

    def __init__(self, ops, dtype, lengths, *, head_size, window=None, block_size=BLOCK):
        generator = torch.Generator().manual_seed(len(lengths))
        self.ops, self.head_size, self.window = ops, head_size, window
        width = max(-(-length // block_size) for length in lengths)
        num_blocks = len(lengths) * width + 1
        order = torch.randperm(num_blocks - 1, generator=generator) + 1
        self.table = order.view(-1, width).int()
        kv_shape = KVShape(block_size, KV_HEADS, head_size, head_size, dtype)
        self.blocks = ops.allocate_blocks(num_blocks, kv_shape.block_bytes + 64)  # with a gap
        self.caches = ops.view_kv_cache(self.blocks, kv_shape)
        shape = (num_blocks * block_size, KV_HEADS, head_size)
        rows = [torch.randn(shape, generator=generator) * 2 for _ in "kv"]
        self.rows = [row.view(num_blocks, block_size, KV_HEADS, head_size) for row in rows]
        everywhere = torch.arange(num_blocks * block_size)
        ops.write_kv_cache(*rows, everywhere, self.caches)
        self.planner = make_planner(
            ops, (HEADS, KV_HEADS), head_size, block_size, window, kv_dtype=dtype
        )

    def attend(self, q, pieces):
        """Of (sequence, first query, stop): (result, metadata)."""
        rows = [sequence for sequence, _, _ in pieces]
        counts = [stop - first for _, first, stop in pieces]
        metadata = self.planner.plan(
            query_start_loc_R1=torch.tensor([0, *counts]).cumsum(0).int(),
            seq_lens_R=torch.tensor([stop for _, _, stop in pieces]).int(),
            block_table_RM=self.table[rows],
            slot_mapping_T=torch.zeros(sum(counts), dtype=torch.int64),
            num_decodes=0,
            num_decode_tokens=0,
        )
        arguments = {"scale": self.head_size**-0.5 / 2, "sliding_window": self.window}
        return (
            self.ops.paged_attention(q, *self.caches.parts, metadata, AttentionParams(**arguments)),
            metadata,
            arguments,
        )


PIECES = [(0, 0, 37), (1, 89, 90), (2, 255, 257), (3, 40, 190), (4, 0, 1), (5, 699, 700)]


@covering_sets(
    dtype=STORED, window=[None, 50], head_size=[10, 64, 80, 256, 528], block_size=[BLOCK, 32]
)
def test_attention_over_a_stored_cache_is_that_over_its_values(
    ops, isa, dtype, window, head_size, block_size
):
    sequences = Sequences(
        ops,
        dtype,
        [stop for _, _, stop in PIECES],
        head_size=head_size,
        window=window,
        block_size=block_size,
    )
    q = torch.randn(sum(stop - first for _, first, stop in PIECES), HEADS, head_size)
    out, metadata, arguments = sequences.attend(q, PIECES)
    expected = reference_paged_attention(
        q, *both_values(sequences.caches), metadata, AttentionParams(**arguments)
    )
    if dtype is torch.int8 and isa in ("avx2", "avx512") and head_size <= 512:
        # to bytes queries and weights are rounded about as far as keys and values have been, to
        # words a hundredth of that
        exact = reference_paged_attention(
            q, *sequences.rows, metadata, AttentionParams(**arguments)
        )
        most = 1.25 if isa == "avx512" else 0.02
        assert (out - expected).norm() < most * (expected - exact).norm()
        return
    torch.testing.assert_close(out, expected, atol=1e-5, rtol=1e-5)
    plain = Sequences(
        ops,
        torch.float32,
        [stop for _, _, stop in PIECES],
        head_size=head_size,
        window=window,
        block_size=block_size,
    )
    keys, values = both_values(sequences.caches)
    plain.caches = KVCache(keys_in_panels(keys), values, plain.caches.shape)
    assert torch.equal(out, plain.attend(q, PIECES)[0])


@covering_sets(head_size=[10, 64, 80, 256], block_size=[8, 16, 48])
def test_bytes_are_multiplied_exactly(ops, head_size, block_size):
    """Where queries are whole numbers up to 127, and all that weighs, weighs the same."""
    sequences = Sequences(ops, torch.int8, [300], head_size=head_size, block_size=block_size)
    generator = torch.Generator().manual_seed(head_size)
    signs = torch.randint(0, 2, (300, KV_HEADS), generator=generator) * 2 - 1
    keys = torch.zeros(300, KV_HEADS, head_size)
    keys[..., 1] = signs * 127.0
    values = torch.randint(-127, 128, keys.shape, generator=generator).float()
    values[..., 0] = 127.0  # so that all scales are 1
    block_of = sequences.table[0].long()[torch.arange(300) // block_size]
    slots = block_of * block_size + torch.arange(300) % block_size
    ops.write_kv_cache(keys, values, slots, sequences.caches)
    q = torch.randint(-127, 128, (200, HEADS, head_size), generator=generator).float()
    q[..., 0], q[..., 1] = 127.0, 100.0
    out, _, _ = sequences.attend(q, [(0, 100, 300)])
    seen = torch.arange(300) <= torch.arange(100, 300)[:, None]
    weight = (seen[..., None] & (signs > 0)).float().repeat_interleave(HEADS // KV_HEADS, dim=2)
    expected = (
        torch.einsum("qkh,khd->qhd", weight, values.repeat_interleave(HEADS // KV_HEADS, dim=1))
        / weight.sum(dim=1)[..., None]
    )
    torch.testing.assert_close(out, expected, atol=1e-4, rtol=1e-6)


def check_bits_in_any_step(ops, dtype, window):
    """Of the tokens of one sequence: whole, in chunks, as a crowd of decodes, as drafts, alone."""
    length = 300
    sequences = Sequences(ops, dtype, [length], head_size=64, window=window, block_size=16)
    q = torch.randn(length, HEADS, 64)
    whole, _, _ = sequences.attend(q, [(0, 0, length)])
    for cuts in (
        [(0, 1), (1, 8), (8, 64), (64, 65), (65, 127), (127, 200), (200, 299), (299, 300)],
        [(at, at + 1) for at in range(0, length, 7)],
        [(at, at + 3) for at in (100, 127, 255)],
        *([(at, at + 1)] for at in (0, 63, 128, 299)),
    ):
        wanted = torch.cat([torch.arange(first, stop) for first, stop in cuts])
        out, _, _ = sequences.attend(q[wanted], [(0, first, stop) for first, stop in cuts])
        assert torch.equal(out, whole[wanted])


@pytest.mark.parametrize("window", [None, 50])
@pytest.mark.parametrize("dtype", [torch.float32, *STORED])
def test_a_token_has_the_same_bits_in_a_prompt_a_chunk_a_crowd_and_alone(ops, dtype, window):
    check_bits_in_any_step(ops, dtype, window)


@pytest.mark.parametrize("window", [None, 50])
@pytest.mark.parametrize("head_size", [16, 64, 80])
def test_panels_of_bytes_have_the_bits_of_rows_whatever_lies_out_of_sight(ops, head_size, window):
    lengths = [stop for _, _, stop in PIECES]
    q = torch.randn(sum(stop - first for _, first, stop in PIECES), HEADS, head_size)
    outs = []
    for block_size in (8, 16, 32):
        sequences = Sequences(
            ops, torch.int8, lengths, head_size=head_size, window=window, block_size=block_size
        )
        sequences.blocks.fill_(0xFF)  # scales that are no numbers
        for row, (_, first, stop) in enumerate(PIECES):
            low = 0 if window is None else max(0, first - window + 1)
            seen = torch.arange(low, stop)
            generator = torch.Generator().manual_seed(row)
            k, v = (torch.randn(800, KV_HEADS, head_size, generator=generator) for _ in "kv")
            blocks = sequences.table[row].long()[seen // block_size]
            slots = blocks * block_size + seen % block_size
            ops.write_kv_cache(k[seen], v[seen], slots, sequences.caches)
            sequences.table[row, : low // block_size] = -1
        outs.append(sequences.attend(q, PIECES)[0])
    assert outs[0].isfinite().all()
    assert torch.equal(outs[1], outs[0])
    assert torch.equal(outs[2], outs[0])


@pytest.mark.parametrize("dtype", STORED)
@pytest.mark.parametrize("block_size", [BLOCK, 16])
def test_copies_within_the_cache_and_through_host_memory_carry_everything(ops, dtype, block_size):
    sequences = Sequences(ops, dtype, [61, 61], head_size=16, block_size=block_size)
    q = torch.randn(2, HEADS, 16)
    pieces = [(0, 60, 61), (1, 60, 61)]
    before, _, _ = sequences.attend(q, pieces)
    copier = ops.make_block_copier(sequences.blocks, 20)
    blocks = sequences.table[0].long()
    away = torch.arange(len(blocks))
    copier.swap_out(blocks, away)
    sequences.blocks[blocks] = 77
    copier.swap_in(away, blocks)
    # and the second sequence's blocks trade places with the first's
    both = torch.cat([blocks, sequences.table[1].long()])
    copier.copy(both, both.roll(len(blocks)))
    sequences.table = sequences.table.flip(0)
    after, _, _ = sequences.attend(q, pieces)
    assert torch.equal(before, after)


def test_a_cache_of_another_form_than_planned_is_refused(ops):
    sequences = Sequences(ops, torch.int8, [9], head_size=16)
    q = torch.randn(1, HEADS, 16)
    for other in (torch.float32, torch.bfloat16):
        sequences.caches = make_cache(ops, 9, BLOCK, KV_HEADS, 16, other)
        with pytest.raises(ValueError, match=r"a cache of KVShape"):
            sequences.attend(q, [(0, 8, 9)])
