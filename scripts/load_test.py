"""Puts load on a running daemon and measures it.

Open loop (`--rate`) for latency under a given load, closed loop (`--concurrency`) for throughput:

    python scripts/load_test.py --rate 2 --num-requests 200 --prompt-len 32:512 --output-len 64
    python scripts/load_test.py --concurrency 64 --duration 30 --ignore-eos --json run.json

A table goes to stderr, one JSON document to the file or to stdout. Exit code 0, 1 if a request
failed, 2 for wrong options, 130 after Ctrl-C. Talks to the given address and to nothing else.
"""

import json
import multiprocessing
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from cyclopts import App, CycloptsError

# `python scripts/load_test.py` puts only this folder on the path
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from frontend import AsyncLLM, EngineClientError, run
from protocol.statistics import EngineStatistics
from scripts.load.arrivals import first_arrivals, poisson
from scripts.load.options import LoadOptions, LoadTestError
from scripts.load.records import RequestRecord, summarise
from scripts.load.report import as_table, describe_run
from scripts.load.worker import LoadClient, WorkerPlan, work
from scripts.load.workload import LengthRange, Workload

_START_DELAY_S = 0.2
_PROGRESS_EVERY_S = 1.0
_LOG_EVERY_S = 10.0


async def _prepare(options: LoadOptions) -> tuple[Workload, dict[str, Any], EngineStatistics]:
    """Looks at the model, sends the warm-up; the workload, the model and the statistics then."""
    prompt_len, output_len = (
        LengthRange.parse(text, distribution=options.length_distribution)
        for text in (options.prompt_len, options.output_len)
    )
    async with AsyncLLM(options.address, client_name="load test") as llm:
        model = llm.model
        special: frozenset[int] = frozenset(model.eos_token_ids)
        if model.tokenizer is not None:
            special |= llm.get_tokenizer().special_token_ids
        workload = Workload(
            seed=options.seed,
            prompt_len=prompt_len,
            output_len=output_len,
            shared_prefix_len=options.shared_prefix_len,
            allowed_token_ids=tuple(i for i in range(model.vocab_size) if i not in special),
            text_token_ids=None if options.text is None else _read_text(options.text, llm),
        )
        if workload.longest_request > model.max_model_len:
            raise LoadTestError(
                f"requests of up to {workload.longest_request} tokens are asked for, the daemon's "
                f"limit is {model.max_model_len}; lower --prompt-len, --output-len or "
                "--shared-prefix-len, or start it with a larger --max-model-len"
            )
        plan = _plan(options, workload, part=0, arrivals=None)
        client = LoadClient(llm, plan, None)
        for index in range(options.warmup):
            # negative indices: prompts that the measurement does not send again
            record = await client.send(workload.request(-1 - index), due_s=0.0)
            if record.error is not None:
                raise LoadTestError(f"a warm-up request failed: {record.error}")
        facts = {
            field: getattr(model, field)
            for field in ("name", "architecture", "dtype", "max_model_len", "num_blocks")
        }
        return workload, facts, await llm.statistics()


def _read_text(path: Path, llm: AsyncLLM) -> list[int]:
    token_ids = llm.get_tokenizer().encode(path.read_text(), add_special_tokens=False)
    if not token_ids:
        raise LoadTestError(f"{path} is empty; give a text to cut prompts from")
    return token_ids


async def _statistics(address: str) -> EngineStatistics:
    async with AsyncLLM(address, client_name="load test") as llm:
        return await llm.statistics()


def _plan(
    options: LoadOptions, workload: Workload, *, part: int, arrivals: tuple[float, ...] | None
) -> WorkerPlan:
    return WorkerPlan(
        address=options.address,
        part=part,
        num_parts=options.processes,
        workload=workload,
        ignore_eos=options.ignore_eos,
        temperature=options.temperature,
        arrivals=arrivals,
        concurrency=options.concurrency,
        num_requests=options.num_requests,
        duration_s=options.duration,
    )


@contextmanager
def _workers(plans: list[WorkerPlan]) -> Iterator[dict[Connection, BaseProcess]]:
    """The client processes and the pipes to them. All of them end with the block."""
    context = multiprocessing.get_context("spawn")
    workers: dict[Connection, BaseProcess] = {}
    try:
        for plan in plans:
            ours, theirs = context.Pipe()
            process: BaseProcess = context.Process(target=work, args=(plan, theirs), daemon=True)
            process.start()
            theirs.close()
            workers[ours] = process
        yield workers
    finally:
        for pipe, process in workers.items():
            process.terminate()
            process.join()
            pipe.close()


def _measure(plans: list[WorkerPlan], num_planned: int | None) -> list[RequestRecord]:
    """Starts the processes, starts their clocks together, gathers their records."""
    with _workers(plans) as workers:
        for pipe in workers:
            _receive(pipe)
        start = time.monotonic() + _START_DELAY_S
        for pipe in workers:
            pipe.send(start)
        records: list[RequestRecord] = []
        running = set(workers)
        progress_due = start
        while running:
            readable = wait(list(running), timeout=_PROGRESS_EVERY_S)
            for pipe in running.intersection(readable):
                received = _receive(pipe)
                if received is None:
                    running.remove(pipe)
                else:
                    records.append(received)
            if time.monotonic() >= progress_due:
                progress_due += _PROGRESS_EVERY_S if sys.stderr.isatty() else _LOG_EVERY_S
                _show_progress(records, num_planned, time.monotonic() - start)
    return records


def _receive(pipe: Connection) -> Any:
    try:
        received = pipe.recv()
    except EOFError:
        raise LoadTestError("a client process ended before its work was done") from None
    if isinstance(received, str) and received != "ready":
        raise LoadTestError(f"a client process failed: {received}")
    return received


def _show_progress(records: list[RequestRecord], num_planned: int | None, now_s: float) -> None:
    total = "" if num_planned is None else f" of {num_planned}"
    num_errors = sum(record.error is not None for record in records)
    line = f"{max(now_s, 0):.0f} s: {len(records)}{total} requests ended, {num_errors} failed"
    end = "\r" if sys.stderr.isatty() else "\n"
    print(line, end=end, file=sys.stderr, flush=True)


app = App(name="load_test", help=__doc__, result_action="return_value")


@app.default
def load_test(options: LoadOptions | None = None) -> int:
    """Put load on a daemon and measure it."""
    options = options or LoadOptions()
    options.check()
    workload, model, before = run(_prepare(options))
    arrivals: tuple[float, ...] | None = None
    num_planned = options.num_requests
    if options.rate is not None:
        arrivals = first_arrivals(
            poisson(options.rate, np.random.default_rng(options.seed)),
            num_requests=options.num_requests,
            duration_s=options.duration,
        )
        num_planned = len(arrivals)
    plans = [
        _plan(options, workload, part=part, arrivals=arrivals) for part in range(options.processes)
    ]
    records = _measure(plans, num_planned)
    summary = summarise(records)
    document = {
        "configuration": asdict(options) | {"text": str(options.text) if options.text else None},
        "model": model,
        "environment": describe_run(),
        "results": summary,
        "statistics_before": msgspec.structs.asdict(before),
        "statistics_after": msgspec.structs.asdict(run(_statistics(options.address))),
    }
    document["configuration"].pop("json")
    print(as_table(summary), file=sys.stderr, flush=True)
    if options.json is None:
        print(json.dumps(document, ensure_ascii=False))
    else:
        options.json.write_text(json.dumps(document, ensure_ascii=False) + "\n")
    return 1 if summary["errors"] else 0


def main(arguments: list[str]) -> int:
    """Run one command line. Returns the exit code."""
    try:
        return int(app(arguments, exit_on_error=False, print_error=False) or 0)
    except (CycloptsError, LoadTestError, ValueError) as error:
        code, text = 2, str(error)
    except (EngineClientError, OSError) as error:
        code, text = 1, str(error)
    except KeyboardInterrupt:
        return 130
    print(f"load_test: {' '.join(text.split())}", file=sys.stderr)
    return code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
