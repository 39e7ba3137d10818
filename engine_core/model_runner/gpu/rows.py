"""The rows of the device as the host must know them, and what a plan changes in them.

Owns which sequence has which row, how many tokens each has, and what its sampling needs. Tokens are
counted when the step that chooses them is launched: the host knows how many there are before it
knows which. Must not know how changes travel, steps, or the model.
"""

from __future__ import annotations

import dataclasses
import secrets
from collections.abc import Sequence

import msgspec
import numpy as np
import numpy.typing as npt

from engine_core.kv_cache import BlockIds
from engine_core.model_runner.gpu.packed_sampling_params import (
    PackedSamplingParams,
    encode_sampling,
)
from engine_core.scheduler import SchedulerOutput
from kernels.interface.sampling_rows import TokenList
from kernels.interface.step_inputs import TOKEN_TABLE, RowUpdate
from protocol.sampling import SamplingParams

Int64Array = npt.NDArray[np.int64]


@dataclasses.dataclass(frozen=True, slots=True)
class History:
    """A row whose penalties must learn of its tokens: [0, num_prompt) and [num_prompt, num_tokens)
    of the row, as they are once the updates are carried out."""

    row: int
    num_prompt_tokens: int
    num_tokens: int


@dataclasses.dataclass(slots=True)
class RowChanges:
    """What the device must be told before a step."""

    rows: list[RowUpdate] = dataclasses.field(default_factory=list)
    """Of tokens and block tables; no two write one cell."""
    sampling: list[RowUpdate] = dataclasses.field(default_factory=list)
    """Of sampling states (as the table of tokens) and lists; likewise."""
    histories: list[History] = dataclasses.field(default_factory=list)


@dataclasses.dataclass(frozen=True, slots=True)
class _Known:
    """What is kept of a sequence while it holds no row."""

    sampling_params: SamplingParams
    num_prompt_tokens: int


class HostRows:
    """
    Args:
        max_num_rows: most sequences running at once.
        vocab_size: of the model.
        num_groups: KV-cache groups, each with a block table of its own.
        eos_token_ids: what min_tokens holds back beside a request's own stop tokens.
    """

    def __init__(
        self,
        *,
        max_num_rows: int,
        vocab_size: int,
        num_groups: int,
        eos_token_ids: tuple[int, ...],
    ) -> None:
        self.num_groups = num_groups
        self.row_of: dict[str, int] = {}
        self.num_tokens: Int64Array = np.zeros(max_num_rows, np.int64)
        """Tokens of each row, those in flight included."""
        self.is_truncated: npt.NDArray[np.bool_] = np.zeros(max_num_rows, np.bool_)
        self.needs_full: npt.NDArray[np.bool_] = np.zeros(max_num_rows, np.bool_)
        self.held_back_until: Int64Array = np.zeros(max_num_rows, np.int64)
        self.num_logprobs: Int64Array = np.full(max_num_rows, -1, np.int64)
        self.refusals: dict[int, str] = {}
        self._name_of: list[str | None] = [None] * max_num_rows
        self._known: dict[str, _Known] = {}
        self._vocab_size = vocab_size
        self._eos_token_ids = eos_token_ids

    def take_in(self, plan: SchedulerOutput) -> RowChanges:
        """Do on the host what the plan says of its rows; the device is to do the rest."""
        for request_id in plan.finished_req_ids:
            self._drop(request_id)
            self._known.pop(request_id, None)
        for request_id in plan.preempted_req_ids:
            self._drop(request_id)
        changes = RowChanges()
        for new in plan.scheduled_new_reqs:
            known = _Known(_seeded(new.sampling_params), len(new.prompt_token_ids))
            self._known[new.req_id] = known
            tokens = [*new.prompt_token_ids, *new.output_token_ids]
            self._place(new.req_id, new.row, tokens, new.block_ids, changes)
        for again in plan.resumed_reqs:
            self._place(again.req_id, again.row, again.token_ids, again.block_ids, changes)
        for update in plan.block_updates:
            changes.rows += _table_updates(update.row, update.start, update.block_ids)
        changes.rows = _without_overlap(changes.rows)
        return changes

    def append(self, rows: Int64Array) -> None:
        """A token that is being chosen for each of these rows, none twice."""
        self.num_tokens[rows] += 1

    def check(self) -> None:
        """Assert that every taken row is one sequence's."""
        taken = {name: row for row, name in enumerate(self._name_of) if name is not None}
        assert taken == self.row_of
        assert self.row_of.keys() <= self._known.keys()

    def _drop(self, request_id: str) -> None:
        row = self.row_of.pop(request_id, None)
        if row is not None:
            self._name_of[row] = None
            self.refusals.pop(row, None)

    def _place(
        self,
        request_id: str,
        row: int,
        token_ids: Sequence[int],
        block_ids: BlockIds,
        changes: RowChanges,
    ) -> None:
        assert self._name_of[row] in (None, request_id), "two sequences in one row"
        assert self.row_of.get(request_id, row) == row, "one sequence in two rows"
        self.row_of[request_id] = row
        self._name_of[row] = request_id
        self.num_tokens[row] = len(token_ids)
        known = self._known[request_id]
        words = encode_sampling(
            known.sampling_params,
            num_prompt_tokens=known.num_prompt_tokens,
            eos_token_ids=self._eos_token_ids,
            vocab_size=self._vocab_size,
        )
        self.is_truncated[row] = words.is_truncated
        self.needs_full[row] = words.needs_full
        self.held_back_until[row] = words.held_back_until
        self.num_logprobs[row] = words.num_logprobs
        self.refusals.pop(row, None)
        if words.refusal is not None:
            self.refusals[row] = words.refusal
        changes.rows.append(RowUpdate(TOKEN_TABLE, row, 0, token_ids))
        changes.rows += _table_updates(row, 0, block_ids)
        changes.sampling += _sampling_updates(row, words)
        if words.has_penalties:
            changes.histories.append(History(row, known.num_prompt_tokens, len(token_ids)))


def _table_updates(row: int, start: int, block_ids: BlockIds) -> list[RowUpdate]:
    return [RowUpdate(group, row, start, ids) for group, ids in enumerate(block_ids) if ids]


def _sampling_updates(row: int, words: PackedSamplingParams) -> list[RowUpdate]:
    lists = (
        (TOKEN_TABLE, words.state),
        (TokenList.HELD_BACK, words.held_back_ids),
        (TokenList.BIAS_IDS, words.bias_ids),
        (TokenList.BIAS_VALUES, words.bias_values),
    )
    return [RowUpdate(table, row, 0, ids) for table, ids in lists if len(ids)]


def _without_overlap(updates: list[RowUpdate]) -> list[RowUpdate]:
    """The same cells with their last ids, each written once; order no longer matters."""
    by_row: dict[tuple[int, int], list[RowUpdate]] = {}
    for update in updates:
        if len(update.ids):
            by_row.setdefault((update.table, update.row), []).append(update)
    result = []
    for (table, row), mine in by_row.items():
        if len(mine) == 1:
            result += mine
            continue
        cells: dict[int, int] = {}
        for update in mine:
            cells |= {update.start + offset: int(id_) for offset, id_ in enumerate(update.ids)}
        columns = np.array(sorted(cells))
        for run in np.split(columns, np.flatnonzero(np.diff(columns) != 1) + 1):
            ids = [cells[column] for column in run.tolist()]
            result.append(RowUpdate(table, row, int(run[0]), ids))
    return result


def _seeded(params: SamplingParams) -> SamplingParams:
    """Draw the seed of a sequence that brought none: once, so that a preemption changes nothing."""
    if params.is_greedy or params.seed is not None:
        return params
    return msgspec.structs.replace(params, seed=secrets.randbits(64))
