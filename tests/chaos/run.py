"""`make chaos`: clients with mixed work against one daemon, while daemon and client processes are
killed, paused and restarted. Of clients that live no request is lost and no token wrong; of killed
ones nothing is left."""

import asyncio
import contextlib
import json
import os
import secrets
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Annotated, Any

from cyclopts import App, Parameter

from frontend import AsyncLLM
from frontend.errors import EngineClientError
from tests.chaos.cases import MAX_MODEL_LEN, make_cases
from tests.chaos.faults import Fault, client_faults, daemon_faults
from tests.chaos.processes import (
    MARK,
    Daemon,
    count_descriptors,
    is_gone,
    marked_processes,
    start_python,
)
from tests.chaos.references import compute_references, tokens_behind_transformers
from tests.chaos.tally import Tally, percentiles

_POLL_S = 0.02
_START_S = 180.0
_FINISH_S = 240.0
"""What runs when the faults end gets this long."""
_FREED_S = 75.0
"""Longer than the 60 s after which a client is lost with its network."""
_HEARTBEATS_S = 2.0
"""Within which an engine sees that a client has left."""
_NUM_SPOT_CHECKED = 6

app = App(name="chaos", help=__doc__, result_action="return_value")


class ClientSlot:
    """A place for one client process after the other."""

    def __init__(self, number: int) -> None:
        self.name = f"client{number}"
        self.number = number
        self.num_starts = 0
        self.process: subprocess.Popen[bytes] | None = None
        self.log: Path | None = None
        self.is_paused = False


class Chaos:
    """
    Args:
        folder: for sockets, logs and settings of the run.
    """

    def __init__(
        self,
        folder: Path,
        *,
        model: str,
        dtype: str,
        seed: int,
        time_s: float,
        num_processes: int,
        clients_per_process: int,
        num_cases: int,
        reconnect_timeout_s: float,
    ) -> None:
        self._folder = folder
        self._address = f"ipc://{folder}/engine.sock"
        self._options = (
            "--model", model, "--dtype", dtype, "--bind", self._address,
            "--max-model-len", MAX_MODEL_LEN, "--num-blocks", 3000, "--drain-timeout", 120,
        )  # fmt: skip
        self._seed = seed
        self._time_s = time_s
        self._cases = make_cases(seed, num_cases)
        self._settings = {
            "address": self._address,
            "case_seed": seed,
            "num_cases": num_cases,
            "references": str(folder / "references.json"),
            "clients_per_process": clients_per_process,
            "reconnect_timeout_s": reconnect_timeout_s,
        }
        self._slots = [ClientSlot(number) for number in range(num_processes)]
        self._logs: list[tuple[Path, float | None]] = []
        self._daemon: Daemon | None = None
        self._over = asyncio.Event()
        self._began_s = 0.0
        self.faults: list[dict[str, Any]] = []
        self.problems: list[str] = []
        self.restarts_s: list[float] = []
        self.references: list[list[dict[str, Any]]] = []
        self._num_idle_descriptors = 0
        """Of an engine that has served, without clients."""
        self.left: dict[str, int] = {}

    # the run

    async def run(self) -> Tally:
        try:
            await self._compute_references()
            (self._folder / "settings.json").write_text(json.dumps(self._settings))
            self._began_s = time.monotonic()
            for slot in self._slots:
                self._start_client(slot)
            asyncio.get_running_loop().call_later(self._time_s, self._over.set)
            async with asyncio.TaskGroup() as group:
                group.create_task(self._disturb_daemon())
                group.create_task(self._disturb_clients())
            await self._finish()
        finally:
            self._kill_all()
        return Tally(self._logs, self.faults)

    async def _compute_references(self) -> None:
        async with self._running_daemon() as daemon:
            self.references = await compute_references(self._address, self._cases)
            await asyncio.sleep(_HEARTBEATS_S)
            self._num_idle_descriptors = count_descriptors(daemon.process.pid)
            Path(self._settings["references"]).write_text(json.dumps(self.references))

    @contextlib.asynccontextmanager
    async def _running_daemon(self) -> AsyncIterator[Daemon]:
        """One that is drained in the end."""
        daemon = self._daemon = self._start_daemon(is_supervised=False)
        if not await self._is_ready(daemon, 1):
            raise RuntimeError(f"the daemon did not start:\n{(self._folder / 'log').read_text()}")
        yield daemon
        daemon.send(signal.SIGTERM)
        await self._has_drained(daemon)

    # the daemon

    def _start_daemon(self, *, is_supervised: bool) -> Daemon:
        return Daemon(self._options, self._folder, is_supervised=is_supervised)

    async def _disturb_daemon(self) -> None:
        down_s = None
        for launch in daemon_faults(self._seed):
            daemon = self._daemon = self._start_daemon(is_supervised=launch.is_supervised)
            num_ready = 1
            for fault in launch.faults:
                if not fault.at_start:
                    if not await self._is_ready(daemon, num_ready):
                        break
                    if down_s is not None:
                        self.restarts_s.append(time.monotonic() - down_s)
                        down_s = None
                if await self._is_over_after(fault.after_s):
                    return
                self._note(fault, "daemon", "supervised" if launch.is_supervised else "plain")
                if fault.kind in ("kill", "kill paused", "kill engine", "drain, kill"):
                    down_s = down_s or time.monotonic()
                num_ready += fault.kind == "kill engine"
                await self._disturb(daemon, fault)
            if await self._is_over_after(0.0):
                return

    async def _disturb(self, daemon: Daemon, fault: Fault) -> None:
        match fault.kind:
            case "pause":
                pid = daemon.send(signal.SIGSTOP, to_engine=True)
                await self._is_over_after(fault.lasts_s)
                if pid is not None and pid == daemon.engine_pid():
                    os.kill(pid, signal.SIGCONT)
            case "kill engine":
                pid = daemon.send(signal.SIGKILL, to_engine=True)
                await self._wait_until_gone(pid)
            case "kill":
                await self._kill_daemon(daemon)
                await self._is_over_after(fault.lasts_s)
            case "kill paused":
                daemon.send(signal.SIGSTOP, to_engine=True)
                await asyncio.sleep(fault.lasts_s)
                await self._kill_daemon(daemon)
            case "drain":
                daemon.send(signal.SIGTERM)
                await self._has_drained(daemon)
            case "drain, kill":
                daemon.send(signal.SIGTERM)
                await asyncio.sleep(fault.lasts_s)
                await self._kill_daemon(daemon)
            case _:
                raise AssertionError(fault.kind)

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

    # clients

    def _start_client(self, slot: ClientSlot) -> None:
        slot.log = self._folder / f"{slot.name}.{slot.num_starts}.jsonl"
        seed = (self._seed * 1000 + slot.number) * 1000 + slot.num_starts
        slot.process = start_python(
            "tests.chaos.client",
            self._folder / "settings.json", slot.log, f"{slot.name}.{slot.num_starts}", seed,
            log=self._folder / "clients.log",
        )  # fmt: skip
        slot.num_starts += 1

    async def _disturb_clients(self) -> None:
        async with asyncio.TaskGroup() as group:
            for fault in client_faults(self._seed):
                if await self._is_over_after(fault.after_s):
                    return
                slot = self._slots[int(fault.pick * len(self._slots))]
                if slot.process is not None and not slot.is_paused:
                    self._note(fault, slot.name)
                    group.create_task(self._disturb_client(slot, fault))

    async def _disturb_client(self, slot: ClientSlot, fault: Fault) -> None:
        process, log = slot.process, slot.log
        assert process is not None and log is not None
        if fault.kind == "kill":
            slot.process = None
            process.kill()
            process.wait()
            self._logs.append((log, time.monotonic()))
            await self._is_over_after(fault.lasts_s)
            self._start_client(slot)
        else:
            slot.is_paused = True
            process.send_signal(signal.SIGSTOP)
            await self._is_over_after(fault.lasts_s)
            process.send_signal(signal.SIGCONT)
            slot.is_paused = False

    # the end

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
            self._logs.append((slot.log, None))
        deadline_s = time.monotonic() + _FINISH_S
        for slot, process in processes:
            while process.poll() is None and time.monotonic() < deadline_s:
                await asyncio.sleep(_POLL_S)
            if process.poll() != 0:
                self.problems.append(f"{slot.name} ended with exit code {process.poll()}")
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

    # small parts

    async def _is_over_after(self, seconds: float) -> bool:
        """Wait, but not longer than the faults go on. Returns whether they are over."""
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._over.wait(), max(seconds, 0.001))
        return self._over.is_set()

    def _note(self, fault: Fault, target: str, more: str = "") -> None:
        self.faults.append(
            {
                "at_s": time.monotonic(),
                "kind": f"{fault.kind} {more}".strip(),
                "target": target,
                "lasts_s": round(fault.lasts_s, 3),
            }
        )


def report(chaos: Chaos, tally: Tally, orphans: list[int]) -> dict[str, Any]:
    """The document of a run."""
    of_daemon = Counter(f["kind"] for f in chaos.faults if f["target"] == "daemon")
    of_clients = Counter(f["kind"] for f in chaos.faults if f["target"] != "daemon")
    return {
        "requests": tally.num_requests,
        "by_verdict": {
            verdict: tally.total(verdict)
            for verdict in sorted({v for counts in tally.by_kind.values() for v in counts})
        },
        "by_kind": {kind: dict(counts) for kind, counts in sorted(tally.by_kind.items())},
        "sequences_by_finish_reason": dict(tally.by_reason),
        "tokens_compared": tally.num_tokens,
        "faults_of_the_daemon": dict(sorted(of_daemon.items())),
        "faults_of_client_processes": dict(sorted(of_clients.items())),
        "resumed_requests": tally.num_resumptions,
        "restart_s": percentiles(chaos.restarts_s),
        "stream_gap_s": percentiles(tally.gaps_s),
        "lost": tally.total("lost"),
        "wrong": tally.total("wrong"),
        "duplicates": tally.num_duplicates,
        "orphans": len(orphans),
        "left_in_the_engine": chaos.left,
        "descriptors_kept_by_a_client": tally.num_descriptors_kept,
        "problems": chaos.problems,
    }


@app.default
def main(
    *,
    time_s: Annotated[float, Parameter(name="--time")] = 300.0,
    seed: int = 0,
    model: str = "smollm2-135m-instruct",
    dtype: str = "auto",
    processes: int = 10,
    clients_per_process: int = 3,
    cases: int = 180,
    reconnect_timeout: float = 300.0,
    spot_check: bool = True,
    json_file: Annotated[Path | None, Parameter(name="--json")] = None,
    keep: Path | None = None,
) -> int:
    """
    Args:
        time_s: seconds of faults; the end takes up to minutes more.
        seed: of the work and of the faults.
        dtype: auto: the file's own blocks; float32.
        reconnect_timeout: seconds that clients wait for a lost engine.
        spot_check: compare greedy references with transformers.
        json_file: where the document goes, too.
        keep: a folder for the logs of a run that failed.
    """
    mark = os.environ.setdefault(MARK, secrets.token_hex(8))
    with tempfile.TemporaryDirectory(prefix="chaos-") as name:
        chaos = Chaos(
            Path(name),
            model=model,
            dtype=dtype,
            seed=seed,
            time_s=time_s,
            num_processes=processes,
            clients_per_process=clients_per_process,
            num_cases=cases,
            reconnect_timeout_s=reconnect_timeout,
        )
        tally = asyncio.run(chaos.run())
        orphans = marked_processes(mark)
        document = {
            "seed": seed, "seconds": time_s, "model": model, "dtype": dtype,
            "clients": processes * clients_per_process,
        } | report(chaos, tally, orphans)  # fmt: skip
        if spot_check:
            behind = behind_transformers(chaos, model)
            document["greedy_tokens_of_transformers"] = behind
        failures = tally.failures + chaos.problems
        failures += [f"{count} {what} left" for what, count in chaos.left.items() if count]
        failures += [f"process {pid} is left" for pid in orphans]
        if tally.num_descriptors_kept > 0:
            failures.append(f"a client process kept {tally.num_descriptors_kept} descriptors")
        if failures and keep is not None:
            import shutil

            shutil.copytree(name, keep, ignore=shutil.ignore_patterns("*.sock*"))
    print(tally.table())
    for failure in failures[:20]:
        print(failure, file=sys.stderr)
    text = json.dumps(document)
    if json_file is not None:
        json_file.write_text(json.dumps(document, indent=1) + "\n")
    print(text)
    return 1 if failures else 0


def behind_transformers(chaos: Chaos, model: str) -> dict[str, float | int]:
    """How the undisturbed engine's greedy tokens compare with transformers' in float32."""
    from engine_core.model_files import open_model_files

    path = open_model_files(model, report=print).path
    behind = tokens_behind_transformers(path, chaos._cases, chaos.references, _NUM_SPOT_CHECKED)
    return {
        "tokens": len(behind),
        "best": sum(value == 0.0 for value in behind),
        "largest_logit_gap": round(max(behind), 4),
    }


if __name__ == "__main__":
    sys.exit(app())
