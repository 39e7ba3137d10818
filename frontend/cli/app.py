"""The commands of `engine-client`. Each loads what it needs when it runs: parsing stays quick."""

from __future__ import annotations

import dataclasses
import logging
import os
import sys
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import cyclopts
from cyclopts import App, Parameter

from frontend.cli.options import (
    EXIT_FAULT,
    EXIT_INTERRUPTED,
    EXIT_USAGE,
    CompletionOptions,
    DaemonOptions,
    SamplingOptions,
    SchedulingOptions,
    UsageError,
    print_fault,
)
from frontend.errors import EngineClientError
from frontend.http.on_demand.options import OnDemandOptions
from frontend.http.settings import ServerSettings

if TYPE_CHECKING:
    from frontend.async_llm import AsyncLLM
    from protocol.calls import EngineStatus

_COMPLETION = CompletionOptions()
_DAEMON = DaemonOptions()
_ON_DEMAND = OnDemandOptions()
_SAMPLING = SamplingOptions()
_SCHEDULING = SchedulingOptions()
_SERVER = ServerSettings()

app = App(
    name="engine-client",
    help="Talk to an engine-core daemon. Its address and the time limits may come before the "
    "command, too.",
    version_flags=["--version"],
    version=lambda: _version(),
    result_action="return_value",
    suppress_keyboard_interrupt=False,
)


@app.command
def chat(
    *,
    system: Annotated[str | None, Parameter(help="The system message.")] = None,
    chat_template: Annotated[
        Path | None,
        Parameter(help="A file with a Jinja2 template to use in place of the model's."),
    ] = None,
    markdown: Annotated[bool, Parameter(help="Render answers as Markdown, at a terminal.")] = True,
    sampling: SamplingOptions = _SAMPLING,
    scheduling: SchedulingOptions = _SCHEDULING,
    daemon: DaemonOptions = _DAEMON,
) -> int:
    """Talk with the model. /help lists the commands, Ctrl-C stops an answer, Ctrl-D leaves."""
    from frontend.cli.chat import run_chat

    return run_chat(daemon, system, chat_template, sampling, scheduling, renders_markdown=markdown)


@app.command
def complete(
    prompt: Annotated[
        str | None, Parameter(help="The text to go on from; default: standard input.")
    ] = None,
    /,
    *,
    options: CompletionOptions = _COMPLETION,
    sampling: SamplingOptions = _SAMPLING,
    scheduling: SchedulingOptions = _SCHEDULING,
    daemon: DaemonOptions = _DAEMON,
) -> int:
    """Complete a prompt, once."""
    from frontend.cli.complete import run_complete

    if options.logprobs is not None and not options.json:
        raise UsageError("--logprobs is shown in JSON only; add --json")
    if options.system is not None and not options.chat:
        raise UsageError("--system is a message of a conversation; add --chat")
    if options.chat_template is not None and not options.chat:
        raise UsageError("--chat-template is for a conversation; add --chat")
    if prompt is None:
        if sys.stdin.isatty():
            raise UsageError("there is no PROMPT; give a text, or pipe one in")
        prompt = sys.stdin.read()
    return _run(run_complete(daemon, prompt, options, sampling, scheduling))


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
        bool, Parameter(help="Show instead the ids of all unfinished requests.", negative="")
    ] = False,
    json: Annotated[
        bool, Parameter(help="Print one JSON document; with every counter.", negative="")
    ] = False,
    daemon: DaemonOptions = _DAEMON,
) -> int:
    """Show the daemon's model, limits and statistics, or one request's state."""
    from frontend.cli.info import run_info

    if request is not None and requests:
        raise UsageError("--request shows one and --requests lists all; give one of them")
    return _run(run_info(daemon, request_id=request, lists_requests=requests, prints_json=json))


@app.command
def top(
    *,
    interval: Annotated[float, Parameter(help="Seconds between two looks, at least 1.")] = 1.0,
    daemon: DaemonOptions = _DAEMON,
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

    return _run(run_top(daemon, interval))


@app.command
def http(
    *engine_options: Annotated[
        str,
        Parameter(
            help="Other options are those of daemons that are started (`engine-core --help-all`).",
            allow_leading_hyphen=True,
        ),
    ],
    model: Annotated[
        list[str] | None,
        Parameter(
            help="NAME=ADDRESS of an engine, NAME=ADDRESS,ADDRESS of several that serve one model, "
            "or a NAME as for `engine-core --model`, whose daemon is started when it is first "
            "asked for and stopped when it is idle; may be repeated. Default: the engine at "
            "--address, under its own name.",
            negative="",
        ),
    ] = None,
    served_model_name: Annotated[
        list[str] | None,
        Parameter(help="The model's name, instead of its own; may be repeated.", negative=""),
    ] = None,
    started: OnDemandOptions = _ON_DEMAND,
    settings: ServerSettings = _SERVER,
    daemon: DaemonOptions = _DAEMON,
) -> int:
    """Serve OpenAI's API over HTTP, for daemons that run or that it starts."""
    from frontend.cli.http import run_http

    started = dataclasses.replace(started, engine_options=engine_options)
    return run_http(daemon, settings, model or [], served_model_name or [], started)


@app.command
def serve(
    model: Annotated[
        str, Parameter(help="A folder, file or known name, as for `engine-core --model`.")
    ],
    /,
    *engine_options: Annotated[
        str,
        Parameter(
            help="Other options are the daemon's (`engine-core --help-all`). It is started again "
            "when it dies, but for --no-supervise.",
            allow_leading_hyphen=True,
        ),
    ],
    served_model_name: Annotated[
        list[str] | None,
        Parameter(help="The model's name, instead of its own; may be repeated.", negative=""),
    ] = None,
    startup_timeout: Annotated[
        float, Parameter(help="Seconds for the daemon to get ready, downloads included.")
    ] = 3600.0,
    settings: ServerSettings = _SERVER,
) -> int:
    """Start a daemon and serve OpenAI's API over HTTP. They end together."""
    from frontend.cli.http import run_serve

    return run_serve(model, engine_options, settings, served_model_name or [], startup_timeout)


_Json = Annotated[bool, Parameter(help="Print one JSON document.", negative="")]


@app.command
def ps(
    *,
    keys: Annotated[Path | None, Parameter(help="Your key's file, for daemons on TCP.")] = None,
    json: _Json = False,
) -> int:
    """List the running daemons of this user."""
    from frontend.cli.ps import run_ps

    return _run(run_ps(keys, prints_json=json))


@app.command
def pause(
    *,
    mode: Annotated[
        Literal["keep", "wait", "abort"],
        Parameter(
            help="Unfinished requests go on afterwards (keep), those that have started end first "
            "(wait), or all are aborted."
        ),
    ] = "keep",
    json: _Json = False,
    daemon: DaemonOptions = _DAEMON,
) -> int:
    """Run no more steps; requests wait until `resume`."""
    return _control(daemon, "pause", lambda llm: llm.pause_generation(mode=mode), json)


@app.command
def resume(*, json: _Json = False, daemon: DaemonOptions = _DAEMON) -> int:
    """End a pause."""
    return _control(daemon, "resume", lambda llm: llm.resume_generation(), json)


@app.command
def sleep(
    *,
    level: Annotated[
        int, Parameter(help="1: the memory of the KV cache is freed; 2: that of the weights, too.")
    ] = 1,
    json: _Json = False,
    daemon: DaemonOptions = _DAEMON,
) -> int:
    """Free memory; requests wait until `wake-up`."""
    return _control(daemon, "sleep", lambda llm: llm.sleep(level), json)


@app.command
def wake_up(*, json: _Json = False, daemon: DaemonOptions = _DAEMON) -> int:
    """End a sleep; after level 2 the weights are loaded again."""
    return _control(daemon, "wake-up", lambda llm: llm.wake_up(), json)


@app.command
def update_weights(
    model: Annotated[
        str, Parameter(help="A folder, file or known name, as for `engine-core --model`.")
    ],
    /,
    *,
    weights_version: Annotated[int | None, Parameter(help="Default: the next number.")] = None,
    json: _Json = False,
    daemon: DaemonOptions = _DAEMON,
) -> int:
    """Serve other weights of the same model."""
    path = Path(model)
    model = str(path.absolute()) if path.exists() else model
    return _control(
        daemon, "update-weights", lambda llm: llm.update_weights(model, weights_version), json
    )


def _control(
    daemon: DaemonOptions,
    command: str,
    change: Callable[[AsyncLLM], Awaitable[EngineStatus]],
    prints_json: bool,
) -> int:
    from frontend.cli.info import run_control

    return _run(run_control(daemon, command, change, prints_json=prints_json))


def run_command_line(arguments: Sequence[str]) -> int:
    """Run one command line. Returns the exit code; a fault is one line on stderr."""
    # the fault's own line says what the library logs about a lost engine
    logging.getLogger("frontend").addHandler(logging.NullHandler())
    try:
        result = app(_with_command_first(arguments), exit_on_error=False, print_error=False)
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
    return [*arguments[end : end + 1], *arguments[:end], *arguments[end + 1 :]]


def _run(command: Coroutine[Any, Any, int]) -> int:
    from frontend.event_loop import run

    return run(command)


def _version() -> str:
    from importlib.metadata import version

    return version("engine-core")
