"""Kinds of engines: a daemon of this project, OpenAI-compatible servers, and libraries in a Python
of their own. Each is described as `NAME=WORDS` and launched by `launch`."""

import json
import shlex
import socket
import sys
import tempfile
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

from frontend.load.clients import ClientsFailed, Daemon, OpenLoop, Target, run_clients
from frontend.load.http_streams import Server, ServerError
from frontend.load.records import RequestRecord
from scripts.comparison import peers
from scripts.comparison.processes import EngineFailed, EngineProcess, environment_for
from scripts.comparison.workloads import Workload

_PORT = "{port}"
_SET_BY_US = ("--bind", "--num-threads")
_Kind = TypeVar("_Kind", bound="Engine")


class NotMeasured(Exception):
    """The engine cannot be asked this; the text says why."""


@dataclass(frozen=True, kw_only=True)
class Conditions:
    """The same for all engines.

    Attributes:
        model: for engines that name no model of their own.
        client_processes: that send to engines with an address.
        logs: the folder for the engines' output.
    """

    model: str
    num_threads: int
    client_processes: int
    startup_timeout_s: float
    workload_timeout_s: float
    logs: Path


@dataclass(frozen=True)
class Running:
    """An engine that takes requests.

    Attributes:
        run: one workload's records. Raises EngineFailed and NotMeasured.
        ready_s: from launch to ready; None for one that was up before.
        pid: of its process, if it was launched.
        facts: what it says about itself.
    """

    run: Callable[[Workload], list[RequestRecord]]
    ready_s: float | None
    facts: dict[str, Any]
    pid: int | None = None


@dataclass(frozen=True)
class Engine(ABC):
    """One engine in one setting.

    Attributes:
        setting: as typed.
        words: of the setting, as a shell would split them.
        environment: from words such as `env:NAME=VALUE`.
    """

    name: str
    setting: str
    words: tuple[str, ...]
    environment: dict[str, str]

    @abstractmethod
    def launch(self, conditions: Conditions) -> AbstractContextManager[Running]:
        """The engine is up inside the block, gone after it. Raises EngineFailed: it did not get
        ready."""

    def process(
        self, command: list[str], conditions: Conditions, *, answers: bool
    ) -> EngineProcess:
        environment = environment_for(conditions.num_threads, self.environment)
        log = conditions.logs / f"{self.name}.log"
        return EngineProcess(command, environment, log, answers=answers)


class OwnEngine(Engine):
    """The daemon in a process of its own; the words are its options."""

    @contextmanager
    def launch(self, conditions: Conditions) -> Iterator[Running]:
        command = [sys.executable, "-m", "engine_core.cli", *self.words]
        if not any(word.split("=")[0] == "--model" for word in self.words):
            command += ["--model", conditions.model]
        command += ["--num-threads", str(conditions.num_threads), "--exit-on-stdin-eof"]
        with tempfile.TemporaryDirectory(prefix="engine-") as folder:
            command += ["--bind", f"ipc://{folder}/engine.sock"]
            with self.process(command, conditions, answers=True) as process:
                facts = process.ready_answer(conditions.startup_timeout_s)
                ready_s = process.since_launch_s
                run = _clients_of(Daemon(facts.pop("address")), conditions)
                yield Running(run, ready_s, facts, process.pid)


class ServerCommand(Engine):
    """An OpenAI-compatible server; the words are the command that starts it on `{port}`. It is
    ready when /health, or /v1/models, answers with 200."""

    @contextmanager
    def launch(self, conditions: Conditions) -> Iterator[Running]:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = str(free.getsockname()[1])
        command = [word.replace(_PORT, port) for word in self.words]
        with self.process(command, conditions, answers=False) as process:
            server = Server.at(f"http://127.0.0.1:{port}")
            process.wait_until(server.is_ready, conditions.startup_timeout_s)
            yield _running(server, conditions, process.since_launch_s, process.pid)


class ServerAddress(Engine):
    """An OpenAI-compatible server that is up already; the word is its URL."""

    @contextmanager
    def launch(self, conditions: Conditions) -> Iterator[Running]:
        [url] = self.words
        server = Server.at(url)
        if not server.is_ready():
            raise EngineFailed(f"no server is ready at {url}")
        yield _running(server, conditions, None)


class Library(Engine):
    """A library in a Python of its own, asked through standard input (`peers.py`); the words are
    the interpreter, the program, the library and its options. Times are taken in its process."""

    @contextmanager
    def launch(self, conditions: Conditions) -> Iterator[Running]:
        *command, rest = *self.words[:3], self.words[3:]
        options = {"model": conditions.model, **dict(word.split("=", 1) for word in rest)}
        command += [json.dumps(options | {"threads": conditions.num_threads})]
        with self.process(command, conditions, answers=True) as process:
            facts = process.ready_answer(conditions.startup_timeout_s)
            ready_s = process.since_launch_s

            def run(workload: Workload) -> list[RequestRecord]:
                if workload.needs_arrivals:
                    raise NotMeasured("requests that arrive one by one need a server")
                asked = [(one.num_output_tokens, one.prompt) for one in workload.requests]
                process.write_line(json.dumps(asked))
                return _records(workload, process.next_answer(conditions.workload_timeout_s))

            yield Running(run, ready_s, facts, process.pid)


def _records(workload: Workload, answer: dict[str, Any]) -> list[RequestRecord]:
    if answer.get("event") != "done":
        raise EngineFailed(str(answer.get("reason", answer))[:500])
    answers = answer["records"]
    if len(answers) != len(workload.requests):
        raise EngineFailed(f"{len(answers)} answers to {len(workload.requests)} requests")
    return [
        RequestRecord(one.index, 0.0, 0.0, num_prompt_tokens=len(one.prompt), **fields)
        for one, fields in zip(workload.requests, answers, strict=True)
    ]


def _running(
    server: Server, conditions: Conditions, ready_s: float | None, pid: int | None = None
) -> Running:
    try:
        named = replace(server, model=server.first_model())
    except ServerError as error:
        raise EngineFailed(str(error)) from error
    return Running(_clients_of(named, conditions), ready_s, {"model": named.model}, pid)


def _clients_of(
    target: Target, conditions: Conditions
) -> Callable[[Workload], list[RequestRecord]]:
    def run(workload: Workload) -> list[RequestRecord]:
        try:
            return run_clients(
                target,
                OpenLoop(workload.requests),
                num_processes=conditions.client_processes,
                timeout_s=conditions.workload_timeout_s,
            ).records
        except ClientsFailed as error:
            raise EngineFailed(str(error)) from error

    return run


# ------------------------------------------------------------------ descriptions


def parse_engine(text: str) -> OwnEngine:
    """`NAME=[OPTIONS]`, the daemon's. Raises ValueError: no name, or an option that the
    comparison sets."""
    engine = _parse(OwnEngine, "--engine", text)
    for word in engine.words:
        if word.split("=")[0] in _SET_BY_US:
            raise ValueError(f"--engine {text!r}: {word} is set by the comparison; omit it")
    return engine


def parse_server(text: str) -> ServerCommand:
    """`NAME=COMMAND ... {port}`. Raises ValueError: no name, or no place for the port."""
    server = _parse(ServerCommand, "--server", text)
    if not any(_PORT in word for word in server.words):
        raise ValueError(f"--server {text!r} has no {_PORT}; write it where its port goes")
    return server


def parse_peer(text: str) -> Library | ServerAddress:
    """`NAME=INTERPRETER [KEY=VALUE ...]` or `NAME=URL`. Raises ValueError: no name, an
    unknown library, or words that are not options."""
    library = _parse(Library, "--peer", text)
    if not library.words:
        raise ValueError(f"--peer {text!r} names no interpreter or URL after its =")
    target, *rest = library.words
    if "://" in target:
        if rest or library.environment:
            raise ValueError(f"--peer {text!r}: a URL takes no options")
        try:
            Server.at(target)
        except ValueError as error:
            raise ValueError(f"--peer {text!r}: {error}") from error
        return ServerAddress(library.name, text, library.words, {})
    if wrong := [word for word in rest if "=" not in word]:
        raise ValueError(f"--peer {text!r}: {wrong[0]!r} is not KEY=VALUE")
    options = dict(word.split("=", 1) for word in rest)
    kind = options.pop("kind", library.name.split("-")[0])
    if kind not in peers.PEERS:
        raise ValueError(
            f"--peer {text!r}: {kind!r} is not a known library; begin the name with one of "
            f"{', '.join(peers.PEERS)}, or say which with kind="
        )
    words = (target, peers.__file__, kind, *(f"{key}={value}" for key, value in options.items()))
    return replace(library, words=words)


def _parse(kind: type[_Kind], option: str, text: str) -> _Kind:
    name, equals, rest = text.partition("=")
    name = name.strip()
    if not equals or not name or any(mark in name for mark in " /"):
        raise ValueError(f"{option} {text!r} begins with no name; write {option} NAME=...")
    try:
        words = shlex.split(rest)
    except ValueError as error:
        raise ValueError(f"{option} {text!r}: {error}") from error
    variables = [word.removeprefix("env:") for word in words if word.startswith("env:")]
    if wrong := [one for one in variables if "=" not in one]:
        raise ValueError(
            f"{option} {text!r}: env:{wrong[0]} has no value; write env:{wrong[0]}=VALUE"
        )
    return kind(
        name,
        text,
        tuple(word for word in words if not word.startswith("env:")),
        dict(one.split("=", 1) for one in variables),
    )
