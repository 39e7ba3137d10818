"""Log-probabilities as users read them, from the wire's columns."""

import abc
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, repeat
from typing import TYPE_CHECKING, Self, TypeVar, overload

import msgspec

from protocol.outputs import EngineCoreOutput, Logprobs
from protocol.requests import EngineRequest
from protocol.sampling import SamplingParams

if TYPE_CHECKING:
    from frontend.text.tokenizer import Tokenizer


@dataclass(slots=True)
class Logprob:
    """One token's log-probability. Rank 1 is the likeliest token of the vocabulary."""

    logprob: float
    rank: int | None = None
    decoded_token: str | None = None


Entry = TypeVar("Entry")


class LogprobEntries(Sequence[Entry]):
    """Dictionaries that are made when they are looked at: the columns take 8 bytes a
    log-probability, dictionaries 200."""

    @abc.abstractmethod
    def _entry(self, place: int) -> Entry: ...

    @property
    @abc.abstractmethod
    def num_entries(self) -> int:
        """Log-probabilities, of all tokens together."""

    @overload
    def __getitem__(self, index: int) -> Entry: ...

    @overload
    def __getitem__(self, index: slice) -> list[Entry]: ...

    def __getitem__(self, index: int | slice) -> Entry | list[Entry]:
        places = range(len(self))[index]
        if isinstance(places, int):
            return self._entry(places)
        return [self._entry(place) for place in places]

    def __iter__(self) -> Iterator[Entry]:
        return map(self._entry, range(len(self)))

    def __eq__(self, other: object) -> bool:
        return list(self) == list(other) if isinstance(other, Sequence) else NotImplemented

    __hash__ = object.__hash__

    def __repr__(self) -> str:
        return repr(list(self))

    def __reduce__(self) -> tuple[type[list[Entry]], tuple[list[Entry]]]:
        """Copied, or sent to another process, it is a list, which needs no tokenizer."""
        return list, (list(self),)


class PromptLogprobs(LogprobEntries[dict[int, Logprob] | None]):
    """One entry a token of a prompt, as vLLM's list: None for the first, then a dictionary each, of
    the token itself and the likeliest in falling order."""

    def __init__(self, columns: Logprobs | None, tokenizer: "Tokenizer | None") -> None:
        self._columns = columns
        self._tokenizer = tokenizer

    @property
    def num_entries(self) -> int:
        return 0 if self._columns is None else self._columns.num_positions * self._columns.width

    def __len__(self) -> int:
        return 1 + (0 if self._columns is None else self._columns.num_positions)

    def _entry(self, place: int) -> dict[int, Logprob] | None:
        if self._columns is None or place == 0:
            return None
        return logprobs_of(self._columns.part(place - 1, place), self._tokenizer)[0]


class PromptReport:
    """A request's PromptLogprobs, from the engine's outputs until its first token."""

    def __init__(self, tokenizer: "Tokenizer | None") -> None:
        self._tokenizer = tokenizer
        self._columns: list[Logprobs] = []
        self._whole: PromptLogprobs | None = None
        self._is_taken = False

    @classmethod
    def of(cls, request: EngineRequest, tokenizer: "Tokenizer | None") -> Self | None:
        """None: the request does not ask for any."""
        return None if request.sampling_params.prompt_logprobs is None else cls(tokenizer)

    def append(self, output: EngineCoreOutput) -> None:
        if output.prompt_logprobs is not None:
            self._columns.append(output.prompt_logprobs)

    def complete(self) -> None:
        """The first token has come: no more of them will."""
        self._whole = PromptLogprobs(Logprobs.joined(self._columns), self._tokenizer)

    def asked_again(self, params: SamplingParams) -> SamplingParams:
        """What the request is sent with: it asks for none once it has all, else again for all."""
        self._columns.clear()
        if self._whole is None:
            return params
        return msgspec.structs.replace(params, prompt_logprobs=None)

    def take(self, *, delta: bool) -> PromptLogprobs | None:
        """None before the first token, and in all outputs of deltas but one."""
        if self._whole is None or (delta and self._is_taken):
            return None
        self._is_taken = True
        return self._whole


class SampleLogprobs(LogprobEntries[dict[int, Logprob]]):
    """A dictionary a sampled token, of the token itself and what was asked for.

    Args:
        columns: of one token each.
        has_ranks: see `logprobs_of`.
    """

    def __init__(
        self, columns: Sequence[Logprobs], tokenizer: "Tokenizer | None", *, has_ranks: bool
    ) -> None:
        self._columns = columns
        self._tokenizer = tokenizer
        self._has_ranks = has_ranks

    @property
    def num_entries(self) -> int:
        return sum(each.width for each in self._columns)

    def __len__(self) -> int:
        return len(self._columns)

    def _entry(self, place: int) -> dict[int, Logprob]:
        columns = self._columns[place]
        return logprobs_of(columns, self._tokenizer, has_ranks=self._has_ranks)[0]


def logprobs_of(
    columns: Logprobs, tokenizer: "Tokenizer | None", *, has_ranks: bool = True
) -> list[dict[int, Logprob]]:
    """One dictionary a position from the wire's columns: the token itself first, then the others.
    `has_ranks`: those are the likeliest, in falling order."""
    size = columns.num_positions * columns.width
    token_ids = struct.unpack(f"<{size}i", columns.token_ids)
    values = struct.unpack(f"<{size}f", columns.logprobs)
    entries: list[dict[int, Logprob]] = []
    for position in range(columns.num_positions):
        start, stop = position * columns.width, (position + 1) * columns.width
        others = range(1, columns.width) if has_ranks else repeat(None, columns.width - 1)
        ranks = chain((columns.ranks[position],), others)
        entry: dict[int, Logprob] = {}
        for token_id, value, rank in zip(
            token_ids[start:stop], values[start:stop], ranks, strict=True
        ):
            if token_id not in entry:  # it may be among the others as well
                text = None if tokenizer is None else tokenizer.pieces.text(token_id)
                entry[token_id] = Logprob(value, rank, text)
        entries.append(entry)
    return entries
