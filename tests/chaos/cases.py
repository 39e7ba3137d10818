"""The mixed work: requests drawn from a seed, each with a seed of its own, so that an undisturbed
engine says once what every later run of it must give."""

import dataclasses
from pathlib import Path
from random import Random
from typing import Any

from frontend import BeamSearchParams, SamplingParams

KINDS = (
    "greedy", "sampled", "samples", "beams", "stop", "penalties", "logprobs", "long", "chat",
)  # fmt: skip
MAX_MODEL_LEN = 1024
_WORDS = (Path(__file__).parents[2] / "LICENSE").read_text().split()
_QUESTIONS = (
    "What is the capital of France?",
    "Write a short poem about the sea.",
    "Explain in one sentence why the sky is blue.",
    "Wie heißt die Hauptstadt von Österreich? 🙂",
    "List three prime numbers above 50.",
)


@dataclasses.dataclass(frozen=True)
class Case:
    """`messages` or `prompt`, and arguments of SamplingParams or BeamSearchParams."""

    number: int
    kind: str
    prompt: str
    arguments: dict[str, Any]

    @property
    def is_beam_search(self) -> bool:
        return self.kind == "beams"

    def params(self, **more: Any) -> SamplingParams:
        return SamplingParams(**self.arguments, **more)

    def beam_params(self) -> BeamSearchParams:
        return BeamSearchParams(**self.arguments)

    @property
    def messages(self) -> list[dict[str, str]]:
        return [{"role": "user", "content": self.prompt}]


def make_cases(seed: int, count: int) -> list[Case]:
    """All kinds by turns."""
    random = Random(seed)
    return [_make_case(random, number, KINDS[number % len(KINDS)]) for number in range(count)]


def _make_case(random: Random, number: int, kind: str) -> Case:
    arguments: dict[str, Any] = {
        "max_tokens": random.randint(8, 64),
        "ignore_eos": random.random() < 0.3,
        "seed": random.getrandbits(40),
    }
    prompt = _text(random, random.randint(3, 40))
    is_greedy = kind == "greedy" or (kind in ("long", "logprobs", "chat") and random.random() < 0.5)
    arguments["temperature"] = 0.0 if is_greedy else random.uniform(0.5, 1.3)
    match kind:
        case "sampled":
            arguments["top_p"] = random.choice([1.0, 0.9])
            arguments["top_k"] = random.choice([0, 40])
            arguments["min_p"] = random.choice([0.0, 0.05])
        case "samples":
            arguments["n"] = random.randint(2, 4)
        case "beams":
            width, length = random.randint(2, 3), random.randint(3, 6)
            arguments = {"beam_width": width, "max_tokens": length}
        case "stop":
            arguments["stop"] = random.sample([" the", ".", ",", "\n", "ing ", "tion"], 2)
            arguments["include_stop_str_in_output"] = random.random() < 0.5
            arguments["min_tokens"] = random.choice([0, 5])
            arguments["n"] = random.choice([1, 1, 2])
        case "penalties":
            arguments["presence_penalty"] = random.uniform(-1, 1)
            arguments["frequency_penalty"] = random.uniform(0, 1)
            arguments["repetition_penalty"] = random.uniform(1, 1.5)
            arguments["logit_bias"] = {random.randrange(1000): 2.0}
        case "logprobs":
            arguments["logprobs"] = random.choice([0, 1, 5])
            arguments["n"] = 1 if is_greedy else random.choice([1, 2])
        case "long":  # more than a step's tokens
            prompt = _text(random, random.randint(250, 450))
            arguments["max_tokens"] = random.randint(4, 20)
        case "chat":
            prompt = random.choice(_QUESTIONS)
    return Case(number, kind, prompt, arguments)


def _text(random: Random, num_words: int) -> str:
    start = random.randrange(len(_WORDS) - num_words)
    return " ".join(_WORDS[start : start + num_words])
