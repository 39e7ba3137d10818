"""Synthetic traces: lengths, shared prefixes and chats, all from one seed. All random numbers of a
chat are drawn when it begins, so the trace does not depend on how fast it is served.
"""

import dataclasses
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import ClassVar

import numpy as np
import numpy.typing as npt

from scripts.simulator import SimulationError
from scripts.simulator.trace import MAX_REQUESTS, Segment, TraceRequest, Turn, shared_segment

Int64Array = npt.NDArray[np.int64]
Lengths = Callable[[np.random.Generator, int], Int64Array]
"""(random numbers, how many) to that many lengths."""
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
                    raise SimulationError(
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
                    raise SimulationError(
                        f"{option} is {text!r}: median and largest must be above 0, sigma not below"
                    )
                return lambda random, count: np.clip(
                    np.rint(random.lognormal(math.log(middle), sigma, count)), 1, most
                ).astype(np.int64)
            case value, []:
                length = int(value)
                if length < 1:
                    raise SimulationError(f"{option} is {value}, it must be at least 1")
                return lambda random, count: np.full(count, length, np.int64)
    except ValueError:
        pass
    raise SimulationError(
        f"{option} is {text!r}, it must be written as 512, uniform:32:512, log-uniform:32:512 or "
        "lognormal:MEDIAN:SIGMA:LARGEST"
    )


def read_pairs(path: Path) -> Int64Array:
    """Lines of `prompt tokens,output tokens`, to be drawn from with replacement; [N, 2]."""
    pairs = []
    try:
        for number, line in enumerate(path.read_text().splitlines(), start=1):
            prompt, _, output = line.partition(",")
            if not (prompt.strip().isdecimal() and output.strip().isdecimal()):
                raise SimulationError(
                    f"{path}, line {number}: {line!r} is no pair of lengths, write 512,128"
                )
            pairs.append((int(prompt), int(output)))
    except OSError as error:
        raise SimulationError(f"cannot read {path}: {error.strerror}") from None
    if not pairs or min(map(min, pairs)) < 1:
        raise SimulationError(f"{path} must hold pairs of lengths above 0, write lines as 512,128")
    return np.array(pairs, np.int64)


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
        arrivals: from a generator to endless rising times (`scripts.load.arrivals`).
        num_requests: in all, later turns of chats included.
        length_pairs: [N, 2], drawn together; if given, the two distributions are not used.
        num_tenants: each request belongs to one of them, drawn at random; 0 for none.
    """

    arrivals: Callable[[np.random.Generator], Iterator[float]]
    prompt_lengths: Lengths
    output_lengths: Lengths
    num_requests: int
    seed: int
    prefixes: SharedPrefixes | None = None
    chats: Chats | None = None
    length_pairs: Int64Array | None = None
    num_tenants: int = 0

    @property
    def name(self) -> str:
        return f"synthetic, seed {self.seed}"

    num_skipped: ClassVar[int] = 0

    def __post_init__(self) -> None:
        if not 1 <= self.num_requests <= MAX_REQUESTS:
            raise SimulationError(
                f"num_requests is {self.num_requests}, it must be from 1 to {MAX_REQUESTS}"
            )
        prefixes, chats = self.prefixes, self.chats
        if prefixes is not None and (prefixes.count < 1 or prefixes.num_tokens < 1):
            raise SimulationError(
                f"{prefixes.count} shared prefixes of {prefixes.num_tokens} tokens were asked for, "
                "both must be at least 1"
            )
        if chats is not None and not (chats.mean_turns >= 1 and chats.mean_think_s >= 0):
            raise SimulationError(
                f"chats of {chats.mean_turns} turns with {chats.mean_think_s} s between them were "
                "asked for; turns must be at least 1, seconds at least 0"
            )

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
            texts, outputs = self._draw_lengths(random, total)
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

    def _draw_lengths(self, random: np.random.Generator, count: int) -> tuple[list[int], list[int]]:
        if self.length_pairs is not None:
            pairs = self.length_pairs[random.integers(len(self.length_pairs), size=count)]
            return pairs[:, 0].tolist(), pairs[:, 1].tolist()
        prompts, outputs = (
            lengths(random, count) for lengths in (self.prompt_lengths, self.output_lengths)
        )
        return prompts.tolist(), outputs.tolist()
