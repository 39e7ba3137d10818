"""Made-up traces: arrivals, lengths, shared prefixes and chats, all from one seed.

All random numbers of a chat are drawn when it begins, so that the trace is the same however fast it
is served.
"""

import dataclasses
from collections.abc import Callable, Iterator

import numpy as np

from scripts.simulator.errors import SimulationError
from scripts.simulator.lengths import Int64Array, Lengths
from scripts.simulator.trace import MAX_REQUESTS, Segment, TraceRequest, Turn, shared_segment

_CHUNK = 1024


@dataclasses.dataclass(frozen=True, slots=True)
class SharedPrefixes:
    """System prompts: number k of `count` is chosen with a weight of 1 / k ** zipf."""

    count: int
    num_tokens: int
    zipf: float = 1.0

    def draw(self, random: np.random.Generator, count: int) -> list[Segment]:
        weights = np.arange(1, self.count + 1) ** -self.zipf
        chosen = random.choice(self.count, count, p=weights / weights.sum())
        return [shared_segment(int(number), self.num_tokens) for number in chosen]


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
        arrivals: makes the stream of times from a generator.
        num_requests: in all, later turns of chats included.
        length_pairs: [N, 2], drawn together; if given, the two distributions are not used.
        tenants: requests are given to so many tenants at random; 0 for none.

    Raises:
        SimulationError: a value outside its limits.
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

    @property
    def num_skipped(self) -> int:
        return 0

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
        # arrivals have a generator of their own: another length gives no other times
        time_random, random = (np.random.default_rng([self.seed, stream]) for stream in (0, 1))
        index = 0
        sessions = self._sessions(random)
        for arrival_s in self.arrivals(time_random):
            session = next(sessions)
            context, tenant, first, later = session
            later = later[: self.num_requests - index - 1]
            yield TraceRequest(
                index=index,
                arrival_s=arrival_s,
                num_text_tokens=first[0],
                num_output_tokens=first[1],
                context=context,
                session=index,
                later_turns=later,
                tenant=tenant,
            )
            index += 1 + len(later)
            if index >= self.num_requests:
                return

    def _sessions(
        self, random: np.random.Generator
    ) -> Iterator[tuple[tuple[Segment, ...], str | None, tuple[int, int], tuple[Turn, ...]]]:
        while True:
            num_turns = self._draw_turns(random)
            total = sum(num_turns)
            texts, outputs = self._draw_lengths(random, total)
            thinks = random.exponential(self.chats.mean_think_s, total) if self.chats else None
            prefixes = self.prefixes.draw(random, _CHUNK) if self.prefixes else None
            tenants = random.integers(self.num_tenants, size=_CHUNK) if self.num_tenants else None
            start = 0
            for number, turns in enumerate(num_turns):
                context = () if prefixes is None else (prefixes[number],)
                tenant = None if tenants is None else f"tenant-{tenants[number]}"
                later: tuple[Turn, ...] = ()
                if thinks is not None and turns > 1:
                    stop = start + turns
                    later = self._later_turns(
                        sum(length for _, length in context) + texts[start] + outputs[start],
                        texts[start + 1 : stop],
                        outputs[start + 1 : stop],
                        thinks[start + 1 : stop].tolist(),
                    )
                yield context, tenant, (texts[start], outputs[start]), later
                start += turns

    def _later_turns(
        self, num_said: int, texts: list[int], outputs: list[int], thinks: list[float]
    ) -> tuple[Turn, ...]:
        assert self.chats is not None
        turns = []
        for text, output, think_s in zip(texts, outputs, thinks, strict=True):
            if num_said + text > self.chats.max_prompt_tokens:
                break
            turns.append(Turn(think_s, text, output))
            num_said += text + output
        return tuple(turns)

    def _draw_turns(self, random: np.random.Generator) -> list[int]:
        if self.chats is None:
            return [1] * _CHUNK
        turns: list[int] = random.geometric(1 / self.chats.mean_turns, _CHUNK).tolist()
        return turns

    def _draw_lengths(self, random: np.random.Generator, count: int) -> tuple[list[int], list[int]]:
        if self.length_pairs is not None:
            pairs = self.length_pairs[random.integers(len(self.length_pairs), size=count)]
            return pairs[:, 0].tolist(), pairs[:, 1].tolist()
        return (
            self.prompt_lengths.draw(random, count).tolist(),
            self.output_lengths.draw(random, count).tolist(),
        )
