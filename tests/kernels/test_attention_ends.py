"""Attention of tokens that see keys behind themselves, such as those of an image among text."""

import torch

from kernels.backends import select_operations
from kernels.interface.operations import AttentionParams, AttentionSpec
from kernels.torch.operations import TorchOperations
from kernels.triton.operations import TritonOperations
from tests.covering import covering_pairs
from tests.kernels.paged_steps import make_cache

H, K, D, S = 4, 2, 16, 4
STEPS = [
    # tokens before this step, and runs of an image [start, stop) by position
    ([(0, 150, [(3, 140)])]),
    ([(7, 40, [(9, 20), (21, 40)]), (30, 1, []), (0, 9, [(0, 9)])]),
    ([(70, 130, [(64, 100), (190, 200)])]),
    ([(1100, 40, [(1103, 1139)])]),  # few tokens that see many keys
]


def backends():
    return {
        "native": (select_operations(torch.device("cpu")), torch.float32),
        "torch": (TorchOperations(), torch.float32),
        "triton": (TritonOperations(torch.device("cpu")), torch.float32),
    }


@covering_pairs(window=[None, 5, 70], step=STEPS, name=["native", "torch", "triton"])
def test_a_run_sees_all_of_itself_within_the_window(name, step, window):
    ops, dtype = backends()[name]
    generator = torch.Generator().manual_seed(0)
    lengths = [before + count for before, count, _ in step]
    num_blocks = sum(-(-length // S) for length in lengths) + 1
    spec = AttentionSpec(
        num_query_heads=H, num_kv_heads=K, head_size=D, block_size=S, sliding_window=window,
        max_num_seqs=4, max_num_batched_tokens=512, max_model_len=2048, dtype=dtype, kv_dtype=dtype,
    )  # fmt: skip
    cache = make_cache(ops, num_blocks, S, K, D, dtype)
    for part in cache.parts:
        part.copy_(torch.randn(part.shape, generator=generator))
    width = max(-(-length // S) for length in lengths)
    table, first, slots, ends = torch.zeros(len(step), width, dtype=torch.int32), 1, [], []
    for row, (before, count, runs) in enumerate(step):
        own = torch.arange(first, first + -(-(before + count) // S))
        table[row, : len(own)] = own
        first += len(own)
        for position in range(before, before + count):
            slots.append(int(own[position // S]) * S + position % S)
            run_stop = [stop for start, stop in runs if start <= position < stop]
            ends.append(max([position + 1, *run_stop]))
    counts = torch.tensor([0] + [count for _, count, _ in step])
    metadata = ops.make_attention_planner(spec).plan(
        query_start_loc_R1=counts.cumsum(0).int(),
        seq_lens_R=torch.tensor(lengths, dtype=torch.int32),
        block_table_RM=table,
        slot_mapping_T=torch.tensor(slots),
        num_decodes=0,
        num_decode_tokens=0,
        ends_T=torch.tensor(ends, dtype=torch.int32),
    )
    q_THD = torch.randn(len(ends), H, D, generator=generator)
    params = AttentionParams(scale=D**-0.5, sliding_window=window)
    out_THD = ops.paged_attention(q_THD, *cache.parts, metadata, params)
    token = 0
    for row, (before, count, _) in enumerate(step):
        keys, values = (part[table[row].long()] for part in cache.parts)
        if name == "triton":  # which keeps the tokens of a head together
            keys, values = keys.transpose(1, 2), values.transpose(1, 2)
        keys, values = keys.flatten(0, 1), values.flatten(0, 1)
        for position in range(before, before + count):
            low = 0 if window is None else max(0, position - window + 1)
            seen = slice(low, ends[token])
            for head in range(H):
                kv = head // (H // K)
                weights = torch.softmax(keys[seen, kv] @ q_THD[token, head] * D**-0.5, 0)
                expected = weights @ values[seen, kv]
                assert torch.allclose(out_THD[token, head], expected, atol=1e-5)
            token += 1
