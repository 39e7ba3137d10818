"""How the cost of a step and of a request grows with what an engine holds, in CPU time."""

import gc
import itertools
import math
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any

import numpy as np
from cyclopts import Parameter

from engine_core.kv_cache import KVCacheManager
from engine_core.scheduler import Request, RequestStatus, SchedulerConfig
from engine_core.server.clients import ClientRegistry, Rights
from engine_core.server.inbox import Inbox
from engine_core.server.outbox import Outbox
from engine_core.server.transport import Frame
from engine_core.startup.scheduler import build_scheduler
from protocol.codec import encode
from protocol.outputs import Heartbeat
from protocol.requests import EngineRequest
from protocol.sampling import SamplingParams
from scripts.benchmarks import Json, report
from scripts.benchmarks.scheduler import BLOCK_SIZE, sampled

_STEP_S, _HEARTBEAT_S = 0.01, 1.0
_PROMPT_LEN = 128
_THOUSANDS = (1000, 10_000, 100_000, 1_000_000)
CASES = {
    "running": ("running sequences", (1, 8, 64, 256, 1024, 4096, 8192)),
    "waiting": ("waiting requests, 64 run", (1, *_THOUSANDS)),
    "context": ("tokens of each of 8 running sequences", _THOUSANDS),
    "chunk": ("tokens before a chunk of 512", _THOUSANDS),
    "waiting head": ("cached tokens of a request without room, 64 run", _THOUSANDS),
    "cache": ("cached blocks, 64 run", (*_THOUSANDS, 10_000_000)),
    "clients": ("clients that share 1,000 running sequences", (1, 10, 100, 1000)),
    "silent clients": ("clients that only listen, 64 sequences run", (1, 10, 100, 1000)),
}
"""What grows: in words, and how far. A step may grow with the running sequences, and with the
clients by their messages; the rest stays as it is in a step."""
_numbers = itertools.count(1)
Row = dict[str, Any]


class _Transport:
    """Clients without sockets."""

    def __init__(self) -> None:
        self.arrived: list[tuple[bytes, list[Frame]]] = []

    def wait(self, timeout_s: float) -> bool:
        return bool(self.arrived)

    def receive_all(self) -> Iterator[tuple[bytes, list[Frame]]]:
        while self.arrived:
            yield self.arrived.pop(0)

    def send(self, identity: bytes, frames: Sequence[Frame]) -> None:
        """It is read at once."""


class _Engine:
    """Scheduler, inbox and outbox, in virtual time; tokens are made up. Prompts have no block in
    common, and block boundaries are spread over the steps."""

    def __init__(
        self, num_running: int, *, context: int = _PROMPT_LEN, blocks: int = 0, clients: int = 1
    ) -> None:
        tokens = (num_running + 8) * (context + 1024)
        num_blocks = blocks or int(1.05 * tokens) // BLOCK_SIZE
        config = SchedulerConfig(
            max_num_batched_tokens=max(512, 2 * num_running),
            max_num_seqs=num_running,
            max_model_len=context + 4096,
        )
        self.kv_cache = KVCacheManager(num_blocks=num_blocks, block_size=BLOCK_SIZE, watermark=0)
        self.scheduler = build_scheduler(config, self.kv_cache)
        self._now_s = 1.0
        self._transport, self._clients = _Transport(), ClientRegistry()
        self._outbox = Outbox(
            self._transport, self._clients, heartbeat_s=_HEARTBEAT_S, clock=lambda: self._now_s
        )
        self._inbox = Inbox(
            self._transport,
            self._clients,
            self._outbox,
            idle_wait_s=0.0,
            welcome=lambda _hello: (Heartbeat(), []),
            clock=lambda: self._now_s,
        )
        for number in range(clients):
            client = self._clients.add(b"client %d" % number, "", Rights())
            self._outbox.post(client, Heartbeat())
        self.num_active_clients = clients
        self._names: list[str] = []
        """Names of unfinished requests, in order."""
        self._prefills = False
        self._tail = np.random.default_rng(0).integers(0, 32_000, size=context + 64).tolist()

    def send_request(self, num_tokens: int, like: int | None = None) -> int:
        """It arrives with the next step. Returns its number. `like`: that of one whose prompt's
        tokens it begins with."""
        number = next(_numbers)
        name = f"request-{number}"
        message = EngineRequest(
            request_id=name,
            prompt_token_ids=[number if like is None else like, *self._tail[1:num_tokens]],
            sampling_params=SamplingParams(max_tokens=4000, ignore_eos=True),
        )
        identity = b"client %d" % (number % self.num_active_clients)
        self._transport.arrived.append((identity, [encode(message)]))
        self._names.append(name)
        return number

    def end_oldest(self) -> None:
        self.scheduler.finish_requests(self._names.pop(0), RequestStatus.FINISHED_ABORTED)

    def receive(self) -> None:
        for client, message in self._inbox.drain(block=False):
            assert isinstance(message, EngineRequest)
            request = Request(
                message, client_index=client.index, arrival_time=self._now_s, eos_token_ids=()
            )
            self.scheduler.add_request(request)

    def step(self) -> float:
        """Microseconds of all but the model."""
        self._now_s += _STEP_S
        times = [time.thread_time_ns()]
        self.receive()
        plan = self.scheduler.schedule(now=self._now_s)
        times.append(time.thread_time_ns())
        self._prefills = plan.total_num_scheduled_tokens > len(plan.batch.rows)
        output = sampled(plan)
        times.append(time.thread_time_ns())
        self._outbox.send(self.scheduler.update_from_output(plan, output, now=self._now_s))
        times.append(time.thread_time_ns())
        return (times[1] - times[0] + times[3] - times[2]) / 1e3

    def start(self, num_requests: int, num_tokens: int = _PROMPT_LEN) -> None:
        """Go on until they all run and have had a block's length of steps."""
        for index in range(num_requests):
            self.send_request(num_tokens + index % BLOCK_SIZE)
            self.receive()
        self.step()
        while self.scheduler.get_request_counts()[1] or self._prefills:
            self.step()
        for _ in range(BLOCK_SIZE):
            self.step()

    def fill_cache(self) -> None:
        """With blocks that nobody asks for: every block that is taken evicts one."""
        pool, num_blocks = self.kv_cache._pool, self.kv_cache.num_blocks
        block_ids = pool.allocate(num_blocks)
        hashes = [number.to_bytes(8, "little") for number in range(num_blocks)]
        pool.register_run(block_ids, 0, hashes, 0, num_blocks)
        pool.release(block_ids)


def prepared(what: str, size: int) -> _Engine:
    """An engine whose next step is as all others."""
    match what:
        case "running":
            engine = _Engine(size)
            engine.start(size)
        case "context":
            engine = _Engine(8, context=size)
            engine.start(8, size)
        case "chunk":
            engine = _Engine(1, context=size + 200_000)
            engine.send_request(size + 200_000)
            for _ in range(size // 512):
                engine.step()
        case "waiting head":
            engine = _Engine(65, context=2 * size + 50_000, blocks=size // BLOCK_SIZE + 3000)
            known = engine.send_request(size)
            engine.start(0)
            engine.end_oldest()
            engine.start(64)
            engine.send_request((engine.kv_cache.num_blocks_free + 8) * BLOCK_SIZE, known)
        case "cache":
            engine = _Engine(64, blocks=max(size, 6000))
            engine.fill_cache()
            engine.start(64)
        case "clients":
            engine = _Engine(1000, clients=size)
            engine.start(1000)
        case _:
            engine = _Engine(64, clients=size if what == "silent clients" else 1)
            engine.num_active_clients = 1
            engine.start(64)
            for _ in range(size if what == "waiting" else 0):
                engine.send_request(32)
                engine.receive()
    return engine


def measured(what: str, size: int, num_steps: int) -> Row:
    """Of a step; and what it takes more if a request ended before it and another one comes: that,
    or the head of the queue, starts in its place. Lower quartiles, as other work only adds."""
    gc.disable()  # while a million objects are made
    engine = prepared(what, size)
    gc.enable()
    gc.collect()
    steps = [engine.step() for _ in range(num_steps)]
    row: Row = {"size": size, "step_us": _lower_quartile(steps)}
    if what in ("context", "chunk", "waiting head"):
        return row
    turns = []
    for _ in range(num_steps // 4):
        engine.end_oldest()
        engine.send_request(_PROMPT_LEN)
        turns.append(engine.step())
        engine.step()
    return row | {"request_us": round(_lower_quartile(turns) - row["step_us"], 1)}


def _lower_quartile(values: Sequence[float]) -> float:
    return round(sorted(values)[len(values) // 4], 1)


def growth(
    *,
    quick: Annotated[bool, Parameter(help="Tiny sizes: does it run at all?")] = False,
    only: Annotated[tuple[str, ...], Parameter(help=f"Of {', '.join(CASES)}.")] = tuple(CASES),
    picture: Annotated[Path | None, Parameter(help="Draw it there, as SVG.")] = None,
    json: Json = None,
) -> None:
    """Scheduler, KV cache, inbox and outbox in CPU time of one thread: no model, no torch, no
    sockets. It takes two minutes and 4 GB."""
    if unknown := set(only) - CASES.keys():
        raise RuntimeError(f"--only {unknown.pop()!r} is none of {', '.join(CASES)}")
    figures: dict[str, list[Row]] = {}
    for what in only:
        sizes = CASES[what][1]
        num_steps = 16 if quick else 128
        figures[what] = [
            measured(what, size, num_steps) for size in (sizes[:2] if quick else sizes)
        ]
    if "torch" in sys.modules:
        raise RuntimeError("torch was imported: the scheduler must not need it")
    if picture is not None:
        _draw(figures, picture)
    report({"growth": figures}, json, as_table(figures))


def as_table(figures: dict[str, list[Row]]) -> str:
    """Microseconds; behind each the exponent of its growth since the row before: 0 is
    none, 1 is linear."""
    lines = []
    for what, rows in figures.items():
        lines += ["", f"{CASES[what][0]:<58}{'a step':>10}{'':7}{'a request':>10}"]
        for before, row in zip([rows[0], *rows], rows, strict=False):
            line = f"{row['size']:>58,}"
            for part in list(row)[1:]:
                line += f"{row[part]:>10,.0f}{_exponent(before, row, part):>7}"
            lines.append(line)
    return "\n".join(lines[1:])


def _exponent(before: Row, row: Row, part: str) -> str:
    if before is row or min(before[part], row[part]) <= 0:
        return ""
    return f"{math.log(row[part] / before[part]) / math.log(row['size'] / before['size']):.2f}"


def _draw(figures: dict[str, list[Row]], path: Path) -> None:
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    figure = Figure(figsize=(13, 6.5), layout="constrained")
    panels = figure.subplots(2, 4, sharey=True)
    for panel, (what, rows) in zip(panels.flat, figures.items(), strict=False):
        sizes = [row["size"] for row in rows]
        for part, label in (("step_us", "a step"), ("request_us", "a request more")):
            if part in rows[0]:
                panel.plot(sizes, [row[part] for row in rows], marker="o", label=label)
        linear = [rows[0]["step_us"] * size / sizes[0] for size in sizes]
        panel.plot(sizes, linear, linestyle=":", color="grey", label="linear growth")
        panel.set(xscale="log", yscale="log", ylim=(10, 1e4))
        panel.set_xlabel(CASES[what][0].replace(", ", ",\n"))
        panel.grid(alpha=0.3)
        panel.minorticks_off()
    for panel in panels[:, 0]:
        panel.set_ylabel("CPU time, microseconds")
    panels[0, 0].legend()
    with rc_context({"svg.fonttype": "none"}):  # letters as letters
        figure.savefig(path, format="svg", metadata={"Date": None})
