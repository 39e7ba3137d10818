"""The commands of `engine-client`. Each loads what it needs when it runs: parsing stays quick."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Coroutine, Sequence
from typing import Annotated, Any

import cyclopts
from cyclopts import App, Parameter

from frontend.cli.options import (
    EXIT_FAULT,
    EXIT_INTERRUPTED,
    EXIT_USAGE,
    ConnectionOptions,
    SamplingOptions,
    SchedulingOptions,
    UsageError,
    print_fault,
)

app = App(
    name="engine-client",
    help="Talk to an engine-core daemon.",
    version_flags=["--version"],
    version=lambda: _version(),
    result_action="return_value",
    suppress_keyboard_interrupt=False,
)


@app.command
def chat(
    *,
    system: Annotated[str | None, Parameter(help="The system message.")] = None,
    sampling: SamplingOptions | None = None,
    scheduling: SchedulingOptions | None = None,
    connection: ConnectionOptions | None = None,
) -> int:
    """Talk with the model. /reset starts over, /exit or Ctrl-D leaves, Ctrl-C stops an answer."""
    from frontend.cli.chat import run_chat

    return run_chat(
        _address(connection),
        system=system,
        sampling=sampling or SamplingOptions(),
        scheduling=scheduling or SchedulingOptions(),
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
    scheduling: SchedulingOptions | None = None,
    connection: ConnectionOptions | None = None,
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
        scheduling=scheduling or SchedulingOptions(),
    )
    return _run(run_complete(_address(connection), completion))


@app.command
def info(
    *,
    request: Annotated[
        str | None,
        Parameter(
            help="Show instead this request's state and its reasons: an id that --requests lists, "
            "or of one of the last that finished."
        ),
    ] = None,
    requests: Annotated[
        bool, Parameter(help="Show instead the ids of all live requests.", negative="")
    ] = False,
    json: Annotated[bool, Parameter(help="Print one JSON document.", negative="")] = False,
    connection: ConnectionOptions | None = None,
) -> int:
    """Show the daemon's model, limits and statistics, or one request's state."""
    from frontend.cli.info import run_info, run_request_info, run_request_list

    if request is not None and requests:
        raise UsageError("--request shows one and --requests lists all; give one of them")
    if requests:
        return _run(run_request_list(_address(connection), prints_json=json))
    if request is not None:
        return _run(run_request_info(_address(connection), request, prints_json=json))
    return _run(run_info(_address(connection), prints_json=json))


def run_command_line(arguments: Sequence[str]) -> int:
    """Run one command line. Returns the exit code; a fault is one line on stderr."""
    # the fault's own line says what the library logs about a lost engine
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
    # the library's own errors and wrong input; anything else is a bug and shows its traceback
    except _user_errors() as error:
        print_fault(error)
        return EXIT_FAULT
    return int(result or 0)


def _user_errors() -> tuple[type[Exception], ...]:
    from frontend.errors import EngineClientError

    return EngineClientError, ValueError, OSError


def _address(connection: ConnectionOptions | None) -> str | None:
    return None if connection is None else connection.address


def _run(command: Coroutine[Any, Any, int]) -> int:
    from frontend.event_loop import run

    return run(command)


def _version() -> str:
    from importlib.metadata import version

    return version("engine-core")
