"""One stream of tokens of a request: what has been sampled, and how far it has been computed.

Must not know queues, blocks or clients. While the sequence runs, its numbers and tokens live in its
row (`BatchState`); before, between and after they live here. In tokens:

    |---- prompt ----|---- output ----|-- drafts --|
    0 .. num_computed .. num_tokens ..  num_tokens_with_spec
"""

from array import array
from math import nan
from typing import TYPE_CHECKING

import numpy as np

from engine_core.scheduler.batch_state import BatchState
from engine_core.scheduler.request_status import RequestStatus

if TYPE_CHECKING:
    from engine_core.scheduler.request import Request


class Sequence:
    """
    Args:
        request: whose stream; the prompt is the request's.
        index: which of the request's sequences, from 0.
        serial: tells apart the sequences that had the same index in turn (beams).
    """

    __slots__ = (
        "_drafts",
        "_num_computed",
        "_output",
        "_rows",
        "block_hashes",
        "first_token_s",
        "has_runner_row",
        "index",
        "is_known_to_runner",
        "request",
        "row",
        "sequence_id",
        "status",
        "stop_reason",
    )

    def __init__(self, request: "Request", index: int = 0, serial: int = 0) -> None:
        self.request = request
        self.index = index
        name = request.request_id
        self.sequence_id = name if not serial else f"{name}#{serial}"
        self.status = RequestStatus.WAITING
        """Its request's, until it finishes before it."""
        self.stop_reason: int | None = None
        self._drafts: list[int] = []
        self.block_hashes: list[bytes] = []
        self.first_token_s = nan
        """When its first output token was there, on the scheduler's clock."""
        self.is_known_to_runner = False
        """Whether the runner has been told of it at all."""
        self.has_runner_row = False
        """Whether the runner has just these tokens in its row."""
        self.row: int | None = None
        self._rows: BatchState | None = None
        self._output = array("i")
        self._num_computed = 0

    # ------------------------------------------------------------------ numbers

    @property
    def num_prompt_tokens(self) -> int:
        return self.request.num_prompt_tokens

    @property
    def num_tokens(self) -> int:
        """Prompt and output."""
        if self._rows is None:
            return self.request.num_prompt_tokens + len(self._output)
        return int(self._rows.num_tokens[self.row])

    @property
    def num_output_tokens(self) -> int:
        return self.num_tokens - self.request.num_prompt_tokens

    @property
    def num_computed_tokens(self) -> int:
        """Scheduled tokens count: a step that is planned is going to run."""
        if self._rows is None:
            return self._num_computed
        return int(self._rows.num_computed[self.row])

    @num_computed_tokens.setter
    def num_computed_tokens(self, value: int) -> None:
        if self._rows is None:
            self._num_computed = value
        else:
            self._rows.num_computed[self.row] = value

    @property
    def num_left(self) -> int:
        """Tokens to be computed, what open steps sample among them. Of one in a row."""
        assert self._rows is not None
        rows, row = self._rows, self.row
        return int(rows.num_tokens[row] + rows.num_ahead[row] - rows.num_computed[row])

    @property
    def is_ahead(self) -> bool:
        """Whether the token to be computed next is not known: an open step samples it."""
        return self._rows is not None and bool(self._rows.num_ahead[self.row])

    @property
    def is_prefill(self) -> bool:
        """Whether tokens are to be computed that were not sampled last."""
        num_computed = self.num_computed_tokens
        return num_computed < self.num_prompt_tokens or self.num_tokens - num_computed > 1

    @property
    def cache_salt(self) -> str | None:
        return self.request.cache_salt

    @property
    def adapter(self) -> str | None:
        return self.request.adapter

    # ------------------------------------------------------------------ tokens

    @property
    def output_token_ids(self) -> list[int]:
        """A copy."""
        if self._rows is None:
            return self._output.tolist()
        start, stop = self.request.num_prompt_tokens, self.num_tokens
        output: list[int] = self._rows.token_ids[self.row, start:stop].tolist()
        return output

    @property
    def all_token_ids(self) -> list[int]:
        """Prompt and output, a copy."""
        return self.request.prompt.tolist() + self.output_token_ids

    @property
    def last_token_id(self) -> int:
        if self._rows is None:
            return self._output[-1] if self._output else self.request.prompt[-1]
        return int(self._rows.token_ids[self.row, self.num_tokens - 1])

    def token_bytes(self, start: int, stop: int) -> bytes:
        """Tokens [start, stop) as int32, little-endian."""
        if self._rows is not None:
            row: np.ndarray = self._rows.token_ids[self.row, start:stop]
            return row.tobytes()
        prompt, num_prompt = self.request.prompt, self.request.num_prompt_tokens
        if stop <= num_prompt:
            return memoryview(prompt)[start:stop].tobytes()
        tail = self._output[max(0, start - num_prompt) : stop - num_prompt].tobytes()
        return memoryview(prompt)[start:num_prompt].tobytes() + tail

    def append_output_token(self, token_id: int) -> None:
        """A sampled token."""
        if self._rows is None:
            self._output.append(token_id)
        else:
            rows, row = self._rows, self.row
            rows.token_ids[row, rows.num_tokens[row]] = token_id
            rows.num_tokens[row] += 1

    def drop_tokens_in_flight(self) -> None:
        """What open steps sample for it is not taken: its last token is to be computed again if
        the sequence goes on, and what a step computes behind it counts as never computed."""
        if self._rows is not None and self._rows.num_open_steps:
            self.num_computed_tokens = min(self.num_computed_tokens, self.num_tokens - 1)

    def set_output(self, token_ids: list[int]) -> None:
        """All of the output, of a sequence without a row."""
        assert self._rows is None
        self._output = array("i", token_ids)

    @property
    def spec_token_ids(self) -> list[int]:
        """Drafts to verify in the next step."""
        return self._drafts

    @spec_token_ids.setter
    def spec_token_ids(self, drafts: list[int]) -> None:
        self._drafts = drafts
        if self._rows is not None and self.row is not None:
            (self._rows.drafted.add if drafts else self._rows.drafted.discard)(self.row)

    # ------------------------------------------------------------------ rows

    def enter_row(self, rows: BatchState, row: int) -> None:
        """From here on its numbers live in that row, which is this sequence's already."""
        assert rows.sequences[row] is self
        num_tokens, num_prompt = self.num_tokens, self.request.num_prompt_tokens
        rows.token_ids[row, :num_prompt] = self.request.prompt
        if self._output:
            rows.token_ids[row, num_prompt:num_tokens] = self._output
        rows.num_tokens[row] = num_tokens
        rows.num_prompt[row] = num_prompt
        rows.num_computed[row] = self._num_computed
        rows.num_allocated_slots[row] = 0
        rows.num_ahead[row] = 0
        rows.is_blocked[row] = False
        rows.index[row] = self.index
        self.row = row
        self._rows = rows

    def leave_row(self) -> int:
        """Take tokens and numbers out of the row. Returns it; to give it back is the caller's."""
        row = self.row
        assert row is not None
        self.has_runner_row = False
        self.spec_token_ids = []
        self._output = array("i", self.token_bytes(self.num_prompt_tokens, self.num_tokens))
        self._num_computed = self.num_computed_tokens
        self._rows = None
        self.row = None
        return row

    def __repr__(self) -> str:
        return (
            f"Sequence({self.sequence_id!r}, {self.status.name}, "
            f"computed {self.num_computed_tokens} of {self.num_tokens})"
        )
