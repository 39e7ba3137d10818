"""What changes single logits before sampling: token masks, then biases, then penalties.

A logits row r reads the history of row `state_row_N[r]`: a bit a prompt token, a count an output
token. The specification of penalties is `kernels.torch.sampling.apply_penalties`."""

import torch
import triton
import triton.language as tl

from kernels.interface.sampling_rows import WORD_BITS, TokenList, num_mask_words
from kernels.triton.sampling.columns import SamplingColumns
from kernels.triton.sampling.row_maxima import TILE, num_splits
from kernels.triton.tensor_checks import check_logits, check_tensor


def apply_token_masks_reference(
    logits_RV: torch.Tensor, masks_RW: torch.Tensor, is_masked_R: torch.Tensor
) -> torch.Tensor:
    """The specification."""
    bits_RWB = masks_RW[:, :, None] >> torch.arange(WORD_BITS, dtype=torch.int32) & 1
    allowed_RV = bits_RWB.flatten(1)[:, : logits_RV.shape[1]].bool()
    return logits_RV.masked_fill(~allowed_RV & is_masked_R[:, None], -torch.inf)


@triton.jit
def token_masks_kernel(
    logits_ptr,  # float32 [R, V], changed
    stride_r,
    num_rows_ptr,  # int32 [1]
    masks_ptr,  # int32 [R, W]
    mask_stride_r,
    is_masked_ptr,  # bool [R]
    V,
    TILE: tl.constexpr,
):
    row = tl.program_id(1).to(tl.int64)
    if row >= tl.load(num_rows_ptr):
        return
    if tl.load(is_masked_ptr + row) == 0:
        return
    ids = tl.program_id(0) * TILE + tl.arange(0, TILE)  # [TILE]
    words = tl.load(masks_ptr + row * mask_stride_r + (ids >> 5), ids < V, -1)  # [TILE]
    is_forbidden = ((words >> (ids & 31)) & 1) == 0
    # nothing is read, and only what changes is written
    forbidden = tl.full([TILE], -float("inf"), tl.float32)
    tl.store(logits_ptr + row * stride_r + ids, forbidden, is_forbidden & (ids < V))


def apply_token_masks(
    logits_RV: torch.Tensor,
    masks_RW: torch.Tensor,
    num_rows_1: torch.Tensor,
    is_masked_R: torch.Tensor,
) -> None:
    """`logits[r, t] = -inf` where bit t of row r's mask is 0, in place.

    Args:
        logits_RV: float32, rows contiguous. Changed.
        masks_RW: int32 [R, ceil(V / 32)], rows contiguous; a set bit allows. Bits past V and rows
            that are not masked are not looked at.
        num_rows_1: int32, how many rows there are; those behind them are not looked at.
        is_masked_R: bool.
    """
    rows, vocab_size = check_logits(logits_RV, num_rows_1)
    shape = (rows, num_mask_words(vocab_size))
    check_tensor("is_masked", is_masked_R, (rows,), torch.bool, logits_RV.device)
    check_tensor("masks", masks_RW, shape, torch.int32, logits_RV.device, contiguous_dims=1)
    if rows:
        token_masks_kernel[(num_splits(vocab_size), rows)](
            logits_RV,
            logits_RV.stride(0),
            num_rows_1,
            masks_RW,
            masks_RW.stride(0),
            is_masked_R,
            vocab_size,
            TILE=TILE,
            num_warps=4,
        )


BLOCK_SIZE = 128


def adjust_tokens_reference(
    logits_V: torch.Tensor, min_tokens_ids: torch.Tensor, bias_ids: torch.Tensor, bias: torch.Tensor
) -> torch.Tensor:
    """The specification, for one row; `min_tokens_ids` is empty once min_tokens are there."""
    result_V = logits_V.clone()
    result_V[min_tokens_ids] = -torch.inf
    result_V[bias_ids] += bias
    return result_V


@triton.jit
def penalties_kernel(
    logits_ptr,  # float32 [R, V], changed
    stride_r,
    num_rows_ptr,  # int32 [1]
    state_row_ptr,  # int64 [R]
    prompt_bits_ptr,  # int32 [N, W]
    counts_ptr,  # int32 [N, V]
    repetition_ptr,  # float32 [R]
    presence_ptr,  # float32 [R]
    frequency_ptr,  # float32 [R]
    draft_ptr,  # int32 [R]
    V,
    W,
    TILE: tl.constexpr,
):
    row = tl.program_id(1).to(tl.int64)
    if row >= tl.load(num_rows_ptr):
        return
    repetition = tl.load(repetition_ptr + row)
    presence = tl.load(presence_ptr + row)
    frequency = tl.load(frequency_ptr + row)
    if (repetition == 1.0) & (presence == 0.0) & (frequency == 0.0):
        return
    state_row = tl.load(state_row_ptr + row)
    ids = tl.program_id(0) * TILE + tl.arange(0, TILE)  # [TILE]
    counts = tl.load(counts_ptr + state_row * V + ids, ids < V, 0)  # [TILE]
    words = tl.load(prompt_bits_ptr + state_row * W + (ids >> 5), ids < V, 0)  # [TILE]
    draft_row = row
    draft = tl.load(draft_ptr + draft_row)
    while draft >= 0:  # a row behind a draft is never the first
        counts += (ids == draft).to(tl.int32)
        draft_row -= 1
        draft = tl.load(draft_ptr + draft_row)
    in_output = counts > 0
    seen = in_output | (((words >> (ids & 31)) & 1) != 0)
    logits_ptr += row * stride_r
    logits = tl.load(logits_ptr + ids, seen & (ids < V), 0.0)  # [TILE]
    repeated = tl.where(logits > 0, tl.div_rn(logits, repetition), logits * repetition)
    # The CPU rounds each product before it subtracts, and a fused multiply-add would not: in
    # float64 the product is exact, and its rounding stands between.
    by_count = (frequency.to(tl.float64) * counts.to(tl.float64)).to(tl.float32)
    repeated = tl.where(repetition == 1.0, logits, repeated)
    penalised = (repeated - by_count) - tl.where(in_output, presence, 0.0)
    tl.store(logits_ptr + ids, penalised, seen & (ids < V))


@triton.jit
def adjust_kernel(
    logits_ptr,  # float32 [R, V], changed
    stride_r,
    num_rows_ptr,  # int32 [1]
    state_row_ptr,  # int64 [R]
    num_min_tokens_ids_ptr,  # int32 [R]
    min_tokens_ids_ptr,  # int32 [N, M]
    num_biases_ptr,  # int32 [R]
    bias_ids_ptr,  # int32 [N, M]
    bias_ptr,  # float32 [N, M]
    M,
    V,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    if row >= tl.load(num_rows_ptr):
        return
    state_row = tl.load(state_row_ptr + row)
    logits_ptr += row * stride_r
    num_biases = tl.load(num_biases_ptr + row)
    for start in range(0, num_biases, BLOCK):
        index = start + tl.arange(0, BLOCK)  # [BLOCK]
        slot = state_row * M + index
        ids = tl.load(bias_ids_ptr + slot, index < num_biases, -1)
        valid = (ids >= 0) & (ids < V)
        logits = tl.load(logits_ptr + ids, valid, 0.0)
        tl.store(logits_ptr + ids, logits + tl.load(bias_ptr + slot, valid, 0.0), valid)
    # last, so that no other thread's bias is read after it or written over it
    tl.debug_barrier()
    num_min_tokens_ids = tl.load(num_min_tokens_ids_ptr + row)
    for start in range(0, num_min_tokens_ids, BLOCK):
        index = start + tl.arange(0, BLOCK)  # [BLOCK]
        slot = state_row * M + index
        ids = tl.load(min_tokens_ids_ptr + slot, index < num_min_tokens_ids, -1)
        impossible = tl.full([BLOCK], -float("inf"), tl.float32)
        tl.store(logits_ptr + ids, impossible, (ids >= 0) & (ids < V))


@triton.jit(do_not_specialize=["num_rows_given"])
def count_kernel(
    tokens_ptr,  # int64 [R]
    num_rows_ptr,  # int32 [1]
    state_row_ptr,  # int64 [R]
    is_counted_ptr,  # bool [R]
    draft_ptr,  # int32 [R]
    counts_ptr,  # int32 [N, V], changed
    V,
    num_rows_given,  # R
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)  # [BLOCK]
    valid = (row < num_rows_given) & (row < tl.load(num_rows_ptr))
    valid = valid & (tl.load(is_counted_ptr + row, valid, 0) != 0)
    tokens = tl.load(tokens_ptr + row, valid, -1)
    valid = valid & (tokens >= 0) & (tokens < V)
    state_row = tl.load(state_row_ptr + row, valid, 0)
    draft_row = row
    draft = tl.load(draft_ptr + draft_row, valid, -1)
    while tl.max(draft, axis=0) >= 0:  # behind a draft that was not sampled none counts
        is_behind = draft >= 0
        sampled = tl.load(tokens_ptr + draft_row - 1, is_behind, -1)
        valid = valid & ((draft < 0) | (sampled == draft))
        draft_row -= 1
        draft = tl.load(draft_ptr + draft_row, is_behind, -1)
    # atomic, because a request may have several rows in a step (draft tokens)
    tl.atomic_add(counts_ptr + state_row * V + tokens, 1, valid, sem="relaxed")


def apply_penalties(
    logits_RV: torch.Tensor,
    columns: SamplingColumns,
    *,
    prompt_bits_NW: torch.Tensor,
    output_counts_NV: torch.Tensor,
) -> None:
    """Penalise, in place, tokens that were there before; bit for bit as the CPU does.

    Repetition (Keskar et al., CTRL, 2019, arXiv:1909.05858) over prompt and output: positive logits
    are divided, others multiplied. Then `logits -= frequency * count`, then `logits -= presence`
    where the count is above 0. Drafts before a row are in its count.

    Args:
        logits_RV: float32, rows contiguous. Changed.
        prompt_bits_NW: int32 [N, ceil(V / 32)] contiguous, laid out as a token mask.
        output_counts_NV: int32 contiguous, occurrences in the output.
    """
    rows, vocab_size = columns.check_logits(logits_RV)
    device = logits_RV.device
    num_states, words = output_counts_NV.shape[0], num_mask_words(vocab_size)
    check_tensor("prompt_bits", prompt_bits_NW, (num_states, words), torch.int32, device)
    check_tensor("output_counts", output_counts_NV, (num_states, vocab_size), torch.int32, device)
    if rows:
        penalties_kernel[(num_splits(vocab_size), rows)](
            logits_RV,
            logits_RV.stride(0),
            columns.num_rows_1,
            columns.state_row_N,
            prompt_bits_NW,
            output_counts_NV,
            columns.repetition_N,
            columns.presence_N,
            columns.frequency_N,
            columns.draft_N,
            vocab_size,
            words,
            TILE=TILE,
            num_warps=4,
        )


def adjust_tokens(
    logits_RV: torch.Tensor, columns: SamplingColumns, lists_3NM: torch.Tensor
) -> None:
    """Add biases to single tokens and make those that min_tokens forbids impossible, in place.

    Args:
        logits_RV: float32, rows contiguous. Changed.
        lists_3NM: int32 contiguous, a table a TokenList. A bias's id once in a row; ids outside
            [0, V) are passed over.
    """
    rows, vocab_size = columns.check_logits(logits_RV)
    check_tensor("lists", lists_3NM, lists_3NM.shape, torch.int32, logits_RV.device)
    if rows:
        adjust_kernel[(rows,)](
            logits_RV,
            logits_RV.stride(0),
            columns.num_rows_1,
            columns.state_row_N,
            columns.num_min_tokens_ids_N,
            lists_3NM[TokenList.MIN_TOKENS_IDS],
            columns.num_biases_N,
            lists_3NM[TokenList.BIAS_IDS],
            lists_3NM[TokenList.BIAS_VALUES].view(torch.float32),
            lists_3NM.shape[2],
            vocab_size,
            BLOCK=BLOCK_SIZE,
            num_warps=4,
        )


def count_tokens(
    token_ids_R: torch.Tensor, columns: SamplingColumns, output_counts_NV: torch.Tensor
) -> None:
    """`output_counts[state_row[r], token_ids[r]] += 1` for the rows that are counted, but for those
    behind a draft that is not the token of its row.

    Args:
        token_ids_R: int64, as `sample` writes them; ids outside [0, V) are passed over.
        output_counts_NV: int32 contiguous. Changed.
    """
    rows, device = columns.state_row_N.shape[0], token_ids_R.device
    check_tensor("token_ids", token_ids_R, (rows,), torch.int64, device)
    shape = output_counts_NV.shape
    check_tensor("output_counts", output_counts_NV, shape, torch.int32, device)
    if rows:
        count_kernel[(triton.cdiv(rows, BLOCK_SIZE),)](
            token_ids_R,
            columns.num_rows_1,
            columns.state_row_N,
            columns.is_counted_N,
            columns.draft_N,
            output_counts_NV,
            shape[1],
            rows,
            BLOCK=BLOCK_SIZE,
            num_warps=4,
        )
