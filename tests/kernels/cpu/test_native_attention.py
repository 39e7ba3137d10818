"""Native paged attention against the loop-per-request reference, and its bits across batches."""

import functools

import paged_steps
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from paged_steps import keys_in_panels, make_planner

from kernels.cpu.attention import NativeAttentionPlan
from kernels.cpu.operations import CpuOperations
from kernels.interface.operations import AttentionParams
from tests.kernels.cpu.instruction_sets import covering_sets
from tests.kernels.paged_steps import reference_paged_attention
from tests.profiles import examples

pytestmark = pytest.mark.slow


@pytest.fixture
def ops(library, isa):
    return CpuOperations(library)


step = functools.partial(paged_steps.step, hides_dropped=True)


def check(ops, requests, *, window=None, options=None, **shapes):
    q, k_cache, v_cache, metadata = step(ops, requests, window=window, **shapes)
    assert isinstance(metadata.plan, NativeAttentionPlan)
    keys = keys_in_panels(k_cache)
    before = q.clone(), keys.clone()
    arguments = {"scale": 0.3, "sliding_window": window, **(options or {})}
    out = ops.paged_attention(q, keys, v_cache, metadata, AttentionParams(**arguments))
    metadata.block_table_RM.clamp_(min=0)
    expected = reference_paged_attention(
        q, k_cache.nan_to_num(), v_cache.nan_to_num(), metadata, AttentionParams(**arguments)
    )
    torch.testing.assert_close(out, expected, atol=1e-5, rtol=1e-5)
    assert torch.equal(q, before[0])
    torch.testing.assert_close(keys, before[1], atol=0, rtol=0, equal_nan=True)


MIXES = {
    "one token": [(1, 1)],
    "one decode": [(1, 63)],
    "decodes": [(1, 1), (1, 4), (1, 5), (1, 63), (1, 64), (1, 65), (1, 7)],
    "decodes around a segment": [(1, 127), (1, 128), (1, 129), (1, 256), (1, 257), (2, 385)],
    "a crowd of decodes": [(1, 1 + 9 * n) for n in range(40)],
    "whole prompt": [(37, 37)],
    "chunk at the end of a long context": [(5, 200)],
    "chunk over several tiles": [(600, 650)],
    "mixed": [(33, 33), (1, 90), (100, 150), (7, 300), (1, 1), (3, 77), (40, 41), (1, 512)],
    "many small prompts": [(n, n) for n in range(1, 40)],
    "drafts": [(4, 100), (3, 50), (1, 70), (4, 4), (2, 31)],
    "one very long decode": [(1, 5000), (1, 3), (1, 3)],
}


@covering_sets(block_size=[4, 32], window=[None, 1, 3, 16, 100], mix=MIXES)
def test_any_mix_equals_the_reference_and_reads_nothing_out_of_sight(ops, mix, window, block_size):
    """Proves S187."""
    check(ops, MIXES[mix], window=window, block_size=block_size)


@covering_sets(
    window=[None, 70],
    mix=["mixed", "decodes around a segment"],
    which=["softcap", "sinks", "slopes", "distance", "all"],
)
def test_softcap_sinks_and_slopes(ops, mix, window, which):
    options = {
        "softcap": 3.0,
        "sinks_H": torch.linspace(-2, 2, 9),
        "alibi_slopes_H": torch.logspace(-6, -1, 9, base=2),
        "distance_bias_HN": torch.linspace(-3, 3, 9 * 41).sin().view(9, 41),
    }
    if which != "all":
        options = {name: value for name, value in options.items() if which in name}
        assert len(options) == 1
    check(ops, MIXES[mix], window=window, options=options)


@covering_sets(
    heads=[(1, 1), (4, 4), (7, 1), (14, 2), (9, 3), (128, 1)],
    head_size=[2, 10, 32, 64, 80, 128, 256],
)
def test_head_counts_and_sizes(ops, heads, head_size):
    mix = [(33, 33), (1, 90), (1, 140), (7, 300)]
    options = {"scale": head_size**-0.5}
    check(ops, mix, heads=heads, head_size=head_size, block_size=16, options=options)


@settings(
    max_examples=examples(30),
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(
    requests=st.lists(
        st.tuples(st.integers(1, 90), st.integers(0, 200)).map(lambda r: (r[0], sum(r))),
        min_size=1,
        max_size=12,
    ),
    window=st.none() | st.integers(1, 120),
    block_size=st.sampled_from([1, 3, 16, 48, 200]),
)
def test_random_steps(ops, requests, window, block_size):
    check(ops, requests, window=window, block_size=block_size)


def test_queries_may_be_a_view_of_a_wider_product(ops):
    q, k_cache, v_cache, metadata = step(ops, [(3, 9), (1, 70)])
    wide = torch.randn(4, 15, 16)
    wide[:, :9] = q
    view = ops.paged_attention(wide[:, :9], k_cache, v_cache, metadata, AttentionParams(scale=0.3))
    assert torch.equal(
        view, ops.paged_attention(q, k_cache, v_cache, metadata, AttentionParams(scale=0.3))
    )


def test_requests_without_tokens_are_passed_over(ops):
    q, k_cache, v_cache, metadata = step(ops, [(1, 9), (1, 20)])
    expected = ops.paged_attention(q, k_cache, v_cache, metadata, AttentionParams(scale=0.3))
    padded = make_planner(ops, (9, 3), 16, 4).plan(
        query_start_loc_R1=torch.tensor([0, 1, 1, 2, 2]).int(),
        seq_lens_R=torch.tensor([9, 0, 20, 0]).int(),
        block_table_RM=metadata.block_table_RM[[0, 0, 1, 1]],
        slot_mapping_T=torch.zeros(2, dtype=torch.int64),
        num_decodes=4,
        num_decode_tokens=2,
    )
    assert torch.equal(
        ops.paged_attention(q, k_cache, v_cache, padded, AttentionParams(scale=0.3)), expected
    )


def test_an_empty_step_gives_an_empty_result(ops):
    metadata = make_planner(ops, (4, 2), 8, 4).plan(
        query_start_loc_R1=torch.zeros(1, dtype=torch.int32),
        seq_lens_R=torch.zeros(0, dtype=torch.int32),
        block_table_RM=torch.zeros(0, 1, dtype=torch.int32),
        slot_mapping_T=torch.zeros(0, dtype=torch.int64),
        num_decodes=0,
        num_decode_tokens=0,
    )
    caches = torch.zeros(2, 4, 2, 8), torch.zeros(2, 4, 2, 8)
    out = ops.paged_attention(torch.empty(0, 4, 8), *caches, metadata, AttentionParams(scale=1.0))
    assert out.shape == (0, 4, 8)


def test_half_precision_goes_to_torch(ops):
    q, k_cache, v_cache, metadata = step(ops, MIXES["mixed"], dtype=torch.bfloat16)
    out = ops.paged_attention(q, k_cache, v_cache, metadata, AttentionParams(scale=0.3))
    expected = reference_paged_attention(
        q, k_cache.nan_to_num(), v_cache.nan_to_num(), metadata, AttentionParams(scale=0.3)
    )
    torch.testing.assert_close(out, expected, atol=3e-2, rtol=3e-2)


@pytest.mark.parametrize("block", [-1, 1000])
def test_a_block_outside_the_cache_is_refused_before_it_is_read(ops, block):
    q, k_cache, v_cache, metadata = step(ops, [(1, 9), (1, 20)])
    metadata.block_table_RM[1, 2] = block
    with pytest.raises(ValueError, match=f"block 2 of request 1 is {block}, the cache has blocks"):
        ops.paged_attention(q, k_cache, v_cache, metadata, AttentionParams(scale=0.3))


@pytest.mark.parametrize(
    ("starts", "lengths", "text"),
    [
        ([0, 1, 3], [9, 20], r"runs from 0 to 3, it must run from 0 to the 2 tokens"),
        ([0, 2, 2], [1, 20], r"request 0 has 2 tokens in the step and a sequence of 1"),
        ([0, 3, 2], [9, 20], r"request 1 has -1 tokens"),
        ([0, 1, 2], [9, 21], r"request 1 has 21 tokens, its block table of 5 x 4 slots"),
    ],
)
def test_lengths_that_do_not_fit_are_refused(ops, starts, lengths, text):
    q, k_cache, v_cache, metadata = step(ops, [(1, 9), (1, 20)])
    broken = make_planner(ops, (9, 3), 16, 4).plan(
        query_start_loc_R1=torch.tensor(starts).int(),
        seq_lens_R=torch.tensor(lengths).int(),
        block_table_RM=metadata.block_table_RM,
        slot_mapping_T=metadata.slot_mapping_T,
        num_decodes=0,
        num_decode_tokens=0,
    )
    with pytest.raises(ValueError, match=text):
        ops.paged_attention(q, k_cache, v_cache, broken, AttentionParams(scale=0.3))


def test_tensors_that_do_not_fit_the_plan_are_refused(ops):
    q, k_cache, v_cache, metadata = step(ops, [(1, 9), (1, 20)])
    with pytest.raises(ValueError, match=r"q is \(2, 8, 16\), the plan is for .* \[2, 9, 16\]"):
        ops.paged_attention(q[:, :8], k_cache, v_cache, metadata, AttentionParams(scale=0.3))
    with pytest.raises(ValueError, match=r"a cache of KVShape"):
        ops.paged_attention(q, k_cache[:, :2], v_cache, metadata, AttentionParams(scale=0.3))
    with pytest.raises(ValueError, match=r"a cache of KVShape"):
        ops.paged_attention(
            q, k_cache.double(), v_cache.double(), metadata, AttentionParams(scale=0.3)
        )
    with pytest.raises(ValueError, match=r"sinks .* must be contiguous .* \(9,\)"):
        ops.paged_attention(
            q, k_cache, v_cache, metadata, AttentionParams(scale=0.3, sinks_H=torch.zeros(3))
        )


@pytest.mark.parametrize(("heads", "window"), [((4, 3), None), ((4, 0), None), ((4, 2), 0)])
def test_planners_that_cannot_be_are_refused(ops, heads, window):
    with pytest.raises(ValueError, match=r"multiple|1 or above"):
        make_planner(ops, heads, 8, 4, window)
