"""Masks of a step's constrained sequences, filled on a thread while the step is computed. A
matcher follows its sequence's tokens when a mask is asked for, so whatever happens to a sequence
between (preemption, a fault, a fork, a resumption) needs no care here."""

import dataclasses
import os
import queue
import threading
from collections.abc import Iterable, Iterator
from collections.abc import Sequence as AnySequence
from typing import TYPE_CHECKING

import numpy as np

from engine_core.scheduler.constraints import ConstrainedSequence, ForcedTokens, KnownTokens
from engine_core.scheduler.plan import MaskRows
from engine_core.structured_output.wide_stack import start_thread

if TYPE_CHECKING:
    from llguidance import LLExecutor, LLMatcher

_EVERY_TOKEN = -1


@dataclasses.dataclass(slots=True)
class _SequenceMatcher:
    """`matcher` is the thread's from `begin` until the masks are done, then the loop's. It will
    have seen `num_tokens` output tokens by then."""

    grammar: "LLMatcher"
    matcher: "LLMatcher | None" = None
    num_tokens: int = 0
    masks: "StepMasks | None" = None
    """The last that were asked for."""


@dataclasses.dataclass(slots=True)
class _Row:
    first: int
    """The first of its rows of the mask."""
    state: _SequenceMatcher
    new_tokens: list[int]
    """Tokens that the matcher has not seen."""
    of: ConstrainedSequence


class StepMasks:
    """See `TokenMasks`."""

    def __init__(
        self, place_M: Iterable[int], offset_M: Iterable[int], rows: list[_Row], num_words: int
    ) -> None:
        place, offset = np.array(place_M, np.int64), np.array(offset_M, np.int64)
        bits = np.empty((len(place), num_words), np.int32)
        if len(place) > len(rows):  # nothing is filled behind a draft that is forbidden
            bits.fill(_EVERY_TOKEN)
        self._rows = MaskRows(place, offset, bits)
        self._asked = rows
        self._failures: dict[str, str] = {}
        self._refused: set[str] = set()
        self._is_done = threading.Event()

    def wait(self) -> MaskRows:
        self._is_done.wait()
        return self._rows

    @property
    def is_done(self) -> bool:
        return self._is_done.is_set()

    def failures(self) -> dict[str, str]:
        return self._failures

    def refused(self) -> set[str]:
        return self._refused

    def fill(self, executor: "LLExecutor") -> None:
        """Fill the mask, on the thread; never raises."""
        from engine_core.structured_output.grammars import reason_of

        try:
            plain, drafted = [], []
            for row in self._asked:
                state = row.state
                if state.matcher is None:
                    state.matcher = state.grammar.deep_copy()
                if row.new_tokens and not state.matcher.consume_tokens(row.new_tokens):
                    continue
                if row.of.drafts:
                    drafted.append((state.matcher, row.first, [*row.of.drafts]))
                else:
                    plain.append((state.matcher, row.first))
            bits = self._rows.bits_MW
            at, width = bits.ctypes.data, bits.shape[1] * bits.itemsize
            if plain:
                executor.unsafe_compute_mask_ptr(plain, at, width, len(bits))
            if drafted:
                executor.unsafe_compute_mask_ptr_with_draft_token(drafted, at, width, len(bits))
            for row in self._asked:
                matcher = row.state.matcher
                if matcher is not None and matcher.is_error():
                    self._fail(row, reason_of(matcher.get_error())[0])
                    self._refused.add(row.of.sequence.sequence_id)
        except BaseException as error:
            for row in self._asked:
                self._fail(row, f"{type(error).__name__}: {error}")
        finally:
            self._is_done.set()

    def _fail(self, row: _Row, why: str) -> None:
        name = row.of.sequence.sequence_id
        self._rows.bits_MW[row.first] = _EVERY_TOKEN
        self._failures[name] = f"structured_outputs cannot go on: {why}"


class MaskFiller:
    """`vocab_size`: of a row of logits."""

    def __init__(self, vocab_size: int) -> None:
        self._num_words = -(-vocab_size // 32)
        self._states: dict[str, _SequenceMatcher] = {}
        self._jobs: queue.SimpleQueue[StepMasks] = queue.SimpleQueue()
        self._has_thread = False

    def begin(self, constrained: AnySequence[tuple[ConstrainedSequence, "LLMatcher"]]) -> StepMasks:
        """See `Constraints.begin_masks`; with the grammar of each."""
        place_M: list[int] = []
        offset_M: list[int] = []
        rows = []
        for each, grammar in constrained:
            name = each.sequence.sequence_id
            state = self._states.get(name)
            if state is None or state.grammar is not grammar:
                state = self._states[name] = _SequenceMatcher(grammar)
            new_tokens: list[int] = []
            if state.num_tokens != each.num_output_tokens:
                new_tokens = each.sequence.output_from(state.num_tokens)
                state.num_tokens = each.num_output_tokens
            rows.append(_Row(len(place_M), state, new_tokens, each))
            place_M.append(each.place)
            offset_M.append(0)
            if each.drafts:
                place_M += [each.place] * len(each.drafts)
                offset_M += range(1, len(each.drafts) + 1)
        masks = StepMasks(place_M, offset_M, rows, self._num_words)
        for row in rows:
            row.state.masks = masks
        if not self._has_thread:
            start_thread(self._work, name="token-masks")
            self._has_thread = True
        self._jobs.put(masks)
        return masks

    def forced_tokens(self, sequences: Iterable[KnownTokens]) -> Iterator[ForcedTokens]:
        """See `Constraints.forced_tokens`: llguidance allows one token alone wherever the next
        bytes are certain, the one that the tokenizer would write there."""
        for sequence, num_output_tokens, last_token in sequences:
            state = self._states.get(sequence.sequence_id)
            if state is None or state.matcher is None or state.masks is None:
                continue
            if not state.masks.is_done:
                continue
            if state.num_tokens == num_output_tokens - 1:
                state.matcher.consume_token(last_token)
            else:
                state.matcher.consume_tokens(sequence.output_from(state.num_tokens))
            state.num_tokens = num_output_tokens
            if forced := state.matcher.compute_ff_tokens():
                yield sequence, forced

    def drop(self, sequence_ids: Iterable[str]) -> None:
        """These have ended."""
        if self._states:
            for sequence_id in sequence_ids:
                self._states.pop(sequence_id, None)

    def _work(self) -> None:
        from llguidance import LLExecutor

        # they share the processor with the model
        executor = LLExecutor(max(1, min(8, (os.cpu_count() or 1) // 2)))
        while True:
            self._jobs.get().fill(executor)
