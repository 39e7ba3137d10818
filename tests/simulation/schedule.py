"""One simulated schedule: clients, an engine and faults, all drawn from a seed."""

import asyncio
import contextlib
import dataclasses
import logging
from random import Random
from unittest import mock

import engine_core.server.outbox as outbox_module
import engine_core.server.transport as engine_transport
import frontend.output_processor as output_processor
from engine_core.scheduler import SchedulerConfig
from frontend import BeamSearchParams, SamplingParams
from frontend.errors import (
    EngineClientError,
)
from frontend.rolling_update import RollingUpdateStopped, rolling_update
from tests.engine_core.scheduler.paged_model import VOCAB
from tests.simulation.clients import Asked, ClientProcess
from tests.simulation.engine_process import (
    ADDRESS,
    LONE_GROUP,
    MAX_MODEL_LEN,
    WITH_STATES,
    EngineProcess,
)
from tests.simulation.judge import FLOOD_MESSAGES, judge, judge_view
from tests.simulation.settings import Report, Settings, Violation
from tests.simulation.sim_zmq import Network
from tests.simulation.virtual_loop import VirtualLoop

NESTED_HELLO = bytes.fromhex("950101a0c3") + b"\x91" * 5000
"""Of a wire version that is to be told from ours, whatever stands behind it."""
AWAY_S = 100.0
HORIZON_S = 300.0
"""By then everything is long over."""


class Simulation:
    def __init__(self, seed: int, settings: Settings) -> None:
        self.random = Random(seed)
        self.random_kinds = Random(seed + 3)
        self.random_stages = Random(seed + 5)
        """What kind of request, apart from the faults and their times."""
        self.settings = settings
        self.report = Report(seed)
        self.trace: list[str] = []
        bounds = Random(seed + 3)
        self.send_queue = bounds.choice(settings.send_queue)
        self.backlog_bytes = bounds.choice(settings.backlog_bytes)
        self.network = Network(Random(seed + 1), self._call_later, self.log)
        self.loop = VirtualLoop(self.network.is_readable)
        self.engines: list[EngineProcess] = []
        """All lives of all engines."""
        num_engines = Random(seed + 4).choice(settings.engines)
        self.groups = Random(seed + 8).choice([LONE_GROUP, LONE_GROUP, WITH_STATES])
        self.addresses = [f"tcp://127.0.0.1:{7 + number}" for number in range(num_engines)]
        self.clients: list[ClientProcess] = []
        self.away_s = 0.0
        self.jumped_s = 0.0
        self.is_over = False
        self.poison: dict[tuple[int, ...], int] = {}
        self.num_drains = 0
        self.num_floods = 0
        self.num_connection_faults = self.num_losses = 0
        self.has_losses = False
        self.was_away = False
        self.drained_s = float("inf")
        self.corrupted: str | None = None
        self.loop_errors: list[str] = []
        self.weights: list[str | None] = [None]
        """That tokens may be of."""

    def log(self, text: str) -> None:
        self.trace.append(f"{self.loop.time():9.4f} {text}")

    def _call_later(self, delay_s: float, callback) -> asyncio.TimerHandle:
        return self.loop.call_later(max(delay_s, 0.0), callback)

    # ------------------------------------------------------------------ the engine's lives

    def start_engine(self, address: str = ADDRESS) -> None:
        if self.is_over:
            return
        engine = EngineProcess(
            f"engine {len(self.engines)}",
            self.network,
            Random(self.random.getrandbits(32)),
            self.config,
            num_blocks=self.num_blocks,
            num_host_blocks=self.num_host_blocks,
            step_s=self.step_s,
            call_later=self._call_later,
            now=self.loop.time,
            fault_rate=self.fault_rate,
            poison=self.poison,
            address=address,
            weights_make_tokens=bool(self.num_rolling),
            event_fault_rate=self.event_fault_rate,
            groups=self.groups,
        )
        engine.on_exit = lambda: self._engine_has_ended(engine)
        if self.kills_left and self.random.random() < 0.5:
            self.kills_left -= 1
            engine.kill_at_call = self.random.randrange(5, 900)
        self.engines.append(engine)
        self.log(f"{engine.process.name} starts")
        engine.start()

    def _engine_has_ended(self, engine: EngineProcess) -> None:
        away_s = self.away_s
        if engine.exit_code == 0 and self.stays_away:
            away_s, self.stays_away, self.was_away = AWAY_S, False, True
        self._call_later(away_s, lambda: self.start_engine(engine.address))

    @property
    def last_lives(self) -> list[EngineProcess]:
        return list({engine.address: engine for engine in self.engines}.values())

    @property
    def engine(self) -> EngineProcess:
        """Any of them."""
        lives = self.last_lives
        return lives[0] if len(lives) == 1 else self.random.choice(lives)

    # ------------------------------------------------------------------ the schedule

    def draw(self) -> None:
        draw, settings = self.random, self.settings
        self.step_s = draw.choice([0.001, 0.01, 0.05])
        self.network.latency_s = draw.choice([0.0001, 0.002, 0.02])
        self.num_blocks = draw.choice([152, 170])  # the largest request alone has room
        self.num_host_blocks = draw.choice([0, 0, 24])
        self.is_tight = self.random_kinds.choice(settings.is_tight)
        if self.is_tight:
            # samples that come back without their blocks may find no state to share keys behind
            self.num_blocks = 30 if self.groups == LONE_GROUP else 60
            self.num_host_blocks = self.random_kinds.choice([0, 24, 60])
        self.config = SchedulerConfig(
            max_num_batched_tokens=draw.choice([8, 16, 64]),
            max_num_seqs=draw.choice([3, 8, 16]),
            max_model_len=MAX_MODEL_LEN,
            max_steps_in_flight=draw.choice([1, 2]),
            min_micro_batch_tokens=self.random_stages.choice([1, 8, 256]),
            max_queued_requests=draw.choice(settings.max_queued),
            scheduling_policy=draw.choice(["fcfs", "fair"]),
            preemption_mode=self.random_kinds.choice(["default", "swap", "recompute", "auto"]),
        )
        num_stages = self.random_stages.choice([1, 1, 1, 2, 3, 4])
        if num_stages > 1:
            self.config = dataclasses.replace(
                self.config, max_steps_in_flight=num_stages, pipeline_parallel_size=num_stages
            )
        self.fault_rate = draw.choice(settings.fault_rate)
        self.kills_left = draw.choice(settings.num_kills)
        self.away_s = draw.choice(settings.away_s)
        self.stays_away = draw.choice(settings.stays_away)
        self.event_fault_rate = Random(self.report.seed + 5).choice(settings.event_fault_rate)
        self.poison_rate = self.random_kinds.choice(settings.poison_rate)
        self.num_rolling = Random(self.report.seed + 5).choice(settings.num_rolling)

    def params(self) -> SamplingParams:
        draw = self.random
        stop = draw.choice([None, None, None, ["!#", '"'], ["$$$"]])
        most_samples, most_tokens = (2, 30) if self.is_tight else (3, 150)
        return SamplingParams(
            n=min(draw.choice([1, 1, 1, 2, 3]), most_samples),
            temperature=1.0,
            seed=draw.getrandbits(32),
            max_tokens=min(draw.choice([1, 3, 20, 40, 150]), most_tokens),
            stop=stop,
            stop_token_ids=draw.choice([[], [], [0]]),
            logprobs=self.random_kinds.choice([None] * 7 + [2]),
        )

    def beam_search_params(self) -> BeamSearchParams:
        draw = self.random_kinds
        return BeamSearchParams(
            beam_width=2,
            max_tokens=draw.choice([1, 5, 30]),
            length_penalty=draw.choice([0.0, 1.0]),
            early_stopping=draw.choice([False, True, "never"]),
            ignore_eos=True,
        )

    async def serve_client(self, client: ClientProcess) -> None:
        await client.open()
        draw = client.random
        shared = [self.random.randrange(VOCAB) for _ in range(20)]
        num_requests = draw.choice(self.settings.num_requests) * (1 + self.is_tight)
        for number in range(num_requests):
            pause_s = draw.choice([0.0, 0.0, 0.05, 1.0])
            await client.clock.sleep(0.0 if self.is_tight else pause_s)
            own = [draw.randrange(VOCAB) for _ in range(draw.randrange(1, 30))]
            asked = Asked(
                f"{client.name}/{number}",
                draw.choice([shared, []]) + own,
                self.params(),
                timeout_s=self.random_kinds.choice([None] * 9 + [0.1, 1.0, 30.0]),
            )
            if self.random_kinds.random() < self.poison_rate:
                asked.prompt += [draw.randrange(VOCAB) for _ in range(20)]  # nobody else has it
                position = len(asked.prompt) + self.random_kinds.choice([-1, 0, 5, 20])
                self.poison[tuple(asked.prompt)] = position
            if self.random_kinds.random() < 0.1:
                asked.params = self.beam_search_params()
                client.spawn(client.ask_beams(asked))
                continue
            client.spawn(
                client.ask(
                    asked,
                    think_s=draw.choice([0.0, 0.0, 0.05]),
                    leave_after=draw.choice([None] * 6 + [1, 4]),
                )
            )
            if draw.random() < 0.1:
                client.spawn(self._abort_later(client, asked))
            if draw.random() < 0.2:
                client.spawn(client.call())

    async def _abort_later(self, client: ClientProcess, asked: Asked) -> None:
        await client.clock.sleep(client.random.random())
        if not asked.num_ends:
            await client.abort(asked)

    def plan_faults(self) -> None:
        draw, settings = self.random, self.settings
        span_s = draw.choice([0.2, 2.0, 6.0])

        def at_random_times(num: int, fault) -> None:
            for _ in range(num):
                self._call_later(draw.random() * span_s, fault)

        at_random_times(self.kills_left, lambda: self.engine.kill("from outside"))
        self.kills_left = draw.choice([0, 0, 1])
        at_random_times(draw.choice(settings.num_cuts), self._cut)
        at_random_times(draw.choice(settings.num_pauses), self._pause)
        at_random_times(draw.choice(settings.num_client_kills), self._kill_client)
        at_random_times(draw.choice(settings.num_garbled), self._garble)
        at_random_times(draw.choice(settings.num_drains), self._drain)
        at_random_times(draw.choice(settings.num_jumps), self._jump)
        at_random_times(draw.choice(settings.num_closes), self._close_client)
        num_lost = self.random_kinds.choice(settings.num_lost_devices)
        at_random_times(num_lost, self._lose_device)
        if draw.choice(settings.num_corrupted):
            self._call_later(draw.random() * span_s, self._corrupt)
        if draw.choice(settings.num_floods):
            self._call_later(draw.random() * span_s, self._flood)

    def _open_connections(self):
        router = self.network.listening.get(self.engine.transport.address)
        return list(router.connections.values()) if router is not None else []

    def _cut(self) -> None:
        connections = self._open_connections()
        if connections:
            self.log("a connection is cut")
            self.num_connection_faults += 1
            self.random.choice(connections).cut()

    def _garble(self) -> None:
        connections = self._open_connections()
        if connections:
            self.log("a frame is corrupt")
            self.num_connection_faults += 1
            data = self.random.randbytes(self.random.randrange(0, 40))
            frames = [data if len(data) % 3 else NESTED_HELLO + data]
            self.random.choice(connections).send(frames, to_router=self.random.random() < 0.5)

    def _pause(self) -> None:
        seconds = self.random.choice(self.settings.pause_s)
        if self.random.random() < 0.5:
            engine = self.engine
            if engine.exit_code is None and not engine.process.is_paused:
                engine.pause(seconds)
        else:
            client = self.random.choice(self.clients)
            if not client.process.is_paused:
                client.pause(seconds + self.random.choice(self.settings.long_pauses_s))

    def _kill_client(self) -> None:
        client = self.random.choice(self.clients)
        if not client.process.is_dead:
            client.kill()

    def _close_client(self) -> None:
        client = self.random.choice(self.clients)
        if not client.process.is_dead and not client.is_closed:
            self.log(f"{client.name} closes")
            client.is_closed = True
            client.spawn(client.llm.close())

    def _flood(self) -> None:
        """Pings come faster than the engine takes them in."""
        client = self.random.choice(self.clients)
        if not client.process.is_dead and not client.is_closed:
            self.log(f"{client.name} floods")
            self.num_floods += 1
            self.engine.message_s = 0.002
            client.spawn(client.flood(FLOOD_MESSAGES, 0.0015))

    def _corrupt(self) -> None:
        client = self.random.choice(self.clients)
        self.log(f"requests of {client.name} arrive as garbage")
        self.network.corrupts = self.corrupted = client.name

        def end() -> None:
            self.network.corrupts = None

        self._call_later(3.0, end)

    def _drain(self) -> None:
        engine = self.engine
        if engine.exit_code is None:
            self.log("SIGTERM")
            self.num_drains += 1
            self.drained_s = min(self.drained_s, self.loop.time())
            engine.lifecycle.drain("SIGTERM")

    def _lose_device(self) -> None:
        self.log("the device is lost")
        self.engine.has_lost_device = True

    def _jump(self) -> None:
        seconds = self.random.choice([0.5, 3.0])
        self.log(f"the engine's clock jumps by {seconds} s")
        self.engine.clock_skew_s += seconds
        self.jumped_s += seconds

    # ------------------------------------------------------------------ run and judge

    def run(self) -> Report:
        numbers = Random(self.report.seed + 2)
        wire_ids = mock.Mock(token_hex=lambda size: f"{numbers.getrandbits(8 * size):x}")
        self.loop.set_exception_handler(
            lambda _loop, context: self.loop_errors.append(
                f"{context.get('message')}: {context.get('exception')!r}"
            )
        )
        with (
            mock.patch.object(output_processor, "secrets", wire_ids),
            mock.patch.object(engine_transport, "_SEND_QUEUE_MESSAGES", self.send_queue),
            mock.patch.object(outbox_module, "_MAX_BACKLOG_BYTES", self.backlog_bytes),
        ):
            try:
                asyncio.set_event_loop(self.loop)
                self.loop.run_until_complete(self._run())
            except BaseException as error:
                raise Violation(self._explain(f"{type(error).__name__}: {error}")) from error
            finally:
                asyncio.set_event_loop(None)
                self.loop.close()
        return self.report

    async def _run(self) -> None:
        self.draw()
        for address in self.addresses:
            self.start_engine(address)
        random = Random(self.report.seed + 3)
        addresses = self.addresses if self.num_rolling else [ADDRESS]
        self.operator = ClientProcess("operator", self.network, self.loop, random, addresses)
        for index in range(self.random.choice(self.settings.num_clients)):
            seed = self.random.getrandbits(32)
            self.clients.append(
                ClientProcess(
                    f"client {index}", self.network, self.loop, Random(seed), self.addresses
                )
            )
        for client in self.clients:
            client.spawn(self.serve_client(client))
        self.operator.spawn(self._operate())
        self.plan_faults()
        while any(client.tasks for client in [*self.clients, self.operator]):
            if self.loop.time() > HORIZON_S:
                raise Violation(f"not over after {HORIZON_S:g} s")
            await asyncio.sleep(0.5)
        await self._settle()
        judge(self)

    async def _operate(self) -> None:
        """One change after another. What pauses is resumed, however often that takes."""
        operator, draw = self.operator, self.operator.random
        llm = operator.llm
        for _ in range(draw.choice(self.settings.num_controls)):
            await operator.clock.sleep(draw.choice([0.0, 0.2, 1.5]) * draw.random())
            change, undo = draw.choice(
                [
                    (llm.pause_generation, llm.resume_generation),
                    (lambda: llm.pause_generation(mode="wait"), llm.resume_generation),
                    (lambda: llm.sleep(draw.choice([1, 2])), llm.wake_up),
                    (lambda: llm.update_weights(draw.choice(["a", "b"])), llm.resume_generation),
                ]
            )
            self.log("the operator makes a change")
            with contextlib.suppress(EngineClientError):
                await change()
            await operator.clock.sleep(draw.choice([0.0, 0.1, 1.0]))
            self.log("the operator ends it")
            while not await self._is_done(undo):
                await operator.clock.sleep(0.3)
        for number in range(self.num_rolling):
            await operator.clock.sleep(draw.choice([0.0, 0.2, 1.5]) * draw.random())
            await self._roll(f"new {number}", draw)
        await operator.llm.close()

    async def _roll(self, model: str, draw: Random) -> None:
        """Again, until it gets to its end."""
        operator = self.operator
        self.weights.append(model)
        new_requests = draw.choice(["any", "old", "new"])
        while True:
            try:
                await operator.open()
                served = await rolling_update(
                    operator.llm.engines,
                    model,
                    new_requests=new_requests,
                    drain_timeout_s=draw.choice(self.settings.drain_timeout_s),
                    report=self.log,
                )
            except RollingUpdateStopped as error:
                self.log(str(error))
                self.report.num_stopped_updates += 1
                await operator.clock.sleep(0.3)
                continue
            assert {each.fingerprint for each in served} == {model}, served
            return

    async def _is_done(self, call) -> bool:
        try:
            await call()
        except EngineClientError:
            return False
        return True

    async def _settle(self) -> None:
        """Clients close; the engine that is left has nothing to do and is well."""
        for client in self.clients:
            if not client.process.is_dead:
                judge_view(self, client)
                await client.llm.close()
        while any(each.exit_code is not None or each.process.is_paused for each in self.last_lives):
            await asyncio.sleep(0.5)
        await asyncio.sleep(3.0)
        self.is_over = True
        for engine in self.last_lives:
            if engine.exit_code is None:
                engine.scheduler.check()
                counts = engine.scheduler.get_request_counts()
                assert sum(counts) == 0, f"requests are left: {counts}"
                assert engine.kv_cache.num_blocks_in_use == 0, "blocks are left"
                assert len(engine.clients) == 0, "clients are left"
                assert not engine.host.runner.model.rows, "rows are left"
            engine.kill("at the end")

    def _explain(self, why: str) -> str:
        lines = "\n".join(self.trace)
        return f"seed {self.report.seed}: {why}\n{lines}"


def run_schedule(
    seed: int, settings: Settings | None = None, *, keeps_trace: bool = False
) -> Report:
    """Raises Violation, with the trace."""
    logging.disable(logging.CRITICAL)
    try:
        simulation = Simulation(seed, settings or Settings())
        report = simulation.run()
        if keeps_trace:
            report.trace = "\n".join(simulation.trace)
        return report
    finally:
        logging.disable(logging.NOTSET)
