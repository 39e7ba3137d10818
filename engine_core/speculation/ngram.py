"""Drafts from the sequence itself: what followed its last tokens when they were there before."""

from collections.abc import Hashable, Sequence

import numpy as np

from engine_core.scheduler.batch_state import Int32Array


class NgramProposer:
    """Prompt look-up: the longest n-gram at the end, of `smallest` to `largest` tokens, that occurs
    before; of several the last one. Keeps nothing.

        ... a b c d e f ... a b c |       the n-gram a b c was followed by d e f

    Where what follows runs into the end, it repeats from the n-gram on, as a period does."""

    name = "ngram"

    def __init__(self, *, smallest: int, largest: int) -> None:
        self.smallest = smallest
        self.largest = largest

    def propose(self, tokens: Int32Array, scope: Hashable, most: int) -> list[int]:
        """See `Proposer.propose`."""
        _, end = longest_match(tokens, smallest=self.smallest, largest=self.largest)
        return follow(tokens, end, most) if end else []

    def learn(self, output: Sequence[int], scope: Hashable) -> None:
        """Nothing is kept."""


def longest_match(tokens: Int32Array, *, smallest: int, largest: int) -> tuple[int, int]:
    """The longest n-gram at the end that occurs before, and where its last such occurrence ends;
    (0, 0) if it is shorter than `smallest`. One pass over the tokens, and one over what is left of
    the candidates for each further token."""
    last = len(tokens) - 1
    ends = np.flatnonzero(tokens[:last] == tokens[last])
    length = 1
    while len(ends) and length < largest:
        inside = ends[ends >= length] if ends[0] < length else ends
        longer = inside[tokens[inside - length] == tokens[last - length]]
        if not len(longer):
            break
        ends, length = longer, length + 1
    if length < smallest or not len(ends):
        return 0, 0
    return length, int(ends[-1]) + 1


def follow(tokens: Int32Array, end: int, most: int) -> list[int]:
    """The tokens from `end` on, again and again if there are fewer than `most`."""
    drafts: list[int] = tokens[end : end + most].tolist()
    while len(drafts) < most:
        drafts += drafts[: most - len(drafts)]
    return drafts
