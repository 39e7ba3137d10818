"""What is sent: prompts and lengths. Request `index` of a seed is always the same one."""

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class LengthRange:
    """Lengths in tokens, both ends included."""

    shortest: int
    longest: int
    distribution: str = "log-uniform"

    @classmethod
    def parse(cls, text: str, *, distribution: str = "log-uniform") -> "LengthRange":
        """From "128" or "32:512". Raises ValueError: neither form, a length below 1, or an empty
        range."""
        parts = text.split(":")
        if len(parts) > 2 or not all(part.isascii() and part.isdigit() for part in parts):
            raise ValueError(f"{text!r} is no length; write 128, or 32:512 for a range")
        shortest, longest = int(parts[0]), int(parts[-1])
        if not 1 <= shortest <= longest:
            raise ValueError(f"the range {text!r} is empty or begins below 1; write 32:512")
        return cls(shortest, longest, distribution)

    def draw(self, rng: random.Random) -> int:
        if self.distribution == "uniform":
            return rng.randint(self.shortest, self.longest)
        # each length stands for [length, length + 1), so that both ends have their share
        low, high = math.log(self.shortest), math.log(self.longest + 1)
        return min(self.longest, int(math.exp(rng.uniform(low, high))))


@dataclass(frozen=True)
class PlannedRequest:
    """`arrival_s` counts from the start of the measurement."""

    index: int
    prompt_token_ids: list[int]
    num_output_tokens: int
    arrival_s: float = 0.0


@dataclass(frozen=True)
class RequestGenerator:
    """All requests of a load test.

    Args:
        text_token_ids: a text to cut prompts from; without one, prompts are random tokens of
            `allowed_token_ids`.
        shared_prefix_len: tokens that every prompt begins with, on top of its own length.
    """

    seed: int
    prompt_len: LengthRange
    output_len: LengthRange
    shared_prefix_len: int
    allowed_token_ids: Sequence[int]
    text_token_ids: Sequence[int] | None = None

    @property
    def longest_request(self) -> int:
        """Most tokens, prompt and output together, that a request may have."""
        return self.shared_prefix_len + self.prompt_len.longest + self.output_len.longest

    def request(self, index: int, arrival_s: float = 0.0) -> PlannedRequest:
        rng = random.Random(f"request-{self.seed}-{index}")
        prompt_len, output_len = self.prompt_len.draw(rng), self.output_len.draw(rng)
        prefix = self._tokens(random.Random(f"prefix-{self.seed}"), self.shared_prefix_len)
        prompt = prefix + self._tokens(rng, prompt_len)
        return PlannedRequest(index, prompt, output_len, arrival_s)

    def _tokens(self, rng: random.Random, length: int) -> list[int]:
        if length == 0:
            return []
        if self.text_token_ids is None:
            return rng.choices(self.allowed_token_ids, k=length)
        text = self.text_token_ids
        start = rng.randrange(len(text))
        # a text shorter than the prompt starts over
        return [text[(start + offset) % len(text)] for offset in range(length)]
