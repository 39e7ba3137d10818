"""`engine-client run`: a conversation with a model, or one answer; with a daemon if none has it."""

import itertools
import subprocess

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
    print_fault,
)
from frontend.engine.daemon import ChildDaemon
from frontend.event_loop import run as run_on_loop
from frontend.presets.llm import adapter_options
from protocol.presets import find_preset, model_of
from protocol.programs import python_module


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
        model: A folder, file, known name or hub id, as for `engine-core --model`, or a name of
            your own (`engine-core create`).
        prompt: Answer this and leave; default: a conversation. Behind it, other options are those
            of a daemon of its own (`engine-core --help-all`), which ends with this command.
        system: The system message.
        startup_timeout: Seconds for the daemon to get ready.

    Raises:
        EngineStartError, EngineClientError: the daemon did not start, or is lost.
    """
    words = list(itertools.takewhile(lambda word: not word.startswith("-"), prompt))
    options = prompt[len(words) :]

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
        run_on_loop(child.ready(startup_timeout))
        return talk(child.address)
    finally:
        run_on_loop(child.close())
