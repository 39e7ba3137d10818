"""Sequences on the model's side: one row each, kept from step to step.

Flat arrays, indexed by row; a step writes only what changed. Which row a sequence has is the
scheduler's choice and stands in the plan. Owns tokens and block tables of the running sequences.
Must not know sampling or the model.
"""

import dataclasses
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

Int32Array = npt.NDArray[np.int32]
Int64Array = npt.NDArray[np.int64]


@dataclasses.dataclass(slots=True)
class PersistentBatch:
    """
    Args:
        max_num_rows: most sequences running at once.
        max_model_len: most tokens of a sequence.
        block_size: tokens a KV block.
        num_groups: KV-cache groups, each with a block table of its own.
    """

    max_num_rows: int
    max_model_len: int
    block_size: int
    num_groups: int
    token_ids: Int32Array = dataclasses.field(init=False)
    """[row, position]: prompt, then output."""
    num_tokens: Int64Array = dataclasses.field(init=False)
    """[row]: tokens known."""
    block_tables: list[Int32Array] = dataclasses.field(init=False)
    """per group [row, logical block] -> physical block. Behind what a plan wrote stands what an
    earlier sequence left: an id in range, which nothing reads."""
    row_of: dict[str, int] = dataclasses.field(init=False, default_factory=dict)
    """For the names of those that go; a step reads the plan's rows."""
    _name_of: list[str | None] = dataclasses.field(init=False)

    def __post_init__(self) -> None:
        rows = self.max_num_rows
        width = -(-self.max_model_len // self.block_size)
        self.token_ids = np.zeros((rows, self.max_model_len), np.int32)
        self.num_tokens = np.zeros(rows, np.int64)
        self._name_of = [None] * rows
        self.block_tables = [np.zeros((rows, width), np.int32) for _ in range(self.num_groups)]

    def place(
        self,
        request_id: str,
        row: int,
        token_ids: Sequence[int],
        block_ids: Sequence[Sequence[int]],
    ) -> None:
        """A sequence takes a row that is free or its own; what stood there is replaced."""
        assert self._name_of[row] in (None, request_id), "two sequences in one row"
        assert self.row_of.get(request_id, row) == row, "one sequence in two rows"
        self.row_of[request_id] = row
        self._name_of[row] = request_id
        self.token_ids[row, : len(token_ids)] = token_ids
        self.num_tokens[row] = len(token_ids)
        self.write_blocks(row, 0, block_ids)

    def write_blocks(self, row: int, start: int, block_ids: Sequence[Sequence[int]]) -> None:
        """Put ids into the row's tables from logical block `start` on, one list a group.

        Blocks behind max_model_len (lookahead) are not kept: no token is ever there.
        """
        for table, written in zip(self.block_tables, block_ids, strict=True):
            stop = min(start + len(written), table.shape[1])
            table[row, start:stop] = written[: max(0, stop - start)]

    def append_tokens(self, rows: Int64Array, token_ids: Int64Array) -> None:
        """One sampled token for each of these rows, none twice. The scheduler ends requests at
        max_model_len, so there is room."""
        positions = self.num_tokens[rows]
        self.token_ids[rows, positions] = token_ids
        self.num_tokens[rows] = positions + 1

    def remove(self, request_id: str) -> int | None:
        """Forget whose row it was. Returns the row, or None if the sequence has none."""
        row = self.row_of.pop(request_id, None)
        if row is not None:
            self._name_of[row] = None
        return row

    def check(self) -> None:
        """Assert that every taken row is one sequence's."""
        taken = {name: row for row, name in enumerate(self._name_of) if name is not None}
        assert taken == self.row_of
