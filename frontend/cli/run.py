"""`engine-client run`: a conversation with a model, or one answer; with a daemon if none has it."""

import asyncio
import itertools
import os
import stat
import subprocess
import sys
import threading

from frontend.cli.chat import chat
from frontend.cli.chat_model import reached_daemon
from frontend.cli.complete import complete
from frontend.cli.http import Passed
from frontend.cli.options import (
    EXIT_FAULT,
    SAMPLING,
    CompletionOptions,
    DaemonOptions,
    SamplingOptions,
    UsageError,
    check_engine_options,
    print_fault,
)
from frontend.cli.ps import statistics_of
from frontend.engine.daemon import ChildDaemon
from frontend.errors import EngineStartError
from frontend.event_loop import run as run_on_loop
from frontend.presets.llm import adapter_options
from protocol.presets import find_preset, model_of
from protocol.programs import python_module

_SILENT_S = 2.0
_LOOK_S = 0.2
_LOOKS_BEFORE_A_WORD = 5


def run(
    model: str | None = None,
    /,
    *prompt: Passed,
    system: str | None = None,
    startup_timeout: float = 3600.0,
    sampling: SamplingOptions = SAMPLING,
) -> int:
    """
    Args:
        model: A folder, file, known name or hub id, as for `engine-core --model`, or a name of
            your own (`engine-core create`).
        prompt: Answer this, behind what a pipe or a file brings on standard input, and leave;
            default: a conversation. Behind it, other options are those of a daemon of its own
            (`engine-core --help-all`), which ends with this command.
        system: The system message.
        startup_timeout: Seconds for the daemon to get ready.

    Raises:
        UsageError: no model, or an option that nobody knows.
        EngineStartError, EngineClientError: the daemon did not start, or is lost.
    """
    if model is None or model.startswith("-"):
        raise UsageError(
            "there is no MODEL; give one first, as `run smollm2-135m-instruct`; `engine-core list` "
            "shows those that are here"
        )
    words = list(itertools.takewhile(lambda word: not word.startswith("-"), prompt))
    options = prompt[len(words) :]
    try:
        check_engine_options(options, python_module("engine_core.cli"))
    except UsageError as error:
        hint = "; a prompt stands before the daemon's options" if "Unused" in str(error) else ""
        raise UsageError(f"{str(error).rstrip('.')}{hint}") from None
    if piped := _piped_text():
        words = [piped, *words]

    preset = find_preset(model)
    source = model_of(model)
    name = None if preset is None else model

    def talk(address: str) -> int:
        daemon = DaemonOptions(address=address)
        if not words:
            return chat(system=system, preset=name, sampling=sampling, daemon=daemon)
        once = CompletionOptions(chat=True, system=system, preset=name)
        return complete(" ".join(words), options=once, sampling=sampling, daemon=daemon)

    is_own = bool(options) or (preset is not None and preset.adapter is not None)
    if not is_own and (daemon := reached_daemon(model)) is not None:
        return talk(daemon.address)
    pull = [*python_module("engine_core.cli"), "pull", source]
    if subprocess.run(pull, stdout=subprocess.DEVNULL, check=False).returncode:
        return EXIT_FAULT  # it has said why
    print_fault(f"starting {model}")
    child = ChildDaemon(["--model", source, *adapter_options(source), *options])
    try:
        try:
            run_on_loop(child.ready(startup_timeout))
        except EngineStartError:
            if not child.last_line.startswith("engine-core: "):
                raise
            print_fault(child.last_line.removeprefix("engine-core: "))  # it says all
            return EXIT_FAULT
        code = talk(child.address)
        run_on_loop(_others_left(child, model))
        return code
    finally:
        run_on_loop(child.close())


async def _others_left(child: ChildDaemon, model: str) -> None:
    """Returns once no other terminal talks with the daemon, which ends then."""
    for look in itertools.count():
        now = await statistics_of(child.address)
        if child.has_ended or (now is not None and now.num_clients < 2):  # one of them asks
            return
        if look == _LOOKS_BEFORE_A_WORD:
            print_fault(f"others talk with {model}, which ends behind the last; Ctrl-C ends it now")
        await asyncio.sleep(_LOOK_S)


def _piped_text() -> str:
    """What a pipe, a socket or a file has on standard input, to its end."""
    try:
        mode = os.fstat(sys.stdin.fileno()).st_mode
    except (AttributeError, OSError, ValueError):  # it was closed
        return ""
    if stat.S_ISCHR(mode):  # a terminal, or /dev/null
        return ""
    text = "reading the prompt from standard input, to its end; </dev/null: it has none"
    notice = threading.Timer(_SILENT_S, print_fault, (text,))
    notice.daemon = True
    notice.start()
    try:
        return sys.stdin.read().strip()
    finally:
        notice.cancel()
