"""A small model that makes drafts in the runner of a large one, over the same rows and blocks. Its
passes are planned, and its drafts sampled, on the host."""

import numpy as np
import numpy.typing as npt
import torch

from engine_core.model_runner.adapter_rows import AdapterRows
from engine_core.model_runner.cache import BlockStorage, PagedKVCache, origin_of_each
from engine_core.model_runner.config import RunnerConfig
from engine_core.model_runner.cpu.drafter import BoolArray, Drafter, DraftSampling
from engine_core.model_runner.cpu.input_batch import StepInputs, gather_step_inputs
from engine_core.model_runner.row_parts import Int64Array
from engine_core.model_runner.rows import PlacedRow
from engine_core.models.heads.head import DraftHead
from engine_core.scheduler import SchedulerOutput
from engine_core.scheduler.runner_output import DraftTokenIds


class DraftModel(Drafter):
    """For a sequence of which the step has sampled t5:

        tokens        t0 .. t3 | t4 t5 | d6 d7 d8
        computed here    before  pass 1  2  3         d6 is sampled behind t5, and so on

    Chunks of prompts are computed in the step in which the model computes them. Where a sequence
    gets no drafts, its tokens are left out, and computed when it next gets some. What no pass
    computed, of a prefix that another sequence left, is known by its blocks (`_num_filled`)."""

    def __init__(
        self,
        config: RunnerConfig,
        storage: BlockStorage,
        sampling: DraftSampling,
        adapters: AdapterRows | None,
    ) -> None:
        super().__init__(sampling)
        draft = config.draft
        assert draft is not None and not isinstance(draft.model, DraftHead)
        self.model = draft.model
        self._ops = draft.ops
        self._cache = PagedKVCache(config, storage, draft)
        self._adapters = adapters
        self._block_size = config.block_size
        self._max_num_tokens = config.max_num_batched_tokens
        self._num_computed: Int64Array = np.zeros(config.max_num_seqs, np.int64)
        """[row], tokens whose keys and values are in the cache; -1: to be seen in the blocks."""
        self._num_marked: Int64Array = np.zeros(config.max_num_seqs, np.int64)
        """[row], blocks known to be computed."""
        self._group = self._longest_group(config)
        self._storage, self._pool = storage, config.layout.groups[self._group].spec.pool
        ids, host_ids = config.block_ids, config.host_block_ids
        num_blocks = 1 + ids.sizes[self._pool] + host_ids.sizes[self._pool]
        self._num_filled: npt.NDArray[np.int32] = np.zeros(num_blocks, np.int32)
        """[block of the group's pool], its first tokens whose keys and values are in the cache."""
        self._num_filled[0] = config.block_size  # out of a window: nothing reads it

    @staticmethod
    def _longest_group(config: RunnerConfig) -> int:
        """The group in whose table a sequence's blocks are looked at: the draft model's layers
        without a window, if it has any."""
        layout, first = config.layout, len(config.model.spec.caches)
        groups = [
            (not group.spec.keeps_all, index)
            for index, group in enumerate(layout.groups)
            if any(layer >= first for layer in group.layers)
        ]
        return min(groups)[1]

    # ------------------------------------------------------------------ what the plan changes

    def place(self, placed: PlacedRow) -> None:
        super().place(placed)
        self._num_computed[placed.row] = -1

    def begin(self, plan: SchedulerOutput, inputs: StepInputs) -> None:
        copies = self._storage.copies_of(self._pool, plan.copies)
        filled, size = self._num_filled, self._block_size
        if copies.disk is not None:  # blocks of prompts, which are computed in both models
            filled[[block_id for _, block_id in copies.disk.load]] = size
        for pairs in (copies.swap_in, copies.swap_out, copies.copy):
            if pairs:
                origins = origin_of_each(pairs)
                filled[list(origins)] = filled[list(origins.values())]
        slots = inputs.slot_mappings_GT[self._group]
        filled[slots[slots % size == 0] // size] = 0  # they get other contents
        if len(slots) >= size:  # what is filled at once is filled here too: others may read it
            filled[np.flatnonzero(np.bincount(slots // size) == size)] = size
        rows, computed = plan.batch.rows, plan.batch.num_computed_tokens
        table = self.batch.block_tables[self._group]
        for place in np.flatnonzero(self._num_computed[rows] < 0).tolist():
            row, num_computed = rows[place], int(computed[place])
            held = filled[table[row, : -(-num_computed // size)]]
            num_full = int(np.argmin(held == size)) if (held < size).any() else len(held)
            num_filled = int(held[: num_full + 1].sum())
            self._num_computed[row] = min(num_filled, num_computed)
            self._num_marked[row] = self._num_computed[row] // size

    # ------------------------------------------------------------------ drafts

    def propose(
        self, plan: SchedulerOutput, inputs: StepInputs, is_sampled: BoolArray
    ) -> DraftTokenIds | None:
        batch, rows = plan.batch, plan.batch.rows
        num_tokens = self.batch.num_tokens[rows]
        num_wanted = self.sampling.num_wanted(plan, is_sampled)
        stop = batch.num_computed_tokens + batch.num_scheduled_tokens.astype(np.int64)
        # drafts that were rejected are no tokens of the sequence
        stop = np.where(is_sampled, num_tokens - (num_wanted == 0), stop)
        start = self._num_computed[rows] = np.minimum(
            self._num_computed[rows], np.where(is_sampled, num_tokens - 1, stop)
        )
        is_chunk = batch.num_scheduled_tokens > 1
        if plan.scheduled_spec_decode_tokens:
            is_chunk &= np.array(
                [name not in plan.scheduled_spec_decode_tokens for name in batch.req_ids]
            )
        places = np.flatnonzero((is_chunk | (num_wanted > 0)) & (start < stop))
        counts = (stop - start)[places]
        left = self._max_num_tokens - (np.cumsum(counts) - counts)
        counts = np.minimum(counts, left)  # the rest comes with the next steps
        places, counts = places[counts > 0], counts[counts > 0]
        if not len(places):
            return None
        hidden_RE = self._run(rows[places], start[places], counts)
        self._note_computed(rows[places], start[places] + counts)
        is_ready = (num_wanted[places] > 0) & (start[places] + counts == stop[places])
        if not is_ready.any():
            return None
        ready = places[is_ready]

        def go_on(_: BoolArray, rows: Int64Array, positions: Int64Array) -> torch.Tensor:
            hidden_RE = self._run(rows, positions, np.ones_like(positions))
            self._num_computed[rows] = positions + 1
            return self._logits(hidden_RE)

        logits_RV = self._logits(hidden_RE[self._cache.sent(is_ready)])
        drafts = self.sampling.sample(rows[ready], num_wanted[ready], logits_RV, go_on)
        return DraftTokenIds([batch.req_ids[place] for place in ready.tolist()], drafts)

    def _run(
        self, rows: Int64Array, start: Int64Array, counts: npt.NDArray[np.int64]
    ) -> torch.Tensor:
        """Compute these rows' tokens from `start` on. Returns the hidden state of each one's last
        token, in the order of the rows."""
        inputs = gather_step_inputs(
            self.batch,
            rows=rows,
            num_computed=start.astype(np.int32),
            num_scheduled=counts.astype(np.int32),
            decodes_first=self._ops.needs_decodes_first,
            order=None if self._adapters is None else self._adapters.order(rows),
        )
        if self._adapters is not None:  # of layers that are the model's own, too
            self._adapters.of_rows(inputs.rows_R, inputs.num_scheduled_R).begin()
        hidden_TE = self.model.forward(
            self._cache.sent(inputs.token_ids_T),
            self._cache.sent(inputs.positions_T),
            inputs.context_in(self._cache),
        )
        last_R = np.empty(len(rows), np.int64)
        last_R[inputs.place_R] = inputs.query_start_R1[1:] - 1
        return hidden_TE[self._cache.sent(last_R)]

    def _logits(self, hidden_RE: torch.Tensor) -> torch.Tensor:
        return self.model.compute_logits(hidden_RE).float()

    def compute_nothing(self, counts: list[int]) -> None:
        counts = counts[: len(self.batch.num_tokens)]
        start = np.zeros(len(counts), np.int64)
        self._logits(self._run(np.arange(len(counts)), start, np.array(counts, np.int64)))

    def _note_computed(self, rows: Int64Array, num_computed: Int64Array) -> None:
        """Tokens that are the sequences' own."""
        self._num_computed[rows] = num_computed
        table, filled, size = (
            self.batch.block_tables[self._group],
            self._num_filled,
            self._block_size,
        )
        num_full, num_behind = np.divmod(num_computed, size)
        is_partial = num_behind > 0
        filled[table[rows[is_partial], num_full[is_partial]]] = num_behind[is_partial]
        for place in np.flatnonzero(num_full > self._num_marked[rows]).tolist():
            row, stop = rows[place], num_full[place]
            filled[table[row, self._num_marked[row] : stop]] = size
            self._num_marked[row] = stop
