"""Drafts from the sequence itself and from earlier outputs of its scope, by the longest suffix.

A. Saxena, C. Jiang et al. (SuffixDecoding, arXiv:2411.04975): the longer the match, the more tokens
are proposed. An index of pairs stands for their tree, as good: docs/guides/speculation.md."""

import itertools
from array import array
from collections import OrderedDict
from collections.abc import Hashable, Sequence

from engine_core.scheduler.batch_state import Int32Array
from engine_core.speculation.ngram import follow, longest_match

_SHORTEST = 2
_SHORTEST_OWN = 3
"""In the sequence itself: two tokens say little there, and were taken back more often."""
_LONGEST = 32
"""Tokens of a match that are looked at."""
_MOST_PLACES = 16
"""Last occurrences of a pair that are kept."""
_GENERATION_TOKENS = 16384
_MOST_TOKENS = 8 * _GENERATION_TOKENS
"""Most tokens in all scopes together: about 30 MiB."""
_MOST_OUTPUT = 4096
"""Tokens of an output that are kept, the last ones."""


class _Outputs:
    """Outputs of one scope, one behind the other, and where each pair of tokens ends."""

    def __init__(self) -> None:
        self.tokens = array("i")
        self._ends: dict[int, list[int]] = {}

    def add(self, output: Sequence[int]) -> None:
        self.tokens.append(-1)  # no token: no match goes beyond it
        start = len(self.tokens)
        self.tokens.extend(output)
        for end, (first, second) in enumerate(itertools.pairwise(output), start + 2):
            ends = self._ends.setdefault(first << 32 | second, [])
            ends.append(end)
            if len(ends) > _MOST_PLACES:
                del ends[0]

    def longest_match(self, suffix: list[int]) -> tuple[int, int]:
        """As `ngram.longest_match`; `suffix`: last tokens of a sequence, at least two."""
        tokens, best, best_end = self.tokens, 0, 0
        for end in reversed(self._ends.get(suffix[-2] << 32 | suffix[-1], ())):
            if end == len(tokens) or tokens[end] < 0:
                continue  # nothing follows
            length = 2
            while length < len(suffix) and tokens[end - 1 - length] == suffix[-1 - length]:
                length += 1
            if length > best:
                best, best_end = length, end
        return best, best_end

    def follow(self, end: int, most: int) -> list[int]:
        drafts = self.tokens[end : end + most].tolist()
        return drafts[: drafts.index(-1)] if -1 in drafts else drafts


class SuffixProposer:
    """The longest match of a sequence's last tokens, in its own tokens or in earlier outputs of its
    scope; as many drafts as the match has tokens. Outputs of the scopes that were used longest ago
    are dropped first."""

    name = "suffix"

    def __init__(self) -> None:
        self.generations: OrderedDict[tuple[Hashable, int], _Outputs] = OrderedDict()
        """By scope and number, two a scope at most; the one used last is last."""
        self.newest: dict[Hashable, int] = {}
        self.num_tokens = 0
        """Tokens in all scopes together."""

    def propose(self, tokens: Int32Array, scope: Hashable, most: int) -> list[int]:
        """See `Proposer.propose`."""
        if len(tokens) < _SHORTEST:
            return []
        length, end = longest_match(tokens, smallest=_SHORTEST_OWN, largest=_LONGEST)
        drafts = follow(tokens, end, min(most, length)) if end else []
        newest = self.newest.get(scope)
        if newest is None or length == _LONGEST:
            return drafts
        suffix = tokens[-_LONGEST:].tolist()
        for number in (newest, newest - 1):
            outputs = self.generations.get((scope, number))
            if outputs is None:
                continue
            self.generations.move_to_end((scope, number))
            longer, end = outputs.longest_match(suffix)
            if longer > length:
                length, drafts = longer, outputs.follow(end, min(most, longer))
        return drafts

    def learn(self, output: Sequence[int], scope: Hashable) -> None:
        """See `Proposer.learn`."""
        if len(output) <= _SHORTEST:
            return
        number = self.newest.setdefault(scope, 0)
        outputs = self.generations.get((scope, number))
        output = output[-_MOST_OUTPUT:]
        if outputs is not None and len(outputs.tokens) + len(output) > _GENERATION_TOKENS:
            self._drop((scope, number - 1))
            number = self.newest[scope] = number + 1
            outputs = None
        if outputs is None:
            outputs = self.generations[scope, number] = _Outputs()
        outputs.add(output)
        self.num_tokens += len(output) + 1
        self.generations.move_to_end((scope, number))
        while self.num_tokens > _MOST_TOKENS:
            scope, number = oldest = next(iter(self.generations))
            self._drop(oldest)
            if number == self.newest[scope]:
                self._drop((scope, number - 1))
                del self.newest[scope]

    def _drop(self, generation: tuple[Hashable, int]) -> None:
        outputs = self.generations.pop(generation, None)
        if outputs is not None:
            self.num_tokens -= len(outputs.tokens)
