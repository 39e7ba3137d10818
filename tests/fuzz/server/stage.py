"""A server with its engine, and the other client, in processes of their own; and what is seen of
them: gaps, texts, processes, memory, logs."""

import asyncio
import contextlib
import dataclasses
import json
import os
import signal
import sys
import time
import urllib.request
from pathlib import Path
from typing import Any

import zmq

from tests.chaos.processes import MARK, is_gone, marked_processes, start_python
from tests.fuzz.server.cases import Case

_START_S = 180.0
_ANSWER_S = 90.0
_DRAIN_S = 60.0
_MAX_ANSWER_BYTES = 64 << 20
_READ_BYTES = 1 << 16
"""A longer request may be refused, and its connection closed, before all of it was sent."""
_SERVER_OPTIONS = (
    "--port",
    "0",
    "--num-blocks",
    "2500",
    "--max-num-seqs",
    "32",
    "--max-restarts",
    "1000",
)


@dataclasses.dataclass
class Seen:
    """Of the other client: one stream or one chat."""

    kind: str
    status: int
    gap_s: float
    at_s: float
    text: str


class Stage:
    """`folder`: for logs. Use it in `async with`."""

    def __init__(self, folder: Path, model: str) -> None:
        self._folder = folder
        self._model = model
        self._mark = f"fuzz-{os.getpid()}"
        self.seen: list[Seen] = []
        """All of the other client; `stream` and `chat` in turn."""

    async def __aenter__(self) -> "Stage":
        os.environ[MARK] = self._mark
        self.server = start_python(
            "frontend.cli", "serve", self._model, *_SERVER_OPTIONS,
            log=self._folder / "server.log", stdout=self._folder / "server.out",
        )  # fmt: skip
        with contextlib.suppress(PermissionError):  # what is seen is not to be the machine's doing
            os.setpriority(os.PRIO_PROCESS, self.server.pid, -10)
        deadline_s = time.monotonic() + _START_S
        while not (line := (self._folder / "server.out").read_text()).endswith("}\n"):
            assert self.server.poll() is None and time.monotonic() < deadline_s, self.log()
            await asyncio.sleep(0.05)
        self.url = json.loads(line)["url"].removesuffix("/v1")
        self.engine_pid, self.address = self._engine()
        self._witness = start_python(
            "tests.fuzz.server.witness", self.url,
            log=self._folder / "witness.log", stdout=self._folder / "witness.out",
        )  # fmt: skip
        with contextlib.suppress(PermissionError):
            os.setpriority(os.PRIO_PROCESS, self._witness.pid, -10)
        self._reader = asyncio.create_task(self._read())
        return self

    async def __aexit__(self, *_: object) -> None:
        self._reader.cancel()
        self._witness.kill()
        if self.server.poll() is None:
            self.server.kill()
        for pid in marked_processes(self._mark):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def document(self, path: str) -> Any:
        with urllib.request.urlopen(self.url + path, timeout=_ANSWER_S) as answer:
            return json.load(answer)

    def log(self) -> str:
        return (self._folder / "server.log").read_text(errors="replace")

    def _engine(self) -> tuple[int, str]:
        """The process that serves, and its socket. Under supervision parent and child have the
        same command line: the child is the younger."""
        found = []
        for pid in marked_processes(self._mark):
            words = Path(f"/proc/{pid}/cmdline").read_bytes().decode().split("\0")
            if "--bind" in words:
                found.append((pid, words[words.index("--bind") + 1]))
        return max(found)

    def engine_changed(self) -> bool:
        return is_gone(self.engine_pid)

    async def engine_is_back(self) -> None:
        """Behind a death that was noted."""
        deadline_s = time.monotonic() + _START_S
        while time.monotonic() < deadline_s:
            with contextlib.suppress(OSError, ValueError):
                (Path(f"/proc/{self._engine()[0]}").stat())
                if self.seen and self.seen[-1].status == 200:
                    self.engine_pid = self._engine()[0]
                    return
            await asyncio.sleep(0.2)

    def memory_mib(self) -> dict[str, float]:
        """Resident, of the server and of the engine; without processes for what users write, which
        have limits of their own."""
        found = {}
        for name, pid in (("engine", self.engine_pid), ("server", self.server.pid)):
            with contextlib.suppress(OSError):
                found[name] = int(Path(f"/proc/{pid}/statm").read_text().split()[1]) / 256
        return found

    async def send(self, case: Case) -> list[str]:
        """Send it in all its copies. Returns what was wrong with the answers."""
        if case.frames:
            return await asyncio.to_thread(self._send_frames, case)
        found = await asyncio.gather(*(self._send_http(case) for _ in range(case.copies)))
        return [each for each in found if each]

    async def _send_http(self, case: Case) -> str:
        host, port = self.url.removeprefix("http://").split(":")
        try:
            async with asyncio.timeout(_ANSWER_S):
                reader, writer = await asyncio.open_connection(host, int(port))
                writer.write(case.data)
                head = await reader.readline()
                size = 0
                while (part := await reader.read(1 << 20)) and size < _MAX_ANSWER_BYTES:
                    size += len(part)
                writer.close()
        except TimeoutError:
            return f"no answer within {_ANSWER_S:g} s"
        except ConnectionError as error:
            return "" if not case.is_whole or len(case.data) > _READ_BYTES else repr(error)
        status = head.split(b" ")[1:2]
        if status and status[0] >= b"500":
            return f"status {status[0].decode()}"
        return "" if status or not case.is_whole else "the connection was closed without an answer"

    def _send_frames(self, case: Case) -> list[str]:
        context = zmq.Context()
        socket = context.socket(zmq.DEALER)
        socket.connect(self.address)
        for message in case.frames:
            socket.send_multipart(message)
        deadline_s = time.monotonic() + 0.3
        while (left_s := deadline_s - time.monotonic()) > 0 and socket.poll(left_s * 1000):
            socket.recv_multipart()
        context.destroy(linger=0)
        return []

    async def _read(self) -> None:
        with (self._folder / "witness.out").open() as lines:
            rest = ""
            while True:
                rest += lines.read()
                *whole, rest = rest.split("\n")
                self.seen += [Seen(**json.loads(line)) for line in whole]
                await asyncio.sleep(0.05)

    async def end(self) -> list[str]:
        """SIGTERM. Returns what is wrong with how it ends."""
        self._witness.kill()
        self.server.send_signal(signal.SIGTERM)
        deadline_s = time.monotonic() + _DRAIN_S
        while (code := self.server.poll()) is None and time.monotonic() < deadline_s:
            await asyncio.sleep(0.05)
        await asyncio.sleep(0.5)
        problems = [] if code == 0 else [f"the server ended with exit code {code}"]
        if left := [pid for pid in marked_processes(self._mark) if pid != self._witness.pid]:
            problems.append(f"{len(left)} processes are left")
        if "Traceback" in self.log():
            problems.append("a traceback in the log")
        return problems


def say(what: str) -> None:
    print(f"{time.strftime('%H:%M:%S')} {what}", file=sys.stderr, flush=True)
