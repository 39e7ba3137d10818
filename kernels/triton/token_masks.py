"""Grammar masks: one bit a token says whether it is possible.

    word w of a row   bit 0: token 32 w   bit 1: token 32 w + 1   ...   bit 31: token 32 w + 31

The layout of xgrammar's and llguidance's bitmasks. Owns their application; must not know grammars.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kernels.triton.row_maxima import TILE, num_splits
from kernels.triton.sampling_arguments import check_logits, check_num_rows, check_tensor

_WORD_BITS = 32


def num_mask_words(vocab_size: int) -> int:
    """int32 words of a row's mask."""
    return -(-vocab_size // _WORD_BITS)


def pack_token_masks(allowed_RV: torch.Tensor) -> torch.Tensor:
    """bool [R, V] as int32 [R, ceil(V / 32)], on the same device; bits past V are 0."""
    rows, vocab_size = allowed_RV.shape
    num_words = num_mask_words(vocab_size)
    bits_RB = torch.zeros(rows, num_words * _WORD_BITS, dtype=torch.int64, device=allowed_RV.device)
    bits_RB[:, :vocab_size] = allowed_RV
    place_B = torch.arange(_WORD_BITS, device=allowed_RV.device)
    words_RW = (bits_RB.view(rows, num_words, _WORD_BITS) << place_B).sum(dim=2)
    # the highest bit of a word is the sign of an int32
    return torch.where(words_RW < 1 << 31, words_RW, words_RW - (1 << 32)).to(torch.int32)


def apply_token_masks_reference(
    logits_RV: torch.Tensor, masks_RW: torch.Tensor, is_masked_R: torch.Tensor
) -> torch.Tensor:
    """The specification."""
    bits_RWB = masks_RW[:, :, None] >> torch.arange(_WORD_BITS, dtype=torch.int32) & 1
    allowed_RV = bits_RWB.flatten(1)[:, : logits_RV.shape[1]].bool()
    return logits_RV.masked_fill(~allowed_RV & is_masked_R[:, None], -torch.inf)


@triton.jit
def _token_masks_kernel(
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
    is_masked_R: torch.Tensor,
    *,
    num_rows_1: torch.Tensor,
) -> None:
    """`logits[r, t] = -inf` where bit t of row r's mask is 0, in place.

    Args:
        logits_RV: float32, rows contiguous. Changed.
        masks_RW: int32 [R, ceil(V / 32)], rows contiguous; a set bit allows. Bits past V and rows
            that are not masked are not looked at.
        is_masked_R: bool.
        num_rows_1: int32 [1]; rows at or beyond it stay as they are.

    Raises:
        TypeError, ValueError: another dtype, shape or device.
    """
    rows, vocab_size = check_logits(logits_RV)
    device = logits_RV.device
    check_num_rows(num_rows_1, device)
    check_tensor("masks", masks_RW, (rows, num_mask_words(vocab_size)), torch.int32, device)
    check_tensor("is_masked", is_masked_R, (rows,), torch.bool, device)
    if rows:
        _token_masks_kernel[(num_splits(vocab_size), rows)](
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
