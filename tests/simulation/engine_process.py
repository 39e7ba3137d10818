"""The daemon of a simulation: the real loop, scheduler, cache and socket code, in a greenlet that
gives way wherever the process would wait."""

from collections.abc import Callable
from random import Random
from typing import Any
from unittest import mock

import greenlet
from msgspec.structs import replace

from engine_core.executor import InProcessExecutor
from engine_core.kv_cache import KVCacheManager
from engine_core.kv_cache.groups import KVCacheGroupSpec
from engine_core.lifecycle import Lifecycle
from engine_core.observers.cache_publisher import CachePublisher
from engine_core.scheduler import (
    DeviceFault,
    ModelRunnerOutput,
    SchedulerConfig,
    SchedulerOutput,
)
from engine_core.scheduler.rules.fault_isolation import FaultIsolation
from engine_core.server import transport as transport_module
from engine_core.server.clients import Client
from engine_core.server.transport import ZmqTransport
from engine_core.startup.scheduler import build_scheduler
from protocol.base import Message
from tests.engine_core.fake_host import FakeHost, NoSalt
from tests.engine_core.made_core import limits, mailboxes, make_core
from tests.engine_core.scheduler.paged_model import VOCAB, PagedModel
from tests.frontend.fake_model import welcome
from tests.simulation.sim_zmq import Network, Process, SimSocket, SimZmq

ADDRESS = "tcp://127.0.0.1:7"
HEARTBEAT_S = 0.25
BLOCK_SIZE = 4
MAX_MODEL_LEN = 200
LONE_GROUP = (KVCacheGroupSpec(),)
WITH_STATES = (*LONE_GROUP, KVCacheGroupSpec(2, is_sparse=True, pool=1))
NUM_STATES = 48


class Killed(BaseException):
    """SIGKILL: nothing of the process runs any more."""


class StepFault(RuntimeError):
    """What an injected fault raises."""


class WrongRead(BaseException):
    """The model found something else in its cache or its rows than the plan says. Not an Exception:
    the engine must not take it for a fault that it can mend."""


class SimRunner:
    """A `PagedModel` whose steps take time. A step fails, in submit or collect, by the engine's
    draw, if it holds a poisoned request, or if the device is lost."""

    def __init__(self, engine: "EngineProcess") -> None:
        self.max_steps_in_flight = engine.depth
        self.model = PagedModel(
            engine.groups, engine.kv_cache.num_blocks, BLOCK_SIZE, engine.kv_cache.host.num_blocks
        )
        self.model.salts = NoSalt()
        self._engine = engine
        self._is_late = engine.random.random() < 0.5
        """Plans are read when their results are collected, behind the next plan's making."""
        self._results: list[tuple[SchedulerOutput, ModelRunnerOutput | Exception | None]] = []
        self._has_read = True
        self._poison: dict[str, int] = {}
        """By request, the position that cannot be computed, nor can those behind it."""

    def _isolates_a_fault(self) -> bool:
        return self._engine.scheduler.parts.find(FaultIsolation).is_active

    def submit(self, plan: SchedulerOutput) -> None:
        engine = self._engine
        engine.at_call("submit")
        failed_before = any(isinstance(result, Exception) for _, result in self._results)
        fault = None
        if engine.has_lost_device or self._is_poisoned(plan):
            fault = engine.random.choice(["submit", "collect"])
        elif plan.total_num_scheduled_tokens and not self._isolates_a_fault():
            fault = engine.draw_fault()  # once, and not again
        if fault == "submit" and not failed_before:
            self._execute_all()
            self._read(plan)
            raise StepFault("out of memory at the launch")
        if fault == "collect" or failed_before:
            self._execute_all()
            if not failed_before or self._has_read:
                self._read(plan)
            self._results.append((plan, StepFault("the device failed")))
        else:
            self._results.append((plan, None if self._is_late else self._execute(plan)))

    def _read(self, plan: SchedulerOutput) -> None:
        """Of a step that fails: what it did before."""
        random = self._engine.random
        self._has_read = random.random() < 0.7
        if self._has_read:
            self.model.follow(plan, with_copies=random.random() < 0.5)

    def _execute(self, plan: SchedulerOutput) -> ModelRunnerOutput:
        try:
            return self.model.execute(plan)
        except AssertionError as error:
            raise WrongRead(str(error)) from error

    def _is_poisoned(self, plan: SchedulerOutput) -> bool:
        for new in plan.scheduled_new_reqs:
            position = self._engine.poison.get(tuple(new.prompt_token_ids))
            if position is not None:
                self._poison[new.req_id] = position
        batch = plan.batch
        ends = (batch.num_computed_tokens + batch.num_scheduled_tokens).tolist()
        return any(
            end > self._poison.get(name, end) for name, end in zip(batch.req_ids, ends, strict=True)
        )

    def check_device(self) -> None:
        if self._engine.has_lost_device and self._engine.random.random() < 0.5:
            raise StepFault("an illegal access")  # else it is not told, and is found out

    def _execute_all(self) -> None:
        self._results = [
            (plan, self._execute(plan) if result is None else result)
            for plan, result in self._results
        ]

    def collect(self) -> ModelRunnerOutput:
        plan, result = self._results.pop(0)
        if result is None:
            result = self._execute(plan)
        if plan.total_num_scheduled_tokens:
            self._engine.sleep(self._engine.step_s * self._engine.random.uniform(0.5, 1.5))
        self._engine.at_call("collect")
        if isinstance(result, Exception):
            raise result
        return result


class EngineProcess:
    """One life of the daemon, from its start to its end.

    Args:
        config: the scheduler's.
        kill_at_call: the number of the call into socket, runner or clock at which it is killed.
        fault_rate: of steps that raise.
        event_fault_rate: of messages on what the cache holds that are lost, late or doubled.
        poison: by prompt, the first position that makes steps raise.
    """

    def __init__(
        self,
        name: str,
        network: Network,
        random: Random,
        config: SchedulerConfig,
        *,
        num_blocks: int,
        num_host_blocks: int,
        step_s: float,
        call_later: Callable[[float, Callable[[], None]], Any],
        now: Callable[[], float],
        fault_rate: float = 0.0,
        poison: dict[tuple[int, ...], int] | None = None,
        address: str = ADDRESS,
        weights_make_tokens: bool = False,
        event_fault_rate: float = 0.0,
        groups: tuple[KVCacheGroupSpec, ...] = LONE_GROUP,
    ) -> None:
        self.groups = groups
        self.address = address
        self.random = random
        self.depth = config.max_steps_in_flight
        self.step_s = step_s
        self.exit_code: int | None = None
        self.fault_rate = fault_rate
        self.poison = {} if poison is None else poison
        self.has_lost_device = False
        self.kill_at_call: int | None = None
        self.on_exit: Callable[[], None] = lambda: None
        self.clock_skew_s = 0.0
        self.message_s = 0.0
        """What taking in a message costs."""
        self._network = network
        self._now = now
        self._call_later = call_later
        self._num_calls = 0
        self._wake_number = 0
        self.process = Process(name)
        self.process.at_call = self.at_call
        self.zmq = SimZmq(network, self.process, self._wait)
        self._greenlet = greenlet.greenlet(self._main)
        self._hub = greenlet.getcurrent()
        with mock.patch.object(transport_module, "zmq", self.zmq):
            self.transport = ZmqTransport(address)
        self.lifecycle = Lifecycle(drain_timeout_s=5.0, clock=self.clock)
        self.kv_cache = KVCacheManager(
            num_blocks=[num_blocks, NUM_STATES][: len(groups)],
            block_size=BLOCK_SIZE,
            groups=groups,
            num_host_blocks=[num_host_blocks, num_host_blocks // 2][: len(groups)],
            checkpoint_interval=16,
        )
        self.scheduler = build_scheduler(config, self.kv_cache)
        executor = InProcessExecutor(SimRunner(self), clock=self.clock)
        self.host = FakeHost(
            executor,
            lambda: SimRunner(self),
            "simulated",
            makes_tokens=weights_make_tokens,
        )
        self._welcome, frames = welcome("simulated", with_tokenizer=True)
        inbox, self.outbox = mailboxes(
            self.transport,
            heartbeat_s=HEARTBEAT_S,
            clock=self.clock,
            sleep=self.sleep,
            welcome=lambda hello: (self._welcome, list(frames)),
        )
        self.clients = self.outbox.clients
        self._late_events: list[tuple[Client, Message]] = []
        self._event_fault_rate = event_fault_rate
        self._event_draws = Random(len(name) + num_blocks)
        self.publisher = CachePublisher(self.kv_cache, self._publish, isolates_tenants=False)
        self.core = make_core(
            inbox,
            self.outbox,
            self.scheduler,
            executor,
            self.lifecycle,
            limits(config, VOCAB),
            host=self.host,
            on_weights=self._use_weights,
            parts=[self.publisher],
            clock=self.clock,
        )

    def _publish(self, client: Client, events: Message) -> bool:
        """Some events are lost, some come twice, some late."""
        send, rate, draws = self.outbox.offer, self._event_fault_rate, self._event_draws
        if not rate:
            return send(client, events)
        late, self._late_events = self._late_events, []
        copies = draws.choice([0, 1, 2]) if draws.random() < rate else 1
        was_sent = [send(client, events) for _ in range(copies)]
        if copies == 1 and draws.random() < rate / 3:
            self._late_events.append((client, events))
        return all([*was_sent, *(send(*each) for each in late)])

    def _use_weights(self, version: int, fingerprint: str) -> None:
        model = self._welcome.model
        model = replace(model, weights_version=version, fingerprint=fingerprint)
        self._welcome = replace(self._welcome, model=model)

    @property
    def unread_by(self) -> set[str]:
        """Clients whose queues were full when it ended, with more for them."""
        return {client.name for client in self.outbox.backlogs}

    # ------------------------------------------------------------------ what faults do

    def start(self) -> None:
        self._call_later(0.0, self._resume)

    def kill(self, why: str) -> None:
        """At this moment, from outside: the process is waiting."""
        if self.exit_code is None:
            self._network.log(f"{self.process.name} is killed {why}")
            self._die()
            if self._greenlet:
                self._greenlet.throw(Killed)

    def pause(self, seconds: float) -> None:
        self._network.log(f"{self.process.name} stands still for {seconds:.2f} s")
        self.process.is_paused = True
        self._call_later(seconds, self._continue)

    def _continue(self) -> None:
        self.process.is_paused = False
        self._resume()

    def draw_fault(self) -> str | None:
        if self.random.random() < self.fault_rate:
            return self.random.choice(["submit", "collect"])
        return None

    # ------------------------------------------------------------------ what the process does

    def clock(self) -> float:
        return self._now() + self.clock_skew_s

    def at_call(self, what: str) -> None:
        if self.process.is_dead:
            if greenlet.getcurrent() is self._greenlet:
                raise Killed
            return
        if what == "receive" and self.message_s:
            self.sleep(self.message_s)
        self._num_calls += 1
        if self.kill_at_call is not None and self._num_calls >= self.kill_at_call:
            self._network.log(f"{self.process.name} is killed at a call of {what}")
            self._die()
            raise Killed

    def _die(self) -> None:
        self.exit_code = -9
        self.zmq.kill(lost=self.random.choice([0, 1, 2, 1000]))

    def sleep(self, seconds: float) -> None:
        self._wake_number += 1
        number = self._wake_number
        self._call_later(seconds, lambda: self._wake(number))
        self._hub.switch()

    def _wait(self, socket: SimSocket, timeout_s: float) -> None:
        if socket.inbox:
            return
        socket.on_arrival = lambda: self._call_later(0.0, self._arrived)
        self._is_waiting = True
        self.sleep(timeout_s)
        socket.on_arrival = lambda: None

    def _arrived(self) -> None:
        self._wake(self._wake_number)

    def _wake(self, number: int) -> None:
        if number == self._wake_number:
            self._resume()

    def _resume(self) -> None:
        """Run the process until it waits again."""
        if self.process.is_paused or self.exit_code is not None:
            return
        self._wake_number += 1
        self._greenlet.switch()

    def _main(self) -> None:
        try:
            code = self._serve()
        except Killed:
            code = -9
        except WrongRead as error:
            self._network.log(f"{self.process.name} reads what is wrong: {error}")
            code = -6
        if self.exit_code is None:
            self.transport.close()
        self.exit_code = code
        self._network.log(f"{self.process.name} ends with {code}")
        self.on_exit()

    def _serve(self) -> int:
        """As `engine_core.daemon._serve` under --supervise."""
        try:
            self.core.run()
        except DeviceFault:
            assert self.has_lost_device
            self.core.close()
            return 1
        self.core.close()
        return 0
