"""Whether a daemon grows under load: memory, descriptors, threads, latency of another client. It
has random weights of a small model, and is measured idle between the phases."""

import asyncio
import json as json_format
import multiprocessing
import os
import signal
import tempfile
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from multiprocessing.context import SpawnProcess
from multiprocessing.queues import Queue
from pathlib import Path
from typing import Annotated, Any

from cyclopts import Parameter

from frontend import AsyncLLM, SamplingParams, run
from scripts.benchmarks import Json, first_token_s, report, running_daemon
from scripts.load.records import distribution
from scripts.load.report import log

_MODEL = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 1000,
    "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 2048, "rms_norm_eps": 1e-5,
    "eos_token_id": 1, "bos_token_id": 0, "tie_word_embeddings": False,
}  # fmt: skip
_PROBE_S = 0.05
_CLIENTS_A_PROCESS = 32
_spawn = multiprocessing.get_context("spawn")


def bounds(
    *,
    num_queued: Annotated[int, Parameter(help="Requests queued at once.")] = 10_000,
    num_clients: Annotated[int, Parameter(help="Clients that join and leave.")] = 512,
    num_requests: Annotated[int, Parameter(help="Short requests of one client.")] = 100_000,
    stop_s: Annotated[float, Parameter(help="Seconds for which a client is stopped.")] = 10.0,
    json: Json = None,
) -> int:
    """In turn: requests queued at once (three times), clients that join and leave (a third by
    SIGKILL, a third without a word; three times), a client that is stopped while its streams run,
    and many short requests of one client."""
    with tempfile.TemporaryDirectory() as folder:
        config = Path(folder, "config.json")
        config.write_text(json_format.dumps(_MODEL))
        options = ["--load-format", "dummy", "--model-config", str(config)]
        with running_daemon([*options, "--kv-cache-memory", "64MiB"]) as (daemon, ready):
            measured = _measure(
                ready["address"], daemon.pid, num_queued, num_clients, num_requests, stop_s
            )
            phases = run(measured)
    report({"phases": phases}, json)
    return 0


async def _measure(
    address: str, pid: int, num_queued: int, num_clients: int, num_requests: int, stop_s: float
) -> list[dict[str, Any]]:
    probes: Queue[Any] = _spawn.Queue()
    probing = _spawn.Process(target=_probe, args=(address, probes), daemon=True)
    probing.start()
    async with AsyncLLM(address) as llm:
        measurement = _Measurement(llm, pid, probes)

        async def short(num_requests: int, at_once: int = 256) -> None:
            numbers = iter(range(num_requests))

            async def some() -> None:
                for number in numbers:
                    await _ask(llm, number, 2)

            await asyncio.gather(*(some() for _ in range(at_once)))

        while (await llm.statistics()).num_clients < 2:
            await asyncio.sleep(0.1)
        await asyncio.sleep(3.0)
        await measurement.end_phase("idle")
        await short(min(5_000, num_requests))
        await measurement.end_phase("warm-up")
        for number in range(3):
            await short(num_queued, at_once=num_queued)
            await measurement.end_phase(f"{num_queued} queued, {number + 1}")
        for number in range(3):
            await asyncio.to_thread(_join_and_leave, num_clients, address)
            await measurement.end_phase(f"{num_clients} clients, {number + 1}")
        facts = await asyncio.to_thread(_stop_and_go_on, stop_s, address, pid)
        await measurement.end_phase(f"a client stopped for {stop_s:g} s", **facts)
        for number in range(5):
            await short(num_requests // 5)
            done = num_requests // 5 * (number + 1)
            await measurement.end_phase(f"{done} short requests")
        await asyncio.sleep(3.0)
        await measurement.end_phase("idle again")
    probing.kill()
    probing.join()
    return measurement.phases


async def _ask(llm: AsyncLLM, number: int, max_tokens: int) -> list[int]:
    prompt = {"prompt_token_ids": [number % 997, *range(7)]}
    params = SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True)
    outputs = [output async for output in llm.generate(prompt, params)]  # type: ignore[arg-type]
    return list(outputs[-1].outputs[0].token_ids)


def _probe(address: str, results: "Queue[Any]") -> None:
    """Another client: a request of one token each 50 ms; its latencies."""

    async def probe() -> None:
        async with AsyncLLM(address) as llm:
            while True:
                latency_s = await first_token_s(llm, list(range(8)))
                results.put((time.time(), latency_s))
                await asyncio.sleep(_PROBE_S)

    asyncio.run(probe())


def _join(address: str, leaves: int, results: "Connection[Any, Any]") -> None:
    """Clients of one process: with a request each that has ended and one that runs."""

    async def join() -> None:
        clients = [AsyncLLM(address) for _ in range(_CLIENTS_A_PROCESS)]
        await asyncio.gather(*(client.open() for client in clients))
        await asyncio.gather(*(_ask(client, 1, 2) for client in clients))
        running = [asyncio.create_task(_ask(client, 2, 1500)) for client in clients]
        await asyncio.sleep(0.5)
        results.send("runs")
        if leaves == 0:
            await asyncio.sleep(600)  # killed
        elif leaves == 1:
            os._exit(0)
        for task in running:
            task.cancel()
        for client in clients:
            await client.close()

    asyncio.run(join())


def _stream(address: str, results: "Connection[Any, Any]") -> None:
    """32 streams of one client; tells how many tokens each has had."""

    async def stream() -> None:
        async with AsyncLLM(address) as llm:
            asked = asyncio.gather(*(_ask(llm, n, 1900) for n in range(_CLIENTS_A_PROCESS)))
            await asyncio.sleep(0.5)
            results.send("streams")
            results.send(sorted({len(tokens) for tokens in await asked}))

    asyncio.run(stream())


def _own_memory(pid: int | str = "self") -> dict[str, int]:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    status = dict(line.split(":", 1) for line in lines)
    return {
        "rss_kib": int(status["VmRSS"].split()[0]),
        "num_descriptors": len(list(Path(f"/proc/{pid}/fd").iterdir())),
        "num_threads": int(status["Threads"]),
    }


class _Measurement:
    """Measures the idle daemon after each phase."""

    def __init__(self, llm: AsyncLLM, pid: int, probes: "Queue[Any]") -> None:
        self._llm, self._pid, self._probes = llm, pid, probes
        self.phases: list[dict[str, Any]] = []
        self._begin_s = time.time()

    async def end_phase(self, name: str, **facts: Any) -> None:
        end_s = time.time()
        deadline_s = end_s + 60
        while (numbers := await self._llm.statistics()).num_clients > 2 or numbers.num_waiting:
            if time.time() > deadline_s:
                raise RuntimeError(f"{numbers.num_clients} clients are left after {name}")
            await asyncio.sleep(0.1)
        await asyncio.sleep(1.0)  # the heartbeat finds dead clients, and their descriptors close
        latencies = []
        while not self._probes.empty():
            at_s, latency_s = self._probes.get()
            if self._begin_s <= at_s <= end_s:
                latencies.append(latency_s)
        found = {
            "phase": name,
            "seconds": round(end_s - self._begin_s, 1),
            "daemon": _own_memory(self._pid),
            "client": _own_memory(),
            "latency_s": distribution(latencies),
            **facts,
        }
        self.phases.append(found)
        log(json_format.dumps(found))
        self._begin_s = time.time()


def _start(
    target: Callable[..., None], *arguments: object
) -> tuple[SpawnProcess, "Connection[Any, Any]"]:
    """A process, and what it tells: a pipe, as one that is killed would leave a queue locked."""
    ours, theirs = _spawn.Pipe()
    process = _spawn.Process(target=target, args=(*arguments, theirs))
    process.start()
    return process, ours


def _join_and_leave(num_clients: int, address: str) -> None:
    """Three processes at a time, each of which leaves in its own way."""
    for _ in range(0, num_clients, 3 * _CLIENTS_A_PROCESS):
        running = [_start(_join, address, leaves) for leaves in range(3)]
        for _, told in running:
            told.recv()
        running[0][0].kill()
        for process, _ in running:
            process.join()


def _stop_and_go_on(stop_s: float, address: str, pid: int) -> dict[str, Any]:
    process, results = _start(_stream, address)
    results.recv()
    assert process.pid is not None
    before = _own_memory(pid)["rss_kib"]
    os.kill(process.pid, signal.SIGSTOP)
    time.sleep(stop_s)
    grown = _own_memory(pid)["rss_kib"] - before
    os.kill(process.pid, signal.SIGCONT)
    lengths = results.recv()
    process.join()
    return {"grown_while_stopped_kib": grown, "tokens_of_each_stream": lengths}
