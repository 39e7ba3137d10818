"""`engine-client run`: a conversation with a model, or one answer; with a daemon if none has it."""

import itertools
import subprocess
from pathlib import Path

from frontend.cli.chat import chat
from frontend.cli.complete import complete
from frontend.cli.http import Passed
from frontend.cli.options import (
    EXIT_FAULT,
    SAMPLING,
    CompletionOptions,
    DaemonOptions,
    SamplingOptions,
    print_fault,
)
from frontend.engine.daemon import ChildDaemon
from frontend.event_loop import run as run_on_loop
from protocol.programs import python_module
from protocol.running_daemons import running_daemons


def run(
    model: str,
    /,
    *prompt: Passed,
    system: str | None = None,
    startup_timeout: float = 3600.0,
    sampling: SamplingOptions = SAMPLING,
) -> int:
    """
    Args:
        model: A folder, file, known name or hub id, as for `engine-core --model`.
        prompt: Answer this and leave; default: a conversation. Behind it, other options are those
            of a daemon of its own (`engine-core --help-all`), which ends with this command.
        system: The system message.
        startup_timeout: Seconds for the daemon to get ready.

    Raises:
        EngineStartError, EngineClientError: the daemon did not start, or is lost.
    """
    words = list(itertools.takewhile(lambda word: not word.startswith("-"), prompt))
    options = prompt[len(words) :]

    def talk(address: str) -> int:
        daemon = DaemonOptions(address=address)
        if not words:
            return chat(system=system, sampling=sampling, daemon=daemon)
        once = CompletionOptions(chat=True, system=system)
        return complete(" ".join(words), options=once, sampling=sampling, daemon=daemon)

    asked = {model, str(Path(model).absolute())}
    for daemon in running_daemons():
        is_reached = daemon.address.startswith("ipc://")  # others may want a key
        if is_reached and not options and asked & {daemon.asked, daemon.model}:
            return talk(daemon.address)
    pull = [*python_module("engine_core.cli"), "pull", model]
    if subprocess.run(pull, stdout=subprocess.DEVNULL, check=False).returncode:
        return EXIT_FAULT  # it has said why
    print_fault(f"starting {model}")
    child = ChildDaemon(["--model", model, *options])
    try:
        run_on_loop(child.ready(startup_timeout))
        return talk(child.address)
    finally:
        run_on_loop(child.close())
