"""Attention over latents, whose last elements are their values, against the loop-per-request
reference, and its bits whatever a sequence was cut into."""

import pytest
import torch

from kernels.cpu.operations import CpuOperations
from kernels.interface.kv_cache import KVShape
from kernels.interface.operations import (
    AttentionParams,
    AttentionSpec,
    RotaryParams,
    allocate_kv_cache,
)
from kernels.torch.operations import TorchOperations
from tests.kernels.cpu.instruction_sets import covering_sets
from tests.kernels.paged_steps import reference_paged_attention

LENGTHS = [(37, 37), (1, 90), (140, 300), (3, 77), (1, 257), (1, 1)]
BLOCK = 16


class Latents:
    """Sequences whose latents `rotary_and_cache` writes, of heads that turn in their first 4."""

    def __init__(
        self,
        ops,
        num_heads,
        size,
        value_size,
        kv_dtype=torch.float32,
        block_size=BLOCK,
        lengths=LENGTHS,
    ):
        self.lengths = lengths
        self.ops, self.num_heads, self.size, self.block_size = ops, num_heads, size, block_size
        shape = KVShape(block_size, 1, size, value_size, kv_dtype, values_in_keys=True)
        assert shape.block_bytes == block_size * size * kv_dtype.itemsize
        self.width = -(-max(length for _, length in lengths) // block_size)
        num_blocks = len(lengths) * self.width + 1
        generator = torch.Generator().manual_seed(size)
        order = torch.randperm(num_blocks - 1, generator=generator) + 1
        self.table_RM = order.view(-1, self.width).int()
        blocks = ops.allocate_blocks(num_blocks, shape.block_bytes + 64)  # with a gap
        self.cache = ops.view_kv_cache(blocks, shape)
        self.cache.keys.fill_(float("nan"))
        self.rows = [
            torch.randn(length, (num_heads + 1) * size, generator=generator)
            for _, length in lengths
        ]
        angles = torch.randn(400, 2, generator=generator)
        self.rotary = RotaryParams(
            num_query_heads=num_heads,
            head_size=size,
            cos_sin_PD=torch.cat([angles.cos(), angles.sin()], 1),
        )
        self.params = AttentionParams(scale=size**-0.5)
        self.planner = ops.make_attention_planner(
            AttentionSpec(
                num_query_heads=num_heads,
                num_kv_heads=1,
                head_size=size,
                value_size=value_size,
                block_size=block_size,
                sliding_window=None,
                max_num_seqs=8,
                max_num_batched_tokens=1024,
                max_model_len=1024,
                dtype=torch.float32,
                kv_dtype=kv_dtype,
            )
        )

    def run(self, pieces, num_decodes=0):
        """Of (sequence, first, stop), decodes first: q, results, and the metadata."""
        rows = torch.cat([self.rows[sequence][first:stop] for sequence, first, stop in pieces])
        positions = torch.cat([torch.arange(first, stop) for _, first, stop in pieces])
        blocks = torch.cat(
            [
                self.table_RM[s, torch.arange(first, stop) // self.block_size]
                for s, first, stop in pieces
            ]
        )
        counts = [stop - first for _, first, stop in pieces]
        metadata = self.planner.plan(
            query_start_loc_R1=torch.tensor([0, *counts]).cumsum(0).int(),
            seq_lens_R=torch.tensor([stop for *_, stop in pieces]).int(),
            block_table_RM=self.table_RM[[sequence for sequence, *_ in pieces]],
            slot_mapping_T=blocks.long() * self.block_size + positions % self.block_size,
            num_decodes=num_decodes,
            num_decode_tokens=num_decodes,
        )
        slots = metadata.slot_mapping_T
        q = self.ops.rotary_and_cache(rows.clone(), positions, slots, self.cache, self.rotary)
        out = self.ops.paged_attention(q, *self.cache.parts, metadata, self.params)
        return q, out, metadata

    def check(self, tolerance):
        """Sequences up to their last pieces, then these."""
        before = [(s, 0, length - n) for s, (n, length) in enumerate(self.lengths) if n < length]
        self.run(before)
        pieces = [(s, length - n, length) for s, (n, length) in enumerate(self.lengths)]
        q, out, metadata = self.run(pieces)
        kept = self.cache.keys.flatten(0, 1)[metadata.slot_mapping_T, 0].float()
        own = torch.cat([self.rows[s][first:stop, -self.size :] for s, first, stop in pieces])
        torch.testing.assert_close(kept[:, 4:], own[:, 4:], atol=tolerance, rtol=tolerance)
        assert not torch.allclose(kept[:, :4], own[:, :4], atol=0.1)  # they are turned
        keys = self.cache.keys.float().nan_to_num()
        values = self.cache.values.float().nan_to_num()
        expected = reference_paged_attention(q, keys, values, metadata, self.params)
        torch.testing.assert_close(out, expected, atol=tolerance, rtol=tolerance)
        return out


SIZES = [(2, 14, 10), (5, 24, 16), (16, 576, 512), (40, 288, 256), (128, 80, 64)]


@covering_sets(sizes=SIZES, kv_dtype=[torch.float32, torch.bfloat16], block_size=[16, 5])
def test_any_step_gives_the_reference_and_a_tokens_bits_are_its_own(
    library, isa, sizes, kv_dtype, block_size
):
    made = [Latents(CpuOperations(library), *sizes, kv_dtype, block_size) for _ in range(2)]
    whole, cut = made
    out = whole.check(1e-5 if kv_dtype is torch.float32 else 1e-2)
    cut.run([(2, 0, 7), (0, 0, 36)])
    cut.run([(2, 7, 299), (0, 36, 37)])
    _, alone, _ = cut.run([(2, 299, 300)])
    last = LENGTHS[0][0] + LENGTHS[1][0] + LENGTHS[2][0] - 1
    assert torch.equal(alone[0], out[last])


@pytest.mark.parametrize("sizes", [(3, 64, 32), (16, 576, 512), (40, 288, 256)])
def test_products_of_pairs(library, pairs_isa, sizes):
    ops = CpuOperations(library, linear_weights="bfloat16")
    Latents(ops, *sizes, torch.bfloat16).check(2e-2)


@pytest.mark.parametrize("sizes", SIZES)
def test_the_torch_backend(sizes):
    Latents(TorchOperations(), *sizes).check(1e-5)


def test_a_format_that_latents_are_not_kept_in_is_refused(library):
    ops = CpuOperations(library)
    shape = KVShape(BLOCK, 1, 24, 16, torch.int8, values_in_keys=True)
    with pytest.raises(ValueError, match="latents are not kept in int8; choose --kv-cache-dtype"):
        allocate_kv_cache(ops, 2, shape)
