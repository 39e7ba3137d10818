"""This engine and others on the same workload, in turn (A B A B), on this machine.

    python scripts/compare_engines.py --engine "fp32=--dtype float32" \
        --peer "vllm=PYTHON model=FOLDER" --server "llama.cpp=llama-server -m FILE --port {port}"

Workloads, in tokens cut from real English text, greedy, end-of-sequence ignored:
    W1        64 requests at once, 32-512 tokens in (log-uniform), 64 out
    W2        one request, 64 in, 128 out
    W3@RATE   48 requests of W1's kind, Poisson arrivals at RATE a second, streamed
    W4        32 requests at once, which share 384 tokens and have 32 of their own, 32 out
    prefill   one request, 2,000 in, 1 out

They are written to one file that all engines are served. Clients of a daemon or a server are other
processes; a library given by its interpreter is asked in its own process. A table goes to stderr,
one JSON document to stdout as the last line. Exit code 0, 1 if something failed, 2 for wrong
options.
"""

import json as json_module
import os
import signal
import sys
import tempfile
from pathlib import Path
from typing import Annotated

from cyclopts import App, CycloptsError, Parameter

# `python scripts/compare_engines.py` puts only this folder on the path
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from scripts.comparison.descriptions import DescriptionError
from scripts.comparison.launching import Conditions, System
from scripts.comparison.offline import parse_peer
from scripts.comparison.report import as_document, summarise, table
from scripts.comparison.systems import OwnEngine, ServerCommand
from scripts.comparison.turns import run_turns
from scripts.comparison.workloads import (
    DEFAULT_WORKLOADS,
    Workload,
    WorkloadError,
    digest,
    make_turns,
    make_warm_up,
    read_turns,
    write_turns,
)
from scripts.load.report import describe_run

app = App(name="compare_engines", help=__doc__, result_action="return_value")
_Several = Parameter(consume_multiple=False, negative="", allow_leading_hyphen=True)


def _text_help(help_text: str) -> Parameter:
    return Parameter(help=help_text)


@app.default
def compare(
    *,
    engine: Annotated[
        list[str] | None,
        _Several,
        _text_help("NAME=OPTIONS of our daemon; env:VAR=VALUE among them. May be repeated."),
    ] = None,
    peer: Annotated[
        list[str] | None,
        _Several,
        _text_help("NAME=INTERPRETER [KEY=VALUE ...], or NAME=URL of an OpenAI-compatible server."),
    ] = None,
    server: Annotated[
        list[str] | None,
        _Several,
        _text_help("NAME=COMMAND ... {port} that starts an OpenAI-compatible server."),
    ] = None,
    model: Annotated[
        str, _text_help("What engines run that name none; its tokenizer cuts the prompts.")
    ] = "smollm2-135m-instruct",
    workloads: Annotated[str, _text_help("Which, with commas.")] = ",".join(DEFAULT_WORKLOADS),
    turns: Annotated[int, _text_help("How often each engine is launched and asked.")] = 3,
    threads: Annotated[
        int | None, _text_help("Of every engine; default: one a core of this process.")
    ] = None,
    client_processes: int = 2,
    text: Annotated[
        Path | None, _text_help("To cut prompts from; default: Python's language reference.")
    ] = None,
    workload_file: Annotated[
        Path | None, _text_help("Served if it is there, else written; default: a temporary file.")
    ] = None,
    startup_timeout: float = 900.0,
    workload_timeout: float = 900.0,
    logs: Annotated[Path | None, _text_help("A folder for what engines say.")] = None,
    json: Annotated[Path | None, _text_help("Write the document here too.")] = None,
) -> int:
    """Compare engines."""
    own = [OwnEngine.parse(one) for one in engine or ()]
    peers = [parse_peer(one) for one in peer or ()]
    systems: list[System] = [*own, *peers, *map(ServerCommand.parse, server or ())]
    names = [system.name for system in systems]
    if len(systems) < 2 or len(set(names)) < len(names):
        raise DescriptionError(
            f"two engines or more with names of their own are compared, here {names}; give "
            "--engine, --peer and --server"
        )
    if turns < 1 or client_processes < 1:
        raise DescriptionError("--turns and --client-processes are at least 1")
    with tempfile.TemporaryDirectory(prefix="comparison-") as folder:
        path = workload_file or Path(folder) / "workloads.json"
        asked, first = _workloads(path, model, text, workloads, turns)
        conditions = Conditions(
            model=model,
            num_threads=threads or len(os.sched_getaffinity(0)),
            client_processes=client_processes,
            startup_timeout_s=startup_timeout,
            workload_timeout_s=workload_timeout,
            logs=_made(logs or Path(folder) / "logs"),
        )
        done = run_turns(systems, asked, first, conditions, report=_say)
        summary = summarise(done, [one.name for one in own], names)
        document = describe_run() | {
            "num_threads": conditions.num_threads,
            "client_processes": client_processes,
            "workload_file": digest(path),
            "systems": {system.name: system.setting for system in systems},
            **summary,
            "turns": [as_document(turn) for turn in done],
        }
    _say(table(summary))
    line = json_module.dumps(document)
    if json is not None:
        json.write_text(line + "\n")
    print(line)
    return 1 if summary["failed"] else 0


def _workloads(
    path: Path, model: str, text: Path | None, names: str, num_turns: int
) -> tuple[list[list[Workload]], list[Workload]]:
    # what cuts the text is not imported by the clients, which import this file
    wanted = [name.strip() for name in names.split(",") if name.strip()]
    if not path.exists():
        from scripts.comparison.text import NoText, english_text, tokens_of

        try:
            token_ids = tokens_of(english_text(text), model)
        except NoText as error:
            raise WorkloadError(str(error)) from error
        made = make_turns(token_ids, wanted, num_turns=num_turns)
        source = f"{text or 'the Python language reference'}, {model}"
        write_turns(path, make_warm_up(token_ids), made, source=source)
    first, found = read_turns(path)
    known = {workload.name for turn in found for workload in turn}
    if len(found) < num_turns or not known.issuperset(wanted):
        raise WorkloadError(
            f"{path} holds {len(found)} turns of {', '.join(sorted(known))}, asked for are "
            f"{num_turns} of {', '.join(wanted)}; remove it and let it be written anew"
        )
    by_name = [{workload.name: workload for workload in turn} for turn in found[:num_turns]]
    return [[turn[name] for name in wanted] for turn in by_name], first


def _made(folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def main(arguments: list[str]) -> int:
    """Run one command line. Returns the exit code."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # engines end with this process
    try:
        return int(app(arguments, exit_on_error=False, print_error=False) or 0)
    except (CycloptsError, DescriptionError, WorkloadError) as error:
        print(f"compare_engines: {' '.join(str(error).split())}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
