"""Requests in token ids that every engine is asked. The same text, names, seed and number of rounds
give the same requests."""

import hashlib
import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import islice

from frontend.load.requests import PlannedRequest

_BATCH, _BATCH_PROMPT, _BATCH_OUTPUT = 64, (32, 512), 64
_SINGLE_PROMPT, _SINGLE_OUTPUT = 64, 128
_STREAMED = 48
_SHARING, _PREFIX, _OWN, _SHARED_OUTPUT = 32, 384, 32, 32
_LONG_PROMPT = 2000
DEFAULT_WORKLOADS = ("W1", "W2", "W3@1", "W4", "prefill")


@dataclass(frozen=True)
class Workload:
    """Greedy requests that ignore end-of-sequence: each gives exactly its number of tokens."""

    name: str
    requests: tuple[PlannedRequest, ...]

    @property
    def needs_arrivals(self) -> bool:
        """Whether requests come one after the other while others are served."""
        return any(request.arrival_s > 0 for request in self.requests)


Cut = Callable[[int], list[int]]
"""So many tokens of the text, from a place where none began before."""


def make_rounds(
    text_token_ids: Sequence[int], names: Sequence[str], *, num_rounds: int, seed: int = 0
) -> list[list[Workload]]:
    """The workloads of each round, in the order of `names`.

    Lengths and arrivals are the same in every round, the texts are others: an engine that is still
    up must not find its prompts in its cache. A text that is used up starts over. `names`: W1, W2,
    W3@RATE, W4, prefill, prefill@TOKENS.
    Raises ValueError: an unknown name, no name, no round, or no text."""
    if not text_token_ids:
        raise ValueError("the text is empty; give one to cut prompts from")
    if num_rounds < 1 or not names:
        raise ValueError(f"{num_rounds} rounds of {len(names)} workloads are nothing to compare")
    cut = _cutter(text_token_ids)
    return [[_make(name, cut, seed) for name in names] for _ in range(num_rounds)]


def make_warm_up(text_token_ids: Sequence[int]) -> list[Workload]:
    """What is sent before anything is timed: the first token, then a small batch."""
    shifted = [*text_token_ids[len(text_token_ids) // 2 :], *text_token_ids]
    cut = _cutter(list(reversed(shifted)))  # shares no beginning with what is measured
    return [
        Workload("first token", _requests([cut(32)], 1)),
        Workload("warm-up", _requests([cut(48 + 16 * at) for at in range(8)], 8)),
    ]


def _cutter(token_ids: Sequence[int]) -> Cut:
    position = 0
    begun: set[int] = set()

    def cut(length: int) -> list[int]:
        nonlocal position
        while position in begun and len(begun) < len(token_ids):  # in a later round
            position = (position + 1) % len(token_ids)
        begun.add(position)
        taken: list[int] = []
        while len(taken) < length:
            part = token_ids[position : position + length - len(taken)]
            taken += part
            position = (position + len(part)) % len(token_ids)
        return taken

    return cut


def _make(name: str, cut: Cut, seed: int) -> Workload:
    kind, _, rate = name.partition("@")
    if name == "W1" or (kind == "W3" and rate):
        arrivals_s = _arrivals(name, rate, seed) if rate else (0.0,) * _BATCH
        rng = random.Random(f"lengths-{seed}")
        low, high = map(math.log, _BATCH_PROMPT)
        prompts = [cut(round(math.exp(rng.uniform(low, high)))) for _ in arrivals_s]
        return Workload(name, _requests(prompts, _BATCH_OUTPUT, arrivals_s))
    if name == "W2":
        return Workload(name, _requests([cut(_SINGLE_PROMPT)], _SINGLE_OUTPUT))
    if name == "W4":
        prefix = cut(_PREFIX)
        return Workload(
            name, _requests([prefix + cut(_OWN) for _ in range(_SHARING)], _SHARED_OUTPUT)
        )
    if name == "prefill" or (kind == "prefill" and rate.isdecimal() and int(rate)):
        return Workload(name, _requests([cut(int(rate or _LONG_PROMPT))], 1))
    raise ValueError(
        f"{name!r} is not a workload; there are W1, W2, W3@RATE, W4, prefill and prefill@TOKENS"
    )


def _requests(
    prompts: Sequence[list[int]], num_output_tokens: int, arrivals_s: Sequence[float] = ()
) -> tuple[PlannedRequest, ...]:
    return tuple(
        PlannedRequest(index, prompt, num_output_tokens, arrivals_s[index] if arrivals_s else 0.0)
        for index, prompt in enumerate(prompts)
    )


def _arrivals(name: str, rate: str, seed: int) -> tuple[float, ...]:
    # numpy is not for the client processes, which import this file
    import numpy as np

    from frontend.load.traces.arrivals import poisson

    try:
        arrivals = poisson(float(rate), np.random.default_rng(seed))
        return tuple(islice(arrivals, _STREAMED))
    except ValueError:
        raise ValueError(
            f"{name!r} has no rate above 0 after its @; write W3@1 for one a second"
        ) from None


def digest(rounds: Sequence[Sequence[Workload]]) -> str:
    """A hash that says which workload a figure is of."""
    return hashlib.sha256(repr(rounds).encode()).hexdigest()[:16]
