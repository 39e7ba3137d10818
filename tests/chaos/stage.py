"""What chaos and soak runs have in common: a folder, references from an undisturbed engine, one
daemon, client processes, and the end, at which everything must be free again."""

import asyncio
import contextlib
import dataclasses
import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from frontend import AsyncLLM
from frontend.errors import EngineClientError
from tests.chaos.cases import MAX_MODEL_LEN, make_cases
from tests.chaos.options import Options
from tests.chaos.processes import Daemon, count_descriptors, is_gone, start_python
from tests.chaos.references import compute_references
from tests.chaos.tally import Tally

_MAX_SHOWN = 20
_POLL_S = 0.02
_START_S = 180.0
_FINISH_S = 240.0
"""What runs when the time is over gets this long."""
_FREED_S = 75.0
"""Longer than the 60 s after which a client is lost with its network."""
_HEARTBEATS_S = 2.0
"""Within which an engine sees that a client has left."""


class ClientSlot:
    """A place for one client process after the other."""

    def __init__(self, number: int) -> None:
        self.name = f"client{number}"
        self.number = number
        self.num_starts = 0
        self.process: subprocess.Popen[bytes] | None = None
        self.log: Path | None = None
        self.is_paused = False


class Stage:
    """
    Args:
        folder: for sockets, logs and settings of the run.
    """

    def __init__(self, folder: Path, options: Options) -> None:
        self._folder = folder
        self._address = f"ipc://{folder}/engine.sock"
        if options.is_tcp:
            with socket.create_server(("127.0.0.1", 0)) as server:
                self._address = f"tcp://127.0.0.1:{server.getsockname()[1]}"
        self._daemon_options = (
            "--model", options.model, "--dtype", options.dtype, "--bind", self._address,
            "--max-model-len", MAX_MODEL_LEN, "--num-blocks", options.num_blocks,
            "--drain-timeout", 120,
        )  # fmt: skip
        self._options = options
        self.cases = make_cases(options.seed, options.num_cases)
        self._slots = [ClientSlot(number) for number in range(options.num_processes)]
        self.logs: list[tuple[Path, float | None]] = []
        """Of client processes that ended: the log, and when it was killed (None: it was not)."""
        self._daemon: Daemon | None = None
        self._over = asyncio.Event()
        self.problems: list[str] = []
        self.references: list[list[dict[str, Any]]] = []
        self._num_idle_descriptors = 0
        """Of an engine that has served, without clients."""
        self.left: dict[str, int] = {}

    async def run(self) -> None:
        """All of it. Whatever happens, no process is left."""
        try:
            self._say("what an undisturbed engine gives")
            daemon = await self._compute_references()
            settings = dataclasses.asdict(self._options) | {"json": None, "address": self._address}
            (self._folder / "settings.json").write_text(json.dumps(settings))
            self._say(f"the run, {self._options.time_s:g} s")
            await self._main(daemon)
            self._say("what runs ends")
            await self._finish()
        finally:
            self._kill_all()

    def failures(self, tally: Tally, orphans: list[int]) -> list[str]:
        """What went wrong; `orphans` are processes that are left."""
        left = [f"{count} {what} left" for what, count in self.left.items() if count]
        left += [f"process {pid} is left" for pid in orphans]
        return tally.failures + self.problems + left

    async def _main(self, daemon: Daemon) -> None:
        """From the start of the clients until the time is over; the daemon runs and is idle.
        Calls `_start_time`."""
        raise NotImplementedError

    async def _compute_references(self) -> Daemon:
        """By an engine that nothing disturbs. It goes on running."""
        daemon = self._daemon = self._start_daemon(is_supervised=False)
        if not await self._is_ready(daemon, 1):
            raise RuntimeError(f"the daemon did not start:\n{(self._folder / 'log').read_text()}")
        self.references = await compute_references(self._address, self.cases)
        (self._folder / "references.json").write_text(json.dumps(self.references))
        await asyncio.sleep(_HEARTBEATS_S)
        self._num_idle_descriptors = count_descriptors(daemon.process.pid)
        return daemon

    def _start_daemon(self, *, is_supervised: bool) -> Daemon:
        return Daemon(self._daemon_options, self._folder, is_supervised=is_supervised)

    async def _kill_daemon(self, daemon: Daemon) -> None:
        engine = daemon.engine_pid()
        if daemon.is_alive:
            daemon.process.kill()
        daemon.process.wait()
        await self._wait_until_gone(engine)

    async def _wait_until_gone(self, pid: int | None) -> None:
        deadline_s = time.monotonic() + 10
        while pid is not None and not is_gone(pid):
            if time.monotonic() > deadline_s:
                self.problems.append(f"engine process {pid} outlived its parent, or its kill")
                os.kill(pid, signal.SIGKILL)
                return
            await asyncio.sleep(_POLL_S)

    async def _is_ready(self, daemon: Daemon, num_ready: int) -> bool:
        deadline_s = time.monotonic() + _START_S
        while daemon.num_ready() < num_ready:
            if not daemon.is_alive or time.monotonic() > deadline_s:
                self.problems.append(
                    f"the daemon did not get ready: exit code {daemon.process.poll()}"
                )
                await self._kill_daemon(daemon)
                return False
            await asyncio.sleep(_POLL_S)
        return True

    async def _has_drained(self, daemon: Daemon) -> None:
        deadline_s = time.monotonic() + _START_S
        while daemon.is_alive and time.monotonic() < deadline_s:
            await asyncio.sleep(_POLL_S)
        if daemon.process.poll() != 0:
            self.problems.append(f"the daemon did not drain: exit code {daemon.process.poll()}")
            await self._kill_daemon(daemon)

    def _start_client(self, slot: ClientSlot) -> None:
        slot.log = self._folder / f"{slot.name}.{slot.num_starts}.jsonl"
        seed = (self._options.seed * 1000 + slot.number) * 1000 + slot.num_starts
        slot.process = start_python(
            "tests.chaos.client",
            self._folder, slot.log, f"{slot.name}.{slot.num_starts}", seed,
            log=self._folder / "clients.log",
        )  # fmt: skip
        slot.num_starts += 1

    async def _finish(self) -> None:
        """No more faults: everything that runs ends, and nothing is left."""
        daemon = self._daemon
        if daemon is None or not daemon.is_alive:
            daemon = self._daemon = self._start_daemon(is_supervised=False)
        await self._is_ready(daemon, max(daemon.num_ready(), 1))
        processes = []
        for slot in self._slots:
            assert slot.process is not None and slot.log is not None
            await self._has_started(slot.process, slot.log)
            slot.process.terminate()
            processes.append((slot, slot.process))
            self.logs.append((slot.log, None))
        deadline_s = time.monotonic() + _FINISH_S
        for slot, process in processes:
            while process.poll() is None and time.monotonic() < deadline_s:
                await asyncio.sleep(_POLL_S)
            if process.poll() != 0:
                self.problems.append(f"{slot.name} ended with exit code {process.poll()}")
        self._say("what is left")
        await self._look_for_what_is_left(daemon)
        daemon.send(signal.SIGTERM)
        await self._has_drained(daemon)

    async def _has_started(self, process: subprocess.Popen[bytes], log: Path) -> None:
        """Until then SIGTERM ends it at once."""
        while process.poll() is None and not (log.exists() and log.stat().st_size):
            await asyncio.sleep(_POLL_S)

    async def _look_for_what_is_left(self, daemon: Daemon) -> None:
        try:
            async with AsyncLLM(self._address) as llm:
                deadline_s = time.monotonic() + _FREED_S
                while True:
                    numbers = await llm.statistics()
                    self.left = {
                        "clients": numbers.num_clients - 1,
                        "requests": len(await llm.request_ids()),
                        "running": numbers.num_running,
                        "waiting": numbers.num_waiting,
                        "blocks in use": numbers.num_blocks_in_use,
                    }
                    if not any(self.left.values()) or time.monotonic() > deadline_s:
                        break
                    await asyncio.sleep(0.1)
        except EngineClientError as error:
            self.problems.append(f"the engine's statistics at the end: {error!r}")
            return
        pid = daemon.engine_pid()
        assert pid is not None
        deadline_s = time.monotonic() + _FREED_S
        allowed = self._num_idle_descriptors
        while (now := count_descriptors(pid)) > allowed and time.monotonic() < deadline_s:
            await asyncio.sleep(0.1)
        self.left["descriptors"] = max(now - allowed, 0)

    def _kill_all(self) -> None:
        processes = [slot.process for slot in self._slots]
        processes += [self._daemon.process] if self._daemon is not None else []
        for process in processes:
            if process is not None and process.poll() is None:
                process.kill()
                process.wait()

    def _start_time(self) -> None:
        asyncio.get_running_loop().call_later(self._options.time_s, self._end)

    def _end(self) -> None:
        """The time is over."""
        self._over.set()

    def _say(self, what: str) -> None:
        print(f"{time.strftime('%H:%M:%S')} {what}", file=sys.stderr, flush=True)

    async def _is_over_after(self, seconds: float) -> bool:
        """Wait, but not longer than the faults go on. Returns whether they are over."""
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._over.wait(), max(seconds, 0.001))
        return self._over.is_set()


def conclude(options: Options, document: dict[str, Any], tally: Tally, failures: list[str]) -> int:
    """Print a run's report, and write it to the file if there is one. Returns the exit code."""
    print(tally.table())
    for failure in failures[:_MAX_SHOWN]:
        print(failure, file=sys.stderr)
    asked = dataclasses.asdict(options)
    path = asked.pop("json")
    document = asked | {
        "requests": tally.num_requests,
        "by_kind": {kind: dict(counts) for kind, counts in sorted(tally.by_kind.items())},
        "tokens_compared": tally.num_tokens,
        "lost": tally.total("lost"),
        "wrong": tally.total("wrong"),
        **document,
    }
    if path is not None:
        path.write_text(json.dumps(document, indent=1) + "\n")
    print(json.dumps(document))
    return 1 if failures else 0
