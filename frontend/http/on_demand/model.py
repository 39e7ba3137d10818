"""A model whose daemon the server starts when it is first asked for, and stops when it is idle."""

import asyncio
import contextlib
import functools
import json
import logging
import math
import os
import signal
import sys
import time
from collections.abc import AsyncGenerator, Callable, Coroutine
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import msgspec

from frontend.async_llm import AsyncLLM
from frontend.engine.daemon import ChildDaemon
from frontend.engine_calls import Engine
from frontend.errors import EngineClientError, EngineUnavailable
from frontend.http.api_errors import ApiError
from frontend.http.exchange import current_exchange
from frontend.http.on_demand.options import OnDemandOptions
from frontend.http.served_models import ModelFacts, ServedModel
from frontend.presets.llm import adapter_options, names_of
from protocol.memory import available_memory_bytes, process_memory_bytes
from protocol.outputs import ModelInfo
from protocol.running_daemons import note_daemon

logger = logging.getLogger(__name__)

_TOLD_WITHIN_S = 5.0
"""The streams of a daemon that died are told why."""
_PROCESS_BYTES = 512 * 1024**2
"""Of a daemon beside its weights, before it has run once: libraries, and the smallest cache."""
_CACHE_BYTES = 256 * 1024**2
"""Memory of a daemon beside what it had when it was ready."""


class DaemonPool:
    """Models that share this machine's memory. Their daemons start one after the other.

    Args:
        told_of: what the log says of a model that has started.
    """

    def __init__(
        self, options: OnDemandOptions, told_of: Callable[[ModelInfo], str] = lambda _: ""
    ) -> None:
        self.options = options
        self.told_of = told_of
        logger.setLevel(logging.INFO)  # others of this program warn alone
        self.models: list[OnDemandModel] = []
        self.starting = asyncio.Lock()
        self.reading = asyncio.Lock()

    async def make_room(self, name: str, needed_bytes: int) -> None:
        """Stop idle daemons until there is room for one more.

        Raises:
            ApiError: there is none.
        """
        while needed_bytes > (free_bytes := self._free_bytes()):
            if not await self.stop_least_recently_used():
                others = ", ".join(each.names[0] for each in self.models if each.resting is None)
                running = f"{others} cannot be stopped now" if others else "no other model runs"
                raise ApiError(
                    503,
                    f"{name} needs {needed_bytes:,} bytes of memory, {free_bytes:,} are "
                    f"available, and {running}; try again later, or free some",
                    code="not_enough_memory",
                    retry_after_s=5,
                )

    def _free_bytes(self) -> int:
        """Free memory without what running daemons may still take."""
        return max(0, available_memory_bytes() - sum(each.untouched_bytes for each in self.models))

    async def stop_least_recently_used(self) -> bool:
        """False: none is idle."""
        idle = [each for each in self.models if each.is_idle]
        if idle:
            await min(idle, key=lambda each: each.last_used_s).stop()
        return bool(idle)


def _pass_on(name: str, line: str) -> None:
    """A daemon's line of its log."""
    if line.startswith("{") and sys.__stderr__ is not None:
        sys.__stderr__.write(f'{line.removesuffix("}")}, "model": {json.dumps(name)}}}\n')
    else:
        sys.stderr.write(f"{name}: {line}\n")


class OnDemandModel(ServedModel):
    """
    Args:
        model: as for `engine-core --model`.
    """

    def __init__(self, model: str, pool: DaemonPool) -> None:
        path = Path(model).expanduser()
        name = path.resolve().name.removesuffix(".gguf") if path.exists() else model
        super().__init__(AsyncLLM, [name])  # never called: it has no address
        self._model = model
        self.asked = names_of(model)
        self._pool = pool
        self._options = pool.options
        pool.models.append(self)
        self._llm: AsyncLLM | None = None
        self._child: ChildDaemon | None = None
        self._changing = asyncio.Lock()
        """Held while a daemon starts or ends."""
        self._starting: asyncio.Task[AsyncLLM] | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._num_users = 0
        self._keep_alive_s = self._options.keep_alive_s
        self._timer: asyncio.TimerHandle | None = None
        self._what = "stopped"
        self._since_s = 0.0
        self._ready_bytes: int | None = None
        self.last_used_s = 0.0
        """When it was used last, on the monotonic clock."""

    @property
    def resting(self) -> str | None:
        if self._llm is not None:
            return None
        if self._starting is None:
            return self._what
        return f"{self._what} for {time.monotonic() - self._since_s:.0f} s"

    @property
    def is_idle(self) -> bool:
        """It runs, and may be stopped."""
        return self._llm is not None and not self._num_users

    @property
    def memory_bytes(self) -> int:
        return (self._child and process_memory_bytes(self._child.pid)) or 0

    @property
    def untouched_bytes(self) -> int:
        """Of its KV cache, at least: it is reserved at the start and touched as it is used."""
        if self._child is None or self._child.said.get("device") != "cpu":
            return 0
        promised_bytes = (self._ready_bytes or 0) + int(self._child.said["kv_cache_bytes"])
        return max(0, promised_bytes - self.memory_bytes)

    @property
    def expires_at(self) -> datetime | None:
        if self._keep_alive_s == math.inf:
            return None
        left_s = self._keep_alive_s
        if not self._num_users:
            left_s -= time.monotonic() - self.last_used_s
        return datetime.now(UTC) + timedelta(seconds=max(0.0, left_s))

    async def ready(self) -> AsyncLLM:
        llm = self._llm
        if llm is None:
            raise EngineUnavailable(f"{self.names[0]} is {self.resting}; a request starts it")
        await llm.ready()
        return llm

    async def engines(self) -> list[Engine]:
        return [] if self._llm is None else self._llm.engines

    async def for_request(self) -> AsyncLLM:
        """Its client, started first if need be. It is kept until the exchange over HTTP ends.

        Raises:
            ApiError: it did not start, or there is no memory for it.
        """
        exchange = current_exchange.get()
        assert exchange is not None
        self._num_users += 1
        exchange.at_end.append(self._release)
        if self._child is not None and self._child.has_ended:
            await self.stop()
        while self._llm is None:
            if self._starting is None:
                self._since_s = time.monotonic()
                self._starting = asyncio.create_task(self._start())
            exchange.waits_for = lambda: f"{self.names[0]} is {self.resting}"
            try:
                await asyncio.shield(self._starting)
            finally:
                exchange.waits_for = None
        return self._llm

    def keep_alive(self, seconds: float, *, by_admin: bool = True) -> None:
        if not by_admin:
            if 0 < seconds <= self._options.keep_alive_s:
                return  # it stays as long as that for everybody
            raise ApiError(
                403,
                f"keep_alive is {seconds:g} s; others use {self.names[0]}, too: only an admin's "
                f"key may stop it, or keep it for longer than {self._options.keep_alive}",
                param="keep_alive",
            )
        self._keep_alive_s = seconds
        if self._child is not None:
            note_daemon(self._child.pid, keep_alive_s=-1 if seconds == math.inf else seconds)
        self._arm()

    async def stop(self) -> None:
        """End its daemon, if there is one."""
        llm, self._llm = self._llm, None
        self.presets.clear()
        self._what = "stopping" if llm else self._what
        async with self._changing:
            if llm is not None:
                await llm.close()
                self._child = None
                self._what = "stopped"

    async def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        if self._starting is not None:
            self._starting.cancel()
            await asyncio.wait([self._starting])
        await self.stop()
        await asyncio.gather(*self._tasks)
        self._pool.models = [each for each in self._pool.models if each is not self]

    def _release(self) -> None:
        self._num_users -= 1
        self.last_used_s = time.monotonic()
        self._arm()

    def _arm(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self.is_idle and self._keep_alive_s != math.inf:
            left_s = self.last_used_s + self._keep_alive_s - time.monotonic()
            loop = asyncio.get_running_loop()
            self._timer = loop.call_later(left_s, self._stop_if_idle)

    def _stop_if_idle(self) -> None:
        if self.is_idle:
            self._run(self.stop())

    def _run(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _start(self) -> AsyncLLM:
        """Raises ApiError: it did not start."""
        try:
            async with self._changing:
                self._what = "starting"
                async for status in self.pull():
                    if "total" in status:
                        done, total = status["completed"] / 1e6, status["total"] / 1e6
                        self._what = f"downloading, {done:,.0f} of {total:,.0f} MB,"
                self._what = "waiting for another model to start"
                async with self._pool.starting:
                    self._what = "starting"
                    needed_bytes = self.size_bytes + _PROCESS_BYTES
                    if self._ready_bytes is not None:
                        needed_bytes = self._ready_bytes + _CACHE_BYTES
                    await self._pool.make_room(self.names[0], needed_bytes)
                    self._llm = await self._launch()
        except Exception as error:
            self._what = f"stopped: {error}"
            raise
        finally:
            self._starting = None
        self.last_used_s = time.monotonic()
        self.keep_alive(self._options.keep_alive_s)
        return self._llm

    async def _launch(self) -> AsyncLLM:
        """Tries again without idle ones, where the daemon says that its memory is not enough."""
        name = self.names[0]
        while True:
            child = ChildDaemon(
                [
                    *("--model", self._model, "--model-name", name),
                    *(*adapter_options(self._model), *self._options.engine_options),
                ],
                command=self._options.command,
                on_line=functools.partial(_pass_on, name),
            )
            try:
                llm = await AsyncLLM.launched(
                    child,
                    client_name="engine-client http",
                    startup_timeout_s=self._options.startup_timeout,
                )
            except EngineClientError as error:
                how, _, _ = str(error).partition(" Its last lines:")
                why = f"{how} The last line of its log: {child.last_line}"
                if "memory" in why and await self._pool.stop_least_recently_used():
                    continue
                raise ApiError(
                    503, f"{name} did not start: {why}", code="engine_unavailable", retry_after_s=5
                ) from None
            if told := self._pool.told_of(llm.model):
                logger.info("%s: %s", name, told)
            llm.session.requests.observer = self.histograms
            self._child = child
            self._ready_bytes = process_memory_bytes(child.pid)
            self._run(self._forget_when_it_ends(child, llm))
            return llm

    async def _forget_when_it_ends(self, child: ChildDaemon, llm: AsyncLLM) -> None:
        report = await child.wait()
        if self._llm is llm:  # it was not told to
            logger.warning("%s: %s", self.names[0], report)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_TOLD_WITHIN_S):
                    while len(llm.session.requests):  # they end with the report, not with the stop
                        await asyncio.sleep(0.01)
            await self.stop()

    async def read_facts(self) -> ModelFacts:
        async with self._pool.reading:
            if self.facts is None:
                process = await asyncio.create_subprocess_exec(
                    *(*self._options.command, "show", self._model, "--json"),
                    stdin=asyncio.subprocess.DEVNULL,
                    stdout=asyncio.subprocess.PIPE,
                    stderr=asyncio.subprocess.DEVNULL,
                )
                try:
                    said, _ = await process.communicate()
                finally:
                    with contextlib.suppress(ProcessLookupError):
                        process.kill()
                with contextlib.suppress(msgspec.MsgspecError):
                    found = msgspec.json.decode(said, type=ModelFacts)
                    if found.architecture:  # else it was not fetched yet
                        self.facts = msgspec.structs.replace(found, name=self.names[0])
        return await super().read_facts()

    async def pull(self) -> AsyncGenerator[dict[str, Any], None]:
        process = await asyncio.create_subprocess_exec(
            *(*self._options.command, "pull", self._model, "--json"),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            start_new_session=True,
        )
        assert process.stdout is not None
        assert process.stderr is not None
        errors = asyncio.ensure_future(process.stderr.read())
        status: dict[str, Any] = {}
        try:
            async for line in process.stdout:
                status = json.loads(line)
                if "bytes" not in status:
                    yield status
            said = (await errors).decode(errors="replace").strip().splitlines()
            code = await process.wait()
        finally:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)  # pip, too
            errors.cancel()
        if code or "bytes" not in status:
            why = (said or [f"engine-core pull ended with exit code {code}"])[-1]
            raise ApiError(503, f"{self.names[0]} cannot be fetched: {why}", retry_after_s=5)
        self.size_bytes = int(status["bytes"])
