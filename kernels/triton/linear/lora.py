"""Adapters beside products on a GPU: shrink and expand, a launch each for all adapters of a step.

Grids depend on the number of tokens alone, tiles are read on the device: both can be captured in a
graph. A row's bits depend on its own values and its adapter only."""

from collections.abc import Mapping, Sequence
from typing import cast

import numpy as np
import torch
import triton
import triton.language as tl

from kernels.interface.lora import Int32Array, LoRAPart, segments_of
from kernels.triton.bound_launch import BoundLaunches, Launch
from kernels.triton.tensor_checks import FLOATS, check_tensor

BLOCK_SIZE_T = 16
BLOCK_SIZE_R = 16
BLOCK_SIZE_E = 64
BLOCK_SIZE_N = 64
_TILE_WORDS = 3


@triton.jit
def lora_shrink_kernel(
    x_ptr,  # [T, E]
    a_ptr,  # [slots, K, E]; K: PARTS times RANK
    ranks_ptr,  # int32 [slots, PARTS]
    tiles_ptr,  # int32 [tiles, 3]: slot, first row, rows
    hidden_ptr,  # float32 [T, K], written where an adapter has ranks
    x_stride_t,
    E: tl.constexpr,
    PARTS: tl.constexpr,
    RANK: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_E: tl.constexpr,
):
    K: tl.constexpr = PARTS * RANK
    tile, block = tl.program_id(0), tl.program_id(1)
    num_rows = tl.load(tiles_ptr + 3 * tile + 2)
    if num_rows > 0:
        slot = tl.load(tiles_ptr + 3 * tile).to(tl.int64)
        part = block // (RANK // BLOCK_R)
        if block % (RANK // BLOCK_R) * BLOCK_R < tl.load(ranks_ptr + slot * PARTS + part):
            in_tile_T = tl.arange(0, BLOCK_T)
            is_row_T = in_tile_T < num_rows
            row_T = tl.load(tiles_ptr + 3 * tile + 1).to(tl.int64) + in_tile_T
            column_R = block * BLOCK_R + tl.arange(0, BLOCK_R)
            inner_E = tl.arange(0, BLOCK_E)
            x_TE = x_ptr + row_T[:, None] * x_stride_t + inner_E[None, :]
            a_ER = a_ptr + (slot * K + column_R)[None, :] * E + inner_E[:, None]
            acc_TR = tl.zeros([BLOCK_T, BLOCK_R], dtype=tl.float32)
            for start in range(0, E, BLOCK_E):
                is_inner_E = inner_E < E - start
                x = tl.load(x_TE + start, mask=is_row_T[:, None] & is_inner_E[None, :], other=0.0)
                a = tl.load(a_ER + start, mask=is_inner_E[:, None], other=0.0)
                acc_TR = tl.dot(x, a, acc=acc_TR, input_precision="ieee")
            hidden_TR = hidden_ptr + row_T[:, None] * K + column_R[None, :]
            tl.store(hidden_TR, acc_TR, mask=is_row_T[:, None])


@triton.jit
def lora_expand_kernel(
    hidden_ptr,  # float32 [T, K]; K: PARTS times RANK
    b_ptr,  # [slots, N, RANK]
    ranks_ptr,  # int32 [slots, PARTS]
    tiles_ptr,  # int32 [tiles, 3]: slot, first row, rows
    blocks_ptr,  # int32 [blocks, 3]: part, first column, columns
    out_ptr,  # [T, N], added to
    out_stride_t,
    N: tl.constexpr,
    PARTS: tl.constexpr,
    RANK: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    K: tl.constexpr = PARTS * RANK
    tile, block = tl.program_id(0), tl.program_id(1)
    num_rows = tl.load(tiles_ptr + 3 * tile + 2)
    if num_rows > 0:
        slot = tl.load(tiles_ptr + 3 * tile).to(tl.int64)
        part = tl.load(blocks_ptr + 3 * block)
        rank = tl.load(ranks_ptr + slot * PARTS + part)
        if rank > 0:
            in_tile_T, in_block_N = tl.arange(0, BLOCK_T), tl.arange(0, BLOCK_N)
            row_T = tl.load(tiles_ptr + 3 * tile + 1).to(tl.int64) + in_tile_T
            column_N = tl.load(blocks_ptr + 3 * block + 1) + in_block_N
            is_column_N = in_block_N < tl.load(blocks_ptr + 3 * block + 2)
            is_row_T = in_tile_T < num_rows
            inner_R = tl.arange(0, BLOCK_R)
            acc_TN = tl.zeros([BLOCK_T, BLOCK_N], dtype=tl.float32)
            for start in range(0, rank, BLOCK_R):
                hidden_TR = hidden_ptr + row_T[:, None] * K + part * RANK + start + inner_R[None, :]
                b_RN = b_ptr + (slot * N + column_N)[None, :] * RANK + start + inner_R[:, None]
                hidden = tl.load(hidden_TR, mask=is_row_T[:, None], other=0.0)
                b = tl.load(b_RN, mask=is_column_N[None, :], other=0.0).to(tl.float32)
                acc_TN = tl.dot(hidden, b, acc=acc_TN, input_precision="ieee")
            out_TN = out_ptr + row_T[:, None] * out_stride_t + column_N[None, :]
            mask_TN = is_row_T[:, None] & is_column_N[None, :]
            sum_TN = tl.load(out_TN, mask=mask_TN, other=0.0).to(tl.float32) + acc_TN
            tl.store(out_TN, sum_TN.to(out_ptr.dtype.element_ty), mask=mask_TN)


_shrink_launches = BoundLaunches(lora_shrink_kernel)
_expand_launches = BoundLaunches(lora_expand_kernel)


class TritonLoRARows:
    """See `kernels.interface.lora.LoRARows`. `begin_step` is called on the steps' stream.

    tiles   | slot, first row, rows | ... | 0, 0, 0 | ...     of at most 16 rows of one slot
    """

    def __init__(
        self,
        num_slots: int,
        *,
        max_rank: int,
        max_num_tokens: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.num_slots = num_slots
        self.rank = -(-max_rank // BLOCK_SIZE_R) * BLOCK_SIZE_R
        self.dtype = dtype
        self.device = device
        self.is_active = False
        shape = (self.num_tiles(max_num_tokens), _TILE_WORDS)
        self.tiles = torch.zeros(shape, dtype=torch.int32, device=device)

    def num_tiles(self, num_tokens: int) -> int:
        """Most tiles of so many tokens: those of a slot are together, twice (decodes, others)."""
        return num_tokens // BLOCK_SIZE_T + min(2 * self.num_slots, num_tokens)

    def begin_step(self, slots_T: Int32Array | None) -> None:
        """Raises ValueError: more runs of tokens than each slot may have."""
        self.is_active = slots_T is not None
        if not self.is_active:
            return
        tiles = [
            (slot, row, min(BLOCK_SIZE_T, stop - row))
            for slot, start, stop in segments_of(slots_T)
            for row in range(start, stop, BLOCK_SIZE_T)
        ]
        if len(tiles) > self.num_tiles(len(cast("Int32Array", slots_T))):
            raise ValueError(f"{len(tiles)} tiles of adapters: their tokens are not grouped")
        words = np.zeros(tuple(self.tiles.shape), np.int32)
        words[: len(tiles)] = np.array(tiles, np.int32).reshape(-1, _TILE_WORDS)
        # from pageable memory: the words are taken before the call returns
        self.tiles.copy_(torch.from_numpy(words), non_blocking=True)

    def make_stack(self, num_inputs: int, part_sizes: Sequence[int]) -> "TritonLoRAStack":
        return TritonLoRAStack(self, num_inputs, part_sizes)


class TritonLoRAStack:
    """See `kernels.interface.lora.LoRAStack`. Weights are of the model's dtype; `place` copies them
    on the steps' stream."""

    def __init__(self, rows: TritonLoRARows, num_inputs: int, part_sizes: Sequence[int]) -> None:
        self.rows = rows
        self.num_inputs, self.num_outputs = num_inputs, sum(part_sizes)
        self.num_parts = len(part_sizes)
        self._starts = [sum(part_sizes[:part]) for part in range(self.num_parts)]
        slots, rank, device = rows.num_slots, rows.rank, rows.device
        a_shape = (slots, self.num_parts * rank, num_inputs)
        self.a_SKE = torch.zeros(a_shape, dtype=rows.dtype, device=device)
        b_shape = (slots, self.num_outputs, rank)
        self.b_SNR = torch.zeros(b_shape, dtype=rows.dtype, device=device)
        self.ranks_SP = torch.zeros((slots, self.num_parts), dtype=torch.int32, device=device)
        blocks = [
            (part, self._starts[part] + start, min(BLOCK_SIZE_N, size - start))
            for part, size in enumerate(part_sizes)
            for start in range(0, size, BLOCK_SIZE_N)
        ]
        self.blocks = torch.tensor(blocks, dtype=torch.int32, device=device)

    def prepare(self, parts: Mapping[int, LoRAPart]) -> object:
        a_KE = torch.zeros(self.a_SKE.shape[1:], dtype=self.rows.dtype, device="cpu")
        b_NR = torch.zeros(self.b_SNR.shape[1:], dtype=self.rows.dtype, device="cpu")
        ranks_P = torch.zeros(self.num_parts, dtype=torch.int32, device="cpu")
        for number, part in parts.items():
            first, row = number * self.rows.rank, self._starts[number]
            a_KE[first : first + part.rank] = part.a_RE
            b_NR[row : row + part.b_NR.shape[0], : part.rank] = part.b_NR
            ranks_P[number] = part.rank
        return a_KE, b_NR, ranks_P

    def place(self, slot: int, prepared: object | None) -> None:
        if prepared is None:
            self.ranks_SP[slot].zero_()
            return
        stacked = (self.a_SKE, self.b_SNR, self.ranks_SP)
        for there, new in zip(stacked, cast("tuple[torch.Tensor, ...]", prepared), strict=True):
            there[slot].copy_(new)


def add_lora(out_TN: torch.Tensor, x_TE: torch.Tensor, stack: TritonLoRAStack) -> torch.Tensor:
    """See `Operations.add_lora`. Raises ValueError: tensors of another shape, dtype or device."""
    rows = stack.rows
    T, N, E = len(x_TE), stack.num_outputs, stack.num_inputs
    check_tensor("x_TE", x_TE, (T, E), FLOATS, rows.device, contiguous_dims=1)
    check_tensor("out_TN", out_TN, (T, N), FLOATS, rows.device, contiguous_dims=1)
    if not rows.is_active or not T:
        return out_TN
    num_tiles, num_parts, rank = rows.num_tiles(T), stack.num_parts, rows.rank
    hidden_TK = torch.empty((T, num_parts * rank), dtype=torch.float32, device=rows.device)
    shared = {"PARTS": num_parts, "RANK": rank, "BLOCK_T": BLOCK_SIZE_T, "BLOCK_R": BLOCK_SIZE_R}
    shrink = {"E": E, "BLOCK_E": BLOCK_SIZE_E, **shared}
    _shrink_launches(
        (x_TE, stack.a_SKE, stack.ranks_SP, rows.tiles, hidden_TK),
        num_tiles,
        lambda: Launch((num_tiles, num_parts * rank // BLOCK_SIZE_R), (x_TE.stride(0),), shrink),
    )
    expand = {"N": N, "BLOCK_N": BLOCK_SIZE_N, **shared}
    _expand_launches(
        (hidden_TK, stack.b_SNR, stack.ranks_SP, rows.tiles, stack.blocks, out_TN),
        num_tiles,
        lambda: Launch((num_tiles, len(stack.blocks)), (out_TN.stride(0),), expand),
    )
    return out_TN
