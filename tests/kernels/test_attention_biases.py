"""Sinks and ALiBi slopes of paged attention: both backends, and the reference against torch."""

import pytest
import torch
import torch.nn.functional as F

from kernels.interface.operations import AttentionParams, AttentionSpec
from kernels.torch.operations import TorchOperations
from kernels.triton.operations import TritonOperations
from tests.covering import covering_pairs
from tests.kernels.paged_steps import make_cache, reference_paged_attention

pytestmark = pytest.mark.slow

TORCH = TorchOperations()
TRITON = TritonOperations(torch.device("cpu"))
BLOCK_SIZE = 4
MIXES = {
    "decodes": [(1, 1), (1, 4), (1, 65)],
    "one prompt": [(37, 37)],
    "mixed": [(1, 90), (1, 1), (33, 33), (20, 150), (3, 77)],
    "chunk over several tiles": [(520, 530)],
    "small": [(1, 21), (1, 1), (9, 9), (3, 18)],
}
BIASES = {"sinks": (True, False), "slopes": (False, True), "both": (True, True)}


def make_step(requests, heads, head_size=8):
    """The tensors of a step; all but the cache, which each backend lays out itself."""
    generator = torch.Generator().manual_seed(len(requests))
    width = max(-(-length // BLOCK_SIZE) for _, length in requests)
    table = torch.randperm(len(requests) * width, generator=generator).view(-1, width).int() + 1
    starts = torch.tensor([0, *(queries for queries, _ in requests)]).cumsum(0).int()
    num_blocks = len(requests) * width + 1
    shape = (num_blocks * BLOCK_SIZE, heads[1], head_size)
    return {
        "heads": heads,
        "starts": starts,
        "lengths": torch.tensor([length for _, length in requests]).int(),
        "table": table,
        "num_decodes": sum(queries == 1 for queries, _ in requests),
        "num_blocks": num_blocks,
        "k": torch.randn(shape, generator=generator),
        "v": torch.randn(shape, generator=generator),
        "q": torch.randn(int(starts[-1]), heads[0], head_size, generator=generator),
    }


def biases_of(kind, num_heads):
    generator = torch.Generator().manual_seed(7)
    has_sinks, has_slopes = BIASES[kind]
    return {
        "sinks_H": torch.randn(num_heads, generator=generator) * 2 if has_sinks else None,
        "alibi_slopes_H": torch.rand(num_heads, generator=generator) if has_slopes else None,
    }


def attend(ops, step, *, window=None, softcap=None, **biases):
    """(attention's output, its reference's) over a cache of this backend."""
    num_heads, num_kv_heads = step["heads"]
    head_size = step["q"].shape[2]
    cache = make_cache(ops, step["num_blocks"], BLOCK_SIZE, num_kv_heads, head_size, torch.float32)
    slots = torch.arange(step["num_blocks"] * BLOCK_SIZE)
    ops.write_kv_cache(step["k"], step["v"], slots, cache)
    metadata = ops.make_attention_planner(
        AttentionSpec(
            num_query_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_size=head_size,
            block_size=BLOCK_SIZE,
            sliding_window=window,
            max_num_seqs=8,
            max_num_batched_tokens=1024,
            max_model_len=1024,
            dtype=torch.float32,
            kv_dtype=torch.float32,
        )
    ).plan(
        query_start_loc_R1=step["starts"],
        seq_lens_R=step["lengths"],
        block_table_RM=step["table"],
        slot_mapping_T=torch.zeros(step["q"].shape[0], dtype=torch.int64),
        num_decodes=step["num_decodes"],
        num_decode_tokens=step["num_decodes"],
    )
    options = {"scale": 0.3, "sliding_window": window, "softcap": softcap, **biases}
    out = ops.paged_attention(step["q"], *cache.parts, metadata, AttentionParams(**options))
    plain = [x.view(-1, BLOCK_SIZE, num_kv_heads, head_size) for x in (step["k"], step["v"])]
    return out, reference_paged_attention(step["q"], *plain, metadata, AttentionParams(**options))


@covering_pairs(
    kind=BIASES, window=[None, 16], softcap=[None, 3.0], heads=[(9, 3), (4, 4), (14, 1)], mix=MIXES
)
def test_torch_equals_the_reference(mix, heads, window, softcap, kind):
    step = make_step(MIXES[mix], heads)
    out, expected = attend(TORCH, step, window=window, softcap=softcap, **biases_of(kind, heads[0]))
    torch.testing.assert_close(out, expected, atol=1e-5, rtol=1e-5)
    without, _ = attend(TORCH, step, window=window, softcap=softcap)
    assert (out - without).abs().max() > 0.05


@covering_pairs(kind=BIASES, heads=[(9, 3), (4, 1)], window=[None, 6], mix=["decodes", "small"])
def test_triton_equals_the_reference(mix, heads, window, kind):
    step = make_step(MIXES[mix], heads)
    out, expected = attend(TRITON, step, window=window, **biases_of(kind, heads[0]))
    torch.testing.assert_close(out, expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("kind", BIASES)
def test_reference_equals_torch_with_a_mask_and_a_key_more(kind):
    """A sink is a key of which the score is given and the value is zero."""
    step = make_step([(21, 21)], (6, 2))
    biases = biases_of(kind, 6)
    _, out = attend(TORCH, step, **biases)
    blocks = step["table"][0].long()
    k, v = (
        step[name].view(-1, BLOCK_SIZE, 2, 8)[blocks].flatten(0, 1)[:21].repeat_interleave(3, 1)
        for name in "kv"
    )
    position = torch.arange(21)
    mask = torch.zeros(6, 21, 22)
    if biases["alibi_slopes_H"] is not None:
        distance = position - position.unsqueeze(1)
        mask[:, :, :21] += biases["alibi_slopes_H"][:, None, None] * distance
    mask[:, :, :21] += torch.full((21, 21), float("-inf")).triu(1)
    mask[:, :, 21] = float("-inf")
    if biases["sinks_H"] is not None:
        mask[:, :, 21] = biases["sinks_H"][:, None]
    zero = torch.zeros(6, 1, 8)
    expected = F.scaled_dot_product_attention(
        step["q"].transpose(0, 1),
        torch.cat((k.transpose(0, 1), zero), dim=1),
        torch.cat((v.transpose(0, 1), zero), dim=1),
        attn_mask=mask,
        scale=0.3,
    )
    torch.testing.assert_close(out, expected.transpose(0, 1), atol=1e-5, rtol=1e-5)
