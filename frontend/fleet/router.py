"""Which of several engines gets a request. It sees numbers alone: loads, and what of the prompt is
cached where. The client and the simulator run the same code."""

from collections import Counter
from collections.abc import Mapping, Sequence
from hashlib import blake2b
from math import inf
from typing import Literal, NamedTuple, get_args

RoutingPolicy = Literal["cache-aware", "least-loaded", "session-sticky"]
ROUTING_POLICIES: tuple[RoutingPolicy, ...] = get_args(RoutingPolicy)

_MATCH_WEIGHT = 2


class Choice(NamedTuple):
    engine: int
    num_matched: int
    """Prompt tokens that are thought to be cached there."""


class Router:
    """Chooses an engine by one of three policies; of equal ones that of the request's session, then
    the one that was sent the fewest tokens.

    cache-aware: the least load - 2 x prompt tokens cached there. So a prompt follows its prefix
    until the queue there costs more than to compute it elsewhere: the rule of NVIDIA Dynamo's
    router. Compared with that of SGLang's in docs/benchmarks.md.
    least-loaded: the least load.
    session-sticky: always the same engine for a session, by its key; without a session, or while
    that engine must not be chosen, cache-aware.
    """

    def __init__(self, policy: RoutingPolicy = "cache-aware") -> None:
        self._policy = policy
        self._num_sent_tokens: Counter[int] = Counter()

    def choose(
        self,
        matched: Mapping[int, int],
        num_tokens: int,
        loads: Sequence[float],
        home: int | None = None,
    ) -> Choice | None:
        """Where to send a prompt. It counts as sent.

        Args:
            matched: by engine, tokens of the prompt that are cached there.
            num_tokens: the prompt's.
            loads: of each engine, in tokens (`load_of`); `inf`: it must not be chosen.
            home: its session's engine.

        Returns:
            None if none may be chosen.
        """
        least = min(loads)
        if least == inf:
            return None
        if self._policy == "session-sticky" and home is not None and loads[home] < inf:
            return self._sent(home, matched, num_tokens)
        weight = 0 if self._policy == "least-loaded" else _MATCH_WEIGHT
        idlest = [engine for engine, load in enumerate(loads) if load == least]
        chosen = min(
            {*idlest, *matched},
            key=lambda engine: (
                loads[engine] - weight * matched.get(engine, 0),
                engine != home,
                self._num_sent_tokens[engine],
                engine,
            ),
        )
        return self._sent(chosen, matched, num_tokens)

    def _sent(self, engine: int, matched: Mapping[int, int], num_tokens: int) -> Choice:
        num_matched = matched.get(engine, 0)
        self._num_sent_tokens[engine] += num_tokens - num_matched
        return Choice(engine, num_matched)


def home_of(session: str, names: Sequence[str]) -> int:
    """The engine of a session, by rendezvous hashing: the same in every process, and where engines
    come or go only their own sessions move.

    Args:
        names: of the engines that there are: their addresses.
    """
    ranks = [blake2b(f"{len(name)} {name}{session}".encode()).digest() for name in names]
    return max(range(len(names)), key=ranks.__getitem__)
