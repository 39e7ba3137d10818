"""Several engines of one model behind one client: each request goes to one of them, and on to
another when its engine is lost."""

import asyncio
import contextlib
import dataclasses
import math
from collections.abc import Callable, Iterable, Sequence

from frontend.engine.session import Arithmetic, EngineSession, Neighbours
from frontend.engine.transport import Frames
from frontend.errors import ClientClosed, EngineClientError, EngineUnavailable, InvalidInput
from frontend.event_loop import Clock
from frontend.fleet.cache_view import CacheView
from frontend.fleet.disaggregation import PrefillHandoff, kv_address_of, may_hand_over
from frontend.fleet.eligibility import may_take, needed_arithmetic
from frontend.fleet.router import Choice, Router, RoutingPolicy, home_of
from frontend.output_processor import OutputProcessor
from frontend.request_state import RequestState
from protocol.cache_events import CacheEvents, load_of
from protocol.calls import AnyCall, AnyResult, GetRequestInfo
from protocol.outputs import Welcome

_RETRY_S = 1.0
"""Between two attempts to reach an engine that is away, while others serve."""
_FIRST_ANSWERS_S = 1.0
"""For the other engines to answer, once the first one has: the first requests are shared out."""
_SILENT_S, _SILENT_LOAD = 5.0, 10**9
"""An engine that sends nothing for longer may hang: it gets a request only if all are silent."""
_PREFILL_LOAD = 10**12
"""An engine that computes prompts for others decodes only if all others are away."""
_MAX_LOSSES = 3
"""A request that as many engines were lost with, and no output between, may be what ends them: it
is not given to another one."""


@dataclasses.dataclass(slots=True)
class _Route:
    """The engine that a request is at, and how it came there."""

    number: int = 0
    """The engine's number."""
    load: int = 0
    num_losses: int = 0
    """Losses since its last output."""
    num_tokens: int = 0
    """Tokens of its output at the last loss."""
    refused_by: set[int] = dataclasses.field(default_factory=set)
    """Engines that refused it at this attempt."""


class EngineGroup(Neighbours):
    """What `EngineSession` is for one engine.

    A request goes where `Router` says, among the engines that are there, do not drain and have the
    tokenizer of `welcome`. One that an engine has begun moves only where tokens are equal.

    Args:
        make_session: from an address, the requests of all sessions, and this group.
    """

    def __init__(
        self,
        addresses: Sequence[str],
        make_session: Callable[[str, OutputProcessor, Neighbours], EngineSession],
        *,
        clock: Clock,
        routing_policy: RoutingPolicy = "cache-aware",
    ) -> None:
        self.requests = OutputProcessor(clock.now)
        self.addresses = list(addresses)
        self.sessions = [make_session(each, self.requests, self) for each in addresses]
        self._make_session = make_session
        self._clock = clock
        self._leader = self.sessions[0]
        """Requests are made for its model."""
        self._router = Router(routing_policy)
        self.view = CacheView(self.sessions)
        self._routes: dict[RequestState, _Route] = {}
        self.handoff = PrefillHandoff(self.requests, place=self._place, now=clock.now)
        self.loads = [0] * len(self.sessions)
        """Of this client's requests on each engine that are not over (`load_of`)."""
        self.num_sent = [0] * len(self.sessions)
        """Requests to each engine."""
        self.num_new_tokens, self.num_matched_tokens = 0, 0
        """Of all prompts: the second are those thought to be cached where they were sent."""
        self._engine_ids = [""] * len(self.sessions)
        self._keepers: dict[EngineSession, asyncio.Task[None]] = {}
        self._leaving: set[EngineSession] = set()
        """They get no more requests, and are closed when they have none."""
        self._is_closed = False

    @property
    def staying(self) -> dict[str, EngineSession]:
        """The engines by address, without those that leave."""
        return {
            address: session
            for address, session in zip(self.addresses, self.sessions, strict=True)
            if session not in self._leaving
        }

    def add_engine(self, address: str) -> None:
        """One more engine; it takes over what waits for a lost one."""
        session = self._make_session(address, self.requests, self)
        gone = self._leaving - self._keepers.keys()
        free = (number for number, each in enumerate(self.sessions) if each in gone)
        number = next(free, len(self.sessions))
        self._leaving.difference_update(self.sessions[number : number + 1])
        self.addresses[number : number + 1] = [address]
        self.sessions[number : number + 1] = [session]
        self.loads[number : number + 1] = self.num_sent[number : number + 1] = [0]
        self._engine_ids[number : number + 1] = [""]
        self.view.forget(number)
        if self._keepers:
            self._keepers[session] = asyncio.create_task(self._keep(session))

    def remove_engine(self, address: str) -> None:
        """It gets no more requests. Those that it has go on, and if it is lost wait for another."""
        self._leaving.add(self.staying[address])

    @property
    def welcome(self) -> Welcome | None:
        return self._leader.welcome

    @property
    def adapters(self) -> dict[str, str]:
        """Fingerprints by name, of any engine that is there."""
        return {
            name: key
            for each in reversed(self.sessions)
            if each.is_connected
            for name, key in each.adapters.items()
        }

    @property
    def welcome_frames(self) -> Frames:
        return self._leader.welcome_frames

    @welcome_frames.setter
    def welcome_frames(self, frames: Frames) -> None:
        self._leader.welcome_frames = frames
        for each in self.sessions:
            if each.welcome_frames and each.welcome is not None and self.welcome is not None:
                is_known = each.welcome.model.tokenizer == self.welcome.model.tokenizer
                each.welcome_frames = frames if is_known else each.welcome_frames

    async def ready(self) -> None:
        """Return once an engine is connected.

        Raises:
            EngineUnavailable: none answers, or comes back in time; ClientClosed.
        """
        if self._is_closed:
            raise ClientClosed("this client is closed; make a new one")
        if not self._keepers:
            await self._wait_for_one()
            others = [asyncio.ensure_future(each.ready()) for each in self.staying.values()]
            await asyncio.wait(others, timeout=_FIRST_ANSWERS_S)
            await _cancel(others)
            self._keepers = {each: asyncio.create_task(self._keep(each)) for each in self.sessions}
        while not any(each.is_connected for each in self.sessions):
            await self._wait_for_one()
        if not self._leader.is_connected:
            self._leader = next(each for each in self.sessions if each.is_connected)

    async def _wait_for_one(self) -> None:
        attempts = [asyncio.ensure_future(each.ready()) for each in self.staying.values()]
        errors = []
        try:
            for attempt in asyncio.as_completed(attempts):
                try:
                    await attempt
                    return
                except ClientClosed:
                    raise
                except EngineClientError as error:
                    errors.append(str(error))
        finally:
            await _cancel(attempts)
        raise EngineUnavailable(f"none of {len(errors)} engines is there: " + "; ".join(errors))

    async def _keep(self, session: EngineSession) -> None:
        """An engine that answers again is used again."""
        while session not in self._leaving:
            with contextlib.suppress(EngineClientError):
                await session.ready(waits=False)
            await self._clock.sleep(_RETRY_S)
        number = self.sessions.index(session)
        while any(route.number == number for route in self._routes.values()):
            await self._clock.sleep(_RETRY_S)
        await session.close()
        del self._keepers[session]

    def submit(self, request: RequestState) -> None:
        """Send a request. It must be given to `release` in the end."""
        self.requests.add_request(request)
        choice = self._choose(request)
        if choice is None or not self._is_computed_elsewhere(request, choice):
            self._place(request, choice)

    def _is_computed_elsewhere(self, request: RequestState, choice: Choice) -> bool:
        """Whether another engine computes the prompt first; then it is placed afterwards."""
        decoder = self.sessions[choice.engine]
        there = [
            number
            for number, each in enumerate(self.sessions)
            if may_hand_over(each, decoder) and self._may_take(each, request, decoder.arithmetic)
        ]
        if not there:
            return False
        matched = self.view.matched(self.view.prompt(request, there))
        engines = {self.sessions[number]: matched.get(number, 0) for number in there}
        return self.handoff.begin(request, engines, decoder, choice.num_matched)

    def _place(self, request: RequestState, choice: Choice | None = None) -> None:
        choice = choice or self._choose(request)
        if choice is None:  # it waits, or is told why not
            if self._leader in self._leaving:
                self._leader = next(iter(self.staying.values()), self._leader)
            choice = Choice(self.sessions.index(self._leader), 0)
        self._send(request, _Route(), choice)

    def release(self, request: RequestState) -> None:
        """Forget a request; its engine stops what still runs of it."""
        self.handoff.release(request)
        route = self._routes.pop(request, None)
        if route is not None:
            self.loads[route.number] -= route.load
            self.sessions[route.number].release(request)

    async def call(self, call: AnyCall) -> AnyResult:
        """Raises InvalidInput, but for questions about a request in flight."""
        if isinstance(call, GetRequestInfo):
            for request, route in self._routes.items():
                if call.request_id in request.wire_ids:
                    return await self.sessions[route.number].call(call)
        raise InvalidInput(
            f"this client has {len(self.sessions)} engines, and {type(call).__name__} is for one; "
            "use one of `client.engines`"
        )

    async def close(self) -> None:
        """End every request with ClientClosed, and every session."""
        self._is_closed = True
        await _cancel([*self._keepers.values(), *self.handoff.close()])
        await self.view.close()
        for session in self.sessions:
            await session.close()

    # what sessions tell

    def on_lost(self, session: EngineSession, arithmetic: Arithmetic) -> None:
        self.handoff.on_lost(session)
        for request in self.requests.in_flight(session):
            route = self._routes.get(request)
            if route is not None:
                num_tokens = sum(len(each.token_ids) for each in request.sequences)
                route.num_losses = route.num_losses + 1 if num_tokens == route.num_tokens else 1
                route.num_tokens = num_tokens
                route.refused_by.clear()
        self._move_requests(session, arithmetic)

    def on_connected(self, session: EngineSession) -> None:
        number = self.sessions.index(session)
        assert session.welcome is not None
        is_new = self._engine_ids[number] != session.welcome.engine_id
        self._engine_ids[number] = session.welcome.engine_id
        self.view.on_connected(number, is_new=is_new)
        self._fetch_requests()

    def on_paused(self, session: EngineSession) -> None:
        if session.is_paused:
            self._move_waiting(session)
        else:
            self._fetch_requests()

    def _fetch_requests(self) -> None:
        """An engine more takes requests: what waits for lost and paused ones moves."""
        for other in self.sessions:
            if other.is_paused:
                self._move_waiting(other)
            elif not other.is_connected and other.arithmetic is not None:
                self._move_requests(other, other.arithmetic)

    def _move_waiting(self, session: EngineSession) -> None:
        """Of an engine that starts no requests; those that it has begun stay."""
        for request in self.requests.in_flight(session):
            route = self._routes.get(request)
            if route is None or request.finished or request.has_started:
                continue
            choice = self._choose(request)
            if choice is not None and choice.engine != route.number:
                self._move(request, route, choice)

    def on_cache_events(self, session: EngineSession, events: CacheEvents) -> None:
        self.view.on_events(self.sessions.index(session), events)

    def take_refused(self, session: EngineSession, request: RequestState) -> bool:
        route = self._routes.get(request)
        if route is None:
            return False
        route.refused_by.add(route.number)
        arithmetic = needed_arithmetic(request, session.arithmetic)
        choice = self._choose(request, arithmetic, route.refused_by)
        if choice is None and arithmetic is not None:  # one of its weights may come back
            away = (each for each in self.sessions if not each.is_connected)
            home = next((each for each in away if each.arithmetic == arithmetic), None)
            choice = None if home is None else Choice(self.sessions.index(home), 0)
        if choice is None:
            return False
        if not request.metrics.num_resumptions:  # no engine has had it yet
            request.metrics.engine_request_id = None
        self._move(request, route, choice)
        return True

    def why_not_moved(self, session: EngineSession, request: RequestState) -> str:
        there = sum(each.is_connected for each in self.sessions if each is not session)
        route = self._routes.get(request)
        if route is None or not there:
            return ""
        if route.num_losses >= _MAX_LOSSES:
            return f"it was not given to another one, as {_MAX_LOSSES} were lost with it in a row"
        return (
            f"none of the {there} other engines that are there could go on with it: they differ in "
            "weights, dtype, formats, --max-model-len or instruction set, drain or are full"
        )

    def _move_requests(self, session: EngineSession, arithmetic: Arithmetic) -> None:
        for request in self.requests.in_flight(session):
            route = self._routes.get(request)
            if route is None or request.finished or route.num_losses >= _MAX_LOSSES:
                continue
            choice = self._choose(request, needed_arithmetic(request, arithmetic), (route.number,))
            if choice is not None:
                request.metrics.num_resumptions += 1
                self._move(request, route, choice)

    def _move(self, request: RequestState, route: _Route, choice: Choice) -> None:
        self.loads[route.number] -= route.load
        self.sessions[route.number].withdraw(request)
        self._send(request, route, choice)

    def _send(self, request: RequestState, route: _Route, choice: Choice) -> None:
        num_prompt_tokens = len(request.wire.prompt_token_ids)
        route.number = choice.engine
        route.load = load_of(num_prompt_tokens - choice.num_matched, len(request.sequences))
        self.loads[route.number] += route.load
        self.num_sent[route.number] += 1
        self.num_matched_tokens += choice.num_matched
        self.num_new_tokens += num_prompt_tokens - choice.num_matched
        self._routes[request] = route
        self.sessions[route.number].resume(request)

    # the choice

    def _choose(
        self, request: RequestState, arithmetic: Arithmetic | None = None, but: Iterable[int] = ()
    ) -> Choice | None:
        """An engine that can take it now; if `arithmetic` is given, of that one."""
        loads = [math.inf] * len(self.sessions)
        for number, session in enumerate(self.sessions):
            if number not in but and self._may_take(session, request, arithmetic):
                load = self.loads[number] + self.view.others_loads[number]
                load += _PREFILL_LOAD * (kv_address_of(session) is not None)
                is_last = session.is_paused or session.silence_s() > _SILENT_S
                loads[number] = load + _SILENT_LOAD * is_last
        blocks = self.view.prompt(request, [n for n, load in enumerate(loads) if load < math.inf])
        matched, home = self.view.matched(blocks), self._home(request.session_id, loads)
        num_tokens = len(request.wire.prompt_token_ids)
        choice = self._router.choose(matched, num_tokens, loads, home)
        if choice is not None:
            self.view.index.use(choice.engine, blocks[choice.engine].keys)
        return choice

    def _home(self, session_id: str | None, loads: Sequence[float]) -> int | None:
        """A session's engine, one that is there and not silent."""
        there = [number for number, load in enumerate(loads) if load < _SILENT_LOAD]
        if session_id is None or not there:
            return None
        return there[home_of(session_id, [self.addresses[number] for number in there])]

    def _may_take(
        self, session: EngineSession, request: RequestState, arithmetic: Arithmetic | None
    ) -> bool:
        leader = self._leader.welcome
        return (
            leader is not None
            and session not in self._leaving
            and arithmetic in (None, session.arithmetic)
            and may_take(session, request, leader.model)
        )


async def _cancel(tasks: Sequence[asyncio.Future[None]]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
