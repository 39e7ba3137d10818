"""Keys that an indexer chooses, and attention to them, against torch's formulas, and their bits
whatever a sequence was cut into."""

import pytest
import torch

from kernels.cpu.operations import CpuOperations
from kernels.interface.kv_cache import KVShape
from kernels.interface.operations import AttentionParams, AttentionSpec
from kernels.torch.operations import TorchOperations
from tests.kernels.cpu.instruction_sets import covering_sets

LENGTHS = (300, 37, 90, 300)
TOP_K, WIDTH, BLOCK, GAP = 40, 20, 16, 64
SIZE, VALUE = 80, 64
PARAMS = AttentionParams(scale=SIZE**-0.5)


class Chosen:
    """Sequences of random latents and keys of an indexer, in shuffled blocks with gaps."""

    def __init__(self, ops, kv_dtype, num_heads=24, index=(20, 33), block_size=BLOCK):
        self.ops, self.block_size = ops, block_size
        shape = KVShape(
            block_size, 1, SIZE, VALUE, kv_dtype, values_in_keys=True, index_size=index[1]
        )
        assert shape.block_bytes == block_size * (SIZE + index[1]) * kv_dtype.itemsize
        generator = torch.Generator().manual_seed(3)
        width = -(-max(LENGTHS) // block_size)
        order = torch.randperm(len(LENGTHS) * width, generator=generator) + 1
        self.table_RM = order.view(len(LENGTHS), width).int()
        blocks_BN = ops.allocate_blocks(1 + len(order), shape.block_bytes + GAP)
        self.cache = ops.view_kv_cache(blocks_BN, shape)

        def random(*sizes):
            return torch.randn(*sizes, generator=generator)

        for cache, size in ((self.cache, SIZE), (self.cache.index, index[1])):
            values = random(*cache.keys.shape[:2], 1, size)
            cache.keys.copy_(values.to(kv_dtype))
        total = max(LENGTHS)
        self.q = random(len(LENGTHS), total, num_heads, SIZE)
        self.index_q = random(len(LENGTHS), total, index[0] + 1, index[1])  # with a gap behind
        self.weights = random(len(LENGTHS), total, index[0])
        self.planner = ops.make_attention_planner(
            AttentionSpec(
                num_query_heads=num_heads,
                num_kv_heads=1,
                head_size=SIZE,
                value_size=VALUE,
                block_size=block_size,
                sliding_window=None,
                max_num_seqs=8,
                max_num_batched_tokens=1024,
                max_model_len=1024,
                dtype=torch.float32,
                kv_dtype=kv_dtype,
            )
        )

    def run(self, pieces, top_k=TOP_K):
        """Of (sequence, first, stop): what is chosen, and attention to it and to all keys."""

        def rows(tensor):
            return torch.cat([tensor[s, first:stop] for s, first, stop in pieces])

        counts = [stop - first for _, first, stop in pieces]
        metadata = self.planner.plan(
            query_start_loc_R1=torch.tensor([0, *counts]).cumsum(0).int(),
            seq_lens_R=torch.tensor([stop for *_, stop in pieces]).int(),
            block_table_RM=self.table_RM[[sequence for sequence, *_ in pieces]],
            slot_mapping_T=torch.zeros(sum(counts), dtype=torch.int64),
            num_decodes=0,
            num_decode_tokens=0,
        )
        q, index_q = rows(self.q), rows(self.index_q)[:, :-1]
        chosen = self.ops.choose_keys(
            index_q, rows(self.weights), self.cache.index, metadata, top_k
        )
        out = self.ops.attend_chosen(q, self.cache, metadata, PARAMS, chosen)
        return chosen, out, self.ops.paged_attention(q, *self.cache.parts, metadata, PARAMS)


@covering_sets(
    kv_dtype=[torch.float32, torch.bfloat16],
    index=[(20, 33), (64, 16), (1, 5)],
    block_size=[16, 5],
)
def test_any_step_gives_the_formulas_and_a_tokens_bits_are_its_own(
    library, isa, kv_dtype, index, block_size
):
    native = Chosen(CpuOperations(library), kv_dtype, index=index, block_size=block_size)
    whole = [(0, 0, 300), (1, 30, 37), (2, 35, 90), (3, 299, 300)]
    chosen, out, full = native.run(whole)
    reference = Chosen(TorchOperations(), torch.float32, index=index, block_size=block_size)
    if kv_dtype is torch.bfloat16:  # what it holds is the same
        for of in (lambda cache: cache, lambda cache: cache.index):
            of(reference.cache).keys.copy_(of(native.cache).keys.float())
    expected_chosen, expected, _ = reference.run(whole)
    seen = torch.cat([torch.arange(first, stop) for _, first, stop in whole]) + 1
    assert torch.equal(chosen[seen > TOP_K], expected_chosen[seen > TOP_K])
    torch.testing.assert_close(out, expected, atol=2e-5, rtol=2e-5)
    assert torch.equal(out[seen <= TOP_K], full[seen <= TOP_K])
    assert not torch.allclose(out[299], full[299], atol=1e-2)
    for pieces, at in (
        ([(0, 0, 41), (2, 88, 90)], [*range(41), 360, 361]),
        ([(3, 299, 300)], [-1]),
    ):
        again, alone, _ = native.run(pieces)
        own = seen[at] > TOP_K
        assert torch.equal(again[own], chosen[at][own])
        assert torch.equal(alone, out[at])


@pytest.mark.parametrize("make", [CpuOperations, lambda library: TorchOperations()])
def test_of_equal_scores_the_first_keys_are_chosen(library, make):
    case = Chosen(make(library), torch.float32)
    case.cache.index.keys.zero_()
    chosen, *_ = case.run([(0, 298, 300)])
    assert chosen.tolist() == [[*range(TOP_K)]] * 2


def test_what_is_no_choice_is_refused(library):
    case = Chosen(CpuOperations(library), torch.float32)
    for wrong, message in (
        ((3, 3), "chosen key 1 of token 0 is 3, it must rise within"),
        ((0, 300), "chosen key 1 of token 0 is 300, it must rise within"),
        ((-1, 5), "chosen key 0 of token 0 is -1, it must rise within"),
    ):
        case.ops.choose_keys = lambda *_, wrong=wrong: torch.tensor([wrong], dtype=torch.int32)
        with pytest.raises(ValueError, match=message):
            case.run([(0, 299, 300)], top_k=2)
