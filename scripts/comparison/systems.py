"""Engines with an address: a daemon of this project, and OpenAI-compatible servers.

Owns how each is started and reached; clients in other processes send to it. Must not know figures.
"""

from __future__ import annotations

import socket
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from scripts.comparison.clients import ClientsFailed, EngineAddress, Target, send_workload
from scripts.comparison.descriptions import Description, DescriptionError, describe
from scripts.comparison.launching import Conditions, Launched, Running, SystemFailed
from scripts.comparison.openai_stream import Server, ServerError
from scripts.comparison.workloads import Workload
from scripts.load.records import RequestRecord

_PORT_MARK = "{port}"
_OWN_OPTIONS = ("--bind", "--num-threads")


@dataclass(frozen=True, slots=True)
class OwnEngine:
    """The daemon in a process of its own."""

    description: Description

    @classmethod
    def parse(cls, text: str) -> OwnEngine:
        """`NAME=[OPTIONS]`, the daemon's.

        Raises:
            DescriptionError: no name, or an option that the comparison sets.
        """
        description = describe(text, "--engine")
        for word in description.words:
            if word.split("=")[0] in _OWN_OPTIONS:
                raise DescriptionError(f"--engine {text!r}: {word} is set by the comparison")
        return cls(description)

    @property
    def name(self) -> str:
        return self.description.name

    @property
    def setting(self) -> str:
        return self.description.setting

    @contextmanager
    def launch(self, conditions: Conditions) -> Iterator[Running]:
        """See `System.launch`."""
        options = self.description.words
        command = [sys.executable, "-m", "engine_core.cli", *options]
        if not any(option.split("=")[0] == "--model" for option in options):
            command += ["--model", conditions.model]
        command += ["--num-threads", str(conditions.num_threads), "--exit-on-stdin-eof"]
        with tempfile.TemporaryDirectory(prefix="engine-") as folder:
            command += ["--bind", f"ipc://{folder}/engine.sock"]
            launched = Launched(self.description, command, conditions, keep_lines=True)
            try:
                ready = launched.wait_for_ready_line()
                ready_s = launched.since_launch_s
                run = _sender(EngineAddress(ready["address"]), conditions)
                facts = {name: ready[name] for name in ready.keys() - {"event", "address"}}
                yield Running(run, ready_s, True, facts)
            finally:
                launched.process.end()


@dataclass(frozen=True, slots=True)
class ServerCommand:
    """An OpenAI-compatible server, started by a command."""

    description: Description

    @classmethod
    def parse(cls, text: str) -> ServerCommand:
        """`NAME=COMMAND ... {port}`.

        Raises:
            DescriptionError: no name, or no place for the port.
        """
        description = describe(text, "--server")
        if not any(_PORT_MARK in word for word in description.words):
            raise DescriptionError(
                f"--server {text!r} does not say where its port goes; write {_PORT_MARK} there"
            )
        return cls(description)

    @property
    def name(self) -> str:
        return self.description.name

    @property
    def setting(self) -> str:
        return self.description.setting

    @contextmanager
    def launch(self, conditions: Conditions) -> Iterator[Running]:
        """See `System.launch`. Ready is when /health, or /v1/models, answers with 200."""
        port = str(_free_port())
        command = [word.replace(_PORT_MARK, port) for word in self.description.words]
        launched = Launched(self.description, command, conditions, keep_lines=False)
        try:
            server = Server.at(f"http://127.0.0.1:{port}")
            launched.wait_until(server.is_ready)
            ready_s = launched.since_launch_s
            yield _running(server, conditions, ready_s)
        finally:
            launched.process.end()


@dataclass(frozen=True, slots=True)
class ServerAddress:
    """An OpenAI-compatible server that is up already. Its start and memory are not known."""

    name: str
    setting: str
    url: str

    @contextmanager
    def launch(self, conditions: Conditions) -> Iterator[Running]:
        """See `System.launch`."""
        server = Server.at(self.url)
        if not server.is_ready():
            raise SystemFailed(f"nobody who is ready answers at {self.url}")
        yield _running(server, conditions, None)


def _running(server: Server, conditions: Conditions, ready_s: float | None) -> Running:
    try:
        named = Server(server.host, server.port, server.path, server.first_model())
    except ServerError as error:
        raise SystemFailed(str(error)) from error
    run = _sender(named, conditions)
    return Running(run, ready_s, ready_s is not None, {"model": named.model})


def _sender(target: Target, conditions: Conditions) -> Callable[[Workload], list[RequestRecord]]:
    def run(workload: Workload) -> list[RequestRecord]:
        try:
            return send_workload(
                target,
                workload,
                num_processes=conditions.client_processes,
                timeout_s=conditions.workload_timeout_s,
            )
        except ClientsFailed as error:
            raise SystemFailed(str(error)) from error

    return run


def _free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])
