"""Sampling state of a step's sampled sequences, gathered from the persistent rows in one launch.

Where a number stands in a state is said in `kernels.interface.sampling_rows`."""

from __future__ import annotations

from dataclasses import dataclass, fields

import torch
import triton
import triton.language as tl

from kernels.interface.sampling_rows import SamplingRows, StateFlag, StateWord
from kernels.interface.step_inputs import PackedLayout
from kernels.triton.step_inputs import columns_of
from kernels.triton.tensor_checks import check_logits, check_tensor

BLOCK_SIZE = 128
NUM_WARPS = 4

_TEMPERATURE = tl.constexpr(int(StateWord.TEMPERATURE))
_TOP_P = tl.constexpr(int(StateWord.TOP_P))
_MIN_P = tl.constexpr(int(StateWord.MIN_P))
_REPETITION = tl.constexpr(int(StateWord.REPETITION))
_PRESENCE = tl.constexpr(int(StateWord.PRESENCE))
_FREQUENCY = tl.constexpr(int(StateWord.FREQUENCY))
_TOP_K = tl.constexpr(int(StateWord.TOP_K))
_SEED_LOW = tl.constexpr(int(StateWord.SEED_LOW))
_SEED_HIGH = tl.constexpr(int(StateWord.SEED_HIGH))
_NUM_LOGPROBS = tl.constexpr(int(StateWord.NUM_LOGPROBS))
_MIN_LENGTH = tl.constexpr(int(StateWord.MIN_LENGTH))
_NUM_MIN_TOKENS_IDS = tl.constexpr(int(StateWord.NUM_MIN_TOKENS_IDS))
_NUM_BIASES = tl.constexpr(int(StateWord.NUM_BIASES))
_FLAGS = tl.constexpr(int(StateWord.FLAGS))
_GREEDY = tl.constexpr(int(StateFlag.GREEDY))
_COUNTED = tl.constexpr(int(StateFlag.COUNTED))
_MASKED = tl.constexpr(int(StateFlag.MASKED))


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingColumns:
    """What sampling reads of each row of logits: an entry a sampled sequence, at most N.

    Attributes:
        num_rows_1: int32, how many there are; nothing is done for rows of logits at or beyond it.
        state_row_N: int64, the sequence's row: whose lists and history are read.
        positions_N: int64, index in its sequence of the token that is chosen.
        seeds_N: int64, the 64 bits of the seed.
        top_k_N: int64, 0 for no limit; above V is V.
        temperature_N: float32, above 0 unless greedy.
        top_p_N, min_p_N: float32; 1 and 0 for no limit.
        repetition_N, presence_N, frequency_N: float32; 1, 0 and 0 switch penalties off.
        is_greedy_N, is_counted_N, is_masked_N: bool, see StateFlag.
        num_logprobs_N: int32, at most V; 0 reports the token alone, below 0 nothing is written.
        num_min_tokens_ids_N: int32, entries of the list that count; 0 once min_tokens are there.
        num_biases_N: int32, likewise.
        draft_N: int32, the draft that stands before the token, and behind that of the entry before;
            -1: none does. Rules hold as if these drafts had been sampled.
    """

    num_rows_1: torch.Tensor
    state_row_N: torch.Tensor
    positions_N: torch.Tensor
    seeds_N: torch.Tensor
    top_k_N: torch.Tensor
    temperature_N: torch.Tensor
    top_p_N: torch.Tensor
    min_p_N: torch.Tensor
    repetition_N: torch.Tensor
    presence_N: torch.Tensor
    frequency_N: torch.Tensor
    is_greedy_N: torch.Tensor
    is_counted_N: torch.Tensor
    is_masked_N: torch.Tensor
    num_logprobs_N: torch.Tensor
    num_min_tokens_ids_N: torch.Tensor
    num_biases_N: torch.Tensor
    draft_N: torch.Tensor

    @staticmethod
    def allocate(num_rows: int, device: torch.device) -> SamplingColumns:
        """Columns for up to so many sampled sequences."""

        def zeros(name: str) -> torch.Tensor:
            size = 1 if name == "num_rows_1" else num_rows
            return torch.zeros(size, dtype=DTYPES[name], device=device)

        columns = SamplingColumns(**{name: zeros(name) for name in DTYPES})
        columns.draft_N.fill_(-1)
        return columns

    def check_logits(self, logits_RV: torch.Tensor) -> tuple[int, int]:
        """(R, V) of floating logits with contiguous rows, one for each entry.
        Raises ValueError: not that, see `tensor_checks.check_logits`."""
        rows, vocab_size = check_logits(logits_RV, self.num_rows_1)
        check_tensor("state_row", self.state_row_N, (rows,), torch.int64, logits_RV.device)
        return rows, vocab_size

    def check(self, num_rows: int, device: torch.device) -> None:
        """Raises ValueError: a column of another length, dtype or layout, or on another device."""
        for name, dtype in DTYPES.items():
            shape = (1,) if name == "num_rows_1" else (num_rows,)
            check_tensor(name, getattr(self, name), shape, dtype, device)

    def first(self, num_rows: int) -> SamplingColumns:
        """Views of the first so many: a bucket in the same memory."""
        return SamplingColumns(**{f.name: getattr(self, f.name)[:num_rows] for f in fields(self)})


DTYPES: dict[str, torch.dtype] = {
    **{field.name: torch.int32 for field in fields(SamplingColumns)},
    **dict.fromkeys(("state_row_N", "positions_N", "seeds_N", "top_k_N"), torch.int64),
    **dict.fromkeys(("temperature_N", "top_p_N", "min_p_N"), torch.float32),
    **dict.fromkeys(("repetition_N", "presence_N", "frequency_N"), torch.float32),
    **dict.fromkeys(("is_greedy_N", "is_counted_N", "is_masked_N"), torch.bool),
}


def gather_sampling_columns_reference(
    packed: torch.Tensor, layout: PackedLayout, rows: SamplingRows
) -> dict[str, torch.Tensor]:
    """The specification: every column, as long as there are sampled sequences."""
    words, num_real = packed.long(), int(packed[0])
    index_R = words[layout.sample_index_at :][:num_real]
    is_sampled_R = index_R >= 0
    starts = words[layout.query_start_at :]
    computed_R = words[layout.computed_at :][:num_real]
    row_N = words[layout.rows_at :][:num_real][is_sampled_R]
    seq_len_N = (computed_R + starts[1 : num_real + 1] - starts[:num_real])[is_sampled_R]
    state_NX = rows.state_NX[row_N]
    numbers, reals = state_NX.T.contiguous(), state_NX.T.contiguous().view(torch.float32)
    flags_N = numbers[StateWord.FLAGS]
    is_below_min_N = seq_len_N < numbers[StateWord.MIN_LENGTH]
    low_N = numbers[StateWord.SEED_LOW].long() & 0xFFFFFFFF
    return {
        "num_rows_1": is_sampled_R.sum(dim=0, keepdim=True),
        "state_row_N": row_N,
        "positions_N": seq_len_N,
        "seeds_N": (numbers[StateWord.SEED_HIGH].long() << 32) | low_N,
        "top_k_N": numbers[StateWord.TOP_K],
        "temperature_N": reals[StateWord.TEMPERATURE],
        "top_p_N": reals[StateWord.TOP_P],
        "min_p_N": reals[StateWord.MIN_P],
        "repetition_N": reals[StateWord.REPETITION],
        "presence_N": reals[StateWord.PRESENCE],
        "frequency_N": reals[StateWord.FREQUENCY],
        "is_greedy_N": (flags_N & StateFlag.GREEDY) != 0,
        "is_counted_N": (flags_N & StateFlag.COUNTED) != 0,
        "is_masked_N": (flags_N & StateFlag.MASKED) != 0,
        "num_logprobs_N": numbers[StateWord.NUM_LOGPROBS],
        "num_min_tokens_ids_N": numbers[StateWord.NUM_MIN_TOKENS_IDS] * is_below_min_N,
        "num_biases_N": numbers[StateWord.NUM_BIASES],
        "draft_N": words[layout.draft_at :][:num_real][is_sampled_R],
    }


@triton.jit(do_not_specialize=["num_given"])
def gather_sampling_columns_kernel(
    packed_ptr,  # int32 words
    numbers_ptr,  # int32 [rows, X]
    reals_ptr,  # the same memory as float32
    num_rows_ptr,  # int32 [1]
    state_row_ptr,  # int64 [N]
    positions_ptr,  # int64 [N]
    seeds_ptr,  # int64 [N]
    top_k_ptr,  # int64 [N]
    temperature_ptr,  # float32 [N]
    top_p_ptr,  # float32 [N]
    min_p_ptr,  # float32 [N]
    repetition_ptr,  # float32 [N]
    presence_ptr,  # float32 [N]
    frequency_ptr,  # float32 [N]
    is_greedy_ptr,  # bool [N]
    is_counted_ptr,  # bool [N]
    is_masked_ptr,  # bool [N]
    num_logprobs_ptr,  # int32 [N]
    num_min_tokens_ids_ptr,  # int32 [N]
    num_biases_ptr,  # int32 [N]
    draft_ptr,  # int32 [N]
    num_given,  # N
    X,
    ROWS_AT: tl.constexpr,
    COMPUTED_AT: tl.constexpr,
    QUERY_START_AT: tl.constexpr,
    SAMPLE_INDEX_AT: tl.constexpr,
    DRAFT_AT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    if tl.program_id(0) == 0:
        tl.store(num_rows_ptr, tl.load(packed_ptr + 2))
    sequence_R = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    is_real_R = sequence_R < tl.load(packed_ptr)
    index_R = tl.load(packed_ptr + SAMPLE_INDEX_AT + sequence_R, mask=is_real_R, other=-1)
    is_sampled_R = (index_R >= 0) & (index_R < num_given)
    row_R = tl.load(packed_ptr + ROWS_AT + sequence_R, mask=is_sampled_R, other=0).to(tl.int64)
    start_ptr = packed_ptr + QUERY_START_AT + sequence_R
    start_R = tl.load(start_ptr, mask=is_sampled_R, other=0)
    stop_R = tl.load(start_ptr + 1, mask=is_sampled_R, other=0)
    computed_R = tl.load(packed_ptr + COMPUTED_AT + sequence_R, mask=is_sampled_R, other=0)
    position_R = computed_R + stop_R - start_R
    number_ptr = numbers_ptr + row_R * X
    real_ptr = reals_ptr + row_R * X
    tl.store(state_row_ptr + index_R, row_R, mask=is_sampled_R)
    tl.store(positions_ptr + index_R, position_R.to(tl.int64), mask=is_sampled_R)
    low_R = tl.load(number_ptr + _SEED_LOW, mask=is_sampled_R, other=0).to(tl.int64) & 0xFFFFFFFF
    high_R = tl.load(number_ptr + _SEED_HIGH, mask=is_sampled_R, other=0).to(tl.int64)
    tl.store(seeds_ptr + index_R, (high_R << 32) | low_R, mask=is_sampled_R)
    top_k_R = tl.load(number_ptr + _TOP_K, mask=is_sampled_R, other=0)
    tl.store(top_k_ptr + index_R, top_k_R.to(tl.int64), mask=is_sampled_R)
    real_R = tl.load(real_ptr + _TEMPERATURE, mask=is_sampled_R, other=0.0)
    tl.store(temperature_ptr + index_R, real_R, mask=is_sampled_R)
    real_R = tl.load(real_ptr + _TOP_P, mask=is_sampled_R, other=0.0)
    tl.store(top_p_ptr + index_R, real_R, mask=is_sampled_R)
    real_R = tl.load(real_ptr + _MIN_P, mask=is_sampled_R, other=0.0)
    tl.store(min_p_ptr + index_R, real_R, mask=is_sampled_R)
    real_R = tl.load(real_ptr + _REPETITION, mask=is_sampled_R, other=0.0)
    tl.store(repetition_ptr + index_R, real_R, mask=is_sampled_R)
    real_R = tl.load(real_ptr + _PRESENCE, mask=is_sampled_R, other=0.0)
    tl.store(presence_ptr + index_R, real_R, mask=is_sampled_R)
    real_R = tl.load(real_ptr + _FREQUENCY, mask=is_sampled_R, other=0.0)
    tl.store(frequency_ptr + index_R, real_R, mask=is_sampled_R)
    flags_R = tl.load(number_ptr + _FLAGS, mask=is_sampled_R, other=0)
    tl.store(is_greedy_ptr + index_R, (flags_R & _GREEDY) != 0, mask=is_sampled_R)
    tl.store(is_counted_ptr + index_R, (flags_R & _COUNTED) != 0, mask=is_sampled_R)
    tl.store(is_masked_ptr + index_R, (flags_R & _MASKED) != 0, mask=is_sampled_R)
    number_R = tl.load(number_ptr + _NUM_LOGPROBS, mask=is_sampled_R, other=0)
    tl.store(num_logprobs_ptr + index_R, number_R, mask=is_sampled_R)
    until_R = tl.load(number_ptr + _MIN_LENGTH, mask=is_sampled_R, other=0)
    number_R = tl.load(number_ptr + _NUM_MIN_TOKENS_IDS, mask=is_sampled_R, other=0)
    number_R = tl.where(position_R < until_R, number_R, 0)
    tl.store(num_min_tokens_ids_ptr + index_R, number_R, mask=is_sampled_R)
    number_R = tl.load(number_ptr + _NUM_BIASES, mask=is_sampled_R, other=0)
    tl.store(num_biases_ptr + index_R, number_R, mask=is_sampled_R)
    draft_R = tl.load(packed_ptr + DRAFT_AT + sequence_R, mask=is_sampled_R, other=-1)
    tl.store(draft_ptr + index_R, draft_R, mask=is_sampled_R)


def gather_sampling_columns(
    packed: torch.Tensor,
    layout: PackedLayout,
    rows: SamplingRows,
    out: SamplingColumns,
    *,
    num_sequences: int,
) -> None:
    """`out[sample] = state[row]` for each sampled sequence of the packed step; see SamplingColumns.

    Args:
        packed: int32, made by `pack_step` with `layout`.
        out: written for the sampled sequences.
        num_sequences: of the step, may count padding.
    """
    num_rows = out.state_row_N.shape[0]
    device, state = rows.state_NX.device, rows.state_NX
    check_tensor("packed", packed, packed.shape, torch.int32, device)
    check_tensor("state_NX", state, state.shape, torch.int32, device)
    if num_sequences > layout.capacity:
        raise ValueError(f"{num_sequences} sequences, the layout has room for {layout.capacity}")
    out.check(num_rows, device)
    gather_sampling_columns_kernel[(max(1, triton.cdiv(num_sequences, BLOCK_SIZE)),)](
        packed,
        state,
        state.view(torch.float32),
        *(getattr(out, name) for name in DTYPES),
        num_rows,
        state.shape[1],
        DRAFT_AT=layout.draft_at,
        BLOCK=BLOCK_SIZE,
        num_warps=NUM_WARPS,
        **columns_of(layout),
    )
