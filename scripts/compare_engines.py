"""This engine and others on the same workload, in alternation (A B A B), on this machine; or one
engine alone.

    python scripts/compare_engines.py --engine "fp32=--dtype float32" \\
        --peer "vllm=PYTHON model=FOLDER" \\
        --server "llama.cpp=llama-server -m FILE --port {port}"

Workloads, in tokens cut from real English text, greedy, end-of-sequence ignored:
    W1        64 requests at once, 32-512 tokens in (log-uniform), 64 out
    W2        one request, 64 in, 128 out
    W3@RATE   48 requests of W1's kind, Poisson arrivals at RATE a second
    W4        32 requests at once, share 384 tokens, 32 of their own, 32 out
    prefill   one request, 2,000 in, 1 out; prefill@8000 has 8,000

Clients of a daemon or a server are other processes; a library given by its interpreter is asked in
its own process. A table goes to stderr, one JSON document to stdout as the last line. Exit code 0,
1 if something failed, 2 for wrong options.
"""

import functools
import os
import sys
import tempfile
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from frontend.load.report import describe_run, log, write_document
from scripts.command_line import make_app, run_app
from scripts.comparison.engines import Conditions, Engine, parse_engine, parse_peer, parse_server
from scripts.comparison.rounds import (
    as_table,
    run_resident_rounds,
    run_rounds,
    summarise_rounds,
)
from scripts.comparison.workloads import (
    DEFAULT_WORKLOADS,
    Workload,
    digest,
    make_rounds,
    make_warm_up,
)

_TIMEOUT_S = 900.0
app = make_app("compare_engines", __doc__)


def _several(text: str) -> Parameter:
    return Parameter(
        help=text,
        show_default=False,
        consume_multiple=False,
        negative="",
        allow_leading_hyphen=True,
    )


@app.default
def compare(
    *,
    engine: Annotated[
        tuple[str, ...],
        _several("NAME=OPTIONS of our daemon; env:VAR=VALUE among them. May be repeated."),
    ] = (),
    peer: Annotated[
        tuple[str, ...],
        _several("NAME=INTERPRETER [KEY=VALUE ...], or NAME=URL of an OpenAI-compatible server."),
    ] = (),
    server: Annotated[
        tuple[str, ...],
        _several("NAME=COMMAND ... {port} that starts an OpenAI-compatible server."),
    ] = (),
    model: Annotated[
        str, Parameter(help="For engines that name none; its tokenizer cuts the prompts.")
    ] = "smollm2-135m-instruct",
    workloads: Annotated[str, Parameter(help="Which, with commas.")] = ",".join(DEFAULT_WORKLOADS),
    rounds: Annotated[int, Parameter(help="How often each engine is launched and asked.")] = 3,
    resident: Annotated[
        bool,
        Parameter(help="Launch all once and ask them in turn: on machines whose speed changes."),
    ] = False,
    threads: Annotated[
        int | None, Parameter(help="Of every engine; default: one a core of this process.")
    ] = None,
    client_processes: int = 2,
    text: Annotated[
        Path | None, Parameter(help="To cut prompts from; default: Python's language reference.")
    ] = None,
    logs: Annotated[Path | None, Parameter(help="A folder for the output of engines.")] = None,
    json: Annotated[Path | None, Parameter(help="Write the document here too.")] = None,
) -> int:
    """Compare engines."""
    own = [parse_engine(one) for one in engine]
    others = [*map(parse_peer, peer), *map(parse_server, server)]
    engines: list[Engine] = [*own, *others]
    names = [one.name for one in engines]
    if not names or len(set(names)) < len(names):
        raise ValueError(
            f"engines with names of their own are compared, here {names}; give --engine, --peer "
            "and --server"
        )
    if rounds < 1 or client_processes < 1:
        raise ValueError("--rounds and --client-processes are at least 1")
    with tempfile.TemporaryDirectory(prefix="comparison-") as folder:
        asked, warm_up = _workloads(model, text, workloads, rounds)
        logs = logs or Path(folder) / "logs"
        logs.mkdir(parents=True, exist_ok=True)
        conditions = Conditions(
            model=model,
            num_threads=threads or len(os.sched_getaffinity(0)),
            client_processes=client_processes,
            startup_timeout_s=_TIMEOUT_S,
            workload_timeout_s=_TIMEOUT_S,
            logs=logs,
        )
        run = run_resident_rounds if resident else run_rounds
        done = run(engines, asked, warm_up, conditions, report=log)
        summary = summarise_rounds(done, [one.name for one in own], names)
        document = describe_run() | {
            "num_threads": conditions.num_threads,
            "client_processes": client_processes,
            "resident": resident,
            "workload": digest(asked),
            "engines": {one.name: one.setting for one in engines},
            **summary,
        }
    log(as_table(summary))
    write_document(document, json)
    return 1 if summary["failed"] else 0


def _workloads(
    model: str, text: Path | None, names: str, num_rounds: int
) -> tuple[list[list[Workload]], list[Workload]]:
    # what cuts the text is not for the client processes, which import this file
    from scripts.comparison.text import english_text, tokens_of

    token_ids = tokens_of(english_text(text), model)
    wanted = [name.strip() for name in names.split(",") if name.strip()]
    return make_rounds(token_ids, wanted, num_rounds=num_rounds), make_warm_up(token_ids)


main = functools.partial(run_app, app)

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
