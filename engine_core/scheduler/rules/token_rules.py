"""Rules that follow a sequence's own tokens: bad words, a budget of tokens to think with, and the
model's on first and last tokens. They become masks beside those of grammars, from the tokens that
are known, drafts included."""

from collections.abc import Collection, Iterable, Iterator
from collections.abc import Sequence as AnySequence

import numpy as np

from engine_core.scheduler.batch_state import Int32Array
from engine_core.scheduler.constraints import (
    ConstrainedSequence,
    Constraints,
    ForcedTokens,
    KnownTokens,
)
from engine_core.scheduler.plan import MaskRows, TokenMasks
from engine_core.scheduler.request import Request
from protocol.sampling import SamplingParams, ThinkingBudget

_WORD_BITS = 32


class TokenRules(Constraints):
    """
    Args:
        grammars: make the masks of sequences that follow one; None: no sequence does.
        vocab_size: length of a row of logits.
    """

    def __init__(self, grammars: Constraints | None, *, vocab_size: int) -> None:
        self._grammars = grammars
        self._num_words = -(-vocab_size // _WORD_BITS)

    def take_compiled(self) -> AnySequence[tuple[Request, str | None]]:
        return () if self._grammars is None else self._grammars.take_compiled()

    def forced_tokens(self, sequences: Iterable[KnownTokens]) -> Iterable[ForcedTokens]:
        return () if self._grammars is None else self._grammars.forced_tokens(sequences)

    def begin_masks(self, constrained: AnySequence[ConstrainedSequence]) -> TokenMasks | None:
        by_grammar = [each for each in constrained if each.sequence.request.grammar is not None]
        masks = None
        if by_grammar and self._grammars is not None:
            masks = self._grammars.begin_masks(by_grammar)
        ruled = [each for each in constrained if each.sequence.sampling_params.has_token_rules]
        rows = [row for each in ruled for row in self._rows(each)]
        if not rows:
            return masks
        place, offset, bits, may_wait = zip(*rows, strict=True)
        own = MaskRows(np.array(place, np.int64), np.array(offset, np.int64), np.stack(bits))
        return _JoinedMasks(masks, own, may_wait)

    def _rows(self, each: ConstrainedSequence) -> Iterator[tuple[int, int, Int32Array, bool]]:
        """Where something is impossible: place, offset, bits; whether these may wait: thinking does
        not end within a character that a grammar is to be whole."""
        params, num_prompt = each.sequence.sampling_params, each.sequence.num_prompt_tokens
        tokens = each.sequence.known_tokens()
        num_known = len(tokens)
        tokens = np.concatenate([tokens, np.array(each.drafts, np.int32)])
        for rows in each.sequence.request.content.embeds:
            tokens[rows.start : rows.stop] = -1  # no token
        for offset in range(len(each.drafts) + 1):
            before = tokens[: num_known + offset]
            thinking = params.thinking
            forced, forbidden = rule_ids(params, len(before) - num_prompt)
            if thinking is not None and is_used_up(thinking, before):
                bits = self._mask([thinking.end_token_id], allowed=True)
                yield each.place, offset, bits, True
            elif forced is not None:
                yield each.place, offset, self._mask([forced], allowed=True), True
            elif forbidden := forbidden + forbidden_ids(params.bad_words, before[num_prompt:]):
                yield each.place, offset, self._mask(forbidden, allowed=False), False

    def _mask(self, token_ids: list[int], *, allowed: bool) -> Int32Array:
        bits = np.zeros(self._num_words * _WORD_BITS, np.uint8)
        bits[token_ids] = 1
        words: Int32Array = np.packbits(bits, bitorder="little").view("<i4").astype(np.int32)
        return words if allowed else ~words


def rule_ids(params: SamplingParams, num_output_tokens: int) -> tuple[int | None, list[int]]:
    """The model's rules for the token behind that many: the only one possible, and those that are
    impossible."""
    rules = params.generation_rules
    if rules is None:
        return None, []
    is_first, is_last = not num_output_tokens, num_output_tokens == params.max_tokens - 1
    if is_first and rules.forced_first is not None:
        return rules.forced_first, []
    if is_last and rules.forced_last is not None:
        return rules.forced_last, []
    return None, [*rules.suppressed, *(rules.suppressed_first if is_first else ())]


def forbidden_ids(bad_words: AnySequence[tuple[int, ...]], output: Int32Array) -> list[int]:
    """The last token of each word whose others are the last of the output."""
    ending = output[-max(map(len, bad_words), default=1) :].tolist()
    return [
        word[-1]
        for word in bad_words
        if len(word) == 1 or tuple(ending[-(len(word) - 1) :]) == word[:-1]
    ]


def is_used_up(thinking: ThinkingBudget, tokens: Int32Array) -> bool:
    """Whether they stand inside of a block of reasoning that has all its tokens: then the marker of
    its end is the only token that is possible."""
    marks = np.flatnonzero((tokens == thinking.start_token_id) | (tokens == thinking.end_token_id))
    if not len(marks) or tokens[marks[-1]] != thinking.start_token_id:
        return False
    return len(tokens) - 1 - int(marks[-1]) >= thinking.max_tokens


class _JoinedMasks:
    """See `TokenMasks`. What both leave, where a row of logits has two. `may_wait`: of own rows,
    which give way if they leave nothing."""

    def __init__(
        self, masks: TokenMasks | None, own: MaskRows, may_wait: AnySequence[bool]
    ) -> None:
        self._masks = masks
        self._own = own
        self._may_wait = may_wait

    def wait(self) -> MaskRows:
        if self._masks is None:
            return self._own
        first, own = self._masks.wait(), self._own
        places = dict(zip(_keys(first), range(len(first.place_M)), strict=True))
        at = [places.get(key, -1) for key in _keys(own)]
        bits_MW = first.bits_MW.copy()
        for index, place in enumerate(at):
            if place >= 0:
                both_W = bits_MW[place] & own.bits_MW[index]
                if both_W.any() or not self._may_wait[index]:
                    bits_MW[place] = both_W
        is_new = np.array(at) < 0
        return MaskRows(
            np.concatenate([first.place_M, own.place_M[is_new]]),
            np.concatenate([first.offset_M, own.offset_M[is_new]]),
            np.concatenate([bits_MW, own.bits_MW[is_new]]),
        )

    def failures(self) -> dict[str, str]:
        return {} if self._masks is None else self._masks.failures()

    def refused(self) -> Collection[str]:
        return () if self._masks is None else self._masks.refused()


def _keys(rows: MaskRows) -> Iterator[tuple[int, int]]:
    return zip(rows.place_M.tolist(), rows.offset_M.tolist(), strict=True)
