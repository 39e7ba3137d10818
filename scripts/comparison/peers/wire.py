"""How a peer's program talks to the comparison: one line of JSON each way.

    argument   {"model": ..., "threads": 2, ...}         the options
    out        {"event": "ready", "version": ...}
    in         [[num_output_tokens, prompt_token_ids], ...]
    out        {"event": "done", "records": [...]}
               or {"event": "failed", "reason": ...}, {"event": "not measured", "reason": ...}

Runs in the peer's own Python: standard library only, nothing of this project. A record holds what
was measured and nothing else: `finished_s` and `num_output_tokens` always, `first_token_s`,
`last_token_s` and `gaps_s` where the library tells when tokens come.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from itertools import pairwise
from typing import Any

Requests = list[tuple[int, list[int]]]
Record = dict[str, Any]
Generate = Callable[[Requests], list[Record]]
Prepare = Callable[[dict[str, Any]], tuple[dict[str, Any], Generate]]


class NotMeasured(Exception):
    """The library cannot be asked this; the text says why."""


def serve(prepare: Prepare) -> None:
    """Run a peer's program until its input ends.

    Args:
        prepare: takes (pops) its options, and gives what it says of itself and what answers
            requests that all come at once.
    """
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what a library prints is no answer

    def answer(document: dict[str, Any]) -> None:
        answers.write(json.dumps(document) + "\n")
        answers.flush()

    options = json.loads(sys.argv[1])
    try:
        facts, generate = prepare(options)
    # a peer may fail in any way: that is reported, never a figure
    except Exception as error:
        answer({"event": "failed", "reason": f"{type(error).__name__}: {error}"[:1000]})
        raise
    if options:  # nothing is accepted and ignored
        reason = f"this peer has no option {', '.join(options)}; omit it"
        answer({"event": "failed", "reason": reason})
        return
    answer({"event": "ready", **facts})
    for line in sys.stdin:
        requests = [(number, prompt) for number, prompt in json.loads(line)]
        try:
            answer({"event": "done", "records": generate(requests)})
        except NotMeasured as error:
            answer({"event": "not measured", "reason": str(error)})
        except Exception as error:
            answer({"event": "failed", "reason": f"{type(error).__name__}: {error}"[:1000]})


class TokenClock:
    """Times of one request's tokens, from the workload's start."""

    def __init__(self, started_s: float) -> None:
        self._started_s = started_s
        self._times_s: list[float] = []
        self._num_tokens = 0

    def note(self, num_tokens: int) -> None:
        """So many tokens have come now."""
        if num_tokens > 0:
            self._times_s.append(time.perf_counter() - self._started_s)
            self._num_tokens += num_tokens

    def record(self) -> Record:
        """The request has ended now."""
        times_s = self._times_s
        return {
            "first_token_s": times_s[0] if times_s else None,
            "last_token_s": times_s[-1] if times_s else None,
            "finished_s": time.perf_counter() - self._started_s,
            "num_output_tokens": self._num_tokens,
            "gaps_s": [late - early for early, late in pairwise(times_s)],
        }


def untimed(num_tokens: int, finished_s: float) -> Record:
    """The record of a request whose tokens came without a time."""
    return {"finished_s": finished_s, "num_output_tokens": num_tokens}
