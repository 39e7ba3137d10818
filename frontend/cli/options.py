"""Options that several commands share, exit codes, and how an error is reported."""

from __future__ import annotations

import dataclasses
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Parameter

from frontend.errors import InvalidInput
from protocol.addresses import default_address

if TYPE_CHECKING:
    from frontend.async_llm import AsyncLLM
    from frontend.sampling_params import RequestOutputKind, SamplingParams
    from protocol.outputs import ModelInfo

EXIT_FAULT = 1
EXIT_USAGE = 2
EXIT_INTERRUPTED = 130


class UsageError(ValueError):
    """Options that contradict each other, or values outside their limits."""


def print_fault(error: BaseException | str) -> None:
    """One line on stderr that names the program."""
    line = " ".join(str(error).split())
    print(f"engine-client: {line}", file=sys.stderr, flush=True)  # noqa: T201


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class DaemonOptions:
    """Where the daemon listens, and how long to wait for it."""

    address: Annotated[
        str | None,
        Parameter(
            help="ipc://PATH or tcp://HOST:PORT. "
            f"[default: {default_address()}, the default of engine-core]",
            show_default=False,
        ),
    ] = None
    reconnect_timeout: Annotated[
        float, Parameter(help="Seconds for a lost daemon to come back.")
    ] = 10.0

    def client(self, command: str) -> AsyncLLM:
        """Not connected yet; `command` is its name in the daemon's log."""
        from frontend.async_llm import AsyncLLM

        return AsyncLLM(
            self.address,
            client_name=f"engine-client {command}",
            reconnect_timeout_s=self.reconnect_timeout,
        )


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class SchedulingOptions:
    """Used by the daemon's scheduling policy."""

    priority: Annotated[
        int, Parameter(help="Smaller is more urgent; for a daemon with policy priority.")
    ] = 0
    tenant: Annotated[
        str | None,
        Parameter(help="Whose share of the daemon is used; for a daemon with policy fair."),
    ] = None


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class CompletionOptions:
    """What to send and how to print the answer."""

    chat: Annotated[
        bool,
        Parameter(
            help="Send PROMPT as a user's message, with the model's chat template.",
            negative="--raw",
        ),
    ] = False
    system: Annotated[str | None, Parameter(help="The system message, with --chat.")] = None
    n: Annotated[int, Parameter(help="How many completions.")] = 1
    logprobs: Annotated[
        int | None,
        Parameter(help="Log-probabilities of this many likeliest tokens a position; with --json."),
    ] = None
    json: Annotated[bool, Parameter(help="Print one JSON document at the end.", negative="")] = (
        False
    )
    stream: Annotated[bool, Parameter(help="Print text as it comes.")] = True

    @property
    def streams(self) -> bool:
        return self.stream and self.n == 1 and not self.json


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class SamplingOptions:
    """How to choose tokens. Default: what the model's authors recommend."""

    max_tokens: Annotated[
        int | None, Parameter(help="Most tokens to generate; default: up to the model's length.")
    ] = None
    min_tokens: Annotated[int | None, Parameter(help="Do not end before this many tokens.")] = None
    temperature: Annotated[float | None, Parameter(help="0 is greedy; higher is more varied.")] = (
        None
    )
    top_p: Annotated[float | None, Parameter(help="Nucleus sampling, above 0 to 1.")] = None
    top_k: Annotated[int | None, Parameter(help="Only the k likeliest tokens; 0 is all.")] = None
    min_p: Annotated[
        float | None, Parameter(help="Drop tokens below this share of the likeliest's.")
    ] = None
    repetition_penalty: Annotated[float | None, Parameter(help="1 is none.")] = None
    presence_penalty: Annotated[float | None, Parameter(help="From -2 to 2; 0 is none.")] = None
    frequency_penalty: Annotated[float | None, Parameter(help="From -2 to 2; 0 is none.")] = None
    seed: Annotated[int | None, Parameter(help="Same seed, same answer.")] = None
    stop: Annotated[
        list[str] | None, Parameter(help="End before this text; may be repeated.", negative="")
    ] = None
    ignore_eos: Annotated[
        bool, Parameter(help="Continue after the model's end-of-sequence.", negative="")
    ] = False

    def to_params(
        self, model: ModelInfo, output_kind: RequestOutputKind, **more: Any
    ) -> SamplingParams:
        """What was typed, over the defaults of the model.

        Raises:
            UsageError: values outside their limits, or that contradict each other.
        """
        from frontend.sampling_params import SamplingParams

        recommended = SamplingParams.from_defaults(model.default_sampling)
        typed = {name: value for name, value in vars(self).items() if value is not None}
        typed = {"max_tokens": None, **typed, **more, "output_kind": output_kind}
        try:
            return dataclasses.replace(recommended, **typed)
        except InvalidInput as error:
            raise UsageError(str(error)) from None
