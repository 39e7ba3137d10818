"""What the model reads in a step, made on the device from one packed buffer.

The buffer's layout is in `kernels.interface.step_inputs`. Grids follow the padded sizes, so a CUDA
graph can hold the launches, and a step starts before the host knows the tokens of the last one."""

import torch
import triton
import triton.language as tl

from kernels.interface.step_inputs import (
    HEADER_WORDS,
    MOST_IDS,
    DeviceRows,
    PackedLayout,
    StepTensors,
)
from kernels.triton.tensor_checks import check_tensor

BLOCK_SIZE = 1024
_UPDATE_PROGRAMS = 128
NUM_WARPS = 4


@triton.jit
def apply_row_updates_kernel(
    packed_ptr,  # int32 words
    token_ids_ptr,  # int32 [rows, max_len]
    block_tables_ptr,  # int32 [G, rows, M]
    max_len,
    table_stride_g,
    M,
    BLOCK: tl.constexpr,
):
    num_updates = tl.load(packed_ptr + 3)
    records_ptr = packed_ptr + tl.load(packed_ptr + 4)
    ids_ptr = packed_ptr + tl.load(packed_ptr + 5)
    lane = tl.arange(0, BLOCK)
    for update in range(tl.program_id(0), num_updates, tl.num_programs(0)):
        record_ptr = records_ptr + 4 * update
        table = tl.load(record_ptr)
        row = tl.load(record_ptr + 1).to(tl.int64)
        column = tl.load(record_ptr + 2) + lane
        first = tl.load(record_ptr + 3)
        is_id = lane < tl.load(record_ptr + 7) - first
        ids = tl.load(ids_ptr + first + lane, mask=is_id, other=0)
        if table < 0:
            at = token_ids_ptr + row * max_len + column
            tl.store(at, ids, mask=is_id & (column < max_len))
        else:
            at = block_tables_ptr + table.to(tl.int64) * table_stride_g + row * M + column
            tl.store(at, ids, mask=is_id & (column < M))


@triton.jit(
    do_not_specialize=["num_tokens", "num_sequences", "slot_stride_g", "out_table_stride_g"]
)
def prepare_step_kernel(
    packed_ptr,  # int32 words
    row_tokens_ptr,  # int32 [rows, max_len]
    row_tables_ptr,  # int32 [G, rows, M]
    token_ids_ptr,  # int64 [T]
    positions_ptr,  # int64 [T]
    slots_ptr,  # int64 [G, T]
    query_start_ptr,  # int32 [R + 1]
    seq_lens_ptr,  # int32 [R]
    tables_ptr,  # int32 [G, R, M]
    logits_at_ptr,  # int64 [R]
    num_tokens,  # T with padding
    num_sequences,  # R with padding
    max_len,
    row_table_stride_g,
    M,
    slot_stride_g,
    out_table_stride_g,
    S: tl.constexpr,
    ROWS_AT: tl.constexpr,
    COMPUTED_AT: tl.constexpr,
    QUERY_START_AT: tl.constexpr,
    SAMPLE_INDEX_AT: tl.constexpr,
    SHIFT_AT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    # programs: (0 .. R - 1: a sequence each, real or padding; R: what is behind all of them) x G
    sequence = tl.program_id(0)
    group = tl.program_id(1)
    num_real = tl.load(packed_ptr)
    real_tokens = tl.load(packed_ptr + 1)
    lane = tl.arange(0, BLOCK)
    slots_ptr += group.to(tl.int64) * slot_stride_g
    if sequence < num_real:
        row = tl.load(packed_ptr + ROWS_AT + sequence).to(tl.int64)
        computed = tl.load(packed_ptr + COMPUTED_AT + sequence)
        start = tl.load(packed_ptr + QUERY_START_AT + sequence)
        stop = tl.load(packed_ptr + QUERY_START_AT + sequence + 1)
        sample_index = tl.load(packed_ptr + SAMPLE_INDEX_AT + sequence)
        shift = tl.load(packed_ptr + SHIFT_AT + sequence)
        seq_len = computed + stop - start
        if group == 0:
            tl.store(query_start_ptr + sequence, start)
            tl.store(seq_lens_ptr + sequence, seq_len)
            if sample_index >= 0:
                tl.store(logits_at_ptr + sample_index, (stop - 1).to(tl.int64))
        row_table_ptr = row_tables_ptr + group.to(tl.int64) * row_table_stride_g + row * M
        for done in range(0, stop - start, BLOCK):
            offset_T = done + lane
            is_token_T = offset_T < stop - start
            position_T = computed + offset_T
            if group == 0:
                at = row_tokens_ptr + row * max_len + position_T
                token_T = tl.load(at, mask=is_token_T, other=0).to(tl.int64)
                tl.store(token_ids_ptr + start + offset_T, token_T, mask=is_token_T)
                shifted_T = (position_T + shift).to(tl.int64)
                tl.store(positions_ptr + start + offset_T, shifted_T, mask=is_token_T)
            block_T = tl.load(row_table_ptr + position_T // S, mask=is_token_T, other=0)
            slot_T = block_T.to(tl.int64) * S + position_T % S
            tl.store(slots_ptr + start + offset_T, slot_T, mask=is_token_T)
        num_blocks = (seq_len + S - 1) // S
        table_ptr = tables_ptr + group.to(tl.int64) * out_table_stride_g + sequence.to(tl.int64) * M
        for done in range(0, num_blocks, BLOCK):
            column_M = done + lane
            block_M = tl.load(row_table_ptr + column_M, mask=column_M < num_blocks, other=0)
            tl.store(table_ptr + column_M, block_M, mask=column_M < num_blocks)
    elif sequence < num_sequences:
        if group == 0:
            tl.store(query_start_ptr + sequence, real_tokens)
            tl.store(seq_lens_ptr + sequence, 0)
    else:
        if group == 0:
            tl.store(query_start_ptr + num_sequences, real_tokens)
            for done in range(tl.load(packed_ptr + 2), num_sequences, BLOCK):
                nothing = tl.zeros([BLOCK], tl.int64)
                tl.store(logits_at_ptr + done + lane, nothing, mask=done + lane < num_sequences)
        for done in range(real_tokens, num_tokens, BLOCK):
            is_padding_T = done + lane < num_tokens
            nothing = tl.zeros([BLOCK], tl.int64)
            if group == 0:
                tl.store(token_ids_ptr + done + lane, nothing, mask=is_padding_T)
                tl.store(positions_ptr + done + lane, nothing, mask=is_padding_T)
            tl.store(slots_ptr + done + lane, nothing - 1, mask=is_padding_T)


@triton.jit
def append_sampled_kernel(
    packed_ptr,  # int32 words, of the step that sampled
    sampled_ptr,  # int32 or int64 [N]
    row_tokens_ptr,  # int32 [rows, max_len]
    max_len,
    ROWS_AT: tl.constexpr,
    COMPUTED_AT: tl.constexpr,
    QUERY_START_AT: tl.constexpr,
    SAMPLE_INDEX_AT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    sequence_R = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    is_real_R = sequence_R < tl.load(packed_ptr)
    index_R = tl.load(packed_ptr + SAMPLE_INDEX_AT + sequence_R, mask=is_real_R, other=-1)
    is_sampled_R = index_R >= 0
    row_R = tl.load(packed_ptr + ROWS_AT + sequence_R, mask=is_sampled_R, other=0).to(tl.int64)
    start_ptr = packed_ptr + QUERY_START_AT + sequence_R
    start_R = tl.load(start_ptr, mask=is_sampled_R, other=0)
    stop_R = tl.load(start_ptr + 1, mask=is_sampled_R, other=0)
    computed_R = tl.load(packed_ptr + COMPUTED_AT + sequence_R, mask=is_sampled_R, other=0)
    position_R = computed_R + stop_R - start_R
    token_R = tl.load(sampled_ptr + index_R, mask=is_sampled_R, other=0).to(tl.int32)
    # the host learns only later that a full row has ended
    has_room_R = is_sampled_R & (position_R < max_len)
    tl.store(row_tokens_ptr + row_R * max_len + position_R, token_R, mask=has_room_R)


def apply_row_updates(packed: torch.Tensor, rows: DeviceRows) -> None:
    """See `DeviceStepOperations.apply_row_updates`. All tensors are on the rows' device."""
    _check_rows(packed, rows)
    apply_row_updates_kernel[(_UPDATE_PROGRAMS,)](
        packed,
        rows.token_ids,
        rows.block_tables,
        rows.token_ids.shape[1],
        rows.block_tables.stride(0),
        rows.block_tables.shape[2],
        BLOCK=MOST_IDS,
        num_warps=NUM_WARPS,
    )


def prepare_step(
    packed: torch.Tensor,
    layout: PackedLayout,
    rows: DeviceRows,
    out: StepTensors,
    *,
    block_size: int,
) -> None:
    """See `DeviceStepOperations.prepare_step`."""
    _check_rows(packed, rows)
    _check_out(out, layout, rows)
    num_groups, num_sequences, width = out.block_tables_GRM.shape
    prepare_step_kernel[(num_sequences + 1, num_groups)](
        packed,
        rows.token_ids,
        rows.block_tables,
        out.token_ids_T,
        out.positions_T,
        out.slot_mappings_GT,
        out.query_start_loc_R1,
        out.seq_lens_R,
        out.block_tables_GRM,
        out.logits_at_R,
        out.token_ids_T.shape[0],
        num_sequences,
        rows.token_ids.shape[1],
        rows.block_tables.stride(0),
        width,
        out.slot_mappings_GT.stride(0),
        out.block_tables_GRM.stride(0),
        S=block_size,
        SHIFT_AT=layout.shift_at,
        BLOCK=BLOCK_SIZE,
        num_warps=NUM_WARPS,
        **columns_of(layout),
    )


def append_sampled(
    packed: torch.Tensor,
    layout: PackedLayout,
    token_ids_N: torch.Tensor,
    rows: DeviceRows,
    *,
    num_sequences: int,
) -> None:
    """See `DeviceStepOperations.append_sampled`."""
    _check_rows(packed, rows)
    dtypes, device = (torch.int64, torch.int32), rows.token_ids.device
    check_tensor("the sampled tokens", token_ids_N, (token_ids_N.numel(),), dtypes, device)
    if num_sequences > layout.capacity:
        raise ValueError(f"{num_sequences} sequences, the layout has room for {layout.capacity}")
    append_sampled_kernel[(triton.cdiv(num_sequences, BLOCK_SIZE),)](
        packed,
        token_ids_N,
        rows.token_ids,
        rows.token_ids.shape[1],
        BLOCK=BLOCK_SIZE,
        num_warps=NUM_WARPS,
        **columns_of(layout),
    )


def columns_of(layout: PackedLayout) -> dict[str, int]:
    """Where a packed step's columns start, as constants of kernels."""
    return {
        "ROWS_AT": layout.rows_at,
        "COMPUTED_AT": layout.computed_at,
        "QUERY_START_AT": layout.query_start_at,
        "SAMPLE_INDEX_AT": layout.sample_index_at,
    }


def _check_rows(packed: torch.Tensor, rows: DeviceRows) -> None:
    device, int32 = rows.token_ids.device, (torch.int32,)
    words = (max(packed.numel(), HEADER_WORDS),)
    tables = (*rows.block_tables.shape[:1], rows.token_ids.shape[0], *rows.block_tables.shape[2:])
    check_tensor("packed", packed, words, int32, device)
    tokens = rows.token_ids
    check_tensor("token_ids", tokens, tokens.shape, int32, device)
    check_tensor("block_tables", rows.block_tables, tables, int32, device)


def _check_out(out: StepTensors, layout: PackedLayout, rows: DeviceRows) -> None:
    G, _, M = rows.block_tables.shape
    T, R = out.token_ids_T.shape[0], out.seq_lens_R.shape[0]
    if layout.capacity < R:
        raise ValueError(f"out has {R} sequences, the layout has room for {layout.capacity}")
    for name, tensor, shape, dtype in (
        ("token_ids_T", out.token_ids_T, (T,), torch.int64),
        ("positions_T", out.positions_T, (T,), torch.int64),
        ("slot_mappings_GT", out.slot_mappings_GT, (G, T), torch.int64),
        ("query_start_loc_R1", out.query_start_loc_R1, (R + 1,), torch.int32),
        ("seq_lens_R", out.seq_lens_R, (R,), torch.int32),
        ("block_tables_GRM", out.block_tables_GRM, (G, R, M), torch.int32),
        ("logits_at_R", out.logits_at_R, (R,), torch.int64),
    ):
        inner = max(1, tensor.dim() - 1)  # a bucket's groups lie apart
        check_tensor(name, tensor, shape, (dtype,), rows.token_ids.device, contiguous_dims=inner)
