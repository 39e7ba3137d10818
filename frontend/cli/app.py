"""The command line of `engine-client`: commands, options, exit codes.

Owns parsing and the way faults become one line on stderr and a number. Must stay quick to
import; each command loads what it needs when it runs.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import cyclopts
from cyclopts import App, Parameter

from frontend.cli.sampling_options import SamplingOptions
from protocol.addresses import default_address

EXIT_FAULT = 1
EXIT_USAGE = 2
EXIT_INTERRUPTED = 130

app = App(
    name="engine-client",
    help="Talk to an engine-core daemon.",
    version_flags=["--version"],
    version=lambda: _version(),
    result_action="return_value",
    suppress_keyboard_interrupt=False,
)


class UsageError(ValueError):
    """Options that contradict each other, or values outside their limits."""


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class EngineAddress:
    """Where the daemon listens."""

    address: Annotated[
        str | None,
        Parameter(
            help="ipc://PATH or tcp://HOST:PORT. "
            f"[default: {default_address()}, where engine-core listens unless told otherwise]",
            show_default=False,
        ),
    ] = None


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class TurnOptions:
    """What the daemon's scheduling policy looks at."""

    priority: Annotated[
        int, Parameter(help="Smaller is more urgent; for a daemon with policy priority.")
    ] = 0
    tenant: Annotated[
        str | None,
        Parameter(help="Whose share of the daemon is used; for a daemon with policy fair."),
    ] = None


@app.command
def chat(
    *,
    system: Annotated[
        str | None, Parameter(help="What the model is told before the conversation.")
    ] = None,
    sampling: SamplingOptions | None = None,
    turn: TurnOptions | None = None,
    engine: EngineAddress | None = None,
) -> int:
    """Talk with the model. /reset starts over, /exit or Ctrl-D leaves, Ctrl-C stops an answer."""
    from frontend.cli.chat import run_chat

    address = None if engine is None else engine.address
    return run_chat(
        address,
        system=system,
        sampling=sampling or SamplingOptions(),
        turn=turn or TurnOptions(),
    )


@app.command
def complete(
    prompt: Annotated[
        str | None, Parameter(help="The text to go on from; default: standard input.")
    ] = None,
    /,
    *,
    chat: Annotated[
        bool,
        Parameter(
            help="Send PROMPT as a user's message, with the model's chat template.",
            negative="--raw",
        ),
    ] = False,
    system: Annotated[str | None, Parameter(help="The system message, with --chat.")] = None,
    n: Annotated[int, Parameter(help="How many completions.")] = 1,
    logprobs: Annotated[
        int | None,
        Parameter(help="Log-probabilities of so many likeliest tokens a position; with --json."),
    ] = None,
    json: Annotated[
        bool, Parameter(help="Print one JSON document at the end.", negative="")
    ] = False,
    stream: Annotated[bool, Parameter(help="Print text as it comes.")] = True,
    sampling: SamplingOptions | None = None,
    turn: TurnOptions | None = None,
    engine: EngineAddress | None = None,
) -> int:
    """Complete a prompt, once."""
    from frontend.cli.complete import Completion, run_complete

    if logprobs is not None and not json:
        raise UsageError("--logprobs is shown in JSON only; add --json")
    if system is not None and not chat:
        raise UsageError("--system is a message of a conversation; add --chat")
    if prompt is None:
        if sys.stdin.isatty():
            raise UsageError("there is no PROMPT; give a text, or pipe one in")
        prompt = sys.stdin.read()
    completion = Completion(
        prompt=prompt,
        is_message=chat,
        system=system,
        n=n,
        logprobs=logprobs,
        prints_json=json,
        streams=stream and n == 1 and not json,
        sampling=sampling or SamplingOptions(),
        turn=turn or TurnOptions(),
    )
    return _run(run_complete(None if engine is None else engine.address, completion))


@app.command
def info(
    *,
    request: Annotated[
        str | None,
        Parameter(
            help="Show instead where this request is and why: an id that --requests lists, or of "
            "one of the last that finished."
        ),
    ] = None,
    requests: Annotated[
        bool, Parameter(help="Show instead the ids of all live requests.", negative="")
    ] = False,
    json: Annotated[bool, Parameter(help="Print one JSON document.", negative="")] = False,
    engine: EngineAddress | None = None,
) -> int:
    """Show the daemon's model, limits and statistics, or one request's fate."""
    from frontend.cli.info import run_info, run_request_info, run_request_list

    address = None if engine is None else engine.address
    if request is not None and requests:
        raise UsageError("--request shows one and --requests lists all; give one of them")
    if requests:
        return _run(run_request_list(address, prints_json=json))
    if request is not None:
        return _run(run_request_info(address, request, prints_json=json))
    return _run(run_info(address, prints_json=json))


def run_command_line(arguments: Sequence[str]) -> int:
    """Run one command line. Returns the exit code; a fault is one line on stderr."""
    # what the library logs about a lost engine is in the fault's own line
    logging.getLogger("frontend").addHandler(logging.NullHandler())
    try:
        result = app(arguments, exit_on_error=False, print_error=False)
        sys.stdout.flush()
    except (cyclopts.CycloptsError, UsageError) as error:
        print_fault(error)
        return EXIT_USAGE
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    except BrokenPipeError:
        # the reader of our output has left (`| head`); keep the interpreter from flushing again
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_FAULT
    # the library's own errors and wrong input; anything else is our bug and shows its traceback
    except _user_errors() as error:
        print_fault(error)
        return EXIT_FAULT
    return int(result or 0)


def print_fault(error: BaseException | str) -> None:
    """One line on stderr that names the program."""
    line = " ".join(str(error).split())
    print(f"engine-client: {line}", file=sys.stderr, flush=True)  # noqa: T201


def _user_errors() -> tuple[type[Exception], ...]:
    from frontend.errors import EngineClientError

    return EngineClientError, ValueError, OSError


def _run(command: Coroutine[Any, Any, int]) -> int:
    from frontend.event_loop import run

    return run(command)


def _version() -> str:
    from importlib.metadata import version

    return version("engine-core")
