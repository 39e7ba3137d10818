"""Fast paged attention against the loop-per-request reference, and that against torch."""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from paged_steps import make_planner, step

from kernels.interface.operations import AttentionParams
from kernels.torch.operations import TorchOperations
from tests.covering import covering_pairs
from tests.kernels.paged_steps import reference_paged_attention
from tests.profiles import examples

OPS = TorchOperations()


BIASES = {
    "none": "",
    "sinks": "sinks_H",
    "slopes": "alibi_slopes_H",
    "both": "sinks_H alibi_slopes_H",
}


def biases_of(kind, num_heads):
    generator = torch.Generator().manual_seed(7)
    sinks_H = torch.randn(num_heads, generator=generator) * 2
    both = {"sinks_H": sinks_H, "alibi_slopes_H": torch.rand(num_heads, generator=generator)}
    return {name: both[name] for name in BIASES[kind].split()}


def check(
    requests,
    *,
    window=None,
    softcap=None,
    biases="none",
    heads=(9, 3),
    bidirectional=False,
    **shape,
):
    q, k_cache, v_cache, metadata = step(
        OPS, requests, window=window, heads=heads, bidirectional=bidirectional, **shape
    )
    before = q.clone(), k_cache.clone()
    params = AttentionParams(
        scale=0.3, sliding_window=window, softcap=softcap, **biases_of(biases, heads[0])
    )
    out = OPS.paged_attention(q, k_cache, v_cache, metadata, params)
    expected = reference_paged_attention(
        q,
        k_cache.nan_to_num(),
        v_cache.nan_to_num(),
        metadata,
        params,
        bidirectional=bidirectional,
    )
    tolerance = 1e-5 if q.dtype == torch.float32 else 3e-2
    torch.testing.assert_close(out, expected, atol=tolerance, rtol=tolerance)
    torch.testing.assert_close(q, before[0], atol=0, rtol=0)
    torch.testing.assert_close(k_cache, before[1], atol=0, rtol=0, equal_nan=True)


MIXES = {
    "one token": [(1, 1)],
    "one decode": [(1, 63)],
    "decodes": [(1, 1), (1, 4), (1, 5), (1, 63), (1, 64), (1, 65), (1, 7)],
    "whole prompt": [(37, 37)],
    "chunk at the end of a long context": [(5, 200)],
    "chunk over several tiles": [(600, 650)],
    "mixed": [(33, 33), (1, 90), (100, 150), (7, 300), (1, 1), (3, 77), (40, 41), (1, 512)],
    "many small prompts": [(n, n) for n in range(1, 40)],
    "drafts": [(4, 100), (3, 50), (1, 70), (4, 4), (2, 31)],
    "one very long decode": [(1, 5000), (1, 3), (1, 3)],
}


@covering_pairs(
    softcap=[None, 3.0],
    biases=BIASES,
    heads=[(9, 3), (4, 4), (14, 1)],
    window=[None, 1, 3, 16, 100],
    mix=MIXES,
)
def test_any_mix_equals_the_reference_and_reads_nothing_out_of_sight(
    mix, window, heads, biases, softcap
):
    """Blocks of each request anywhere in the cache. Proves S177, S187."""
    check(MIXES[mix], window=window, heads=heads, biases=biases, softcap=softcap)


@pytest.mark.parametrize("window", [None, 1, 5, 70])
@pytest.mark.parametrize("lengths", [(1,), (64,), (1, 5, 5, 63, 300), (600, 2)])
def test_bidirectional_attention_equals_the_reference(lengths, window):
    check([(n, n) for n in lengths], window=window, bidirectional=True)


@pytest.mark.parametrize("heads", [(1, 1), (4, 4), (7, 1), (14, 2), (9, 3)])
@pytest.mark.parametrize("head_size", [2, 10, 80])
def test_head_counts_and_sizes(heads, head_size):
    check(MIXES["mixed"], heads=heads, head_size=head_size, block_size=16)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("softcap", [None, 3.0])
def test_half_precision(dtype, softcap):
    check(MIXES["mixed"], dtype=dtype, softcap=softcap, window=50)


@settings(max_examples=examples(60), deadline=None)
@given(
    requests=st.lists(
        st.tuples(st.integers(1, 90), st.integers(0, 200)).map(lambda r: (r[0], sum(r))),
        min_size=1,
        max_size=12,
    ),
    window=st.none() | st.integers(1, 120),
    block_size=st.sampled_from([1, 4, 16]),
)
def test_random_steps(requests, window, block_size):
    check(requests, window=window, block_size=block_size)


def test_empty_step_gives_an_empty_result():
    q = torch.empty(0, 4, 8)
    caches = torch.zeros(2, 4, 2, 8), torch.zeros(2, 4, 2, 8)
    metadata = make_planner(OPS, (4, 2), 8, 4).plan(
        query_start_loc_R1=torch.zeros(1, dtype=torch.int32),
        seq_lens_R=torch.zeros(0, dtype=torch.int32),
        block_table_RM=torch.zeros(0, 1, dtype=torch.int32),
        slot_mapping_T=torch.zeros(0, dtype=torch.int64),
        num_decodes=0,
        num_decode_tokens=0,
    )
    assert OPS.paged_attention(q, *caches, metadata, AttentionParams(scale=1.0)).shape == (0, 4, 8)


@pytest.mark.parametrize("kind", BIASES)
def test_reference_equals_torch_with_a_mask_and_a_key_more(kind):
    """A sink is a key of which the score is given and the value is zero."""
    q, k_cache, v_cache, metadata = step(OPS, [(21, 21), (50, 50)])
    biases = biases_of(kind, 9)
    params = AttentionParams(scale=0.3, **biases)
    out = reference_paged_attention(q, k_cache.nan_to_num(), v_cache.nan_to_num(), metadata, params)
    for request, (start, stop) in enumerate([(0, 21), (21, 71)]):
        length = stop - start
        blocks = metadata.block_table_RM[request].long()
        k, v = (
            F.pad(cache[blocks].flatten(0, 1)[:length].transpose(0, 1), (0, 0, 0, 1))
            for cache in (k_cache, v_cache)
        )
        distance = torch.arange(length) - torch.arange(length).unsqueeze(1)
        mask = torch.full((9, length, length + 1), float("-inf"))
        mask[:, :, :length] = biases.get("alibi_slopes_H", torch.zeros(9))[:, None, None] * distance
        mask[:, :, :length].masked_fill_(distance > 0, float("-inf"))
        if "sinks_H" in biases:
            mask[:, :, length] = biases["sinks_H"][:, None]
        expected = F.scaled_dot_product_attention(
            q[start:stop].transpose(0, 1), k, v, attn_mask=mask, scale=0.3, enable_gqa=True
        )
        torch.testing.assert_close(out[start:stop], expected.transpose(0, 1), atol=1e-5, rtol=1e-5)


def test_a_cache_of_another_dtype_is_refused_with_the_option_to_change():
    with pytest.raises(ValueError, match=r"float8_e4m3fn under .*float32: .*--kv-cache-dtype"):
        make_planner(OPS, (4, 2), 8, 4, kv_dtype=torch.float8_e4m3fn)
