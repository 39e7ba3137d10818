"""Benchmarks of this machine. A table goes to stderr, one JSON document to stdout as the last line.

    python scripts/bench.py scheduler
    python scripts/bench.py startup --options "--dtype float32"
    python scripts/bench.py offline
    python scripts/bench.py cpu-kernels --rows 1 64 --kinds float32 int8 --isa avx2
    python scripts/bench.py cpu-operations model --rows 1 32

Exit code 0, 1 if something failed, 2 for wrong options.
"""

import os
import sys
from pathlib import Path
from typing import Annotated, Any, Literal

from cyclopts import Parameter

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from scripts.command_line import make_app, run_app
from scripts.load.report import describe_run, write_document

# what is measured is imported by its own command: the scheduler's must not find torch
app = make_app("bench", __doc__)

Json = Annotated[Path | None, Parameter(help="Write the document here too.")]
Model = Annotated[str, Parameter(help="A known model, a file or a folder.")]
Rows = Annotated[list[int], Parameter(consume_multiple=True, negative="")]
_DEFAULT_MODEL = "smollm2-135m-instruct"


@app.command
def scheduler(*, quick: bool = False, json: Json = None) -> int:
    """Microseconds that the scheduler takes: a step, an arrival, a long queue, a step's messages.

    No model and no torch: the sampled tokens are made up. One thread; the garbage collector runs as
    it does in the engine.

    Parameters
    ----------
    quick
        Tiny sizes: does it run at all?
    """
    from scripts.benchmarks import scheduler

    figures = scheduler.measure(quick=quick)
    if "torch" in sys.modules:
        raise SystemExit("torch was imported: the scheduler must not need it")
    return _report(scheduler.as_table(figures), figures, json)


@app.command
def startup(
    *,
    model: Model = _DEFAULT_MODEL,
    options: Annotated[str, Parameter(allow_leading_hyphen=True)] = "",
    repeat: int = 3,
    server: Annotated[list[str] | None, Parameter(negative="", consume_multiple=False)] = None,
    json: Json = None,
) -> int:
    """From launch to ready and to the first token, and the daemon's memory.

    The first launch is not counted: it warms the file cache, and what is compiled or packed once is
    there from then on.

    Parameters
    ----------
    options
        Of the daemon.
    repeat
        Launches; medians are reported.
    server
        NAME=COMMAND ... {port}: an OpenAI-compatible server, launched in alternation with the
        daemon. May be repeated.
    """
    from scripts.benchmarks import startup

    _check_repeat(repeat)
    figures = startup.measure(model, options, repeat, server or [])
    _report(startup.as_table(figures), figures, json)
    return 1 if figures["failed"] else 0


@app.command
def offline(*, model: Model = _DEFAULT_MODEL, repeat: int = 3, json: Json = None) -> int:
    """Throughput and single-stream speed, through the daemon and the client library.

    Random token ids, greedy, end-of-sequence ignored. Batch: 64 requests at once, prompt lengths
    log-uniform 32-512, 64 output tokens each. Single: one request, 64 tokens in, 128 out.

    Parameters
    ----------
    repeat
        Runs; medians are reported.
    """
    from scripts.benchmarks import offline

    _check_repeat(repeat)
    figures = offline.measure(model, repeat)
    return _report(offline.as_table(figures), figures, json)


@app.command
def cpu_kernels(
    *,
    rows: Rows = [1, 4, 16, 64, 256, 512],  # noqa: B006
    rounds: int = 10,
    kinds: Annotated[
        list[Literal["float32", "int8", "int4", "Q8_0", "Q4_0", "Q4_1", "Q4_K", "Q6_K"]] | None,
        Parameter(consume_multiple=True, negative=""),
    ] = None,
    isa: str | None = None,
    step: Annotated[bool, Parameter(negative="")] = False,
    json: Json = None,
) -> int:
    """The native dense products beside torch's prepacked ones, at SmolLM2-135M's shapes.

    All products of a shape alternate in one process, so a ratio is one of the same minute; the best
    of several rounds is given. With ENGINE_CORE_NATIVE_THREADS=1 the clock is the thread's own,
    which other programs disturb less.

    Parameters
    ----------
    rows
        Numbers of rows.
    kinds
        Of weights; default: all.
    isa
        Not the machine's best, but this one.
    step
        All products of one step of the model, 30 layers and the logits, with weights that no cache
        holds, in place of single shapes.
    """
    from scripts.benchmarks import cpu_kernels

    figures = cpu_kernels.measure(rows, rounds, kinds, isa, step=step)
    return _report(None, figures, json)


@app.command
def cpu_operations(
    what: Literal["operations", "model", "overhead"],
    *,
    only: str = "",
    threads: int | None = None,
    model: Model = _DEFAULT_MODEL,
    rows: Rows = [1, 32, 64],  # noqa: B006
    num_output: int = 48,
    long: int = 2000,
    weights: Literal["float32", "int8", "int4", "own"] = "float32",
    json: Json = None,
) -> int:
    """Native CPU operations beside torch's: each at a model's shapes, or a whole model.

    Backends alternate in one process; the best of several rounds is given. With --threads 1 the
    time is that of the one core's work, which other programs disturb little.

    Parameters
    ----------
    what
        "operations": each alone. "model": the real runner without scheduler and sockets, decode and
        a long prompt, after a check that both backends choose the same tokens up to near ties.
        "overhead": of a decode step, what is spent inside the library, and what around it.
    only
        Operations whose name contains this.
    threads
        Default: one a core.
    rows
        Requests decoded at once.
    num_output
        Tokens of each.
    long
        Tokens of the long prompt.
    weights
        Of "overhead"; "own": quantised ones as the file holds them.
    """
    import torch

    from kernels.cpu.library import THREADS_VARIABLE
    from scripts.benchmarks import cpu_models, cpu_operations

    threads = threads or len(os.sched_getaffinity(0))
    torch.set_num_threads(threads)
    os.environ[THREADS_VARIABLE] = str(threads)
    if what == "operations":
        return _report(None, cpu_operations.measure(only), json)
    from engine_core.model_files import open_model_files

    files = open_model_files(model, report=lambda line: print(line, file=sys.stderr))
    if what == "model":
        return _report(None, cpu_models.measure_model(files, rows, num_output, long), json)
    kept = None if weights == "own" else weights
    return _report(None, cpu_models.measure_overhead(files, rows, num_output, kept), json)


def _check_repeat(repeat: int) -> None:
    if repeat < 1:
        raise ValueError(f"--repeat is {repeat}, it must be 1 or more")


def _report(table: str | None, figures: dict[str, Any], json: Path | None) -> int:
    if table is not None:
        print(table, file=sys.stderr)
    write_document(describe_run() | figures, json)
    return 0


def main(arguments: list[str]) -> int:
    """Run one command line. Returns the exit code."""
    return run_app(app, arguments, refused=(ValueError,), failed=(RuntimeError, OSError))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
