"""The tokens of a sequence, and how far they are computed: in its row of the batch state while it
runs, here before and after."""

import dataclasses
from array import array
from collections.abc import Sequence

import numpy as np

from engine_core.scheduler.batch_state import BatchState, Int32Array

_MAX_TOKEN_ID = 2**31 - 1


@dataclasses.dataclass(slots=True, eq=False, repr=False)
class TokenStream:
    """
    |---- prompt ----|---- output ----|-- drafts --|
    0 .. num_computed .. num_tokens ..  num_tokens_with_spec
    """

    prompt: "array[int]" = dataclasses.field(init=False)
    """The request's own. Not to be changed."""
    row: int | None = dataclasses.field(init=False, default=None)
    _batch: BatchState | None = dataclasses.field(init=False, default=None)
    _output: "array[int]" = dataclasses.field(init=False, default_factory=lambda: array("i"))
    _num_computed: int = dataclasses.field(init=False, default=0)

    # ------------------------------------------------------------------ numbers

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.prompt)

    @property
    def num_tokens(self) -> int:
        """Number of prompt and output tokens."""
        if self._batch is None:
            return len(self.prompt) + len(self._output)
        return int(self._batch.num_tokens[self.row])

    @property
    def num_output_tokens(self) -> int:
        return self.num_tokens - len(self.prompt)

    @property
    def num_computed_tokens(self) -> int:
        """Number of computed tokens; scheduled ones count."""
        if self._batch is None:
            return self._num_computed
        return int(self._batch.num_computed_tokens[self.row])

    @num_computed_tokens.setter
    def num_computed_tokens(self, value: int) -> None:
        if self._batch is None:
            self._num_computed = value
        else:
            self._batch.num_computed_tokens[self.row] = value

    @property
    def is_prefill(self) -> bool:
        """Whether tokens other than the last sampled one are to be computed."""
        num_computed = self.num_computed_tokens
        return num_computed < len(self.prompt) or self.num_tokens - num_computed > 1

    # ------------------------------------------------------------------ tokens

    @property
    def output_token_ids(self) -> list[int]:
        """A copy of the output tokens."""
        return self.output_from(0)

    @property
    def all_token_ids(self) -> list[int]:
        """A copy of prompt and output tokens."""
        return self.prompt.tolist() + self.output_token_ids

    @property
    def last_token_id(self) -> int:
        if self._batch is None:
            return self._output[-1] if self._output else self.prompt[-1]
        return int(self._batch.token_ids[self.row, self.num_tokens - 1])

    def known_tokens(self) -> Int32Array:
        """Prompt and output. Not to be changed."""
        if self._batch is None:
            return np.array(self.all_token_ids, np.int32)
        known: Int32Array = self._batch.token_ids[self.row, : self.num_tokens]
        return known

    def token_bytes(self, start: int, stop: int) -> bytes:
        """Tokens [start, stop) as int32, little-endian."""
        if self._batch is not None:
            tokens: np.ndarray = self._batch.token_ids[self.row, start:stop]
            return tokens.tobytes()
        prompt, num_prompt = self.prompt, len(self.prompt)
        if stop <= num_prompt:
            return memoryview(prompt)[start:stop].tobytes()
        tail = self._output[max(0, start - num_prompt) : stop - num_prompt].tobytes()
        return memoryview(prompt)[start:num_prompt].tobytes() + tail

    def output_from(self, start: int) -> list[int]:
        """Output tokens from this one on."""
        if self._batch is None:
            return self._output[start:].tolist()
        batch, row = self._batch, self.row
        first = len(self.prompt) + start
        return batch.token_ids[row, first : batch.num_tokens[row]].tolist()  # type: ignore[no-any-return]

    def append_output_token(self, token_id: int) -> None:
        if self._batch is None:
            self._output.append(token_id)
        else:
            batch, row = self._batch, self.row
            batch.token_ids[row, batch.num_tokens[row]] = token_id
            batch.num_tokens[row] += 1

    def set_output(self, token_ids: Sequence[int]) -> None:
        """All of the output, of a sequence without a row."""
        assert self._batch is None
        self._output = array("i", token_ids)

    def drop_placeholders(self) -> None:
        """Drop what steps in flight sample for it: its last token is to be computed again if the
        sequence goes on."""
        if self._batch is not None and self._batch.num_steps_in_flight:
            self.num_computed_tokens = min(self.num_computed_tokens, self.num_tokens - 1)

    # ------------------------------------------------------------------ rows

    def _move_to_row(self, batch: BatchState, row: int) -> None:
        num_tokens, num_prompt = self.num_tokens, len(self.prompt)
        batch.token_ids[row, :num_prompt] = self.prompt
        if self._output:
            batch.token_ids[row, num_prompt:num_tokens] = self._output
        batch.num_tokens[row] = num_tokens
        batch.num_prompt_tokens[row] = num_prompt
        batch.num_computed_tokens[row] = self._num_computed
        self.row, self._batch = row, batch

    def _move_out_of_row(self) -> None:
        self._output = array("i", self.token_bytes(len(self.prompt), self.num_tokens))
        self._num_computed = self.num_computed_tokens
        self.row = self._batch = None


def checked_ids(name: str, token_ids: Sequence[int]) -> "array[int]":
    """Token ids as a flat array of 4 bytes each.
    Raises ValueError: an id below 0 or above 2**31 - 1, or no whole number."""
    try:
        flat = array("I", token_ids)  # faster than "i", and the bytes are the same
        # numpy begins later and goes faster
        most = np.frombuffer(flat, np.uint32).max() if len(flat) > 1024 else max(flat, default=0)
        is_valid = bool(most <= _MAX_TOKEN_ID)
    except OverflowError:
        is_valid = False
    except TypeError as error:
        raise ValueError(f"{name} holds something that is not a token id: {error}") from error
    if not is_valid:
        raise ValueError(
            f"{name} holds ids from {min(token_ids)} to {max(token_ids)}, they must be from 0 to "
            f"{_MAX_TOKEN_ID}; use the model's own tokenizer"
        )
    return flat
