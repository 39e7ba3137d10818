"""Which of several engines gets a request. It knows what was sent, and the loads that its user
counts from what has ended; the client and the simulator run the same code."""

from array import array
from collections import Counter, OrderedDict
from collections.abc import Iterator, Sequence
from math import inf
from typing import NamedTuple

Prefix = tuple[int, int]
"""Hash and length of a prompt's beginning."""

PREFIX_TOKENS = 16
_SEQUENCE_TOKENS = 128
_MATCH_WEIGHT = 2


def prefixes_of(token_ids: Sequence[int], salt: str | None = None) -> Iterator[Prefix]:
    """Of each whole run of PREFIX_TOKENS tokens, all up to its end."""
    identity, tokens = hash(salt), array("i", token_ids).tobytes()
    size = len(tokens) // len(token_ids) if token_ids else 0
    for end in range(PREFIX_TOKENS, len(token_ids) + 1, PREFIX_TOKENS):
        identity = hash((identity, tokens[(end - PREFIX_TOKENS) * size : end * size]))
        yield identity, end


def load_of(num_prompt_tokens: int, num_sequences: int = 1) -> int:
    """What an unfinished request adds to its engine's load, in tokens: those of its prompt that
    were not sent there before, and for each sequence what running beside it costs others. How long
    answers get is not known."""
    return num_prompt_tokens + _SEQUENCE_TOKENS * num_sequences


class Choice(NamedTuple):
    engine: int
    num_matched: int
    """Prompt tokens that it was sent before."""


class CacheAwareRouter:
    """Chooses the engine with the least load - 2 x prompt tokens that it was sent before; of equals
    the one that was sent the fewest tokens.

    So a prompt follows its prefix until the queue there costs more than to compute it elsewhere:
    the rule of NVIDIA Dynamo's router, over hashes of prefixes instead of a radix tree. Compared
    with that of SGLang's router in docs/benchmarks.md.

    Args:
        max_prefixes: beyond them the prompts that were not sent for longest are forgotten, their
            ends first.
    """

    def __init__(self, *, max_prefixes: int = 100_000) -> None:
        self._max_prefixes = max_prefixes
        self._engines_by_prefix: OrderedDict[int, dict[int, int]] = OrderedDict()
        """Each engine, and which of its caches. The prefixes that were sent last are last."""
        self._num_lost_caches: Counter[int] = Counter()
        self._num_sent_tokens: Counter[int] = Counter()

    def choose(
        self, prefixes: Sequence[Prefix], num_tokens: int, loads: Sequence[float]
    ) -> Choice | None:
        """Where to send a prompt. It counts as sent.

        Args:
            num_tokens: the prompt's.
            loads: of each engine, in tokens; `inf`: it must not be chosen.

        Returns:
            None if none may be chosen.
        """
        least = min(loads)
        if least == inf:
            return None
        matched = self._matched(prefixes)
        idlest = [engine for engine, load in enumerate(loads) if load == least]
        chosen = min(
            {*idlest, *matched},
            key=lambda engine: (
                loads[engine] - _MATCH_WEIGHT * matched.get(engine, 0),
                self._num_sent_tokens[engine],
                engine,
            ),
        )
        num_matched = matched.get(chosen, 0)
        self._num_sent_tokens[chosen] += num_tokens - num_matched
        self._note(prefixes, chosen)
        return Choice(chosen, num_matched)

    def forget(self, engine: int) -> None:
        """Its cache is lost."""
        self._num_lost_caches[engine] += 1

    def _matched(self, prefixes: Sequence[Prefix]) -> dict[int, int]:
        """By engine, how much of the prompt it was sent."""
        matched: dict[int, int] = {}
        for prefix, end in prefixes:
            engines = self._engines_by_prefix.get(prefix)
            if engines is None:
                break
            for engine, number in engines.items():
                if number == self._num_lost_caches[engine]:
                    matched[engine] = end
        return matched

    def _note(self, prefixes: Sequence[Prefix], engine: int) -> None:
        known, cache = self._engines_by_prefix, self._num_lost_caches[engine]
        for prefix, _ in reversed(prefixes):  # so that a prompt's end is forgotten first
            known.setdefault(prefix, {})[engine] = cache
            known.move_to_end(prefix)
        while len(known) > self._max_prefixes:
            known.popitem(last=False)
