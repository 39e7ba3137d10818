"""Puts load on a running daemon and measures it.

Open loop (--rate) for latency under a given load, closed loop (--concurrency) for throughput:

    python scripts/load_test.py --rate 2 --num-requests 200 --prompt-len 32:512
    python scripts/load_test.py --concurrency 64 --duration 30 --ignore-eos

A table goes to stderr; one JSON document to the file, or to stdout unless that is a terminal. Exit
code 0, 1 if a request failed, 2 for wrong options, 130 after Ctrl-C. Talks to the given address
and to nothing else.
"""

import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
import numpy as np
from cyclopts import Parameter

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from frontend import AsyncLLM, EngineClientError, SamplingParams, run
from protocol.addresses import default_address
from protocol.calls import EngineStatistics
from scripts.command_line import make_app, run_app
from scripts.load.arrivals import first_arrivals, poisson
from scripts.load.clients import (
    GREEDY,
    Client,
    ClientsFailed,
    ClosedLoop,
    Engine,
    OpenLoop,
    engine_stream,
    run_clients,
)
from scripts.load.records import RequestRecord, summarise
from scripts.load.report import as_table, describe_run, log, write_document
from scripts.load.workload import LengthRange, RequestGenerator

_LOG_EVERY_S = 10.0


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class LoadOptions:
    """Options of a run."""

    address: Annotated[str, Parameter(help="Of the daemon.")] = default_address()
    keys: Annotated[
        Path | None, Parameter(help="Your key's file, for a daemon on TCP with keys.")
    ] = None
    rate: Annotated[float | None, Parameter(help="Open loop: mean requests a second.")] = None
    concurrency: Annotated[int | None, Parameter(help="Closed loop: requests at a time.")] = None
    num_requests: Annotated[int | None, Parameter(help="End after so many requests.")] = None
    duration: Annotated[
        float | None, Parameter(help="Send for so many seconds; what was sent is waited for.")
    ] = None
    processes: Annotated[int, Parameter(help="Client processes.")] = 1
    prompt_len: Annotated[str, Parameter(help="Tokens, as 128 or 32:512.")] = "128"
    output_len: Annotated[str, Parameter(help="Most tokens generated, as 64 or 16:256.")] = "64"
    length_distribution: Annotated[
        Literal["log-uniform", "uniform"], Parameter(help="Of lengths within their ranges.")
    ] = "log-uniform"
    shared_prefix_len: Annotated[
        int, Parameter(help="Tokens that all prompts begin with, besides their own.")
    ] = 0
    text: Annotated[
        Path | None, Parameter(help="Cut prompts from this file; default: random tokens.")
    ] = None
    ignore_eos: Annotated[
        bool, Parameter(help="Always generate the full output length.", negative="")
    ] = False
    temperature: Annotated[float, Parameter(help="0 is greedy.")] = 0.0
    warmup: Annotated[int, Parameter(help="Requests before the measurement, one by one.")] = 0
    seed: Annotated[int, Parameter(help="Of lengths, prompts and arrivals.")] = 0
    json: Annotated[
        Path | None, Parameter(help="Where the document goes; default: a piped stdout.")
    ] = None

    @property
    def sampling(self) -> SamplingParams:
        return replace(GREEDY, temperature=self.temperature, ignore_eos=self.ignore_eos)

    def check(self) -> None:
        """Raises ValueError: options that contradict each other or are outside their limits."""
        if (self.rate is None) == (self.concurrency is None):
            raise ValueError("give either --rate (open loop) or --concurrency (closed loop)")
        if self.num_requests is None and self.duration is None:
            raise ValueError("the run has no end; give --num-requests or --duration")
        for name in ("concurrency", "num_requests", "processes", "shared_prefix_len", "warmup"):
            value, minimum = getattr(self, name), int(name not in ("shared_prefix_len", "warmup"))
            if value is not None and value < minimum:
                option = name.replace("_", "-")
                raise ValueError(f"--{option} is {value}, it must be at least {minimum}")
        for name in ("rate", "duration"):
            value = getattr(self, name)
            if value is not None and not 0 < value < float("inf"):
                raise ValueError(f"--{name} is {value}, it must be a number above 0")


async def _prepare(
    options: LoadOptions,
) -> tuple[RequestGenerator, dict[str, Any], EngineStatistics]:
    """What to send, facts about the model, and its statistics after the warm-up."""
    prompt_len, output_len = (
        LengthRange.parse(text, distribution=options.length_distribution)
        for text in (options.prompt_len, options.output_len)
    )
    async with _client(options) as llm:
        model = llm.model
        special: frozenset[int] = frozenset(model.eos_token_ids)
        if model.tokenizer is not None:
            special |= llm.get_tokenizer().special_token_ids
        generator = RequestGenerator(
            seed=options.seed,
            prompt_len=prompt_len,
            output_len=output_len,
            shared_prefix_len=options.shared_prefix_len,
            allowed_token_ids=tuple(i for i in range(model.vocab_size) if i not in special),
            text_token_ids=None if options.text is None else _read_text(options.text, llm),
        )
        if generator.longest_request > model.max_model_len:
            raise ValueError(
                f"requests of up to {generator.longest_request} tokens are asked for, the daemon's "
                f"limit is {model.max_model_len}; lower --prompt-len, --output-len or "
                "--shared-prefix-len, or start it with a larger --max-model-len"
            )
        client = Client(engine_stream(llm, options.sampling))
        for index in range(options.warmup):
            # negative indices: prompts that the measurement does not send again
            record = await client.send(generator.request(-1 - index), due_s=0.0)
            if record.error is not None:
                raise ValueError(f"a warm-up request failed: {record.error}")
        facts = {
            field: getattr(model, field)
            for field in ("name", "architecture", "dtype", "max_model_len", "num_blocks")
        }
        return generator, facts, await llm.statistics()


def _read_text(path: Path, llm: AsyncLLM) -> list[int]:
    token_ids = llm.get_tokenizer().encode(path.read_text(), add_special_tokens=False)
    if not token_ids:
        raise ValueError(f"{path} is empty; give a text to cut prompts from")
    return token_ids


def _client(options: LoadOptions) -> AsyncLLM:
    return AsyncLLM(options.address, client_name="load test", keys=options.keys)


async def _statistics(options: LoadOptions) -> EngineStatistics:
    async with _client(options) as llm:
        return await llm.statistics()


def _loop(options: LoadOptions, generator: RequestGenerator) -> OpenLoop | ClosedLoop:
    if options.concurrency is not None:
        return ClosedLoop(generator, options.concurrency, options.num_requests, options.duration)
    assert options.rate is not None, "checked with the options"
    arrivals_s = first_arrivals(
        poisson(options.rate, np.random.default_rng(options.seed)),
        num_requests=options.num_requests,
        duration_s=options.duration,
    )
    return OpenLoop(tuple(generator.request(*arrival) for arrival in enumerate(arrivals_s)))


def _progress(num_planned: int | None) -> Callable[[list[RequestRecord], float], None]:
    """Shows how far the run is, on a terminal each second and in the same line."""
    is_terminal = sys.stderr.isatty()
    due_s = 0.0
    total = "" if num_planned is None else f" of {num_planned}"

    def show(records: list[RequestRecord], now_s: float) -> None:
        nonlocal due_s
        if now_s < due_s:
            return
        due_s += 1.0 if is_terminal else _LOG_EVERY_S
        num_errors = sum(record.error is not None for record in records)
        line = f"{now_s:.0f} s: {len(records)}{total} requests ended, {num_errors} failed"
        print(line, end="\r" if is_terminal else "\n", file=sys.stderr, flush=True)

    return show


app = make_app("load_test", __doc__)


@app.default
def load_test(options: LoadOptions | None = None) -> int:
    """Put load on a daemon and measure it."""
    options = options or LoadOptions()
    options.check()
    generator, model, before = run(_prepare(options))
    loop = _loop(options, generator)
    num_planned = len(loop.requests) if isinstance(loop, OpenLoop) else loop.num_requests
    records = run_clients(
        Engine(options.address, options.keys),
        loop,
        num_processes=options.processes,
        sampling=options.sampling,
        on_progress=_progress(num_planned),
    )
    summary = summarise(records)
    configuration = asdict(options)
    for name in ("text", "keys"):
        configuration[name] = configuration[name] and str(configuration[name])
    del configuration["json"]
    if sys.stderr.isatty():
        print("\r\x1b[K", end="", file=sys.stderr)  # the line of progress
    log(as_table(summary))
    document = {
        "configuration": configuration,
        "model": model,
        "environment": describe_run(),
        "results": summary,
        "statistics_before": msgspec.structs.asdict(before),
        "statistics_after": msgspec.structs.asdict(run(_statistics(options))),
    }
    stdout = options.json is None and not sys.stdout.isatty()
    write_document(document, options.json, stdout=stdout)
    return 1 if summary["errors"] else 0


if __name__ == "__main__":
    sys.exit(run_app(app, sys.argv[1:], failed=(EngineClientError, ClientsFailed, OSError)))
