"""A step's inputs: packed into one int32 buffer, so that it takes one copy, and as tensors.

C is the capacity in sequences, fixed when the engine starts: the columns stand at the
same words in every step, whatever its size, so that a recorded CUDA graph finds them.

    word  0        8      8 + C      8 + 2C        9 + 3C   9 + 4C  9 + 5C  9 + 6C
          | header | rows | computed | query_start | sample | draft | shift | records  | ids |
          |   8    |  C   |    C     |    C + 1    |   C    |   C   |   C   | 4(U + 1) |  I  |

    header       R sequences, T tokens, N sampled sequences, U updates, word of the records, word of
                 the ids, 0, 0
    rows         the row of each sequence of the step, each row once but for drafts
    computed     tokens in its cache before the step
    query_start  where its tokens start in the step; word R of the column is T
    sample       index among the tokens sampled in this step; -1: it is not sampled
    draft        the token that the entry computes, if it is a draft; else -1
    shift        what its tokens' positions are more than their places in the sequence
    records      (table, row, start, first id) an update, then (0, 0, 0, I); the ids of update u are
                 ids[first of u : first of u + 1] and go to table[row, start:]

Words of a column behind R hold anything. A sequence is sampled if all its tokens are computed after
the step, so that its next one is chosen:

    sequence   [0 ...... computed)[computed ...... seq_len)       next, if sampled
                  in the cache        this step's tokens       at position seq_len

A sequence with k drafts has k + 1 entries of one token each, one behind the other, at rising
`computed`: keys and values of all are written before any is attended to, so each is a decode.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

Int32Array = npt.NDArray[np.int32]
IntArray = npt.NDArray[np.int32] | npt.NDArray[np.int64]

HEADER_WORDS = 8
RECORD_WORDS = 4
MOST_IDS = 1024
"""Of a record; the packer cuts longer updates, so that many programs share them."""
TOKEN_TABLE = -1
"""The table of an update that writes tokens; block tables are 0 .. G - 1."""


@dataclass(frozen=True, slots=True)
class RowUpdate:
    """`table[row, start : start + len(ids)] = ids`; what is past the table's width is dropped."""

    table: int
    row: int
    start: int
    ids: Sequence[int] | IntArray


@dataclass(frozen=True, slots=True)
class PackedLayout:
    """Where the columns of a buffer for `capacity` sequences start."""

    capacity: int

    @property
    def rows_at(self) -> int:
        return HEADER_WORDS

    @property
    def computed_at(self) -> int:
        return HEADER_WORDS + self.capacity

    @property
    def query_start_at(self) -> int:
        return HEADER_WORDS + 2 * self.capacity

    @property
    def sample_index_at(self) -> int:
        return HEADER_WORDS + 3 * self.capacity + 1

    @property
    def draft_at(self) -> int:
        return HEADER_WORDS + 4 * self.capacity + 1

    @property
    def shift_at(self) -> int:
        return HEADER_WORDS + 5 * self.capacity + 1

    @property
    def records_at(self) -> int:
        return HEADER_WORDS + 6 * self.capacity + 1

    def num_words(self, updates: Sequence[RowUpdate] = ()) -> int:
        """Words that a step with these updates takes."""
        num_records = sum(-(-len(update.ids) // MOST_IDS) for update in updates)
        num_ids = sum(len(update.ids) for update in updates)
        return self.records_at + RECORD_WORDS * (num_records + 1) + num_ids


def pack_step(
    words: Int32Array,
    layout: PackedLayout,
    *,
    rows: IntArray,
    num_computed: IntArray,
    num_scheduled: IntArray,
    needs_sampling: npt.NDArray[np.bool_],
    drafts: IntArray | None = None,
    shifts: IntArray | None = None,
    updates: Sequence[RowUpdate] = (),
) -> int:
    """Write a step into `words`. Returns how many words to copy. Raises ValueError: more sequences
    than the layout has room for, or more words than `words`.

    Args:
        words: at least `layout.num_words(updates)` long, the host's end of the copy; overwritten.
        rows: [R].
        num_computed: [R], tokens in the cache before this step.
        num_scheduled: [R], tokens in this step, at least 1.
        needs_sampling: [R], see above. The n-th sampled sequence gets the n-th sampled token.
        drafts, shifts: [R], see above; None: there are none.
        updates: carried out before the step's tokens are read; no two may write one cell.
    """
    num_sequences, needed = len(rows), layout.num_words(updates)
    if num_sequences > layout.capacity:
        raise ValueError(
            f"{num_sequences} sequences, the layout has room for {layout.capacity}; schedule fewer "
            "or make a larger layout"
        )
    if needed > len(words):
        raise ValueError(f"a step of {needed} words, the buffer has {len(words)}; make it larger")
    ids_at = needed - sum(len(update.ids) for update in updates)
    num_records = (ids_at - layout.records_at) // RECORD_WORDS - 1
    query_start = words[layout.query_start_at :][: num_sequences + 1]
    query_start[0] = 0
    np.cumsum(num_scheduled, out=query_start[1:])
    sample_index = words[layout.sample_index_at :][:num_sequences]
    np.cumsum(needs_sampling, out=sample_index)
    num_sampled = int(sample_index[-1]) if num_sequences else 0
    sample_index[:] = np.where(needs_sampling, sample_index - 1, -1)
    words[layout.rows_at :][:num_sequences] = rows
    words[layout.computed_at :][:num_sequences] = num_computed
    words[layout.draft_at :][:num_sequences] = -1 if drafts is None else drafts
    words[layout.shift_at :][:num_sequences] = 0 if shifts is None else shifts
    words[:HEADER_WORDS] = (
        num_sequences,
        query_start[-1],
        num_sampled,
        num_records,
        layout.records_at,
        ids_at,
        0,
        0,
    )
    _pack_updates(words[layout.records_at : ids_at], words[ids_at:needed], updates)
    return needed


def _pack_updates(records: Int32Array, ids: Int32Array, updates: Sequence[RowUpdate]) -> None:
    at = first = 0
    for update in updates:
        ids[first : first + len(update.ids)] = update.ids
        for done in range(0, len(update.ids), MOST_IDS):
            record = (update.table, update.row, update.start + done, first + done)
            records[at : at + RECORD_WORDS] = record
            at += RECORD_WORDS
        first += len(update.ids)
    records[at:] = (0, 0, 0, first)


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceRows:
    """Tokens and block tables of the running sequences, a row each, kept from step to step.

    Attributes:
        token_ids: int32 [rows, max_model_len].
        block_tables: int32 [G, rows, M], a table a KV-cache group. Always ids in range.
    """

    token_ids: torch.Tensor
    block_tables: torch.Tensor

    @staticmethod
    def allocate(
        *, num_rows: int, max_model_len: int, block_size: int, num_groups: int, device: torch.device
    ) -> DeviceRows:
        width = -(-max_model_len // block_size)
        return DeviceRows(
            token_ids=torch.zeros((num_rows, max_model_len), dtype=torch.int32, device=device),
            block_tables=torch.zeros(
                (num_groups, num_rows, width), dtype=torch.int32, device=device
            ),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTensors:
    """What `prepare_step` writes. T and R count the padding of a bucket.

    |<- real ->|<- padding ->|  of T: token 0, position 0, slot -1
    |<- real ->|<- padding ->|  of R: no tokens, seq_len 0, block table as it was

    Attributes:
        token_ids_T: int64 [T].
        positions_T: int64 [T], with the shift of each sequence.
        slot_mappings_GT: int64 [G, T]; of groups whose blocks have `block_size` tokens.
        query_start_loc_R1: int32 [R + 1]; padding starts and ends where the real tokens end.
        seq_lens_R: int32 [R], tokens in the cache after this step.
        block_tables_GRM: int32 [G, R, M]. Ids behind a sequence's end are those of earlier steps,
            in range.
        logits_at_R: int64 [R], index along T of the n-th sampled sequence's last token, then 0.
    """

    token_ids_T: torch.Tensor
    positions_T: torch.Tensor
    slot_mappings_GT: torch.Tensor
    query_start_loc_R1: torch.Tensor
    seq_lens_R: torch.Tensor
    block_tables_GRM: torch.Tensor
    logits_at_R: torch.Tensor

    @staticmethod
    def allocate(
        *, num_tokens: int, num_sequences: int, num_groups: int, width: int, device: torch.device
    ) -> StepTensors:
        """Tensors of the largest step; `first` gives those of a bucket."""

        def zeros(*shape: int, dtype: torch.dtype = torch.int64) -> torch.Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        return StepTensors(
            token_ids_T=zeros(num_tokens),
            positions_T=zeros(num_tokens),
            slot_mappings_GT=zeros(num_groups, num_tokens),
            query_start_loc_R1=zeros(num_sequences + 1, dtype=torch.int32),
            seq_lens_R=zeros(num_sequences, dtype=torch.int32),
            block_tables_GRM=zeros(num_groups, num_sequences, width, dtype=torch.int32),
            logits_at_R=zeros(num_sequences),
        )

    def first(self, num_tokens: int, num_sequences: int) -> StepTensors:
        """Views of the first so many tokens and sequences: a bucket in the same memory."""
        return StepTensors(
            token_ids_T=self.token_ids_T[:num_tokens],
            positions_T=self.positions_T[:num_tokens],
            slot_mappings_GT=self.slot_mappings_GT[:, :num_tokens],
            query_start_loc_R1=self.query_start_loc_R1[: num_sequences + 1],
            seq_lens_R=self.seq_lens_R[:num_sequences],
            block_tables_GRM=self.block_tables_GRM[:, :num_sequences],
            logits_at_R=self.logits_at_R[:num_sequences],
        )
