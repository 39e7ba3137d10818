"""`make chaos`: clients with mixed work against one daemon, while daemon and client processes are
killed, paused and restarted. Of clients that live no request is lost and no token wrong; of killed
ones nothing is left."""

import asyncio
import os
import secrets
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Annotated, Any

from cyclopts import App, Parameter

from tests.chaos.faults import Fault, client_faults, daemon_faults
from tests.chaos.options import Options
from tests.chaos.processes import MARK, Daemon, marked_processes
from tests.chaos.stage import ClientSlot, Stage, conclude
from tests.chaos.tally import Tally, percentiles

_DEFAULT = Options()
app = App(name="chaos", help=__doc__, result_action="return_value")


class Chaos(Stage):
    """
    Args:
        min_faults: of the daemon; on a slow machine they need more time.
    """

    def __init__(self, folder: Path, options: Options, *, min_faults: int) -> None:
        super().__init__(folder, options)
        self._min_faults = min_faults
        self.faults: list[dict[str, Any]] = []
        self.restarts_s: list[float] = []
        """From a kill, or the end of a drain, to the next engine that is ready."""

    async def _main(self, daemon: Daemon) -> None:
        daemon.send(signal.SIGTERM)
        await self._has_drained(daemon)
        self._start_time()
        for slot in self._slots:
            self._start_client(slot)
        async with asyncio.TaskGroup() as group:
            group.create_task(self._disturb_daemon())
            group.create_task(self._disturb_clients())

    async def _disturb_daemon(self) -> None:
        down_s = None
        for launch in daemon_faults(self._options.seed):
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
                if fault.kind == "drain":
                    down_s = time.monotonic()
            if await self._is_over_after(0.0):
                return

    def _end(self) -> None:
        num_faults = sum(fault["target"] == "daemon" for fault in self.faults)
        if num_faults >= self._min_faults:
            self._over.set()
        else:
            asyncio.get_running_loop().call_later(1.0, self._end)

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

    async def _disturb_clients(self) -> None:
        async with asyncio.TaskGroup() as group:
            for fault in client_faults(self._options.seed):
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
            self.logs.append((log, time.monotonic()))
            await self._is_over_after(fault.lasts_s)
            self._start_client(slot)
        else:
            slot.is_paused = True
            process.send_signal(signal.SIGSTOP)
            await self._is_over_after(fault.lasts_s)
            process.send_signal(signal.SIGCONT)
            slot.is_paused = False

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
        "by_verdict": {
            verdict: tally.total(verdict)
            for verdict in sorted({v for counts in tally.by_kind.values() for v in counts})
        },
        "sequences_by_finish_reason": dict(tally.by_reason),
        "faults_of_the_daemon": dict(sorted(of_daemon.items())),
        "faults_of_client_processes": dict(sorted(of_clients.items())),
        "resumed_requests": tally.num_resumptions,
        "restart_s": percentiles(chaos.restarts_s),
        "stream_gap_s": percentiles(tally.gaps_s),
        "duplicates": tally.num_duplicates,
        "orphans": len(orphans),
        "left_in_the_engine": chaos.left,
        "descriptors_kept_by_a_client": tally.num_descriptors_kept,
        "problems": chaos.problems,
    }


@app.default
def main(
    *,
    options: Options = _DEFAULT,
    min_faults: Annotated[int, Parameter(help="Of the daemon; the run goes on until then.")] = 0,
    keep: Annotated[Path | None, Parameter(help="For the logs of a run that failed.")] = None,
) -> int:
    mark = os.environ.setdefault(MARK, secrets.token_hex(8))
    with tempfile.TemporaryDirectory(prefix="chaos-") as name:
        chaos = Chaos(Path(name), options, min_faults=min_faults)
        asyncio.run(chaos.run())
        tally = Tally(chaos.logs, chaos.faults)
        orphans = marked_processes(mark)
        failures = chaos.failures(tally, orphans)
        if failures and keep is not None:
            shutil.copytree(name, keep, ignore=shutil.ignore_patterns("*.sock*"))
    if tally.num_descriptors_kept > 0:
        failures.append(f"a client process kept {tally.num_descriptors_kept} descriptors")
    return conclude(options, report(chaos, tally, orphans), tally, failures)


if __name__ == "__main__":
    sys.exit(app())
