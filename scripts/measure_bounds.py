"""Measures whether a daemon grows: memory, descriptors, threads, another client's latency.

It starts a daemon of its own, with random weights of a small model:

    python scripts/measure_bounds.py --num-requests 100000 --json docs/benchmarks/bounds.json

In turn: 10,000 requests queued at once (three times), 512 clients that join and leave (a third by
SIGKILL, a third without a word; three times), a client that is stopped while its streams run, and
many short requests of one client. Between them the daemon is idle and is measured. Lines go to
stderr, one JSON document to the file, or to stdout unless that is a terminal.
"""

import asyncio
import contextlib
import json
import multiprocessing
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from multiprocessing.connection import Connection
from multiprocessing.queues import Queue
from pathlib import Path
from typing import Annotated, Any

from cyclopts import Parameter

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from frontend import AsyncLLM, SamplingParams
from scripts.command_line import make_app, run_app
from scripts.load.records import distribution
from scripts.load.report import describe_run, log, write_document

_MODEL = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 1000,
    "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 2048, "rms_norm_eps": 1e-5,
    "eos_token_id": 1, "bos_token_id": 0, "tie_word_embeddings": False,
}  # fmt: skip
_PROBE_S = 0.05
_CLIENTS_A_PROCESS = 32
_spawn = multiprocessing.get_context("spawn")


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class Options:
    num_queued: Annotated[int, Parameter(help="Requests queued at once.")] = 10_000
    num_clients: Annotated[int, Parameter(help="Clients that join and leave.")] = 512
    num_requests: Annotated[int, Parameter(help="Short requests of one client.")] = 100_000
    stop_s: Annotated[float, Parameter(help="Seconds for which a client is stopped.")] = 10.0
    json: Annotated[Path | None, Parameter(help="Where the document goes.")] = None


@contextlib.contextmanager
def _daemon(folder: Path) -> Iterator[tuple[int, str]]:
    """Its process id and address."""
    (folder / "config.json").write_text(json.dumps(_MODEL))
    command = [sys.executable, "-m", "engine_core.cli", "--load-format", "dummy"]
    command += ["--model-config", str(folder / "config.json"), "--kv-cache-memory", "64MiB"]
    command += ["--bind", f"ipc://{folder}/s", "--exit-on-stdin-eof", "--log-level", "error"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        try:
            assert process.stdout is not None
            yield process.pid, json.loads(process.stdout.readline())["address"]
        finally:
            process.terminate()


def _params(max_tokens: int) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True)


async def _ask(llm: AsyncLLM, number: int, max_tokens: int) -> list[int]:
    prompt = {"prompt_token_ids": [number % 997, *range(7)]}
    outputs = [output async for output in llm.generate(prompt, _params(max_tokens))]  # type: ignore[arg-type]
    return list(outputs[-1].outputs[0].token_ids)


def _probe(address: str, results: "Queue[Any]") -> None:
    """Another client: a request of one token each 50 ms; its latencies."""

    async def probe() -> None:
        async with AsyncLLM(address) as llm:
            while True:
                begin_s = time.perf_counter()
                await _ask(llm, 0, 1)
                results.put((time.time(), time.perf_counter() - begin_s))
                await asyncio.sleep(_PROBE_S)

    asyncio.run(probe())


def _join(address: str, results: "Connection[Any, Any]", leaves: int) -> None:
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


def _stream(address: str, results: "Queue[Any]") -> None:
    """32 streams of one client; tells how many tokens each has had, and of how many resumptions."""

    async def stream() -> None:
        async with AsyncLLM(address) as llm:
            asked = asyncio.gather(*(_ask(llm, n, 1900) for n in range(_CLIENTS_A_PROCESS)))
            await asyncio.sleep(0.5)
            results.put("streams")
            results.put(sorted({len(tokens) for tokens in await asked}))

    asyncio.run(stream())


def _own_memory(pid: int | str = "self") -> dict[str, int]:
    status = dict(
        line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines()
    )
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
        log(json.dumps(found))
        self._begin_s = time.time()


async def _measure(options: Options, address: str, pid: int) -> list[dict[str, Any]]:
    results: Queue[Any] = _spawn.Queue()
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
        await short(5_000)
        await measurement.end_phase("warm-up")
        for number in range(3):
            await short(options.num_queued, at_once=options.num_queued)
            await measurement.end_phase(f"{options.num_queued} queued, {number + 1}")
        for number in range(3):
            await asyncio.to_thread(_join_and_leave, options.num_clients, address)
            await measurement.end_phase(f"{options.num_clients} clients, {number + 1}")
        facts = await asyncio.to_thread(_stop_and_go_on, options.stop_s, address, pid, results)
        await measurement.end_phase(f"a client stopped for {options.stop_s:g} s", **facts)
        for number in range(5):
            await short(options.num_requests // 5)
            done = options.num_requests // 5 * (number + 1)
            await measurement.end_phase(f"{done} short requests")
        await asyncio.sleep(3.0)
        await measurement.end_phase("idle again")
    probing.kill()
    probing.join()
    return measurement.phases


def _join_and_leave(num_clients: int, address: str) -> None:
    """Three processes at a time, each of which leaves in its own way."""
    numbers = list(range(num_clients // _CLIENTS_A_PROCESS))
    while numbers:
        some, numbers = numbers[:3], numbers[3:]
        running = []
        for number in some:
            ours, theirs = _spawn.Pipe()  # a killed process would leave a queue locked
            process = _spawn.Process(target=_join, args=(address, theirs, number % 3))
            process.start()
            running.append((number, process, ours))
        for _, _, ours in running:
            ours.recv()
        for number, process, _ in running:
            if number % 3 == 0:
                process.kill()
            process.join()


def _stop_and_go_on(stop_s: float, address: str, pid: int, results: "Queue[Any]") -> dict[str, Any]:
    process = _spawn.Process(target=_stream, args=(address, results))
    process.start()
    results.get(timeout=120)
    assert process.pid is not None
    before = _own_memory(pid)["rss_kib"]
    os.kill(process.pid, signal.SIGSTOP)
    time.sleep(stop_s)
    grown = _own_memory(pid)["rss_kib"] - before
    os.kill(process.pid, signal.SIGCONT)
    lengths = results.get(timeout=300)
    process.join()
    return {"grown_while_stopped_kib": grown, "tokens_of_each_stream": lengths}


app = make_app("measure_bounds", __doc__)


@app.default
def measure_bounds(options: Options | None = None) -> int:
    """Measure whether a daemon grows under load."""
    options = options or Options()
    with (
        tempfile.TemporaryDirectory(prefix="ec-") as folder,
        _daemon(Path(folder)) as (pid, address),
    ):
        phases = asyncio.run(_measure(options, address, pid))
    configuration = {name: value for name, value in asdict(options).items() if name != "json"}
    document = {"configuration": configuration, "environment": describe_run(), "phases": phases}
    write_document(document, options.json, stdout=options.json is None and not sys.stdout.isatty())
    return 0


if __name__ == "__main__":
    sys.exit(run_app(app, sys.argv[1:], failed=(OSError, RuntimeError)))
