"""What is asked of every engine: requests in token ids, written to one file that all are served.

Owns the workloads' definitions and the file. Must not know engines. Pure: the same text, names,
seed and number of turns give the same file, byte for byte.
"""

from __future__ import annotations

import hashlib
import json
import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from scripts.load.arrivals import first_arrivals, poisson

_FORMAT = 1
_BATCH, _BATCH_PROMPT, _BATCH_OUTPUT = 64, (32, 512), 64
_SINGLE_PROMPT, _SINGLE_OUTPUT = 64, 128
_STREAMED = 48
_SHARING, _PREFIX, _OWN, _SHARED_OUTPUT = 32, 384, 32, 32
_LONG_PROMPT = 2000
DEFAULT_WORKLOADS = ("W1", "W2", "W3@1", "W4", "prefill")


class WorkloadError(Exception):
    """A workload that does not exist, or a file that is none."""


@dataclass(frozen=True, slots=True)
class PlannedRequest:
    """One request.

    Attributes:
        arrival_s: when it is due, from the workload's start.
        num_output_tokens: exactly so many, greedy, end-of-sequence ignored.
    """

    arrival_s: float
    prompt_token_ids: list[int]
    num_output_tokens: int


@dataclass(frozen=True, slots=True)
class Workload:
    name: str
    requests: tuple[PlannedRequest, ...]

    @property
    def needs_arrivals(self) -> bool:
        """Whether requests come one after the other while others are served."""
        return any(request.arrival_s > 0 for request in self.requests)

    @property
    def longest(self) -> int:
        """Most tokens of a request, prompt and output."""
        return max(len(one.prompt_token_ids) + one.num_output_tokens for one in self.requests)


Cut = Callable[[int], list[int]]
"""So many tokens of the text, from a place where none began before."""


def make_turns(
    text_token_ids: Sequence[int], names: Sequence[str], *, num_turns: int, seed: int = 0
) -> list[list[Workload]]:
    """The workloads of each turn, in the order of `names`.

    Lengths and arrivals are the same in every turn, the texts are others: an engine that is still
    up must not find its prompts in its cache. A text that is used up starts over.

    Args:
        names: W1, W2, W3@RATE, W4, prefill.

    Raises:
        WorkloadError: an unknown name, no name, no turn, or no text.
    """
    if not text_token_ids:
        raise WorkloadError("the text is empty; give one to cut prompts from")
    if num_turns < 1 or not names:
        raise WorkloadError(f"{num_turns} turns of {len(names)} workloads are nothing to compare")
    cut = _cutter(text_token_ids)
    return [[_make(name, cut, seed) for name in names] for _ in range(num_turns)]


def make_warm_up(text_token_ids: Sequence[int], *, seed: int = 0) -> list[Workload]:
    """What is sent before anything is timed: the first token, then a small batch."""
    shifted = [*text_token_ids[len(text_token_ids) // 2 :], *text_token_ids]
    cut = _cutter(list(reversed(shifted)))  # shares no beginning with what is measured
    first = Workload("first token", (PlannedRequest(0.0, cut(32), 1),))
    batch = tuple(PlannedRequest(0.0, cut(48 + 16 * at), 8) for at in range(8))
    return [first, Workload("warm-up", batch)]


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
    if kind == "W1" and not rate:
        return Workload(name, _batch(cut, seed, [0.0] * _BATCH))
    if kind == "W2" and not rate:
        return Workload(name, (PlannedRequest(0.0, cut(_SINGLE_PROMPT), _SINGLE_OUTPUT),))
    if kind == "W3" and rate:
        return Workload(name, _batch(cut, seed, _arrivals(name, rate, seed)))
    if kind == "W4" and not rate:
        prefix = cut(_PREFIX)
        own = [PlannedRequest(0.0, prefix + cut(_OWN), _SHARED_OUTPUT) for _ in range(_SHARING)]
        return Workload(name, tuple(own))
    if name == "prefill":
        return Workload(name, (PlannedRequest(0.0, cut(_LONG_PROMPT), 1),))
    raise WorkloadError(f"{name!r} is no workload; there are W1, W2, W3@RATE, W4 and prefill")


def _batch(cut: Cut, seed: int, arrivals_s: Sequence[float]) -> tuple[PlannedRequest, ...]:
    rng = random.Random(f"lengths-{seed}")
    low, high = map(math.log, _BATCH_PROMPT)
    return tuple(
        PlannedRequest(at, cut(round(math.exp(rng.uniform(low, high)))), _BATCH_OUTPUT)
        for at in arrivals_s
    )


def _arrivals(name: str, rate: str, seed: int) -> list[float]:
    try:
        arrivals = poisson(float(rate), np.random.default_rng(seed))
        return list(first_arrivals(arrivals, num_requests=_STREAMED))
    except ValueError:
        raise WorkloadError(
            f"{name!r} has no rate above 0 after its @; write W3@1 for one a second"
        ) from None


def write_turns(
    path: Path, warm_up: Sequence[Workload], turns: Sequence[Sequence[Workload]], *, source: str
) -> None:
    """One JSON document. `source` says where the tokens come from."""
    document = {
        "format": _FORMAT,
        "source": source,
        "warm_up": [_as_json(workload) for workload in warm_up],
        "turns": [[_as_json(workload) for workload in turn] for turn in turns],
    }
    path.write_text(json.dumps(document, separators=(",", ":")) + "\n")


def read_turns(path: Path) -> tuple[list[Workload], list[list[Workload]]]:
    """What is sent first, and each turn's workloads.

    Raises:
        WorkloadError: the file is not one that `write_turns` wrote.
    """
    try:
        document: dict[str, Any] = json.loads(path.read_text())
        if document["format"] != _FORMAT:
            raise WorkloadError(
                f"{path} has format {document['format']}, this script reads {_FORMAT}; remove the "
                "file and let it be written anew"
            )
        warm_up = [_from_json(workload) for workload in document["warm_up"]]
        return warm_up, [[_from_json(workload) for workload in turn] for turn in document["turns"]]
    except OSError as error:
        raise WorkloadError(f"{path} cannot be read: {error.strerror}") from error
    except (ValueError, KeyError, TypeError) as error:
        raise WorkloadError(
            f"{path} is no workload file ({type(error).__name__}: {error}); remove it and let it "
            "be written anew"
        ) from error


def _as_json(workload: Workload) -> dict[str, Any]:
    requests = [
        [one.arrival_s, one.num_output_tokens, one.prompt_token_ids] for one in workload.requests
    ]
    return {"name": workload.name, "requests": requests}


def _from_json(document: dict[str, Any]) -> Workload:
    requests = (
        PlannedRequest(arrival_s, prompt, num_outputs)
        for arrival_s, num_outputs, prompt in document["requests"]
    )
    return Workload(document["name"], tuple(requests))


def digest(path: Path) -> str:
    """Of the file's bytes, to say which workload a figure is of."""
    return hashlib.sha256(path.read_bytes()).hexdigest()[:16]
