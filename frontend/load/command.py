"""`engine-client bench` puts load on a daemon, or on any server with OpenAI's or Ollama's API, and
measures it; `engine-client compare` compares two results. NumPy loads when a command runs."""

import contextlib
import dataclasses
import math
import sys
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any

import msgspec
from cyclopts import Parameter
from tqdm import tqdm

from frontend.async_llm import AsyncLLM
from frontend.cli.options import UsageError
from frontend.errors import EngineClientError, EngineUnavailable
from frontend.event_loop import run
from frontend.load.clients import (
    Client,
    ClientsFailed,
    Daemon,
    OpenLoop,
    Target,
    connected,
    run_clients,
)
from frontend.load.http_streams import ServerError
from frontend.load.interrupt import interrupted_by_sigterm
from frontend.load.options import (
    SEVERAL,
    LoadOptions,
    ReportOptions,
    TargetOptions,
    parse_goodput,
    parse_pairs,
)
from frontend.load.records import RequestRecord
from frontend.load.report import describe_run, give_document, log
from frontend.load.results import (
    Result,
    as_table,
    comparison_table,
    make_result,
    read_json,
    verdict_line,
    write_csv,
    write_json,
)
from frontend.load.traces import TraceError
from frontend.load.workload import WORDS, DatasetOptions, Workload
from protocol.calls import EngineStatistics

_LOG_EVERY_S = 10.0
_TARGET, _DATASET = TargetOptions(), DatasetOptions()
_LOAD, _REPORT = LoadOptions(), ReportOptions()


@contextlib.contextmanager
def _answered(command: str) -> Iterator[None]:
    """Errors become those of a command line."""
    if find_spec("numpy") is None:
        raise UsageError(
            f"{command} needs NumPy, of the extra `bench`; install it with `pip install numpy`"
        )
    with interrupted_by_sigterm():
        try:
            yield
        except (ValueError, TraceError) as error:
            raise UsageError(str(error)) from error
        except (ClientsFailed, ServerError) as error:
            raise EngineClientError(str(error)) from error
        except EngineUnavailable as error:
            server = "or measure a server over HTTP: --base-url http://127.0.0.1:8000"
            raise EngineClientError(f"{error}, {server}") from error


@_answered("bench")
def bench(
    *,
    target: TargetOptions = _TARGET,
    dataset: DatasetOptions = _DATASET,
    load: LoadOptions = _LOAD,
    report: ReportOptions = _REPORT,
) -> int:
    """Returns the exit code: 1 if a request failed."""
    report = report.with_out()
    dataset.check()
    load.check(dataset)
    slos_s, percentiles = parse_goodput(report.goodput), report.percentiles()
    metadata = dict(parse_pairs("metadata", report.metadata))
    asked, model, parts = run(_prepare(target, dataset))
    results: list[Result] = []
    run(_warm_up(asked, load.num_warmups, dataset, parts))
    for name, loop in load.loops(dataset, **parts):
        next(iter(loop.requests), None)  # a wrong file is told before processes start
        before = run(_statistics(asked))
        with tqdm(
            total=load.num_prompts or (None if load.duration else loop.requests.num_requests),
            desc=name,
            unit="req",
            mininterval=0.1 if sys.stderr.isatty() else _LOG_EVERY_S,
        ) as bar:
            outcome = run_clients(
                asked,
                loop,
                num_processes=load.processes,
                request_timeout_s=load.request_timeout,
                on_progress=_progress(bar),
            )
        facts = {
            "backend": target.api,
            "target": asked.address if isinstance(asked, Daemon) else target.base_url,
            "model_id": model["name"],
            "request_rate": _plain(loop.requests.arrivals.rate),
            "burstiness": _plain(load.burstiness),
            "max_concurrency": loop.limit,
            "num_prompts": len(outcome.records),
            "metadata": metadata,
            "configuration": _configuration(target, dataset, load, report),
            "model": model,
            "environment": describe_run(),
            "statistics_before": before,
            "statistics_after": run(_statistics(asked)),
        }
        result = make_result(
            f"{report.label}, {name}" if report.label and results else report.label or name,
            outcome,
            percentiles=percentiles,
            slos_s=slos_s,
            is_limited=isinstance(loop, OpenLoop) and loop.limit is not None,
            facts=facts,
        )
        results.append(result)
        log(f"{result.name}\n{as_table(result.document['results'])}")
        for warning in result.document["warnings"]:
            log(f"warning: {warning}")
    _write(report, results)
    return int(any(result.document["failed"] for result in results))


@_answered("compare")
def compare(
    first: Path,
    second: Path,
    /,
    *,
    goodput: Annotated[
        tuple[str, ...], SEVERAL, Parameter(help="SLOs, ms: ttft:500 tpot:50.")
    ] = (),
    json: Annotated[Path | None, Parameter(help="Where the document goes.")] = None,
    html: Annotated[Path | None, Parameter(help="A page with pictures.")] = None,
) -> int:
    """Returns the exit code. Runs of sweeps are compared in turn.

    Args:
        first: A result of `bench --json`.
        second: Another, which is compared with it.
    """
    from frontend.load.comparison import compare as compare_records
    from frontend.load.page import page

    sides = read_json(first), read_json(second)
    if len(sides[0]) != len(sides[1]):
        raise ValueError(
            f"{first} holds {len(sides[0])} runs and {second} {len(sides[1])}; compare as many"
        )
    slos_s = parse_goodput(goodput)
    pairs: list[Result] = []
    comparisons = []
    for one, other in zip(*sides, strict=True):
        if one.name == other.name:
            one = one._replace(name=f"{first.stem}, {one.name}")
            other = other._replace(name=f"{second.stem}, {other.name}")
        pairs += [one, other]
        comparisons.append(compare_records(one.records, other.records, slos_s=slos_s))
        log(f"{one.name} (first) against {other.name} (second)")
        log(comparison_table(comparisons[-1], "first", "second"))
        log(f"the second is {verdict_line(comparisons[-1])}")
        for side in (one, other):
            for warning in side.document["warnings"]:
                log(f"warning, {side.name}: {warning}")
    if html is not None:
        html.write_text(page(pairs, comparisons))
    document = {"first": str(first), "second": str(second), "comparisons": comparisons}
    give_document(document, json)
    return 0


async def _prepare(
    target: TargetOptions, dataset: DatasetOptions
) -> tuple[Target, dict[str, Any], dict[str, Any]]:
    """The target, facts about its model, and what prompts are made of."""
    made = target.make()
    is_chat = target.api.endswith("chat")
    parts: dict[str, Any] = {"is_chat": is_chat}
    text = None if dataset.text is None else dataset.text.read_text()
    if text is not None and not text.strip():
        raise ValueError(f"{dataset.text} is empty; give a text to cut prompts from")
    if not isinstance(made, Daemon):
        if made.model:
            made.check_reachable()
        else:
            made = dataclasses.replace(made, model=made.first_model())
        parts["units"] = text.split() if text else WORDS
        return made, {"name": made.model}, parts
    async with AsyncLLM(made.address, client_name="load test", keys=made.keys) as llm:
        model = llm.model
        if dataset.longest_request > model.max_model_len:
            raise ValueError(
                f"requests of up to {dataset.longest_request} tokens are asked for, the daemon's "
                f"limit is {model.max_model_len}; lower --input-len, --output-len or --prefix-len, "
                "or start it with a larger --max-model-len"
            )
        if is_chat:
            parts["units"] = text.split() if text else WORDS
        elif text is not None:
            parts["units"] = llm.get_tokenizer().encode(text, add_special_tokens=False)
        else:
            special: frozenset[int] = frozenset(model.eos_token_ids)
            if model.tokenizer is not None:
                special |= llm.get_tokenizer().special_token_ids
            parts["units"] = tuple(i for i in range(model.vocab_size) if i not in special)
        names = ("name", "architecture", "dtype", "max_model_len", "num_blocks")
        facts = {name: getattr(model, name) for name in names}
    return made, facts, (parts | {"max_prompt_tokens": model.max_model_len - 1})


async def _warm_up(
    target: Target, count: int, dataset: DatasetOptions, parts: dict[str, Any]
) -> None:
    """Prompts that the measurement does not send again."""
    if not count:
        return
    source = dataset if dataset.dataset_name == "random" else DatasetOptions()
    source = dataclasses.replace(source, turns=1, think=0.0, seed=dataset.seed + 2**32)
    async with connected(target) as stream:
        client = Client(stream)
        for request in Workload(options=source, num_requests=count, **parts):
            record, _ = await client.send(request, due_s=0.0)
            if record.error is not None:
                raise ClientsFailed(f"a warm-up request failed: {record.error}: {record.detail}")


async def _statistics(target: Target) -> dict[str, Any] | None:
    """A daemon's own; None of a server."""
    if not isinstance(target, Daemon):
        return None
    async with AsyncLLM(target.address, client_name="load test", keys=target.keys) as llm:
        statistics: EngineStatistics = await llm.statistics()
    return msgspec.structs.asdict(statistics)


def _progress(bar: Any) -> Callable[[list[RequestRecord], float], None]:
    failed = 0

    def show(records: list[RequestRecord], _now_s: float) -> None:
        nonlocal failed
        failed += sum(record.error is not None for record in records[bar.n :])
        bar.set_postfix(failed=failed, refresh=False)
        bar.update(len(records) - bar.n)

    return show


def _configuration(*groups: Any) -> dict[str, Any]:
    """All options as given; of headers only the names, which may be keys."""
    found: dict[str, Any] = {}
    for group in groups:
        found |= dataclasses.asdict(group)
    for name in ("out", "json", "csv", "html", "metadata"):
        del found[name]
    found["header"] = [one.partition("=")[0] for one in found["header"]]
    return {name: _plain(value) for name, value in found.items()}


def _plain(value: Any) -> Any:
    """The value for JSON, which has no infinity."""
    if isinstance(value, tuple):
        return [_plain(one) for one in value]
    return str(value) if value == math.inf or isinstance(value, Path) else value


def _write(report: ReportOptions, results: list[Result]) -> None:
    from frontend.load.page import page

    if report.json is not None:
        write_json(report.json, results)
    else:
        documents = [result.document for result in results]
        give_document(documents[0] if len(documents) == 1 else {"runs": documents}, None)
    if report.csv is not None:
        write_csv(report.csv, results)
    if report.html is not None:
        report.html.write_text(page(results))
