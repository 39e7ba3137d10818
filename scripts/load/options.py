"""The options of a load test and their limits. Must not know how they are carried out."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from cyclopts import Parameter

from protocol.addresses import default_address


class LoadTestError(Exception):
    """The run cannot be done as asked, or broke off."""


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class LoadOptions:
    """Options of a run."""

    address: Annotated[str, Parameter(help="Of the daemon.")] = default_address()
    rate: Annotated[float | None, Parameter(help="Open loop: mean requests a second.")] = None
    concurrency: Annotated[int | None, Parameter(help="Closed loop: requests at a time.")] = None
    num_requests: Annotated[int | None, Parameter(help="End after so many requests.")] = None
    duration: Annotated[
        float | None, Parameter(help="Send for so many seconds; what was sent is waited for.")
    ] = None
    processes: Annotated[int, Parameter(help="Client processes.")] = 1
    prompt_len: Annotated[str, Parameter(help="Tokens, as 128 or 32:512.")] = "128"
    output_len: Annotated[str, Parameter(help="Most tokens generated, as 64 or 16:256.")] = "64"
    length_distribution: Annotated[
        Literal["log-uniform", "uniform"], Parameter(help="Of lengths within their ranges.")
    ] = "log-uniform"
    shared_prefix_len: Annotated[
        int, Parameter(help="Tokens that all prompts begin with, besides their own.")
    ] = 0
    text: Annotated[
        Path | None, Parameter(help="Cut prompts from this file; default: random tokens.")
    ] = None
    ignore_eos: Annotated[
        bool, Parameter(help="Always generate the full output length.", negative="")
    ] = False
    temperature: Annotated[float, Parameter(help="0 is greedy.")] = 0.0
    warmup: Annotated[int, Parameter(help="Requests before the measurement, one by one.")] = 0
    seed: Annotated[int, Parameter(help="Of lengths, prompts and arrivals.")] = 0
    json: Annotated[Path | None, Parameter(help="Where the document goes; default: stdout.")] = None

    def check(self) -> None:
        """
        Raises:
            LoadTestError: options that contradict each other or are outside their limits.
        """
        if (self.rate is None) == (self.concurrency is None):
            raise LoadTestError("give either --rate (open loop) or --concurrency (closed loop)")
        if self.num_requests is None and self.duration is None:
            raise LoadTestError("the run has no end; give --num-requests or --duration")
        limits = {
            "concurrency": 1,
            "num_requests": 1,
            "processes": 1,
            "shared_prefix_len": 0,
            "warmup": 0,
        }
        for name, minimum in limits.items():
            value = getattr(self, name)
            if value is not None and value < minimum:
                option = name.replace("_", "-")
                raise LoadTestError(f"--{option} is {value}, it must be at least {minimum}")
        for name in ("rate", "duration"):
            value = getattr(self, name)
            if value is not None and not 0 < value < float("inf"):
                raise LoadTestError(f"--{name} is {value}, it must be a number above 0")
