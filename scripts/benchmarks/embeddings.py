"""Sentences a second through client and daemon, in turn with other libraries."""

import json as json_format
import math
import random
import re
import statistics
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Annotated, Any

from cyclopts import Parameter

from frontend import LLM, PoolingParams
from frontend.load.report import log
from scripts.benchmarks import (
    START_TIMEOUT_S,
    Json,
    Repeat,
    cpu_seconds,
    report,
    running_daemon,
)
from scripts.comparison.processes import EngineProcess, environment_for

_PEER = Path(__file__).with_name("embedding_peer.py")
_CUT = PoolingParams(truncate_prompt_tokens=-1)


class Ours:
    """Client and daemon."""

    def __init__(self, llm: LLM, pid: int) -> None:
        self._llm, self._pid = llm, pid

    def run(self, batches: list[list[str]]) -> tuple[float, float, list[float]]:
        """Seconds, CPU seconds, the first vector."""
        started_s, cpu_s = time.perf_counter(), time.process_time() + cpu_seconds(self._pid)
        outputs = [self._llm.embed(texts, _CUT, use_tqdm=False) for texts in batches]
        elapsed_s = time.perf_counter() - started_s
        cpu_s = time.process_time() + cpu_seconds(self._pid) - cpu_s
        return elapsed_s, cpu_s, list(outputs[0][0].outputs.embedding)


class Peer:
    """Another library, in a process of its own."""

    def __init__(self, process: EngineProcess) -> None:
        self._process = process

    def run(self, batches: list[list[str]]) -> tuple[float, float, list[float]]:
        """Seconds, CPU seconds, the first vector. Raises EngineFailed: it has ended."""
        self._process.write_line(json_format.dumps(batches))
        answer = self._process.next_answer(START_TIMEOUT_S)
        return answer["seconds"], answer["cpu_s"], answer["vector"]


def sentences() -> list[str]:
    """Of this project's documents: of mixed lengths, in an order that does not change."""
    folder = Path(__file__).resolve().parents[2] / "docs"
    text = " ".join(file.read_text() for file in sorted(folder.glob("*.md")))
    found = [" ".join(part.split()) for part in re.split(r"(?<=[.!?])\s", text)]
    found = [part for part in found if 3 < len(part) < 1500]
    random.Random(0).shuffle(found)
    return found


def embeddings(
    *,
    folder: Annotated[str, Parameter(help="The model's, as `engine-core pull` prints it.")],
    peers: Annotated[str | None, Parameter(help="A Python with the other libraries.")] = None,
    options: Annotated[str, Parameter(allow_leading_hyphen=True, help="Of the daemon.")] = "",
    threads: int = 2,
    repeat: Repeat = 5,
    json: Json = None,
) -> None:
    """64 sentences one by one, and 256 at once; medians. CPU: sentences in a second of all THREADS,
    from the CPU time of all processes. Vectors must be equal to 1e-4."""
    texts = sentences()
    work = {"1": [[text] for text in texts[:64]], "256": [texts[:256]]}
    command = ["--model", folder, "--num-threads", str(threads), *options.split()]
    running: dict[str, Ours | Peer] = {}
    times: dict[str, list[tuple[float, float]]] = {}
    with ExitStack() as stack:
        daemon, ready = stack.enter_context(running_daemon(command))
        llm = stack.enter_context(LLM(address=ready["address"]))
        running["engine-core"] = Ours(llm, daemon.pid)
        logs = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        for kind in ("onnxruntime", "sentence-transformers") if peers else ():
            words = [str(peers), "-P", str(_PEER), kind, folder, str(threads)]
            environment = environment_for(threads, {})
            process = EngineProcess(words, environment, logs / kind, answers=True)
            running[kind] = Peer(stack.enter_context(process))
        for number in range(repeat + 1):
            for batch, batches in work.items():
                first = None
                for name, each in running.items():
                    elapsed_s, cpu_s, vector = each.run(batches)
                    first = first or vector
                    if math.dist(first, vector) > 1e-4 and not options:
                        raise RuntimeError(f"{name} gives another vector")
                    if number:  # the first run warms up
                        times.setdefault(f"{name}, {batch}", []).append((elapsed_s, cpu_s))
    counts = {batch: sum(map(len, batches)) for batch, batches in work.items()}
    figures: dict[str, Any] = {}
    for name, spent in times.items():
        count = counts[name.rpartition(", ")[2]]
        wall, cpu = (statistics.median(one[at] for one in spent) for at in range(2))
        figures[name] = [round(count / wall, 1), round(count / cpu * threads, 1)]
        log(f"{name:28}{figures[name][0]:9}/s wall{figures[name][1]:9}/s CPU")
    report({"folder": folder, "options": options, "sentences_per_s": figures}, json)
