"""New weights for several engines behind one address, one engine after another: no request is lost,
and none has tokens of both."""

import asyncio
import contextlib
import dataclasses
from collections.abc import Callable, Sequence
from typing import Literal

from frontend.engine_calls import Engine
from frontend.errors import CallRefused, EngineClientError, EngineDied, EngineUnavailable
from protocol.calls import EngineState

NewRequests = Literal["any", "old", "new"]

_MAX_ATTEMPTS = 3
"""Attempts with one engine, which may be lost and come back meanwhile."""
_PING_S = 60.0
_RETURN_S = 5.0
"""For clients to find an engine that was started again, and to send what it had: their back-off."""


@dataclasses.dataclass(frozen=True)
class ServedWeights:
    """What an engine serves. `state`: running, paused, asleep, or why it does not answer."""

    address: str
    state: str
    weights_version: int | None = None
    fingerprint: str = ""

    def __str__(self) -> str:
        if self.weights_version is None:
            return f"{self.address}: {self.state}"
        version = f"weights version {self.weights_version} ({self.fingerprint:.12})"
        return f"{self.address}: {version}, {self.state}"


class RollingUpdateStopped(EngineClientError):
    """It did not get to its end. `engines`: what each serves now."""

    def __init__(self, why: str, engines: Sequence[ServedWeights]) -> None:
        super().__init__("; ".join((f"the update stopped: {why}", *map(str, engines))))
        self.engines = list(engines)


class _Stop(Exception):
    """The text says why."""


async def rolling_update(
    engines: Sequence[Engine],
    model: str,
    version: int | None = None,
    *,
    new_requests: NewRequests = "any",
    drain_timeout_s: float = 600.0,
    previous: str | None = None,
    report: Callable[[str], None] = lambda _line: None,
) -> list[ServedWeights]:
    """One engine at a time: it is paused, so that routers give new requests to the others, its
    streams end, it loads the weights, is checked and resumed.

    Args:
        engines: of an AsyncLLM with several addresses.
        model: as for `AsyncLLM.update_weights`, where each engine is.
        version: of all engines in the end; default: one above the largest.
        new_requests: which weights they get while both are served: "any" of the two, "old" until
            one engine is left that has them, or "new" as soon as an engine has them.
        drain_timeout_s: for the streams of an engine to end.
        previous: the old weights' model, for an engine that turns out to have loaded others than
            the rest; None: such an engine stays paused.
        report: gets a line a step.

    An engine that is paused already, as an update that was killed leaves it, runs in the end.

    Raises:
        RollingUpdateStopped: an engine refuses the weights, its streams take longer, or it is lost
            and does not come back. It serves what it did before, where it can; those before it
            serve the new weights. The call may be made again.
    """
    update = _Update(list(engines), model, drain_timeout_s, previous, report)
    try:
        return await update.run(version, new_requests)
    except (_Stop, EngineClientError) as error:
        await update.resume_all()
        raise RollingUpdateStopped(str(error), await update.served()) from error
    finally:
        await update.resume_all()


class _Update:
    def __init__(
        self,
        engines: list[Engine],
        model: str,
        drain_timeout_s: float,
        previous: str | None,
        report: Callable[[str], None],
    ) -> None:
        self._engines = engines
        self._model = model
        self._drain_timeout_s = drain_timeout_s
        self._previous = previous
        self._report = report
        self._version = 0
        self._fingerprint: str | None = None
        """The fingerprint of the new weights, once an engine has them."""
        self._paused: dict[Engine, asyncio.Task[object]] = {}
        """Engines that this update has paused, and the calls that end with their streams."""

    async def run(self, version: int | None, new_requests: NewRequests) -> list[ServedWeights]:
        before = {engine: await self._served_by(engine) for engine in self._engines}
        for each in before.values():
            if each.state not in (EngineState.RUNNING, EngineState.PAUSED):  # as one left behind
                raise _Stop(f"{each.address} cannot be updated, it is {each.state}")
        versions = [each.weights_version or 0 for each in before.values()]
        self._version = max(versions) + 1 if version is None else version
        for number, engine in enumerate(self._engines):
            if new_requests == "old" and number == len(self._engines) - 1:
                await self._resume(*self._engines[:number])
            await self._replace(engine, before[engine])
            if new_requests != "old" or number == len(self._engines) - 1:
                await self._resume(engine)
            if new_requests == "new":
                for other in self._engines[number + 1 :]:
                    self._pause(other)
        for _ in range(_MAX_ATTEMPTS):  # what was lost since then serves what it started with
            served = await self.served()
            late = [
                engine
                for engine, each in zip(self._engines, served, strict=True)
                if each.fingerprint != self._fingerprint
            ]
            if not late:
                return served
            for engine in late:
                await self._replace(engine, before[engine])
                await self._resume(engine)
        raise _Stop(f"{late[0].address} came back with other weights again and again")

    async def _replace(self, engine: Engine, before: ServedWeights) -> None:
        for attempt in range(1, _MAX_ATTEMPTS + 1):
            try:
                await self._drain(engine)
                await self._load(engine, before)
                return
            except (EngineDied, EngineUnavailable) as error:
                if attempt == _MAX_ATTEMPTS:
                    raise
                self._report(f"{engine.address} is lost ({error}); waiting for it to come back")
                await engine.session.ready()
                self._forget(engine)

    async def _drain(self, engine: Engine) -> None:
        limit_s = self._drain_timeout_s
        self._report(
            f"{engine.address} gets no new requests; its streams have {limit_s:g} s to end"
        )
        self._pause(engine)
        try:
            async with asyncio.timeout(limit_s):
                await asyncio.shield(self._paused[engine])
        except TimeoutError:
            raise _Stop(
                f"requests of {engine.address} did not end within {limit_s:g} s; allow more time, "
                "or end them (engine-client pause --mode abort), and try again"
            ) from None

    async def _load(self, engine: Engine, before: ServedWeights) -> None:
        self._report(f"{engine.address} loads {self._model}")
        try:
            status = await engine.update_weights(self._model, self._version)
        except CallRefused as error:
            raise _Stop(f"{engine.address} refuses {self._model}: {error}") from error
        found = _fingerprint_of(engine)
        self._fingerprint = self._fingerprint or found
        is_well = found == self._fingerprint and status.weights_version == self._version
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_PING_S):
                await engine.ping()
                if is_well:
                    return
        why = f"it does not answer within {_PING_S:g} s"
        if not is_well:
            why = (
                f"its weights are {found:.12}, those of the engines before {self._fingerprint:.12}"
            )
        if self._previous is None:
            self._forget(engine)  # and stays paused
            raise _Stop(f"{engine.address} loaded {self._model}, but {why}; it is left paused")
        await engine.update_weights(self._previous, before.weights_version)
        raise _Stop(
            f"{engine.address} loaded {self._model}, but {why}; it has the old weights again"
        )

    def _pause(self, engine: Engine) -> None:
        if engine not in self._paused:
            call = asyncio.ensure_future(_pause(engine))
            call.add_done_callback(lambda done: done.cancelled() or done.exception())
            self._paused[engine] = call

    def _forget(self, engine: Engine) -> None:
        call = self._paused.pop(engine, None)
        if call is not None:
            call.cancel()

    async def _resume(self, *engines: Engine) -> None:
        for engine in engines:
            if engine in self._paused:
                self._paused[engine].cancel()  # it may not have been sent yet
                try:
                    await engine.resume_generation()
                except EngineDied:  # or the connection alone was lost
                    await engine.session.ready()
                    await engine.resume_generation()
                self._forget(engine)
                self._report(f"{engine.address} serves again")

    async def resume_all(self) -> None:
        """Of those that are there; an engine that is started again is not paused."""
        for engine in list(self._paused):
            with contextlib.suppress(EngineClientError):
                await self._resume(engine)

    async def served(self) -> list[ServedWeights]:
        return [await self._served_by(engine) for engine in self._engines]

    async def _served_by(self, engine: Engine) -> ServedWeights:
        try:
            found = await engine.statistics()
        except EngineClientError as error:
            return ServedWeights(engine.address, str(error))
        version = found.weights_version
        return ServedWeights(engine.address, found.state.value, version, _fingerprint_of(engine))


async def _pause(engine: Engine) -> None:
    """Returns when its streams have ended, also those that it got back after a restart."""
    await asyncio.sleep(max(0.0, _RETURN_S - (await engine.ping()).uptime_s))
    await engine.pause_generation(mode="wait")


def _fingerprint_of(engine: Engine) -> str:
    arithmetic = engine.session.arithmetic
    assert isinstance(arithmetic, tuple), "it was never heard"
    return str(arithmetic[0])
