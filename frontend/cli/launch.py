"""`engine-client launch`: a coding agent on a model of ours. What each is told stands in
`launch.toml`; nothing is written but what the program itself writes."""

import contextlib
import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import tomllib
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from string import Template
from types import FrameType
from typing import Any, Literal

from frontend.cli.http import Passed
from frontend.cli.options import EXIT_FAULT, Flag, UsageError, print_fault
from frontend.errors import EngineStartError, EngineUnavailable
from protocol.presets import model_of
from protocol.programs import python_module

_DEFAULT_URL = "http://127.0.0.1:8000"
_KEY_VARIABLE = "VLLM_API_KEY"
_NO_KEY = "no-key"
_MOST_OUTPUT = 32_000
_NUMBERS = ("$context", "$output")
_LOAD_S, _ANSWER_S, _END_S = 3600.0, 30.0, 40.0
_NUM_SHOWN_LINES = 15


@dataclass(frozen=True)
class _Target:
    """A model of a server. `context`: tokens of prompt and answer; None: not known yet."""

    url: str
    model: str
    context: int | None

    def values(self) -> dict[str, str]:
        """The texts that stand in the place of names in `launch.toml`."""
        context, output = "CONTEXT", "OUTPUT"
        if self.context is not None:
            context, output = str(self.context), str(min(_MOST_OUTPUT, self.context // 4))
        same = {"url": self.url, "model": self.model, "key": _key()}
        return {**same, "context": context, "output": output}


def launch(
    program: Literal["claude", "codex", "opencode", "aider"],
    /,
    *words: Passed,
    url: str | None = None,
    startup_timeout: float = 3600.0,
    dry_run: Flag = False,
) -> int:
    """
    Args:
        program: The one to run; it must be installed.
        words: MODEL, by one of the server's names, or as for `engine-core --model` where a server
            is started for it, which ends with the program; default: the server's first. Behind --
            arguments of the program.
        url: The server's address; its key is taken from the variable VLLM_API_KEY.
        startup_timeout: Seconds for a daemon to get ready.
        dry_run: Print the command, and run nothing.

    Raises:
        UsageError: there is no server, and no model to start one for.
        EngineUnavailable: no server answers at `url`, or it has no such model.
        EngineStartError: the server did not start.
    """
    cut = words.index("--") if "--" in words else len(words)
    own, passed = words[:cut], words[cut + 1 :]
    if own[1:]:
        raise UsageError(f"{own[1]!r}: arguments of {program} stand behind --")
    model = own[0] if own else None
    with Path(__file__).with_suffix(".toml").open("rb") as file:
        told = tomllib.load(file)[program]
    path = shutil.which(program)
    if path is None and not dry_run:
        print_fault(f"{program} is not on PATH; install it: {told['install']}")
        return EXIT_FAULT
    with contextlib.ExitStack() as stack:
        target = _running(url, model)
        if target is None and model is None:
            raise UsageError(
                f"no server answers at {_DEFAULT_URL}; name a MODEL to start one for, as `launch "
                f"{program} qwen3:8b`, or give --url"
            )
        if target is None and dry_run:
            target = _Target("http://127.0.0.1:PORT", str(model), None)
            sys.stdout.write(f"engine-client serve {shlex.quote(str(model))} --port 0 &\n")
        elif target is None:
            target = _running(stack.enter_context(_server(str(model), startup_timeout)), None)
        assert target is not None
        command, environment = _told(told, target, stack, writes=not dry_run)
        unset = told.get("unset", [])
        if dry_run:
            pairs = [f"{name}={value}" for name, value in environment.items()]
            gone = [word for name in unset for word in ("-u", name)]
            line = shlex.join(["env", *gone, *pairs, program, *command, *passed])
            sys.stdout.write(f"{line}\n")
            return 0
        _say(program, target, command, environment)
        kept = {name: value for name, value in os.environ.items() if name not in unset}
        return _run([str(path), *command, *passed], kept | environment)


def _key() -> str:
    return os.environ.get(_KEY_VARIABLE) or _NO_KEY


def _running(url: str | None, model: str | None) -> _Target | None:
    """The model of the server at `url`. None: there is none at the default address, or it has
    another model.

    Raises:
        EngineUnavailable: none at the address that was given, or it has no such model.
    """
    base = (url or _DEFAULT_URL).rstrip("/").removesuffix("/v1")
    try:
        cards = _ask(base, "/v1/models", _ANSWER_S)["data"]
        names = [card["id"] for card in cards]
        if model not in (None, *names):
            if url is None:
                return None
            there = ", ".join(names)
            raise EngineUnavailable(f"the server at {base} has no {model!r}, it has {there}")
        (card, *_) = [card for card in cards if model in (None, card["id"])]
        if card.get("max_model_len") is None:  # it is started when it is asked for
            _ask(base, "/api/generate", _LOAD_S, model=card["id"], stream=False)
            cards = _ask(base, "/v1/models", _ANSWER_S)["data"]
            (card,) = [each for each in cards if each["id"] == card["id"]]
        return _Target(base, card["id"], int(card["max_model_len"]))
    except (OSError, ValueError, TypeError, LookupError) as error:
        refused = isinstance(error, urllib.error.HTTPError) and error.code in (401, 403)
        if url is None and not refused:
            return None
        why = f"it wants a key; set {_KEY_VARIABLE}" if refused else str(error)
        raise EngineUnavailable(f"no server of ours answers at {base}: {why}") from None


def _ask(base: str, path: str, timeout_s: float, **body: Any) -> Any:
    """Raises OSError, ValueError: no answer, or none in JSON."""
    headers = {"authorization": f"Bearer {_key()}", "content-type": "application/json"}
    data = json.dumps(body).encode() if body else None
    request = urllib.request.Request(base + path, data, headers)
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # it is near
    with opener.open(request, timeout=timeout_s) as answer:
        return json.load(answer)


@contextlib.contextmanager
def _server(model: str, timeout_s: float) -> Iterator[str]:
    """The URL of a server of its own. Raises EngineStartError: see its log."""
    pull = [*python_module("engine_core.cli"), "pull", model_of(model)]
    if subprocess.run(pull, stdout=subprocess.DEVNULL, check=False).returncode:
        raise EngineStartError(f"{model} is not here and cannot be fetched")
    serve = [*python_module("frontend.cli"), "serve", model, "--port", "0"]
    for each in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(each, lambda number, _frame: sys.exit(128 + number))  # by way of `finally`
    with tempfile.NamedTemporaryFile("w+", prefix="engine-client-launch-", suffix=".log") as log:
        print_fault(f"starting {model}; log: {log.name}")
        process = subprocess.Popen(
            [*serve, "--startup-timeout", f"{timeout_s:g}"],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
            start_new_session=True,  # Ctrl-C is for the program
        )
        try:
            assert process.stdout is not None
            line = process.stdout.readline()
            if not line:
                tail = Path(log.name).read_text().splitlines()[-_NUM_SHOWN_LINES:]
                raise EngineStartError("the server did not start: " + "\n".join(tail))
            yield json.loads(line)["url"]
        finally:
            process.terminate()
            try:
                process.wait(_END_S)
            except subprocess.TimeoutExpired:
                process.kill()


def _told(
    told: dict[str, Any], target: _Target, stack: contextlib.ExitStack, *, writes: bool
) -> tuple[list[str], dict[str, str]]:
    """The program's arguments and variables."""
    values = target.values()
    values["document"] = json.dumps(_filled(told.get("document", {}), values))
    values["file"] = "FILE"
    if writes and "$file" in told.get("arguments", ()):
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        (folder / "document.json").write_text(values["document"])
        values["file"] = str(folder / "document.json")
    arguments = [str(_filled(each, values)) for each in told.get("arguments", ())]
    environment = {k: str(_filled(v, values)) for k, v in told["environment"].items()}
    return arguments, environment


def _filled(value: Any, values: dict[str, str]) -> Any:
    """With what stands in the place of names; numbers of tokens are numbers."""
    if isinstance(value, dict):
        return {_filled(k, values): _filled(v, values) for k, v in value.items()}
    if not isinstance(value, str):
        return value
    text = Template(value).substitute(values)
    return int(text) if value in _NUMBERS and text.isdecimal() else text


def _say(program: str, target: _Target, arguments: list[str], set_: dict[str, str]) -> None:
    pairs = [f"{name}={value.replace(_key(), '...')}" for name, value in set_.items()]
    print_fault(
        f"{program} with {target.model} at {target.url}, {target.context:,} tokens of context"
    )
    print_fault(f"for it alone: {shlex.join([*pairs, *arguments])}")


def _run(command: list[str], environment: dict[str, str]) -> int:
    """Its exit code. Signals for this process are passed on; a terminal sends Ctrl-C to both."""
    with subprocess.Popen(command, env=environment) as child:

        def pass_on(number: int, _frame: FrameType | None) -> None:
            child.send_signal(number)

        handlers = dict.fromkeys((signal.SIGTERM, signal.SIGHUP, signal.SIGINT), pass_on)
        if sys.stdin.isatty():
            handlers[signal.SIGINT] = lambda *_: None
        before = {each: signal.signal(each, handler) for each, handler in handlers.items()}
        try:
            code = child.wait()
        finally:
            for each, handler in before.items():
                signal.signal(each, handler)
    return code if code >= 0 else 128 - code
