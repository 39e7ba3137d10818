"""Options that several commands share, exit codes, and how an error is reported."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Parameter
from cyclopts.validators import Number

from frontend.errors import InvalidInput
from protocol.addresses import default_address
from protocol.presets import find_preset

if TYPE_CHECKING:
    from frontend.async_llm import AsyncLLM
    from frontend.fleet.router import RoutingPolicy
    from frontend.sampling_params import RequestOutputKind, SamplingParams

EXIT_FAULT = 1
EXIT_USAGE = 2
EXIT_START = 3
"""The start failed: the address to listen at is taken, or the engine's own start failed."""
EXIT_INTERRUPTED = 130

DEFAULT_CONNECT_S = 60.0


Flag = Annotated[bool, Parameter(negative="")]
"""A flag without a --no- form."""
Json = Annotated[Flag, Parameter(help="Print one JSON document.")]


class UsageError(ValueError):
    """Options that contradict each other, or values outside their limits."""


def option(text: str, **limits: float) -> Parameter:
    """A number's help, and its limits, which cyclopts checks."""
    return Parameter(help=text, validator=Number(**limits))


def refuse_without_effect(options: Any, names: Iterable[str], reason: str) -> None:
    """Raises UsageError: one of these was given. `options`: a dataclass with defaults."""
    for name in names:
        value = getattr(options, name)
        if value != getattr(type(options), name):
            option_name = f"--{name.replace('_', '-')}"
            raise UsageError(
                f"{option_name} is {value} and does nothing, as {reason}; leave it out"
            )


def print_fault(error: BaseException | str) -> None:
    """One line on stderr that names the program."""
    line = " ".join(str(error).split())
    print(f"engine-client: {line}", file=sys.stderr, flush=True)  # noqa: T201


def check_engine_options(
    options: Sequence[str], program: Sequence[str], models: Sequence[str] = ()
) -> None:
    """Ask `program`, an `engine-core`, before anything is fetched or started.
    Raises UsageError: it refuses them, or knows no such model; in its words."""
    if options or models:
        names = [f"--models={each}" for each in models]
        command = [*program, "check", *names, "--model", "NAME", *options]
        checked = subprocess.run(command, capture_output=True, text=True, check=False)
        if checked.returncode:
            raise UsageError(checked.stderr.strip().removeprefix("engine-core: "))


def through_preset(llm: AsyncLLM, name: str | None) -> AsyncLLM:
    """Raises UsageError: there is no preset of this name."""
    from frontend.presets.llm import PresetLLM

    if name is None:
        return llm
    if (preset := find_preset(name)) is None:
        raise UsageError(f"--preset: there is no {name!r}; `engine-core list` shows yours")
    return PresetLLM(llm, preset)


def read_template(file: Path | None, llm: AsyncLLM) -> str | None:
    """The text of --chat-template, or None for the model's own.

    Raises:
        UsageError: the file cannot be read, or there is neither.
    """
    if file is not None:
        try:
            return file.read_text()
        except (OSError, UnicodeDecodeError) as error:
            reason = getattr(error, "strerror", None) or error
            raise UsageError(f"--chat-template: {file} cannot be read: {reason}") from None
    model, tokenizer = llm.model, llm.input_processor.optional_tokenizer
    if tokenizer is None:
        raise UsageError(
            f"{model.name} came without a tokenizer, so it takes no text; serve it with one "
            "(engine-core --tokenizer), or send token ids from Python"
        )
    if tokenizer.chat_template is None:
        raise UsageError(
            f"{model.name} has no chat template: it continues texts rather than answer; use "
            '`engine-client complete "Once upon a time"`, or give a Jinja2 template with '
            "--chat-template FILE"
        )
    return None


_DEFAULT_ADDRESS = "needed" if sys.platform == "win32" else f"default: {default_address()}"


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class DaemonOptions:
    """The daemon's address, and how long to wait for it."""

    address: Annotated[
        str | None,
        Parameter(
            help="ipc://PATH or tcp://HOST:PORT, or with commas several that serve one model. "
            f"[{_DEFAULT_ADDRESS}]",
            show_default=False,
        ),
    ] = None
    connect_timeout: float | None = None
    """Seconds for the daemon to answer, which it does between two steps; default: 60, behind all of
    its start."""
    reconnect_timeout: float = 60.0
    """Seconds for a lost daemon to come back."""
    keys: Path | None = None
    """Your key's file, for a daemon on TCP with keys (made by `engine-core keys add`)."""

    def client(
        self,
        command: str,
        addresses: Sequence[str] = (),
        routing_policy: RoutingPolicy = "cache-aware",
    ) -> AsyncLLM:
        """Not connected yet; `command` is its name in the daemon's log.

        Raises:
            UsageError: a time limit that is none.
        """
        from frontend.async_llm import AsyncLLM

        for name in ("connect_timeout", "reconnect_timeout"):
            limit_s = getattr(self, name)
            if limit_s is not None and not 0 < limit_s < float("inf"):
                option = name.replace("_", "-")
                raise UsageError(f"--{option} is {limit_s:g}, it must be a number above 0")
        return AsyncLLM(
            addresses or (None if self.address is None else self.address.split(",")),
            client_name=f"engine-client {command}",
            connect_timeout_s=self.connect_timeout or DEFAULT_CONNECT_S,
            reconnect_timeout_s=self.reconnect_timeout,
            keys=self.keys,
            routing_policy=routing_policy,
        )


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class SchedulingOptions:
    """Used by the daemon's scheduling policy, and which weights."""

    priority: int = 0
    """Smaller is more urgent; under policy fair among the requests of one tenant."""
    tenant: str | None = None
    """Whose share of the daemon is used, under policy fair; TENANT/USER divides it."""
    adapter: str | None = None
    """The name of one of the daemon's adapters."""


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class CompletionOptions:
    """The request to send, and how to print the answer."""

    chat: Annotated[bool, Parameter(negative="--raw")] = False
    """Send PROMPT as a user's message, with the model's chat template."""
    system: str | None = None
    """The system message, with --chat."""
    preset: str | None = None
    """Apply what this name of your own stands for (engine-core create) to the daemon's model."""
    chat_template: Path | None = None
    """A file with a Jinja2 template to use in place of the model's, with --chat."""
    n: int = 1
    """How many completions."""
    logprobs: int | None = None
    """Log-probabilities of this many likeliest tokens a position; with --json."""
    json: Annotated[bool, Parameter(negative="")] = False
    """Print one JSON document at the end."""
    stream: bool = True
    """Print text as it comes."""

    @property
    def streams(self) -> bool:
        return self.stream and self.n == 1 and not self.json


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class SamplingOptions:
    """How to choose tokens. Default: what the model's authors recommend, else temperature 0.8,
    top_k 40, top_p 0.95."""

    max_tokens: int | None = None
    """Most tokens to generate; default: up to the model's length."""
    min_tokens: int | None = None
    """Do not end before this many tokens."""
    temperature: float | None = None
    """0 is greedy; higher is more varied."""
    top_p: float | None = None
    """Nucleus sampling, above 0 to 1."""
    top_k: int | None = None
    """Only the k likeliest tokens; 0 is all."""
    min_p: float | None = None
    """Drop tokens below this share of the likeliest's."""
    repetition_penalty: float | None = None
    """1 is none."""
    presence_penalty: float | None = None
    """Penalty of tokens that are in the answer, from -2 to 2; 0 is none."""
    frequency_penalty: float | None = None
    """Penalty of a token for each time it is in the answer, from -2 to 2; 0 is none."""
    seed: int | None = None
    """Same seed, same answer."""
    stop: Annotated[list[str] | None, Parameter(negative="")] = None
    """End before this text; may be repeated."""
    ignore_eos: Annotated[bool, Parameter(negative="")] = False
    """Continue after the model's end-of-sequence."""
    extra_args: str | None = None
    """A JSON object for the daemon's logits processors."""

    def to_params(
        self, llm: AsyncLLM, output_kind: RequestOutputKind, **more: Any
    ) -> SamplingParams:
        """What was typed, over the defaults of the preset and the model.

        Raises:
            UsageError: values outside their limits, or that contradict each other.
        """
        from frontend.sampling_params import FIRST_ANSWER_SAMPLING, SamplingParams

        defaults = llm.model.default_sampling or FIRST_ANSWER_SAMPLING
        recommended = SamplingParams.from_defaults(defaults)
        typed = {name: value for name, value in vars(self).items() if value is not None}
        if self.extra_args is not None:
            try:
                typed["extra_args"] = json.loads(self.extra_args)
            except ValueError as error:
                raise UsageError(f"--extra-args is no JSON: {error}") from None
        typed = {"max_tokens": None, **llm.preset_sampling, **typed, **more}
        try:
            return dataclasses.replace(recommended, **typed, output_kind=output_kind)
        except InvalidInput as error:
            raise UsageError(str(error)) from None


COMPLETION = CompletionOptions()
DAEMON = DaemonOptions()
SAMPLING = SamplingOptions()
SCHEDULING = SchedulingOptions()
