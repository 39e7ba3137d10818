"""A replica: an actor of Ray Serve that has an engine's process. Clients reach the engine itself,
by its TCP address; Serve starts, watches, scales and ends the actor."""

import asyncio
import collections
import contextlib
import os
import signal
import socket
import sys
import time
from collections.abc import Awaitable

import ray
from ray.exceptions import RayError

from frontend.async_llm import AsyncLLM
from frontend.cluster.autoscaling import RUNNING, SLO_MET, SLO_MISSED, WAITING
from frontend.cluster.deployment import ModelDeployment
from frontend.cluster.directory import REPORT_S
from frontend.cluster.directory_actor import DirectoryClient
from frontend.cluster.keys import KeyFiles
from frontend.cluster.rank import start_ranks
from frontend.engine.daemon import ChildDaemon

_LEAVE_S = 1.0
"""For HTTP replicas to hear that this engine leaves, before it refuses what they send."""
_KILL_S = 10.0


class EngineReplica:
    async def __init__(  # type: ignore[misc]  # Serve awaits it
        self, model: ModelDeployment
    ) -> None:
        self._model = model
        self._name = model.served_name
        self._directory = DirectoryClient()
        self._is_healthy = True
        self._is_ending = False
        self._slo: collections.deque[tuple[float, int, int]] = collections.deque()
        """Times, and the requests that met and missed their SLOs until then."""
        self._key_files = KeyFiles(await self._directory.keys())
        host = _host(ray.util.get_node_ip_address())
        arguments = [*model.daemon_arguments(), "--keys", str(self._key_files.folder)]
        if model.num_ranks > 1:
            workers = f"tcp://{host}:{_free_port(host)}"
            arguments += ["--workers-bind", workers, f"--num-joining={model.num_ranks - 1}"]
        self._child = ChildDaemon(
            arguments,
            bind=f"tcp://{host}:0",
            on_line=lambda line: sys.stderr.write(f"{line}\n"),
        )
        self._ends: list[Awaitable[str]] = [self._child.wait()]
        try:
            if model.num_ranks > 1:
                self._ends += start_ranks(model, workers, await self._directory.keys())
            await self._child.ready(model.startup_timeout_s)
            self._llm = AsyncLLM(
                self._child.address, client_name="replica", keys=self._key_files.of_client
            )
            await self._llm.open()
        except BaseException:
            await self._child.close()
            self._key_files.close()
            raise
        self._tasks = [
            asyncio.create_task(each) for each in (self._report(), self._end_with_the_engine())
        ]

    async def start(self) -> None:
        """Does nothing: that Serve has to find a replica for the call starts one."""

    async def check_health(self) -> None:
        """Serve's health check. The engine answers between two steps: only if it makes progress.
        Raises RuntimeError: it does not."""
        timeout_s = self._model.health_timeout_s
        try:
            async with asyncio.timeout(timeout_s):
                await self._llm.ping()
        except Exception as error:
            self._is_healthy = False
            raise RuntimeError(
                f"the engine of {self._name} at {self._child.address} has ended no step within "
                f"{timeout_s:g} s ({type(error).__name__}: {error})"
            ) from None
        self._is_healthy = True

    async def record_autoscaling_stats(self) -> dict[str, float]:
        """The figures that `ScaleByLoad` reads."""
        now = await self._llm.statistics()
        now_s = time.monotonic()
        missed = now.num_slo_requests - now.num_slo_met
        self._slo.append((now_s, now.num_slo_met, missed))
        while len(self._slo) > 1 and now_s - self._slo[1][0] > self._period_s:
            self._slo.popleft()
        _, met_before, missed_before = self._slo[0]
        return {
            RUNNING: now.num_running,
            WAITING: now.num_waiting,
            SLO_MET: now.num_slo_met - met_before,
            SLO_MISSED: missed - missed_before,
        }

    @property
    def _period_s(self) -> float:
        return self._model.autoscaling.look_back_period_s

    async def _report(self) -> None:
        while True:
            if self._is_healthy:
                await self._directory.report(self._name, self._child.address)
            await asyncio.sleep(REPORT_S)

    async def _leave(self) -> None:
        await self._directory.leave(self._name, self._child.address)

    async def _end_with_the_engine(self) -> None:
        """Or with another of its ranks. Serve starts another replica for an actor that has
        ended, at once."""
        first = await next(asyncio.as_completed([_said(each) for each in self._ends]))
        if not self._is_ending:
            sys.stderr.write(f"{self._name}: {first}\n")
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_LEAVE_S):
                    await self._leave()
            os._exit(1)

    async def __del__(self) -> None:
        """Serve's destructor: the engine drains. What it has not finished in time goes on at
        another one."""
        self._is_ending = True
        for each in self._tasks[:1]:
            each.cancel()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_KILL_S):
                await self._leave()
        if self._is_healthy:
            await asyncio.sleep(_LEAVE_S)
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._child.pid, signal.SIGTERM)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._model.drain_timeout_s + _KILL_S):
                    await self._child.wait()
        else:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._child.pid, signal.SIGKILL)
        await self._llm.close()
        await self._child.close()
        self._key_files.close()


async def _said(end: Awaitable[str]) -> str:
    try:
        return await end
    except RayError as error:
        return f"a worker is lost: {error}"


def _free_port(host: str) -> int:
    address = host.strip("[]")
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.socket(family) as listener:
        listener.bind((address, 0))
        port: int = listener.getsockname()[1]
        return port


def _host(address: str) -> str:
    return f"[{address}]" if ":" in address else address
