"""How the cost of a step and of a request grows with what an engine holds, in CPU time."""

import gc
import itertools
import math
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any

import numpy as np
from cyclopts import Parameter

from engine_core.kv_cache import KVCacheManager
from engine_core.scheduler import Request, RequestStatus, Scheduler, SchedulerConfig
from engine_core.server.clients import ClientRegistry, Rights
from engine_core.server.inbox import Inbox
from engine_core.server.outbox import Outbox
from engine_core.server.transport import Frame
from protocol.codec import encode
from protocol.outputs import Heartbeat
from protocol.requests import EngineRequest
from protocol.sampling import SamplingParams
from scripts.benchmarks import Json, report
from scripts.benchmarks.scheduler import BLOCK_SIZE, sampled

_STEP_S = 0.01
_BUDGET = 2048
"""Tokens a step."""
_HEARTBEAT_S = 1.0
_NUMBERS = itertools.count(1)
Row = dict[str, Any]
_TITLES = {
    "running": "running sequences",
    "waiting": "waiting requests, 64 run",
    "context": "tokens of each of 8 running sequences",
    "chunk": "tokens before a chunk of 512",
    "waiting head": "cached tokens of a request that finds no free blocks, 64 run",
    "cache": "cached blocks, 64 run",
    "clients": "clients that share 1,000 running sequences",
    "silent clients": "clients that only listen, 64 sequences of another run",
}
"""What grows. A step may grow with the first and, by its messages, with the clients."""


def cpu_us() -> float:
    return time.thread_time_ns() / 1e3


class _Transport:
    """Clients without sockets: what they send is put into `arrived`, what they get is counted."""

    def __init__(self) -> None:
        self.arrived: list[tuple[bytes, list[Frame]]] = []
        self.num_sent = 0

    def wait(self, timeout_s: float) -> bool:
        return bool(self.arrived)

    def receive_all(self) -> Iterator[tuple[bytes, list[Frame]]]:
        while self.arrived:
            yield self.arrived.pop(0)

    def send(self, identity: bytes, frames: Sequence[Frame]) -> None:
        self.num_sent += 1


class _Engine:
    """Scheduler, inbox and outbox, in virtual time; tokens are made up. Prompts have no block in
    common, and block boundaries are spread over the steps."""

    def __init__(
        self,
        num_running: int,
        num_blocks: int,
        *,
        context: int,
        clients: int = 1,
        budget: int = _BUDGET,
    ) -> None:
        config = SchedulerConfig(
            max_num_batched_tokens=max(budget, 2 * num_running),
            max_num_seqs=num_running,
            max_model_len=context + 4096,
        )
        self.kv_cache = KVCacheManager(num_blocks=num_blocks, block_size=BLOCK_SIZE, watermark=0)
        self.scheduler = Scheduler(config, self.kv_cache)
        self.now_s = 1.0
        self._transport, self._clients = _Transport(), ClientRegistry()
        self._outbox = Outbox(
            self._transport, self._clients, heartbeat_s=_HEARTBEAT_S, clock=lambda: self.now_s
        )
        self._inbox = Inbox(
            self._transport,
            self._clients,
            self._outbox,
            idle_wait_s=0.0,
            welcome=lambda _hello: (Heartbeat(), []),
            clock=lambda: self.now_s,
        )
        for number in range(clients):
            self.connect(number)
        self.num_clients = clients
        self._names: list[str] = []
        """Of unfinished requests, in order."""
        self._tail = np.random.default_rng(0).integers(0, 32_000, size=context + 64).tolist()

    def connect(self, number: int) -> None:
        client = self._clients.add(b"client %d" % number, "", Rights())
        self._outbox.post(client, Heartbeat())

    def send_request(self, num_tokens: int, like: int | None = None) -> int:
        """It arrives with the next step. Returns its number. `like`: that of one whose prompt's
        tokens it begins with."""
        number = next(_NUMBERS)
        prompt = [number if like is None else like, *self._tail[1:num_tokens]]
        params = SamplingParams(max_tokens=4000, ignore_eos=True)
        name = f"request-{number}"
        message = EngineRequest(request_id=name, prompt_token_ids=prompt, sampling_params=params)
        identity = b"client %d" % (number % self.num_clients)
        self._transport.arrived.append((identity, [encode(message)]))
        self._names.append(name)
        return number

    def end_oldest(self) -> None:
        self.scheduler.finish_requests(self._names.pop(0), RequestStatus.FINISHED_ABORTED)

    def receive(self) -> None:
        for client, message in self._inbox.drain(block=False):
            assert isinstance(message, EngineRequest)
            request = Request.from_engine_core_request(
                message, client_index=client.index, arrival_time=self.now_s, eos_token_ids=()
            )
            self.scheduler.add_request(request)

    def step(self) -> float:
        """Microseconds of all but the model."""
        self.now_s += _STEP_S
        start = cpu_us()
        self.receive()
        plan = self.scheduler.schedule(now=self.now_s)
        planned = cpu_us()
        self._prefills = plan.total_num_scheduled_tokens > len(plan.batch.rows)
        output = sampled(plan)
        ready = cpu_us()
        self._outbox.send(self.scheduler.update_from_output(plan, output, now=self.now_s))
        return cpu_us() - ready + planned - start

    def start(self, num_requests: int, num_tokens: int) -> None:
        """Until they all run and have had a block's length of steps."""
        for index in range(num_requests):
            self.send_request(num_tokens + index % BLOCK_SIZE)
            self.receive()
        self.step()
        while self.scheduler.get_request_counts()[1] or self._prefills:
            self.step()
        for _ in range(BLOCK_SIZE):
            self.step()

    def fill_cache(self, num_blocks: int) -> None:
        """With blocks that nobody asks for, the first the oldest."""
        pool = self.kv_cache._pool
        block_ids = pool.allocate(num_blocks)
        hashes = [number.to_bytes(8, "little") for number in range(num_blocks)]
        pool.register_run(block_ids, 0, hashes, 0, num_blocks)
        pool.release(block_ids)


def _costs(engine: _Engine, num_steps: int, num_tokens: int | None = None) -> Row:
    """Medians of a step, and of what it takes more if a request ended before it and another one
    comes, or the head of the queue in its place."""
    gc.collect()
    step_us = statistics.median(engine.step() for _ in range(num_steps))
    if num_tokens is None:
        return {"step_us": step_us}
    turns = []
    for _ in range(num_steps // 4):
        engine.end_oldest()
        engine.send_request(num_tokens)
        turns.append(engine.step())
        engine.step()
    return {"step_us": step_us, "request_us": max(0.0, statistics.median(turns) - step_us)}


def _blocks(num_sequences: int, num_tokens: int) -> int:
    """With room for some more requests and 1,000 steps."""
    return int(1.05 * (num_sequences + 8) * (num_tokens + 1024)) // BLOCK_SIZE + 64


def _running(size: int, num_steps: int) -> Row:
    engine = _Engine(size, _blocks(size, 128), context=128)
    engine.start(size, 128)
    return _costs(engine, num_steps, 128)


def _waiting(size: int, num_steps: int) -> Row:
    engine = _Engine(64, _blocks(64, 128), context=128)
    engine.start(64, 128)
    gc.disable()
    for _ in range(size):
        engine.send_request(32)
        engine.receive()
    gc.enable()
    return _costs(engine, num_steps, 32)


def _context(size: int, num_steps: int) -> Row:
    engine = _Engine(8, _blocks(8, size), context=size)
    engine.start(8, size)
    return _costs(engine, num_steps)


def _chunk(size: int, num_steps: int) -> Row:
    chunk = 512
    total = size + chunk * num_steps
    engine = _Engine(1, _blocks(1, total), context=total, budget=chunk)
    engine.send_request(total)
    for _ in range(size // chunk):
        engine.step()
    return _costs(engine, num_steps - 1)


def _waiting_head(size: int, num_steps: int) -> Row:
    engine = _Engine(65, _blocks(64, 128) + size // BLOCK_SIZE, context=2 * size + 400_000)
    known = engine.send_request(size)
    engine.start(0, 0)
    engine.end_oldest()
    engine.start(64, 128)
    engine.send_request((engine.kv_cache.num_blocks_free + 8) * BLOCK_SIZE, known)
    return _costs(engine, num_steps)


def _cache(size: int, num_steps: int) -> Row:
    """Blocks of others, each older than the next: every block that is taken evicts one."""
    engine = _Engine(64, size + _blocks(64, 128), context=128)
    engine.fill_cache(size)
    engine.start(64, 128)
    return _costs(engine, num_steps, 128)


def _clients(size: int, num_steps: int) -> Row:
    engine = _Engine(1000, _blocks(1000, 128), context=128, clients=size)
    engine.start(1000, 128)
    return _costs(engine, num_steps, 128)


def _silent_clients(size: int, num_steps: int) -> Row:
    engine = _Engine(64, _blocks(64, 128), context=128)
    for number in range(1, size):
        engine.connect(number)
    engine.start(64, 128)
    return _costs(engine, num_steps, 128)


_MILLION = 1_000_000
_SIZES: dict[str, tuple[Callable[[int, int], Row], tuple[int, ...]]] = {
    "running": (_running, (1, 8, 64, 256, 1024, 4096, 8192)),
    "waiting": (_waiting, (1, 1000, 10_000, 100_000, _MILLION)),
    "context": (_context, (1000, 10_000, 100_000, _MILLION)),
    "chunk": (_chunk, (1000, 10_000, 100_000, _MILLION)),
    "waiting head": (_waiting_head, (1000, 10_000, 100_000, _MILLION)),
    "cache": (_cache, (1000, 10_000, 100_000, _MILLION, 10 * _MILLION)),
    "clients": (_clients, (1, 10, 100, 1000)),
    "silent clients": (_silent_clients, (1, 10, 100, 1000)),
}


def growth(
    *,
    quick: Annotated[bool, Parameter(help="Tiny sizes: does it run at all?")] = False,
    only: Annotated[tuple[str, ...], Parameter(help="Names of what grows.")] = tuple(_SIZES),
    picture: Annotated[Path | None, Parameter(help="Draw it there, as SVG.")] = None,
    json: Json = None,
) -> None:
    """Scheduler, KV cache, inbox and outbox in CPU time of one thread: no model, no torch, no
    sockets. The largest takes 5 GB and a minute."""
    figures: dict[str, list[Row]] = {}
    for name in only:
        measure, sizes = _SIZES[name]
        rows = figures[name] = []
        for size in sizes[:2] if quick else sizes:
            row = measure(size, 16 if quick else 128)
            rows.append({"size": size} | {part: round(us, 1) for part, us in row.items()})
            gc.collect()
    if "torch" in sys.modules:
        raise RuntimeError("torch was imported: the scheduler must not need it")
    if picture is not None:
        _draw(figures, picture)
    report({"growth": figures}, json, as_table(figures))


def as_table(figures: dict[str, list[Row]]) -> str:
    """Medians, microseconds of CPU time; behind them the exponent of the growth since the row
    before: 0 is none, 1 is linear."""
    lines = []
    for name, rows in figures.items():
        lines += ["", f"{_TITLES[name]:<54}{'a step':>10}{'':6}{'a request':>12}"]
        for before, row in zip([None, *rows], rows, strict=False):
            line = f"{row['size']:>54,}"
            for part, width in (("step_us", 10), ("request_us", 12)):
                if part in row:
                    line += f"{row[part]:>{width},.0f}{_exponent(before, row, part):>6}"
            lines.append(line)
    return "\n".join(lines[1:])


def _exponent(before: Row | None, row: Row, part: str) -> str:
    if before is None or before[part] <= 0 or row[part] <= 0:
        return ""
    return f"{math.log(row[part] / before[part]) / math.log(row['size'] / before['size']):.2f}"


def _draw(figures: dict[str, list[Row]], path: Path) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(13, 6.5), layout="constrained")
    panels = figure.subplots(2, 4, sharey=True).flat
    for panel, (name, rows) in zip(panels, figures.items(), strict=False):
        sizes = [row["size"] for row in rows]
        for part, label in (("step_us", "a step"), ("request_us", "a request more")):
            values = [row.get(part, 0) for row in rows]
            if any(values):
                panel.plot(sizes, values, marker="o", label=label)
        panel.set(xscale="log", yscale="log", ylim=(10, 1e5))
        panel.set_xlabel(_TITLES[name].replace(", ", ",\n"))
        panel.grid(alpha=0.3)
        # a line as steep as linear growth
        start = rows[0]["step_us"]
        panel.plot(sizes, [start * s / sizes[0] for s in sizes], ":", c="grey", label="linear")
    figure.axes[0].legend()
    for panel in (figure.axes[0], figure.axes[4]):
        panel.set_ylabel("CPU time, microseconds")
    figure.savefig(path, format="svg", metadata={"Date": None})
