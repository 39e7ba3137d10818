"""Mixed steps of decodes and prefills against the reference, option by option.

Every cache slot that no query may see holds NaN, and so do the outputs before the kernels run.
"""

from dataclasses import dataclass, replace
from itertools import accumulate

import pytest
import torch

from kernels.interface.operations import AttentionMetadata, AttentionParams
from kernels.triton.attention.paged import paged_attention
from kernels.triton.attention.work import AttentionVariant, AttentionWorkspace, WorkLimits
from tests.kernels.paged_steps import reference_paged_attention

NAN = float("nan")
SPARE_ROWS = 2  # rows of q and out that belong to no request
DECODES = [(1, 1), (63, 1), (64, 1), (65, 1), (257, 1), (530, 1)]
PREFILLS = [(5, 5), (70, 70), (131, 43), (65, 64)]


@dataclass
class Step:
    """A step's tensors; `requests` are (sequence length, query tokens), decodes first."""

    requests: list[tuple[int, int]]
    num_decodes: int
    q_THD: torch.Tensor
    kv_B2KSD: torch.Tensor
    query_start_loc_R1: torch.Tensor
    seq_lens_R: torch.Tensor
    block_table_RM: torch.Tensor


def make_step(
    decodes: list[tuple[int, int]] = DECODES,
    prefills: list[tuple[int, int]] = PREFILLS,
    *,
    heads: tuple[int, int] = (3, 1),
    head_size: int = 64,
    block_size: int = 16,
    dtype: torch.dtype = torch.float32,
    kv_dtype: torch.dtype | None = None,
    window: int | None = None,
) -> Step:
    generator = torch.Generator().manual_seed(1)
    requests = decodes + prefills
    widths = [-(-length // block_size) for length, _ in requests]
    num_blocks = 1 + sum(widths)
    order = (torch.randperm(num_blocks - 1, generator=generator) + 1).tolist()
    table = torch.zeros(len(requests), max(widths) + 1, dtype=torch.int32)
    shape = (num_blocks, 2, heads[1], block_size, head_size)
    kv = torch.full(shape, NAN)
    values = torch.randn(shape, generator=generator)
    for row, ((length, queries), width) in enumerate(zip(requests, widths, strict=True)):
        first_seen = 0 if window is None else max(0, length - queries - window + 1)
        for logical in range(width):
            block = order.pop()
            if (logical + 1) * block_size <= first_seen:
                continue  # left of the window: the table keeps the null block
            table[row, logical] = block
            start = max(0, first_seen - logical * block_size)
            stop = min(block_size, length - logical * block_size)
            kv[block, :, :, start:stop] = values[block, :, :, start:stop]
    num_tokens = sum(queries for _, queries in requests)
    q = torch.randn(num_tokens + SPARE_ROWS, heads[0], head_size, generator=generator)
    return Step(
        requests=requests,
        num_decodes=len(decodes),
        q_THD=q.to(dtype),
        kv_B2KSD=kv.to(kv_dtype or dtype),
        query_start_loc_R1=torch.tensor(
            [0, *accumulate(queries for _, queries in requests)], dtype=torch.int32
        ),
        seq_lens_R=torch.tensor([length for length, _ in requests], dtype=torch.int32),
        block_table_RM=table,
    )


def make_workspace(
    step: Step,
    window: int | None = None,
    *,
    num_programs: int = 5,
    variant: AttentionVariant = AttentionVariant(),  # noqa: B008
    **limits,
) -> AttentionWorkspace:
    queries = [count for _, count in step.requests]
    return AttentionWorkspace(
        WorkLimits(
            **{
                "max_requests": len(queries),
                "max_prefill_tokens": sum(queries[step.num_decodes :]),
                "max_seq_len": 1000,
                "num_query_heads": step.q_THD.shape[1],
                "num_kv_heads": step.kv_B2KSD.shape[2],
                "head_size": step.q_THD.shape[2],
                "max_decode_queries": max(queries[: step.num_decodes], default=0),
                "sliding_window": window,
            }
            | limits
        ),
        device=step.q_THD.device,
        num_programs=num_programs,
        variant=variant,
    )


def plan(step: Step, workspace: AttentionWorkspace, window: int | None) -> AttentionMetadata:
    queries = [count for _, count in step.requests]
    workspace.work.partial_out.fill_(NAN)
    workspace.work.partial_lse.fill_(NAN)
    return AttentionMetadata(
        query_start_loc_R1=step.query_start_loc_R1,
        seq_lens_R=step.seq_lens_R,
        block_table_RM=step.block_table_RM,
        slot_mapping_T=torch.empty(0, dtype=torch.int64),
        block_size=step.kv_B2KSD.shape[3],
        sliding_window=window,
        plan=workspace.plan(
            query_start_loc_R1=step.query_start_loc_R1,
            seq_lens_R=step.seq_lens_R,
            has_decodes=step.num_decodes > 0,
            num_prefills=len(queries) - step.num_decodes,
            num_prefill_tokens=sum(queries[step.num_decodes :]),
        ),
    )


def run(step: Step, metadata: AttentionMetadata, **options: object) -> torch.Tensor:
    """The rows of no request are still poisoned."""
    out = torch.full_like(step.q_THD, NAN)
    params = AttentionParams(**{"scale": 0.2, "sliding_window": metadata.sliding_window, **options})
    caches = step.kv_B2KSD.unbind(1)
    assert paged_attention(step.q_THD, *caches, metadata, params, out=out) is out
    return out


def check(
    step: Step,
    *,
    tolerance: float = 1e-5,
    window: int | None = None,
    max_seq_len: int = 1000,
    both_sides: bool = False,
    variant: AttentionVariant = AttentionVariant(),  # noqa: B008
    **options,
) -> None:
    limits = {"max_seq_len": max_seq_len, "both_sides": both_sides}
    workspace = make_workspace(step, window, variant=variant, **limits)
    metadata = plan(step, workspace, window)
    out = run(step, metadata, **options)
    assert (workspace.work.decode_arrivals_RK == 0).all()
    params = AttentionParams(**{"scale": 0.2, "sliding_window": window, **options})
    # what may not be seen is multiplied by zero there
    caches = step.kv_B2KSD.float().nan_to_num(nan=0.0).transpose(2, 3).unbind(1)
    expected = reference_paged_attention(
        step.q_THD.float(), *caches, metadata, params, bidirectional=both_sides
    )
    tokens = int(step.query_start_loc_R1[-1])
    assert out[tokens:].isnan().all()
    scale = expected[:tokens].abs().max()
    assert (out[:tokens].float() - expected[:tokens]).abs().max() <= tolerance * scale


@pytest.mark.parametrize("heads", [(9, 3), (2, 2), (2, 1), (4, 1), (5, 1), (6, 1), (7, 1), (16, 2)])
def test_every_group_size_gives_the_reference(heads):
    check(make_step(DECODES[1:5], PREFILLS[2:], heads=heads, head_size=16))


@pytest.mark.parametrize("head_size", [64, 80, 96, 128, 256, 320, 512])
def test_every_head_size_gives_the_reference(head_size):
    check(make_step(DECODES[2:5], PREFILLS[2:], head_size=head_size))


@pytest.mark.parametrize("block_size", [16, 32, 64, 128])
def test_every_block_size_gives_the_reference(block_size):
    check(make_step(head_size=32, block_size=block_size))


@pytest.mark.parametrize("window", [1, 10, 64, 65, 300])
def test_a_window_hides_and_never_reads_what_is_left_of_it(window):
    """Proves S187."""
    step = make_step([*DECODES, (900, 1)], [*PREFILLS, (700, 90)], head_size=16, window=window)
    check(step, window=window)


@pytest.mark.parametrize(
    ("prefill", "window"),
    [((66, 4), None), ((67, 4), None), ((193, 40), 128), ((192, 40), 128), ((191, 40), 128)],
)
def test_the_part_without_masks_ends_where_the_first_key_is_hidden(prefill, window):
    check(make_step([], [prefill], head_size=16, window=window), window=window)


@pytest.mark.parametrize("window", [None, 1, 17, 200])
def test_sequences_may_see_both_sides_of_themselves(window):
    """Of one tile and of three."""
    step = make_step([], [(n, n) for n in (1, 9, 300, 64)], heads=(2, 2), head_size=12)
    check(step, window=window, both_sides=True)


@pytest.mark.parametrize(
    "options",
    [
        {"softcap": 2.0},
        {"sinks_H": torch.tensor([0.5, -3.0, 4.0])},
        {"alibi_slopes_H": torch.tensor([0.5, 0.25, 0.01])},
        {"softcap": 3.0, "alibi_slopes_H": torch.tensor([0.5, 0.25, 0.01])},
        {"softcap": 3.0, "sinks_H": torch.tensor([0.5, -30.0, 4.0])},
    ],
    ids=lambda options: "+".join(options),
)
@pytest.mark.parametrize("window", [None, 50])
def test_options_give_the_reference(options, window):
    check(make_step(DECODES[1:], PREFILLS, head_size=16, window=window), window=window, **options)


@pytest.mark.parametrize("window", [None, 3])
def test_decodes_with_several_query_tokens_are_causal_among_themselves(window):
    decodes = [(5, 5), (64, 1), (66, 4), (258, 5), (300, 2), (257, 3)]
    check(make_step(decodes, [], head_size=32, window=window), window=window)


def test_half_precision_is_within_rounding():
    check(make_step(dtype=torch.float16), tolerance=1.5e-3)


@pytest.mark.parametrize(
    ("dtype", "head_size", "by_bits"),
    [(torch.float16, 64, True), (torch.float32, 64, False), (torch.float32, 256, False)],
)
def test_an_fp8_cache_gives_the_reference(dtype, head_size, by_bits):
    step = make_step(
        DECODES[2:5],
        PREFILLS[2:],
        head_size=head_size,
        dtype=dtype,
        kv_dtype=torch.float8_e4m3fn,
    )
    tolerance = 1e-5 if dtype == torch.float32 else 1.5e-3
    check(step, tolerance=tolerance, variant=AttentionVariant(float8_by_bits=by_bits))


def test_large_scores_do_not_overflow():
    check(make_step(DECODES[2:5], PREFILLS[2:], head_size=16), scale=200.0, tolerance=1e-4)


def test_a_step_of_prefills_only_gives_the_reference():
    check(make_step([], PREFILLS, head_size=16))


def test_padding_requests_write_nothing():
    step = make_step([(70, 1), (0, 0), (0, 0)], [], head_size=16)
    check(step)


def test_a_request_gives_the_same_bits_alone_and_in_a_crowd():
    step = make_step(head_size=32)
    out = run(step, plan(step, make_workspace(step), None))
    for row, request in enumerate(step.requests):
        start, stop = step.query_start_loc_R1[row : row + 2].tolist()
        alone = replace(
            step,
            requests=[request],
            num_decodes=int(row < step.num_decodes),
            q_THD=step.q_THD[start:stop],
            query_start_loc_R1=torch.tensor([0, stop - start], dtype=torch.int32),
            seq_lens_R=step.seq_lens_R[row : row + 1],
            block_table_RM=step.block_table_RM[row : row + 1],
        )
        out_alone = run(alone, plan(alone, make_workspace(alone), None))
        assert torch.equal(out_alone, out[start:stop])


@pytest.mark.parametrize("window", [None, 50])
def test_a_chunked_prompt_gives_the_rows_of_the_whole_prompt(window):
    whole = make_step([], [(300, 300)], head_size=16)
    out = run(whole, plan(whole, make_workspace(whole, window), window))
    for start, stop in [(0, 37), (37, 165), (165, 300)]:
        chunk = replace(
            whole,
            requests=[(stop, stop - start)],
            q_THD=whole.q_THD[start:stop],
            query_start_loc_R1=torch.tensor([0, stop - start], dtype=torch.int32),
            seq_lens_R=torch.tensor([stop], dtype=torch.int32),
        )
        chunk_out = run(chunk, plan(chunk, make_workspace(chunk, window), window))
        assert torch.equal(chunk_out, out[start:stop])


def test_draft_tokens_do_not_change_the_tokens_before_them():
    with_drafts = make_step([(260, 5), (70, 5)], [], head_size=16)
    workspace = make_workspace(with_drafts)
    out = run(with_drafts, plan(with_drafts, workspace, None))
    without = replace(
        with_drafts,
        requests=[(256, 1), (66, 1)],
        q_THD=with_drafts.q_THD[[0, 5]],
        query_start_loc_R1=torch.tensor([0, 1, 2], dtype=torch.int32),
        seq_lens_R=torch.tensor([256, 66], dtype=torch.int32),
    )
    out_without = run(without, plan(without, workspace, None))
    assert torch.equal(out_without, out[[0, 5]])


def test_launches_with_old_host_numbers_serve_a_new_step():
    step = make_step([(700, 1), (3, 1), (90, 1)], [], head_size=16)
    workspace = make_workspace(step)
    metadata = plan(step, workspace, None)
    step.seq_lens_R.copy_(torch.tensor([255, 2, 90]))
    plan(step, workspace, None)
    out = run(step, metadata)  # what a replayed graph does
    expected = run(step, plan(step, make_workspace(step), None))
    assert torch.equal(out[:3], expected[:3])


LONG = [(2600, 9), (3000, 1), (2100, 40), (70, 70)]
"""Few queries behind many keys, whose keys are split; one decode; one that is not split."""


@pytest.mark.parametrize("window", [None, 1500])
def test_short_chunks_behind_long_prefixes_give_the_reference(window):
    options = {"sinks_H": torch.tensor([0.5, -30.0, 4.0, 0.0])}
    step = make_step([LONG[1]], [*LONG[:1], *LONG[2:]], heads=(4, 2), head_size=16, window=window)
    check(step, window=window, max_seq_len=3000, **options)
    check(step, window=window, max_seq_len=3000)


def test_a_split_chunk_has_the_same_bits_in_every_crowd_and_leaves_counters_at_zero():
    step = make_step([], [(2100, 20)] * 18 + [(2600, 9)], heads=(2, 1), head_size=16)
    workspace = make_workspace(step, max_seq_len=3000)
    metadata = plan(step, workspace, None)
    assert metadata.plan.max_split_prefills == 19, "more than one launch has scratch for"
    out = run(step, metadata)
    assert (workspace.work.tile_arrivals == 0).all()
    for row in (0, 17, 18):
        start, stop = step.query_start_loc_R1[row : row + 2].tolist()
        alone = replace(
            step,
            requests=[step.requests[row]],
            q_THD=step.q_THD[start:stop],
            query_start_loc_R1=torch.tensor([0, stop - start], dtype=torch.int32),
            seq_lens_R=step.seq_lens_R[row : row + 1],
            block_table_RM=step.block_table_RM[row : row + 1],
        )
        out_alone = run(alone, plan(alone, make_workspace(alone, max_seq_len=9000), None))
        assert torch.equal(out_alone, out[start:stop])


def test_without_splits_a_token_has_the_same_bits_in_every_chunk():
    step = make_step([], [(2600, 9)], heads=(2, 1), head_size=16)
    options = {"max_seq_len": 3000, "splits_tiles": False}
    out = run(step, plan(step, make_workspace(step, **options), None))
    last = replace(
        step,
        requests=[(2600, 2)],
        q_THD=step.q_THD[7:9],
        query_start_loc_R1=torch.tensor([0, 2], dtype=torch.int32),
    )
    assert torch.equal(run(last, plan(last, make_workspace(last, **options), None)), out[7:9])


def test_without_an_output_argument_a_new_tensor_is_returned():
    step = make_step(DECODES[:2], [], head_size=16)
    metadata = plan(step, make_workspace(step), None)
    out = paged_attention(
        step.q_THD, step.kv_B2KSD[:, 0], step.kv_B2KSD[:, 1], metadata, AttentionParams(scale=0.2)
    )
    assert torch.equal(out[:2], run(step, metadata)[:2])


def test_what_does_not_fit_is_refused():
    step = make_step(DECODES[:2], [], head_size=16)
    metadata = plan(step, make_workspace(step), None)
    for error, message, options in [
        (ValueError, "sliding window", {"sliding_window": 5}),
        (ValueError, "must be above 0", {"scale": 0.0}),
        (ValueError, "must be above 0", {"softcap": -1.0}),
        (ValueError, "sinks_H", {"sinks_H": torch.zeros(2)}),
        (
            ValueError,
            "alibi_slopes_H is float16.*make it float32",
            {"alibi_slopes_H": torch.zeros(3, dtype=torch.float16)},
        ),
    ]:
        with pytest.raises(error, match=message):
            run(step, metadata, **options)
    for error, message, changed in [
        (ValueError, "plan was made for", replace(step, q_THD=step.q_THD[:, :2])),
        (ValueError, "head size", replace(step, q_THD=step.q_THD[..., :8])),
        (TypeError, "the cache", replace(step, q_THD=step.q_THD.half())),
        (ValueError, "power of two", replace(step, kv_B2KSD=step.kv_B2KSD[:, :, :, :12])),
    ]:
        with pytest.raises(error, match=message):
            run(changed, metadata)
    with pytest.raises(TypeError, match=r"AttentionWorkspace\.plan"):
        run(step, replace(metadata, plan=None))
    with pytest.raises(ValueError, match=r"block_table_RM is int64.*make it int32"):
        run(step, replace(metadata, block_table_RM=metadata.block_table_RM.long()))
