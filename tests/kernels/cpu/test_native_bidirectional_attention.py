"""Native attention in which a query sees the keys behind it, too, against the reference."""

import pytest
import torch
from paged_steps import keys_in_panels, step

from kernels.cpu.operations import CpuOperations
from kernels.interface.operations import AttentionParams
from kernels.interface.special_inputs import PositionScores
from tests.kernels.cpu.instruction_sets import covering_sets
from tests.kernels.paged_steps import reference_paged_attention

LENGTHS = [(1,), (2, 1), (16, 31, 33), (63, 64, 65), (96, 97), (1, 300, 7, 129, 128), (0, 5, 0)]


def attend(ops, requests, window, **options):
    q, k, v, metadata = step(ops, requests, window=window, bidirectional=True, **options)
    params = AttentionParams(scale=0.3, sliding_window=window)
    expected = reference_paged_attention(
        q, k.nan_to_num(), v.nan_to_num(), metadata, params, bidirectional=True
    )
    return ops.paged_attention(q, keys_in_panels(k), v, metadata, params), expected


@covering_sets(window=[None, 1, 2, 65, 130], lengths=LENGTHS)
@pytest.mark.usefixtures("isa")
def test_it_equals_the_reference_and_reads_nothing_out_of_sight(library, lengths, window):
    requests = [(length, length) for length in lengths]
    out, expected = attend(CpuOperations(library), requests, window, block_size=64)
    torch.testing.assert_close(out, expected, atol=1e-5, rtol=1e-5)


@covering_sets(lengths=LENGTHS[1:])
@pytest.mark.usefixtures("isa")
def test_scores_of_positions_are_added(library, lengths):
    ops, (heads, buckets, reach) = CpuOperations(library), (9, 14, 40)
    requests = [(length, length) for length in lengths]
    q_THD, k, v, metadata = step(ops, requests, bidirectional=True, block_size=64)
    made = torch.Generator().manual_seed(5)
    scores = torch.randn(2, heads, len(q_THD), buckets, generator=made)
    positions = PositionScores(
        queries=list(scores[0]),
        keys=list(scores[1]),
        buckets_N=torch.randint(buckets, (2 * reach + 1,), generator=made).int(),
        num_buckets=buckets,
    )
    params = AttentionParams(scale=0.3)
    found = ops.paged_attention(q_THD, keys_in_panels(k), v, metadata, params, positions)
    start = 0
    for request, length in enumerate(lengths):
        of_step, blocks = slice(start, start + length), metadata.block_table_RM[request].long()
        start += length
        k_LHD, v_LHD = (
            cache[blocks].flatten(0, 1)[:length].repeat_interleave(3, 1) for cache in (k, v)
        )
        distance_LL = torch.arange(length) - torch.arange(length)[:, None]
        bucket_LL = positions.buckets_N[distance_LL.clamp(-reach, reach) + reach].long()
        of_queries, of_keys = scores[:, :, of_step]
        score_HLL = 0.3 * torch.einsum("qhd,lhd->hql", q_THD[of_step], k_LHD)
        score_HLL += of_queries.gather(2, bucket_LL.expand(heads, -1, -1))
        score_HLL += of_keys.mT.gather(1, bucket_LL.expand(heads, -1, -1))
        expected = torch.einsum("hql,lhd->qhd", score_HLL.softmax(2), v_LHD)
        torch.testing.assert_close(found[of_step], expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("head_size", [32, 40, 64])
def test_heads_of_encoders(library, head_size):
    requests = [(length, length) for length in (5, 70, 200)]
    options = {"heads": (12, 12), "head_size": head_size, "block_size": 64}
    out, expected = attend(CpuOperations(library), requests, None, **options)
    torch.testing.assert_close(out, expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("window", [None, 20])
def test_a_sequence_has_the_same_bits_alone_and_in_any_batch(library, window):
    """The last of several sequences, moved into a step of its own."""
    ops, lengths = CpuOperations(library), [7, 130, 40, 33]
    q, k, v, metadata = step(ops, [(n, n) for n in lengths], window=window, bidirectional=True)
    params = AttentionParams(scale=0.3, sliding_window=window)
    together = ops.paged_attention(q, k, v, metadata, params)
    alone = step(ops, [(33, 33)], window=window, bidirectional=True)[3]
    blocks = metadata.block_table_RM[3:].clone()
    planner_keeps = alone.plan.keeps
    planner_keeps[2].copy_(blocks[:, : planner_keeps[2].shape[1]])
    own = ops.paged_attention(q[-33:].contiguous(), k, v, alone, params)
    assert torch.equal(own, together[-33:])


def test_part_of_a_sequence_is_refused(library):
    text = "request 1 has 3 of its 9 tokens in the step; bidirectional attention needs all"
    with pytest.raises(ValueError, match=text):
        attend(CpuOperations(library), [(4, 4), (3, 9)], None)
