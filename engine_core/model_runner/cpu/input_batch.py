"""The CPU runner's persistent batch, and what the model reads of it in one step. Flat arrays by
row: a step writes only what changed, and gathers without a loop over tokens or sequences."""

import dataclasses
from collections.abc import Sequence

import numpy as np
import torch

from engine_core.model_runner.cache import PagedKVCache
from engine_core.model_runner.config import RunnerConfig
from engine_core.model_runner.drafts import num_drafts_of
from engine_core.model_runner.row_parts import Int32Array, Int64Array, StepRows
from engine_core.model_runner.rows import PlacedRow, TableWrites
from engine_core.model_runner.sampled_tokens import SampledTokens
from engine_core.scheduler import SchedulerOutput
from kernels.interface.operations import ForwardContext, OutputRows


class CPUInputBatch:
    def __init__(self, config: RunnerConfig) -> None:
        rows = config.max_num_seqs
        self._block_size = config.block_size
        self.token_ids: Int32Array = np.zeros((rows, config.max_model_len), np.int32)
        """[row, position]: prompt, then output."""
        self.num_tokens: Int64Array = np.zeros(rows, np.int64)
        """[row]: tokens known; of a row that is pooled one more, so that it is never sampled."""
        self.block_tables: list[Int32Array] = [
            np.zeros((rows, -(-config.max_model_len // config.block_size)), np.int32)
            for _ in config.layout.groups
        ]
        """per group [row, logical block] -> index of a physical block in its pool. Behind what a
        plan wrote stands what an earlier sequence left: an index in range, which nothing reads."""
        self._writes = TableWrites(config)
        self._placed_in: Int64Array = np.zeros(rows, np.int64)
        """[row]: the step in which the row was written anew."""

    def place(self, placed: PlacedRow, step_id: int) -> None:
        """A sequence takes a row. Tables behind those of the groups are for others to keep."""
        self.write_row(placed.row, placed.token_ids, placed.block_ids)
        self.num_tokens[placed.row] = placed.num_known
        self._placed_in[placed.row] = step_id

    def write_row(
        self, row: int, token_ids: Sequence[int], block_ids: Sequence[Sequence[int]]
    ) -> None:
        """Replace what stood in the row by these tokens and block ids."""
        self.token_ids[row, : len(token_ids)] = token_ids
        self.num_tokens[row] = len(token_ids)
        self.write_blocks(row, 0, block_ids)

    def write_blocks(self, row: int, start: int, block_ids: Sequence[Sequence[int]]) -> None:
        """Put ids into the row's tables from logical block `start` on, one list a group.

        Blocks behind max_model_len (lookahead) are not kept: no token is ever there."""
        for group, written in self._writes.of(block_ids):
            table = self.block_tables[group]
            stop = min(start + len(written), table.shape[1])
            table[row, start:stop] = written[: max(0, stop - start)]

    def tables(self, rows_R: Int64Array, seq_len: int) -> list[Int32Array]:
        """The tables of these rows, as wide as the longest sequence needs."""
        width = -(-seq_len // self._block_size)
        return [table[rows_R, :width] for table in self.block_tables]

    def slots(self, rows_T: Int64Array, positions_T: Int64Array) -> list[Int64Array]:
        """The slot of each token, a list a group."""
        size = self._block_size
        block_T, offset_T = np.divmod(positions_T, size)
        return [
            table[rows_T, block_T].astype(np.int64) * size + offset_T for table in self.block_tables
        ]

    def write_drafts(self, row: int, drafts: Sequence[int]) -> None:
        """Behind the row's tokens, for the next step; they are none of them yet."""
        start = self.num_tokens[row]
        self.token_ids[row, start : start + len(drafts)] = drafts

    def append_tokens(self, rows: Int64Array, positions: Int64Array, token_ids: Int64Array) -> None:
        """Sampled tokens, which a row has at rising positions from its `num_tokens` on. The
        scheduler ends requests at max_model_len, so there is room."""
        self.token_ids[rows, positions] = token_ids
        self.num_tokens[rows] = positions + 1  # of a row's several the last one stays

    def take_sampled(self, sampled: SampledTokens) -> None:
        """Append what the last stage of a pipeline sampled in an earlier step. A row that another
        sequence has had since, or that was resumed, takes none."""
        rows, positions = sampled.rows, sampled.positions
        is_next = positions >= self.num_tokens[rows]
        is_next &= self._placed_in[rows] <= sampled.step_id
        self.append_tokens(rows[is_next], positions[is_next], sampled.token_ids[is_next])


@dataclasses.dataclass(slots=True, kw_only=True)  # see SchedulerOutput
class StepInputs(StepRows):
    """Shapes: T tokens of the step, R sequences in it, M block-table width, G groups.

    sequence 0: 3 tokens at 4..6    sequence 1: 1 token at 9
    positions_T       4 5 6 9
    query_start_R1    0 3 4        seq_lens_R   7 10
    """

    token_ids_T: Int64Array
    positions_T: Int64Array
    query_start_R1: Int32Array
    seq_lens_R: Int32Array
    """Tokens in the cache after this step."""
    block_tables_GRM: list[Int32Array]
    slot_mappings_GT: list[Int64Array]
    num_drafts_R: Int64Array | None = None
    """Drafts among each sequence's tokens, the last ones; None: there are none."""
    sampled_R: Int64Array
    """Which of the R sequences have all their tokens computed after this step, drafts included, so
    that their next token can be chosen."""
    num_decodes: int
    """Sequences [0, num_decodes) compute one token each. All that do, if decodes come first."""

    def context_in(self, cache: PagedKVCache, ends_T: Int32Array | None = None) -> ForwardContext:
        """The forward context of this step for a model whose KV cache is `cache`."""
        return cache.forward_context(
            query_start_loc_R1=cache.sent(self.query_start_R1),
            seq_lens_R=cache.sent(self.seq_lens_R),
            block_tables_GRM=[cache.sent(table) for table in self.block_tables_GRM],
            slot_mappings_GT=[cache.sent(slots) for slots in self.slot_mappings_GT],
            num_decodes=self.num_decodes,
            ends_T=None if ends_T is None else torch.from_numpy(ends_T),
        )

    def output_rows(
        self, cache: PagedKVCache, ends_T: Int32Array | None = None
    ) -> OutputRows | None:
        """The rows that are sampled: of each sampled sequence its last token, and the drafts among
        its tokens with the one before them. None: that are all.

        A step that samples nothing has its last row."""
        planner = cache.output_planner
        if planner is None or self.num_decodes == len(self.rows_R):
            return None
        counts_R = np.zeros(len(self.rows_R), np.int64)
        counts_R[self.sampled_R] = 1
        if self.num_drafts_R is not None:
            counts_R[self.sampled_R] += self.num_drafts_R[self.sampled_R]
        if not self.sampled_R.size:
            counts_R[-1] = 1
        has_S = np.flatnonzero(counts_R)
        counts_S = counts_R[has_S]
        start_S1 = np.zeros(len(has_S) + 1, np.int64)
        np.cumsum(counts_S, out=start_S1[1:])
        num_rows = int(start_S1[-1])
        if num_rows == len(self.token_ids_T):
            return None
        rows_N = np.arange(num_rows)
        rows_N += np.repeat(self.query_start_R1[1:][has_S] - start_S1[1:], counts_S)
        group = cache.last_group
        metadata = planner.plan(
            query_start_loc_R1=torch.from_numpy(start_S1.astype(np.int32)),
            seq_lens_R=torch.from_numpy(self.seq_lens_R[has_S]),
            block_table_RM=torch.from_numpy(self.block_tables_GRM[group][has_S]),
            slot_mapping_T=torch.from_numpy(self.slot_mappings_GT[group][rows_N]),
            num_decodes=0,
            num_decode_tokens=0,
            ends_T=None if ends_T is None else torch.from_numpy(ends_T[rows_N]),
        )
        return OutputRows(torch.from_numpy(rows_N), metadata)


def gather_planned_inputs(
    plan: SchedulerOutput,
    batch: CPUInputBatch,
    *,
    decodes_first: bool = False,
    order: Int64Array | None = None,
) -> StepInputs:
    """See `gather_step_inputs`; the plan's drafts are written to their rows."""
    num_drafts = None
    if plan.scheduled_spec_decode_tokens:
        num_drafts = num_drafts_of(plan)
        for place in np.flatnonzero(num_drafts).tolist():
            drafts = plan.scheduled_spec_decode_tokens[plan.batch.req_ids[place]]
            batch.write_drafts(int(plan.batch.rows[place]), drafts)
    return gather_step_inputs(
        batch,
        rows=plan.batch.rows,
        num_computed=plan.batch.num_computed_tokens,
        num_scheduled=plan.batch.num_scheduled_tokens,
        num_drafts=num_drafts,
        decodes_first=decodes_first,
        order=order,
    )


def gather_step_inputs(
    batch: CPUInputBatch,
    *,
    rows: Int64Array,
    num_computed: Int32Array,
    num_scheduled: Int32Array,
    num_drafts: Int64Array | None = None,
    decodes_first: bool = False,
    order: Int64Array | None = None,
) -> StepInputs:
    """
    Args:
        rows: [R], in batch order, each once.
        num_computed: [R], tokens in the cache before this step.
        num_scheduled: [R], tokens in this step, at least 1.
        num_drafts: [R], drafts among these, the last ones; None if there are none.
        decodes_first: put sequences that compute one token before all others; the order within
            either kind stays.
        order: in which the sequences are to stand before that; None: as they are.
    """
    if order is not None:
        inputs = gather_step_inputs(
            batch,
            rows=rows[order],
            num_computed=num_computed[order],
            num_scheduled=num_scheduled[order],
            num_drafts=None if num_drafts is None else num_drafts[order],
            decodes_first=decodes_first,
        )
        return dataclasses.replace(inputs, place_R=order[inputs.place_R])
    is_longer_R = num_scheduled != 1
    if not is_longer_R.any():
        return _gather_decodes(batch, rows, num_computed.astype(np.int64))
    order_R = (
        np.argsort(is_longer_R, kind="stable") if decodes_first else np.arange(len(rows))
    ).astype(np.int64)
    rows_R = rows[order_R]
    computed_R = num_computed[order_R].astype(np.int64)
    counts_R = num_scheduled[order_R].astype(np.int64)
    query_start_R1 = np.zeros(len(rows_R) + 1, np.int64)
    np.cumsum(counts_R, out=query_start_R1[1:])
    seq_lens_R = computed_R + counts_R
    # position = computed + offset within the sequence; one repeat gives both terms
    rows_T = np.repeat(rows_R, counts_R)
    positions_T = np.arange(query_start_R1[-1]) + np.repeat(
        computed_R - query_start_R1[:-1], counts_R
    )
    longer = np.flatnonzero(counts_R != 1)
    known_R = batch.num_tokens[rows_R]
    if num_drafts is not None:
        num_drafts = num_drafts[order_R]
        known_R = known_R + num_drafts
    return StepInputs(
        place_R=order_R,
        rows_R=rows_R,
        num_computed_R=computed_R,
        num_scheduled_R=counts_R,
        token_ids_T=batch.token_ids[rows_T, positions_T].astype(np.int64),
        positions_T=positions_T,
        query_start_R1=query_start_R1.astype(np.int32),
        seq_lens_R=seq_lens_R.astype(np.int32),
        block_tables_GRM=batch.tables(rows_R, int(seq_lens_R.max())),
        slot_mappings_GT=batch.slots(rows_T, positions_T),
        num_drafts_R=num_drafts,
        sampled_R=np.flatnonzero(seq_lens_R == known_R),
        num_decodes=int(longer[0]) if longer.size else len(rows_R),
    )


def _gather_decodes(
    batch: CPUInputBatch, rows_R: Int64Array, positions_R: Int64Array
) -> StepInputs:
    """A step in which every sequence computes one token: what is a token's is its sequence's."""
    num_rows = len(rows_R)
    seq_lens_R = positions_R + 1
    return StepInputs(
        place_R=np.arange(num_rows),
        rows_R=rows_R,
        num_computed_R=positions_R,
        num_scheduled_R=np.ones(num_rows, np.int64),
        token_ids_T=batch.token_ids[rows_R, positions_R].astype(np.int64),
        positions_T=positions_R,
        query_start_R1=np.arange(num_rows + 1, dtype=np.int32),
        seq_lens_R=seq_lens_R.astype(np.int32),
        block_tables_GRM=batch.tables(rows_R, int(seq_lens_R.max())),
        slot_mappings_GT=batch.slots(rows_R, positions_R),
        sampled_R=np.flatnonzero(seq_lens_R == batch.num_tokens[rows_R]),
        num_decodes=num_rows,
    )
