"""GET /v1/scheduler: an engine's scheduler at work, as server-sent events."""

import asyncio
import contextlib
import re
from collections import deque
from collections.abc import AsyncGenerator, Sequence
from types import GenericAlias
from typing import Any

import msgspec
from msgspec.structs import replace
from starlette.requests import Request
from starlette.responses import Response

from frontend.errors import EngineClientError, EngineUnavailable
from frontend.http.api_errors import ApiError
from frontend.http.ask_engines import engine_name
from frontend.http.event_stream import EventStream, ending_with_errors, event
from frontend.http.exchange import Exchange, exchange_of
from frontend.http.operations import operation
from frontend.http.served_models import ServedModel, served_models
from frontend.http.settings import ServerSettings
from protocol import snapshots
from protocol.base import Message
from protocol.calls import EngineStatistics, SchedulerSnapshot

_RETRY_S = 1.0


def _by_name(kind: type[Message]) -> Any:
    """The same fields as a JSON object: on the wire they are an array."""
    fields = [(field.name, field.type) for field in msgspec.structs.fields(kind)]
    return msgspec.defstruct(kind.__name__, fields, frozen=True, kw_only=True)


SchedulerEvent: Any = msgspec.defstruct(
    "SchedulerEvent",
    [
        ("engine", str),
        ("engines", dict[str, str]),
        ("unavailable", str | None),
        ("sees_all", bool),
        ("steps", GenericAlias(list, _by_name(snapshots.StepSummary))),
        ("requests", GenericAlias(list, _by_name(snapshots.RequestSummary))),
        ("blocks", _by_name(snapshots.BlockMap) | None),
        ("statistics", _by_name(EngineStatistics) | None),
    ],
    frozen=True,
    kw_only=True,
)
"""Fields are those of protocol/snapshots.py and protocol/calls.py. `engine` is one of
`engines`: the server's, names by id. If it is `unavailable`, there is only the reason."""


class SchedulerFeed:
    """Snapshots of one engine for all who look at it. The engine is asked while there is one.

    Args:
        number: which of the model's engines.
        silence_s: an engine that ends no step for longer is said to be silent.
    """

    def __init__(self, model: ServedModel, number: int, silence_s: float) -> None:
        self._model = model
        self._number = number
        self._silence_s = silence_s
        self._latest: SchedulerSnapshot | str | None = None
        self._steps: deque[snapshots.StepSummary] = deque(maxlen=snapshots.MAX_STEPS)
        self._num_steps = 0
        """Steps of all engines at this address."""
        self._news = asyncio.Event()
        self.num_readers = 0
        self._asking: asyncio.Task[None] | None = None

    async def states(self) -> AsyncGenerator[SchedulerSnapshot | str, None]:
        """Each new snapshot, or in words why there is none. Who reads slowly misses snapshots, and
        gets the steps between, the last MAX_STEPS of them."""
        self.num_readers += 1
        if self._asking is None:
            self._latest = None
            self._asking = asyncio.create_task(self._ask())
        last, num_seen = None, 0
        try:
            while True:
                if self._latest is last:
                    await self._news.wait()
                    continue
                last = self._latest
                if not isinstance(last, SchedulerSnapshot):
                    yield last or "it is asked"
                    continue
                num_new = min(self._num_steps - num_seen, len(self._steps))
                num_seen = self._num_steps
                steps = list(self._steps)[len(self._steps) - num_new :]
                yield replace(last, view=replace(last.view, steps=steps))
        finally:
            self.num_readers -= 1
            if not self.num_readers:
                self._asking.cancel()
                self._asking = None
                self._steps.clear()

    def _publish(self, latest: SchedulerSnapshot | str) -> None:
        self._latest = latest
        self._news.set()
        self._news = asyncio.Event()

    async def _ask(self) -> None:
        while True:
            try:
                async with asyncio.timeout(self._silence_s):
                    if self._model.resting is not None:  # looking does not start it
                        raise EngineUnavailable(f"{self._model.resting}; a request starts it")
                    engines = await self._model.engines()
                    if self._number >= len(engines):
                        raise EngineUnavailable(f"this model has {len(engines)} engines")
                    engine = engines[self._number]
                    await engine.session.ready(waits=False)
                last_step_id = -1
                while True:
                    call = asyncio.ensure_future(engine.watch_scheduler(last_step_id))
                    try:
                        if not (await asyncio.wait((call,), timeout=self._silence_s))[0]:
                            self._publish(f"no step has ended for {self._silence_s:g} s")
                        snapshot = await call
                    finally:
                        call.cancel()
                    steps = snapshot.view.steps
                    self._steps += steps
                    self._num_steps += len(steps)
                    last_step_id = steps[-1].step_id if steps else last_step_id
                    self._publish(snapshot)
            except TimeoutError:
                self._publish(f"nothing answers within {self._silence_s:g} s")
            except EngineClientError as error:
                self._publish(str(error))
                await asyncio.sleep(_RETRY_S)


@operation("GET", "/v1/scheduler", event=SchedulerEvent)
async def watch_scheduler(request: Request) -> Response:
    """Steps, requests and KV blocks of ?engine=ID: of others' requests only that they are there."""
    settings: ServerSettings = request.app.state.settings
    feeds: dict[str, SchedulerFeed] = request.app.state.feeds
    asked = request.query_params.get("engine", "0.0")
    served = list(served_models(request))
    found = re.fullmatch(r"(\d{1,4})\.(\d{1,4})", asked, re.ASCII)
    if found is None or int(found[1]) >= len(served):
        known = ", ".join(_names(served))
        raise ApiError(400, f"engine is {asked!r:.20}, it must be one of {known}", param="engine")
    caller = exchange_of(request)
    caller.is_endless = True

    async def events() -> AsyncGenerator[bytes, None]:
        model, number = served[int(found[1])], int(found[2])
        feed = feeds.setdefault(asked, SchedulerFeed(model, number, settings.health_timeout))
        try:
            async with contextlib.aclosing(feed.states()) as states:
                async for state in states:
                    yield event(_event(state, caller, engine=asked, engines=_names(served)))
        finally:
            if not feed.num_readers:
                feeds.pop(asked, None)

    return EventStream(ending_with_errors(request, events()))


def _names(models: Sequence[ServedModel]) -> dict[str, str]:
    """Engines' names by id: the numbers of model and engine."""
    names = {}
    for number, model in enumerate(models):
        engines = model.known_engines
        for index, engine in enumerate(engines or (None,)):
            names[f"{number}.{index}"] = engine_name(model, number, engine, of=len(engines))
    return names


def _event(state: SchedulerSnapshot | str, caller: Exchange, **engine: Any) -> msgspec.Struct:
    fields = dict.fromkeys(("unavailable", "blocks", "statistics")) | {"steps": [], "requests": []}
    if isinstance(state, str):
        fields["unavailable"] = state
    else:
        view, statistics = state.view, state.statistics
        if not caller.is_admin:
            view = view.of_owner(lambda request: caller.owns(request.tenant))
            served = statistics.service_by_tenant
            own = {tenant: served[tenant] for tenant in served if caller.owns(tenant)}
            statistics = replace(statistics, service_by_tenant=own)
        fields |= {"steps": view.steps, "requests": view.requests}
        fields |= {"blocks": view.blocks, "statistics": statistics}
    made: msgspec.Struct = msgspec.convert(
        fields | {"sees_all": caller.is_admin} | engine, SchedulerEvent, from_attributes=True
    )
    return made
