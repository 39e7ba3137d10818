"""How long prompts and answers are: distributions of whole numbers, and how they are written.

512                        always so many
uniform:32:512             each length of the range as likely
log-uniform:32:512         each factor of 2 as likely
lognormal:300:1.2:8192     median, sigma of the logarithm, largest
"""

import dataclasses
import math
from pathlib import Path
from typing import Protocol

import numpy as np
import numpy.typing as npt

from scripts.simulator.errors import SimulationError

Int64Array = npt.NDArray[np.int64]
_FORMS = "as 512, uniform:32:512, log-uniform:32:512 or lognormal:MEDIAN:SIGMA:LARGEST"


class Lengths(Protocol):
    def draw(self, random: np.random.Generator, count: int) -> Int64Array: ...


@dataclasses.dataclass(frozen=True, slots=True)
class Constant:
    value: int

    def draw(self, random: np.random.Generator, count: int) -> Int64Array:
        return np.full(count, self.value, np.int64)


@dataclasses.dataclass(frozen=True, slots=True)
class Uniform:
    smallest: int
    largest: int

    def draw(self, random: np.random.Generator, count: int) -> Int64Array:
        return random.integers(self.smallest, self.largest, count, endpoint=True)


@dataclasses.dataclass(frozen=True, slots=True)
class LogUniform:
    smallest: int
    largest: int

    def draw(self, random: np.random.Generator, count: int) -> Int64Array:
        logs = random.uniform(math.log(self.smallest), math.log(self.largest), count)
        return np.rint(np.exp(logs)).astype(np.int64)


@dataclasses.dataclass(frozen=True, slots=True)
class LogNormal:
    median: float
    sigma: float
    largest: int

    def draw(self, random: np.random.Generator, count: int) -> Int64Array:
        drawn = np.rint(random.lognormal(math.log(self.median), self.sigma, count))
        return np.clip(drawn, 1, self.largest).astype(np.int64)


def parse_lengths(option: str, text: str) -> Lengths:
    """
    Raises:
        SimulationError: names the option, what it was given and what it takes.
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
                return Uniform(low, high) if name == "uniform" else LogUniform(low, high)
            case "lognormal", [median, sigma, highest]:
                lognormal = LogNormal(float(median), float(sigma), int(highest))
                if lognormal.median <= 0 or lognormal.sigma < 0 or lognormal.largest < 1:
                    raise SimulationError(
                        f"{option} is {text!r}: median and largest must be above 0, sigma not below"
                    )
                return lognormal
            case value, []:
                if int(value) < 1:
                    raise SimulationError(f"{option} is {value}, it must be at least 1")
                return Constant(int(value))
    except ValueError:
        pass
    raise SimulationError(f"{option} is {text!r}, it must be written {_FORMS}")


def read_pairs(path: Path) -> Int64Array:
    """Lines of `prompt tokens,output tokens`, to be drawn from with replacement; [N, 2].

    Raises:
        SimulationError: a file that cannot be read, or names the line.
    """
    pairs = []
    try:
        lines = path.read_text().splitlines()
    except OSError as error:
        raise SimulationError(f"cannot read {path}: {error.strerror}") from None
    for number, line in enumerate(lines, start=1):
        try:
            prompt, output = map(int, line.split(","))
        except ValueError:
            prompt = output = 0
        if prompt < 1 or output < 1:
            raise SimulationError(
                f"{path}, line {number}: {line!r} is no pair of lengths above 0, as 512,128"
            )
        pairs.append((prompt, output))
    if not pairs:
        raise SimulationError(f"{path} holds no pair of lengths; write lines as 512,128")
    return np.array(pairs, np.int64)
