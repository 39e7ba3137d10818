"""The commands of `engine-client`. Each is imported when it runs: parsing stays quick."""

import dataclasses
import logging
import os
import sys
from collections.abc import Sequence
from importlib.util import find_spec
from typing import Annotated

import cyclopts
from cyclopts import App, Parameter

from frontend.cli.options import (
    DAEMON,
    EXIT_FAULT,
    EXIT_INTERRUPTED,
    EXIT_START,
    EXIT_USAGE,
    DaemonOptions,
    UsageError,
    print_fault,
)
from frontend.errors import EngineClientError, EngineStartError
from protocol.programs import become

_OF_ENGINE_CORE = ("pull", "list", "ls", "rm", "create", "show", "cp", "stop", "batch", "keys",
                   "on-ray", "plan", "simulate")  # fmt: skip
"""Typed here they are `engine-core`'s."""

app = App(
    name="engine-client",
    help="Talk to an engine-core daemon. Its address and the time limits may come before the "
    "command, too.",
    version_flags=["--version"],
    version=lambda: _version(),
    result_action="return_value",
    suppress_keyboard_interrupt=False,
)
for path, text in {
    "chat:chat": "Talk with the model. /help lists the commands, Ctrl-C stops an answer, Ctrl-D "
    "leaves.",
    "complete:complete": "Complete a prompt, once.",
    "embed:embed": "Print a vector for each text, as lines of JSON.",
    "info:info": "Show the daemon's model, limits and statistics, or one request's state.",
    "http:http": "Serve OpenAI's API over HTTP, for daemons that run or that it starts.",
    "http:serve": "Start a daemon and serve OpenAI's API over HTTP. They end together.",
    "launch:launch": "Run a coding agent (claude, codex, opencode, aider) on a model of ours.",
    "run:run": "Talk with MODEL, or have it answer a prompt; a daemon is started if none runs.",
    "ps:ps": "List the running daemons of this user.",
    "control:pause": "Run no more steps; requests wait until `resume`.",
    "control:resume": "End a pause.",
    "control:sleep": "Free memory; requests wait until `wake-up`.",
    "control:wake_up": "End a sleep; after level 2 the weights are loaded again.",
    "control:update_weights": "Serve other weights of the same model.",
}.items():
    name = path.partition(":")[2].replace("_", "-")
    app.command(f"frontend.cli.{path}", name=name, help=text)
app.command("frontend.load.command:bench", name="bench", help="Measure a daemon, or any server "
            "with OpenAI's or Ollama's API, under load.")  # fmt: skip
app.command("frontend.load.command:compare", name="compare", help="Compare two results of `bench "
            "--json`: ratios with 95 % confidence intervals.")  # fmt: skip


@app.command
def top(
    *,
    interval: Annotated[float, Parameter(help="Seconds between two looks, at least 1.")] = 1.0,
    daemon: DaemonOptions = DAEMON,
) -> int:
    """Watch the daemon: its queue, steps, memory and latencies, and each request's progress."""
    if not 1 <= interval <= 3600:
        raise UsageError(f"--interval is {interval:g} s, it must be from 1 to 3600")
    if find_spec("textual") is None:
        raise UsageError(
            "top needs Textual, the extra `tui`; install it with `pip install textual`"
        )
    if not (sys.stdin.isatty() and sys.stdout.isatty()):
        raise UsageError("top needs a terminal; `engine-client info` prints the numbers once")
    from frontend.cli.top import run_top
    from frontend.event_loop import run

    return run(run_top(daemon, interval))


def run_command_line(arguments: Sequence[str]) -> int:
    """Run one command line. Returns the exit code; a fault is one line on stderr."""
    if arguments and arguments[0] in _OF_ENGINE_CORE:
        become("engine_core.cli", list(arguments))
    # the fault's own line says what the library logs about a lost engine
    logging.getLogger("frontend").addHandler(logging.NullHandler())
    try:
        typed = _with_command_first(arguments)
        if typed[:1] == ["bench"]:
            from frontend.cli.other_benchmarks import as_typed

            typed[1:] = as_typed(typed[1:])
        result = app(typed, exit_on_error=False, print_error=False)
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
    except EngineStartError as error:
        print_fault(error)
        # what the engine means by them is meant here: the next start would fail alike
        return error.exit_code if error.exit_code in (EXIT_USAGE, EXIT_START) else EXIT_FAULT
    # the library's own errors and wrong input; anything else is a bug and shows its traceback
    except (EngineClientError, ValueError, OSError) as error:
        print_fault(error)
        return EXIT_FAULT
    return int(result or 0)


def _with_command_first(arguments: Sequence[str]) -> list[str]:
    """`--address X complete ...` as `complete --address X ...`.

    Raises:
        UsageError: there is no command.
    """
    names = {f"--{field.name.replace('_', '-')}" for field in dataclasses.fields(DaemonOptions)}
    end = 0
    while end < len(arguments) and arguments[end].partition("=")[0].replace("_", "-") in names:
        end += 1 if "=" in arguments[end] else 2
    if end and not arguments[end:]:
        raise UsageError("there is no command; `engine-client --help` lists them")
    if list(arguments[end : end + 1]) == ["launch"] and "--" in arguments:
        cut = arguments.index("--")  # which it sees, as its program's arguments stand behind
        arguments = [*arguments[:cut], "--", *arguments[cut:]]
    return [*arguments[end : end + 1], *arguments[:end], *arguments[end + 1 :]]


def _version() -> str:
    from protocol.release import release_line

    return release_line()
