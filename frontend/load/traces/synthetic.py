"""Synthetic traces: lengths, shared prefixes and chats, all from one seed. All random numbers of a
chat are drawn when it begins, so the trace does not depend on how fast it is served."""

import dataclasses
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import ClassVar

import numpy as np
import numpy.typing as npt

from frontend.load.traces import TraceError
from frontend.load.traces.trace import Segment, TraceRequest, Turn, shared_segment

Int64Array = npt.NDArray[np.int64]
Lengths = Callable[[np.random.Generator, int], Int64Array]
"""(random numbers, count) to that many lengths, [count]; of pairs, [count, 2]."""
_CHUNK = 1024


def parse_lengths(option: str, text: str) -> Lengths:
    """
    512                        always 512
    uniform:32:512             each length of the range as likely
    log-uniform:32:512         each factor of 2 as likely
    lognormal:300:1.2:8192     median, sigma of the logarithm, largest
    """
    name, *numbers = text.split(":")
    try:
        match name, numbers:
            case (("uniform" | "log-uniform"), [smallest, largest]):
                low, high = int(smallest), int(largest)
                if not 1 <= low <= high:
                    raise TraceError(
                        f"{option} is {text!r}: lengths must rise from at least 1; swap them"
                    )
                if name == "uniform":
                    return lambda random, count: random.integers(low, high, count, endpoint=True)
                low_log, high_log = math.log(low), math.log(high)
                return lambda random, count: np.rint(
                    np.exp(random.uniform(low_log, high_log, count))
                ).astype(np.int64)
            case "lognormal", [median, spread, highest]:
                middle, sigma, most = float(median), float(spread), int(highest)
                if middle <= 0 or sigma < 0 or most < 1:
                    raise TraceError(
                        f"{option} is {text!r}: median and largest must be above 0, sigma not below"
                    )
                return lambda random, count: np.clip(
                    np.rint(random.lognormal(math.log(middle), sigma, count)), 1, most
                ).astype(np.int64)
            case value, []:
                length = int(value)
                if length < 1:
                    raise TraceError(f"{option} is {value}, it must be at least 1")
                return lambda random, count: np.full(count, length, np.int64)
    except ValueError:
        pass
    raise TraceError(
        f"{option} is {text!r}, it must be written as 512, uniform:32:512, log-uniform:32:512 or "
        "lognormal:MEDIAN:SIGMA:LARGEST"
    )


def independent(prompts: Lengths, outputs: Lengths) -> Lengths:
    """Pairs."""
    return lambda random, count: np.stack([prompts(random, count), outputs(random, count)], axis=1)


def read_pairs(path: Path) -> Lengths:
    """Pairs drawn with replacement from a file's lines of `prompt tokens,output tokens`."""
    pairs = []
    try:
        for number, line in enumerate(path.read_text().splitlines(), start=1):
            prompt, _, output = line.partition(",")
            if not (prompt.strip().isdecimal() and output.strip().isdecimal()):
                raise TraceError(
                    f"{path}, line {number}: {line!r} is no pair of lengths, write 512,128"
                )
            pairs.append((int(prompt), int(output)))
    except OSError as error:
        raise TraceError(f"cannot read {path}: {error.strerror}") from None
    if not pairs or min(map(min, pairs)) < 1:
        raise TraceError(f"{path} must hold pairs of lengths above 0, write lines as 512,128")
    array = np.array(pairs, np.int64)
    return lambda random, count: array[random.integers(len(array), size=count)]


@dataclasses.dataclass(frozen=True, slots=True)
class SharedPrefixes:
    """System prompts: number k of `count` is chosen with a weight of 1 / k ** zipf."""

    count: int
    num_tokens: int
    zipf: float = 1.0

    def draw(self, random: np.random.Generator, count: int) -> list[tuple[Segment, ...]]:
        weights = np.arange(1, self.count + 1) ** -self.zipf
        chosen = random.choice(self.count, count, p=weights / weights.sum())
        return [(shared_segment(number, self.num_tokens),) for number in chosen.tolist()]


@dataclasses.dataclass(frozen=True, slots=True)
class Chats:
    """Every arrival begins a chat. Its number of turns is geometric with this mean; think times are
    exponential. A chat ends early when its prompt would pass `max_prompt_tokens`."""

    mean_turns: float
    mean_think_s: float
    max_prompt_tokens: int


@dataclasses.dataclass(frozen=True, slots=True)
class SyntheticTrace:
    """
    Args:
        arrivals: from a generator to endless rising times (`frontend.load.traces.arrivals`).
        num_requests: in all, later turns of chats included.
        lengths: draws prompts' own tokens and outputs, as `parse_lengths` and `read_pairs` do.
        num_tenants: each request belongs to one of them, drawn at random; 0 for none.
    """

    arrivals: Callable[[np.random.Generator], Iterator[float]]
    lengths: Lengths
    num_requests: int
    seed: int
    prefixes: SharedPrefixes | None = None
    chats: Chats | None = None
    num_tenants: int = 0

    @property
    def name(self) -> str:
        return f"synthetic, seed {self.seed}"

    num_skipped: ClassVar[int] = 0

    def __iter__(self) -> Iterator[TraceRequest]:
        # arrivals have a generator of their own: other lengths leave the times as they are
        time_random, random = (np.random.default_rng([self.seed, stream]) for stream in (0, 1))
        index = 0
        for arrival_s, chat in zip(self.arrivals(time_random), self._chats(random), strict=False):
            (context, tenant, num_text, num_output, later) = chat
            later = later[: self.num_requests - index - 1]
            yield TraceRequest(
                index=index,
                arrival_s=arrival_s,
                num_text_tokens=num_text,
                num_output_tokens=num_output,
                context=context,
                session=index,
                later_turns=later,
                tenant=tenant,
            )
            index += 1 + len(later)
            if index >= self.num_requests:
                return

    def _chats(
        self, random: np.random.Generator
    ) -> Iterator[tuple[tuple[Segment, ...], str | None, int, int, tuple[Turn, ...]]]:
        """Context, tenant, text and output tokens of the first turn, and the later turns."""
        chats = self.chats
        while True:
            num_turns = [1] * _CHUNK
            if chats is not None:
                num_turns = random.geometric(1 / chats.mean_turns, _CHUNK).tolist()
            total = sum(num_turns)
            texts, outputs = self.lengths(random, total).T.tolist()
            thinks = random.exponential(chats.mean_think_s, total) if chats else np.zeros(total)
            prefixes = self.prefixes.draw(random, _CHUNK) if self.prefixes else [()] * _CHUNK
            tenants: list[str | None] = [None] * _CHUNK
            if self.num_tenants:
                drawn = random.integers(self.num_tenants, size=_CHUNK)
                tenants = [f"tenant-{number}" for number in drawn]
            turns = map(Turn, thinks.tolist(), texts, outputs)
            for context, tenant, count in zip(prefixes, tenants, num_turns, strict=True):
                first, *later = (next(turns) for _ in range(count))
                num_said = sum(length for _, length in context)
                num_said += first.num_text_tokens + first.num_output_tokens
                yield (
                    context,
                    tenant,
                    first.num_text_tokens,
                    first.num_output_tokens,
                    self._fitting(num_said, later),
                )

    def _fitting(self, num_said: int, turns: list[Turn]) -> tuple[Turn, ...]:
        """Up to the first turn whose prompt would be too long."""
        for place, turn in enumerate(turns):
            assert self.chats is not None
            if num_said + turn.num_text_tokens > self.chats.max_prompt_tokens:
                return tuple(turns[:place])
            num_said += turn.num_text_tokens + turn.num_output_tokens
        return tuple(turns)
