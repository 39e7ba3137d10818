"""Client processes of a simulation: the real library, and what its users do."""

import asyncio
import contextlib
import dataclasses
from collections.abc import Callable, Sequence
from random import Random
from typing import Any
from unittest import mock

import frontend.engine.transport as transport_module
from frontend import AsyncLLM, BeamSearchParams, SamplingParams
from frontend.errors import ClientClosed, EngineClientError
from frontend.event_loop import Clock, Timer
from frontend.logprobs import Logprob
from protocol.calls import Ping
from protocol.requests import Call
from tests.simulation.engine_process import ADDRESS
from tests.simulation.sim_zmq import Network, Process, SimZmq


@dataclasses.dataclass
class Asked:
    """What a user asked and what came."""

    name: str
    prompt: list[int]
    params: SamplingParams | BeamSearchParams
    timeout_s: float | None = None
    logprobs: dict[int, list[dict[int, Logprob]]] = dataclasses.field(default_factory=dict)
    """By sample."""
    is_aborted: bool = False
    is_left: bool = False
    """The user left the stream early."""
    num_ends: int = 0
    tokens: list[list[int]] = dataclasses.field(default_factory=list)
    texts: list[str] = dataclasses.field(default_factory=list)
    reasons: list[str | None] = dataclasses.field(default_factory=list)
    details: dict[int, str | None] = dataclasses.field(default_factory=dict)
    error: BaseException | None = None
    at_s: float = 0.0
    ended_s: float = 0.0
    num_resumptions: int = 0
    largest_gap_s: float = 0.0
    """Between two outputs."""


class ClientClock(Clock):
    """Virtual time; timers of a process that stands still fire when it goes on."""

    def __init__(self, loop: asyncio.AbstractEventLoop, process: Process) -> None:
        self._loop = loop
        self._process = process
        self._held: list[Callable[[], None]] = []

    def now(self) -> float:
        return self._loop.time()

    def call_later(self, delay_s: float, callback: Callable[[], None]) -> Timer:
        def fire() -> None:
            if self._process.is_paused and not self._process.is_dead:
                self._held.append(callback)
            elif not self._process.is_dead:
                callback()

        return self._loop.call_later(max(delay_s, 0.0), fire)

    def go_on(self) -> None:
        held, self._held = self._held, []
        for callback in held:
            self._loop.call_soon(callback)


class ClientProcess:
    def __init__(
        self,
        name: str,
        network: Network,
        loop: asyncio.AbstractEventLoop,
        random: Random,
        addresses: Sequence[str] = (ADDRESS,),
    ) -> None:
        self.name = name
        self.random = random
        self.process = Process(name)
        self.zmq = SimZmq(network, self.process)
        self.clock = ClientClock(loop, self.process)
        self.llm = AsyncLLM(addresses, client_name=name, seed=random.getrandbits(32))
        self.llm._clock = self.clock
        with mock.patch.object(transport_module, "zmq", self.zmq):
            self.llm._session = self.llm._make_client_session()
        self.asked: list[Asked] = []
        self.call_errors: list[BaseException] = []
        self.tasks: set[asyncio.Task[None]] = set()
        self.is_closed = False
        self._network = network
        self._loop = loop

    async def open(self) -> None:
        """Connect, as often as it takes: whoever starts a client waits for the engine to be up."""
        while not self.process.is_dead:
            try:
                await self.llm.ready()
                return
            except ClientClosed:
                return
            except EngineClientError:
                await self.clock.sleep(0.3)

    def spawn(self, coroutine: Any) -> None:
        task = self._loop.create_task(coroutine)
        self.tasks.add(task)
        task.add_done_callback(self.tasks.discard)

    def pause(self, seconds: float) -> None:
        self._network.log(f"{self.name} stands still for {seconds:.2f} s")
        self.process.is_paused = True

        def go_on() -> None:
            self.process.is_paused = False
            self.clock.go_on()

        self._network.call_later(seconds, go_on)

    def kill(self) -> None:
        self._network.log(f"{self.name} is killed")
        self.zmq.kill(lost=self.random.choice([0, 1, 1000]))
        for task in self.tasks:
            task.cancel()

    async def ask(self, asked: Asked, *, think_s: float, leave_after: int | None) -> None:
        """One user: reads a stream with pauses, and may leave it early."""
        self.asked.append(asked)
        assert isinstance(asked.params, SamplingParams)
        num_samples = asked.params.n
        asked.tokens = [[] for _ in range(num_samples)]
        asked.texts = ["" for _ in range(num_samples)]
        asked.reasons = [None] * num_samples
        asked.at_s = self.clock.now()
        stream = self.llm.generate(
            asked.prompt, asked.params, asked.name, timeout_s=asked.timeout_s
        )
        num_outputs = 0
        last_s = float("inf")
        try:
            async with contextlib.aclosing(stream):
                async for output in stream:
                    assert not asked.num_ends, f"{asked.name}: an output behind the last one"
                    for part in output.outputs:
                        asked.tokens[part.index] = list(part.token_ids)
                        asked.texts[part.index] = part.text
                        asked.logprobs[part.index] = part.logprobs or []
                        asked.reasons[part.index] = part.finish_reason
                        asked.details[part.index] = part.detail
                    asked.num_ends += output.finished
                    num_outputs += 1
                    asked.num_resumptions = output.metrics.num_resumptions
                    now_s = self.clock.now()
                    asked.largest_gap_s = max(asked.largest_gap_s, now_s - last_s)
                    last_s = now_s
                    if leave_after is not None and num_outputs >= leave_after:
                        asked.is_left = True
                        break
                    if think_s:
                        await self.clock.sleep(think_s * self.random.random())
        except EngineClientError as error:
            asked.num_ends += 1
            asked.error = error
        asked.ended_s = self.clock.now()

    async def ask_beams(self, asked: Asked) -> None:
        self.asked.append(asked)
        asked.at_s = self.clock.now()
        assert isinstance(asked.params, BeamSearchParams)
        try:
            found = await self.llm.beam_search(asked.prompt, asked.params, asked.name)
        except EngineClientError as error:
            asked.error = error
        else:
            asked.tokens = [beam.output_token_ids for beam in found.sequences]
            asked.reasons = [beam.finish_reason for beam in found.sequences]
            asked.details[0] = found.detail
        asked.num_ends += 1
        asked.ended_s = self.clock.now()

    async def call(self) -> None:
        try:
            llm = self.llm.engines[0]
            await self.random.choice([llm.ping, llm.statistics, llm.request_ids])()
        except EngineClientError as error:
            self.call_errors.append(error)

    async def flood(self, num_messages: int, interval_s: float) -> None:
        """Pings without waiting for their answers."""
        connection = self.llm.session._connection
        for number in range(num_messages):
            if connection is None or connection.is_closed:
                return
            connection.send(Call(call_id=10**9 + number, call=Ping()))
            await self.clock.sleep(interval_s)

    async def abort(self, asked: Asked) -> None:
        asked.is_aborted = True
        await self.llm.abort(asked.name)
