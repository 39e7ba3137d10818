"""Requests on the model's side: one row each, kept from step to step.

Flat arrays, indexed by row; a step writes only what changed. Owns tokens and block tables of the
running requests. Must not know sampling or the model.
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
        max_num_rows: most requests running at once.
        max_model_len: most tokens of a request.
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
    num_computed: Int64Array = dataclasses.field(init=False)
    """[row]: tokens whose keys and values are in the cache before the step at hand."""
    block_tables: list[Int32Array] = dataclasses.field(init=False)
    """per group [row, logical block] -> physical block."""
    num_blocks: Int64Array = dataclasses.field(init=False)
    """[group, row]: filled length of the block table."""
    row_of: dict[str, int] = dataclasses.field(init=False, default_factory=dict)
    _free_rows: list[int] = dataclasses.field(init=False)

    def __post_init__(self) -> None:
        rows = self.max_num_rows
        width = -(-self.max_model_len // self.block_size)
        self.token_ids = np.zeros((rows, self.max_model_len), np.int32)
        self.num_tokens = np.zeros(rows, np.int64)
        self.num_computed = np.zeros(rows, np.int64)
        self.block_tables = [np.zeros((rows, width), np.int32) for _ in range(self.num_groups)]
        self.num_blocks = np.zeros((self.num_groups, rows), np.int64)
        self._free_rows = list(range(rows - 1, -1, -1))

    def add(
        self,
        request_id: str,
        token_ids: Sequence[int],
        block_ids: Sequence[Sequence[int]],
        num_computed: int,
    ) -> int:
        """Give a request a row. Returns the row."""
        row = self._free_rows.pop()
        self.row_of[request_id] = row
        self.token_ids[row, : len(token_ids)] = token_ids
        self.num_tokens[row] = len(token_ids)
        self.num_computed[row] = num_computed
        self.num_blocks[:, row] = 0
        self.append_blocks(row, block_ids)
        return row

    def append_blocks(self, row: int, block_ids: Sequence[Sequence[int]]) -> None:
        """New blocks behind the row's tables, one list a group."""
        for group, new in enumerate(block_ids):
            start = int(self.num_blocks[group, row])
            self.block_tables[group][row, start : start + len(new)] = new
            self.num_blocks[group, row] = start + len(new)

    def append_token(self, row: int, token_id: int) -> None:
        """A sampled token. The scheduler ends requests at max_model_len, so there is room."""
        position = int(self.num_tokens[row])
        self.token_ids[row, position] = token_id
        self.num_tokens[row] = position + 1

    def remove(self, request_id: str) -> int | None:
        """Free a request's row. Returns it, or None if the request has none."""
        row = self.row_of.pop(request_id, None)
        if row is not None:
            self._free_rows.append(row)
        return row

    def check(self) -> None:
        """Assert that every row is either free or one request's."""
        rows = [*self.row_of.values(), *self._free_rows]
        assert sorted(rows) == list(range(self.max_num_rows))
