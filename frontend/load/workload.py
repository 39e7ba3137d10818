"""Requests of a load test, from a seed, a trace or a file of texts. Each client process makes its
own from the same options."""

import itertools
import math
import random
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from cyclopts import Parameter

from frontend.cli.options import option, refuse_without_effect
from frontend.load.conversations import read_custom, read_sharegpt
from frontend.load.requests import PlannedRequest, PlannedTurn, Prompt
from frontend.load.traces.trace import MAX_REQUESTS, TraceFile, TraceRequest, take_part

if TYPE_CHECKING:  # `bench --help` does without NumPy, and so without what is imported below
    import numpy as np

_FILES_OF_TEXT = {"sharegpt": read_sharegpt, "custom": read_custom}
# common English words: one token each, with the space before them, in most vocabularies
_WORDS = (
    "the of and to in is you that it he was for on are as with his they at be this have from or "
    "one had by word but not what all were we when your can said there use an each which she do "
    "how if will up other about out many then them these so some her would make like him into "
    "time has look two more write go see number no way could people my than first water been call "
    "who oil its now find long down day did get come made may part "
)
WORDS = tuple(_WORDS.split())


@dataclass(frozen=True, kw_only=True)
class Arrivals:
    """When conversations begin: `rate` a second, at infinity all at once or at a trace's own times
    (`rate_scale` times as fast), or a ramp: strategy, first and last rate."""

    rate: float = math.inf
    burstiness: float = 1.0
    ramp: tuple[str, float, float] | None = None
    rate_scale: float = 1.0
    duration_s: float | None = None


@Parameter(name="*", group="Requests")
@dataclass(frozen=True, kw_only=True)
class DatasetOptions:
    """The requests that are sent."""

    dataset_name: Annotated[
        Literal["random", "sharegpt", "custom", "azure", "mooncake", "burstgpt"],
        Parameter(help="custom: JSONL; the last three are trace files."),
    ] = "random"
    dataset_path: Annotated[Path | None, Parameter(help="The file.")] = None
    text: Annotated[Path | None, Parameter(help="To cut prompts from; default: none.")] = None
    input_len: Annotated[
        str, Parameter(help="Tokens: 512, uniform:A:B, log-uniform:A:B, lognormal:MEDIAN:SIGMA:MAX")
    ] = "128"
    output_len: Annotated[str | None, Parameter(help="Default: 64, or as the file says.")] = None
    prefixes: Annotated[int, option("Number of shared prefixes.", gte=0)] = 0
    prefix_len: Annotated[int, option("Tokens of each, besides the prompt's own.", gte=1)] = 512
    prefix_zipf: Annotated[float, Parameter(help="Exponent of their popularity.")] = 1.0
    turns: Annotated[float, option("Mean turns of a chat; of a file of texts the most.", gte=1)] = 1
    think: Annotated[float, option("Mean seconds between answer and next turn.", gte=0)] = 0.0
    seed: Annotated[int, option("Of all that is random.", gte=0)] = 0

    @property
    def is_trace_file(self) -> bool:
        return self.dataset_name not in ("random", *_FILES_OF_TEXT)

    @property
    def lengths(self) -> tuple[str, str]:
        """Lengths of random prompts and answers."""
        return self.input_len, self.output_len or "64"

    @property
    def longest_request(self) -> int:
        """The longest request in tokens; 0: a file says."""
        if self.dataset_name != "random":
            return 0
        # all forms of lengths end with the largest
        largest = sum(int(text.split(":")[-1]) for text in self.lengths)
        return largest + (self.prefix_len if self.prefixes else 0)

    def check(self) -> None:
        """Raises ValueError: options that contradict each other."""
        from frontend.load.traces.synthetic import parse_lengths

        name = self.dataset_name
        for option_name, text in zip(("input", "output"), self.lengths, strict=True):
            parse_lengths(f"--{option_name}-len", text)
        if (self.dataset_path is None) != (name == "random"):
            raise ValueError(
                f"--dataset-name {name} and --dataset-path {self.dataset_path} do not go together; "
                "all but random need a file"
            )
        if name != "random":
            of_random = {"input_len", "prefixes", "prefix_len", "prefix_zipf", "think"}
            more = {"output_len", "turns"} if self.is_trace_file else {"text"}
            refuse_without_effect(self, of_random | more, f"--dataset-name is {name}")
        if not self.prefixes:
            refuse_without_effect(self, ("prefix_len", "prefix_zipf"), "--prefixes is 0")
        if self.turns == 1:
            refuse_without_effect(self, ("think",), "--turns is 1")


@dataclass(frozen=True, kw_only=True)
class Workload:
    """All requests of a load test, in order of arrival, anew for each iteration. `units` are token
    ids or words that prompts are made of: of a text as they stand in a row, else drawn at random.
    `num_requests` counts later turns; None: all of a file. A random conversation ends before a
    prompt of more than `max_prompt_tokens`."""

    options: DatasetOptions
    arrivals: Arrivals = Arrivals()
    units: Sequence[int] | Sequence[str] = WORDS
    is_chat: bool = False
    num_requests: int | None = None
    max_prompt_tokens: int = 2**30

    def __iter__(self) -> Iterator[PlannedRequest]:
        requests = (
            self._from_texts()
            if self.options.dataset_name in _FILES_OF_TEXT
            else self._from_trace()
        )
        end_s = self.arrivals.duration_s
        if end_s is not None:
            requests = itertools.takewhile(lambda request: request.arrival_s < end_s, requests)
        num_left = self.num_requests or sys.maxsize
        for request in requests:
            yield replace(request, later_turns=request.later_turns[: num_left - 1])
            num_left -= 1 + len(request.later_turns)
            if num_left <= 0:
                return

    def _times(self, generator: "np.random.Generator") -> Iterator[float]:
        from frontend.load.traces.arrivals import gamma, ramp

        asked = self.arrivals
        if asked.ramp is not None:
            assert self.num_requests is not None, "checked with the options"
            strategy, first, last = asked.ramp
            return ramp(first, last, strategy, self.num_requests, asked.burstiness)(generator)
        if math.isinf(asked.rate):
            return itertools.repeat(0.0)
        return gamma(asked.rate, asked.burstiness, generator)

    def _random(self, stream: int) -> "np.random.Generator":
        import numpy as np

        return np.random.default_rng([self.options.seed, stream])

    # ------------------------------------------------------------------ synthetic, and traces

    def _from_trace(self) -> Iterator[PlannedRequest]:
        for one in self._trace():
            numbered = enumerate(one.later_turns, start=one.index + 1)
            turns = (
                PlannedTurn(
                    self._joined([(2 * number, turn.num_text_tokens)]),
                    turn.num_output_tokens,
                    turn.think_s,
                )
                for number, turn in numbered
            )
            prompt = self._prompt(self._joined(one.segments))
            yield PlannedRequest(
                one.index, prompt, one.num_output_tokens, one.arrival_s, tuple(turns)
            )

    def _trace(self) -> Iterator[TraceRequest]:
        from frontend.load.traces import synthetic

        asked, path = self.options, self.options.dataset_path
        if path is not None:
            rows = TraceFile(path, asked.dataset_name)
            trace = take_part(rows, rate_scale=self.arrivals.rate_scale)
            if self.arrivals.ramp is None and math.isinf(self.arrivals.rate):
                return trace
            times = self._times(self._random(0))
            return (replace(one, arrival_s=at) for one, at in zip(trace, times, strict=False))
        prefixes = synthetic.SharedPrefixes(asked.prefixes, asked.prefix_len, asked.prefix_zipf)
        chats = synthetic.Chats(asked.turns, asked.think, self.max_prompt_tokens)
        inputs, outputs = (
            synthetic.parse_lengths(f"--{name}-len", text)
            for name, text in zip(("input", "output"), asked.lengths, strict=True)
        )
        made = synthetic.SyntheticTrace(
            arrivals=self._times,
            lengths=synthetic.independent(inputs, outputs),
            num_requests=self.num_requests or MAX_REQUESTS,
            seed=asked.seed,
            prefixes=prefixes if asked.prefixes else None,
            chats=chats if asked.turns > 1 else None,
        )
        return iter(made)

    def _joined(self, segments: Sequence[tuple[int, int]]) -> Any:
        """Equal (number, length) give equal units."""
        units: list[Any] = []
        for number, length in segments:
            rng = random.Random(f"{self.options.seed}-{number}")
            if self.options.text is not None:
                start = rng.randrange(len(self.units))  # a text that is too short starts over
                units += itertools.islice(itertools.cycle(self.units), start, start + length)
            else:
                units += rng.choices(self.units, k=length)
        return " ".join(units) if isinstance(self.units[0], str) else units

    def _prompt(self, prompt: Prompt) -> Prompt:
        is_text = isinstance(prompt, str)
        return [{"role": "user", "content": prompt}] if self.is_chat and is_text else prompt

    # ------------------------------------------------------------------ files of texts

    def _from_texts(self) -> Iterator[PlannedRequest]:
        from frontend.load.traces.synthetic import parse_lengths

        asked, path = self.options, self.options.dataset_path
        assert path is not None, "checked with the options"
        conversations = _FILES_OF_TEXT[asked.dataset_name](path, int(asked.turns))
        random.Random(asked.seed).shuffle(conversations)
        arrivals, lengths = self._times(self._random(0)), self._random(1)
        draw = asked.output_len and parse_lengths("--output-len", asked.output_len)
        index = 0
        # as often over as the number of requests asks for
        rounds = itertools.count() if self.num_requests else range(1)
        for conversation in (one for _ in rounds for one in conversations):
            planned = []
            for text, recorded in conversation:
                num_tokens = int(draw(lengths, 1)[0]) if draw else recorded
                if num_tokens is None:
                    raise ValueError(f"{path}: a line has no output_tokens; give --output-len")
                planned.append(PlannedTurn(text, num_tokens))
            opening: Any = self._prompt(planned[0].text)
            if isinstance(opening, list) and self.is_chat != isinstance(opening[0], dict):
                raise ValueError(
                    f"{path} holds messages, which only a chat backend takes, or token ids, which "
                    "only the others take; choose another --backend"
                )
            num_tokens = planned[0].num_output_tokens
            yield PlannedRequest(index, opening, num_tokens, next(arrivals), tuple(planned[1:]))
            index += len(planned)
