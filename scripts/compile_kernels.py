"""Compiles every GPU kernel for sm_90 without a GPU, and says what it takes of the machine.

    python scripts/fetch_compiler.py     # once; prints the folder of the GPU machine's triton
    PYTHONPATH=.cache/triton-3.6.0 python scripts/compile_kernels.py \\
        --check docs/benchmarks/kernels_sm90.json

Every module of kernels/triton that has a `variants()` is asked what can be launched. A table
goes to stderr, one JSON document to --json FILE. Exit code 0, 1 if something is wrong with a
kernel, 2 for wrong options or input, 130 after Ctrl-C. Compiled kernels stay in triton's cache, so
that a second run takes seconds.
"""

import dataclasses
import json as json_format
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Any

from cyclopts import App, CycloptsError, Parameter

# `python scripts/compile_kernels.py` puts only this folder on the path
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from scripts.kernel_proof.compilation import (
    CAPABILITY,
    Compiler,
    Listing,
    Outcome,
    compile_variant,
    describe_compiler,
    interpreting,
    list_variants,
)
from scripts.kernel_proof.figures import Figures
from scripts.kernel_proof.judgement import compare, judge
from scripts.kernel_proof.workers import Workers

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = "kernels.triton"
NUM_PROCESSES = 2
Table = dict[tuple[str, str], Figures]


class CompileProofError(Exception):
    """The proof cannot be made; says what to do."""


def find_modules() -> list[str]:
    """Import names of the modules of the package, whatever is in them."""
    folder = ROOT.joinpath(*PACKAGE.split("."))
    files = sorted(path.relative_to(folder) for path in folder.rglob("*.py"))
    return [
        ".".join((PACKAGE, *path.with_suffix("").parts))
        for path in files
        if path.name != "__init__.py" and "__pycache__" not in path.parts
    ]


def _describe(_: None) -> Compiler | str:
    try:
        return describe_compiler()
    except (ImportError, OSError, RuntimeError) as error:
        return f"triton cannot compile here: {error}; scripts/fetch_compiler.py gets one that can"


def read_table(path: Path, compiler: Compiler) -> Table:
    """Figures by module and name of variant.

    Raises:
        CompileProofError: no such table, or another compiler's.
    """
    try:
        document = json_format.loads(path.read_text())
        made_by = document["compiler"]["triton"]
        table = {
            (row["module"], row["variant"]): Figures.from_json(row) for row in document["variants"]
        }
    except OSError as error:
        raise CompileProofError(f"cannot read {path}: {error.strerror}") from None
    except (ValueError, KeyError, TypeError) as error:
        raise CompileProofError(f"{path} is no table of compiled kernels: {error}") from None
    if made_by != compiler.triton:
        raise CompileProofError(
            f"{path.name} was made with triton {made_by}, this is {compiler.triton}; "
            "set PYTHONPATH to the folder that scripts/fetch_compiler.py prints"
        )
    return table


def as_document(compiler: Compiler, outcomes: Iterable[Outcome]) -> dict[str, Any]:
    """What --json writes: rows in the order of the modules."""
    return {
        "target": f"sm_{CAPABILITY}",
        "compiler": {"triton": compiler.triton, "ptxas": compiler.ptxas},
        "variants": [
            {"module": outcome.variant.module, "variant": outcome.variant.name}
            | dataclasses.asdict(outcome.figures)
            | _allowance(outcome)
            for outcome in outcomes
            if outcome.figures is not None
        ],
    }


def _allowance(outcome: Outcome) -> dict[str, Any]:
    """What of its spills is allowed, and why."""
    variant = outcome.variant
    if not variant.max_spill_bytes:
        return {}
    return {"max_spill_bytes": variant.max_spill_bytes, "spill_reason": variant.spill_reason}


def as_table(outcomes: Iterable[Outcome]) -> str:
    """A line a variant."""
    outcomes = list(outcomes)
    width = max([len(str(outcome.variant)) for outcome in outcomes], default=0)
    heads = ("regs", "stack", "sp.st", "sp.ld", "shared", "wgmma", "ptx", "s")
    lines = [" " * width + "".join(f"{head:>8}" for head in heads)]
    for outcome in outcomes:
        figures = outcome.figures
        if figures is None:
            lines.append(f"{outcome.variant!s:{width}}  does not compile")
            continue
        wgmma = f"{figures.num_wgmma}{'!' if figures.wgmma_serialized else ''}"
        cells = (
            figures.registers,
            figures.stack_bytes,
            figures.spill_store_bytes,
            figures.spill_load_bytes,
            figures.shared_bytes,
            wgmma,
            figures.ptx_bytes,
            f"{figures.compile_s:.1f}",
        )
        lines.append(f"{outcome.variant!s:{width}}" + "".join(f"{cell:>8}" for cell in cells))
    return "\n".join(lines)


app = App(
    name="compile_kernels", help=__doc__, help_format="plaintext", result_action="return_value"
)


@app.default
def compile_kernels(
    *,
    module: Annotated[
        tuple[str, ...],
        Parameter(help="Only this one; a file of kernels/triton or a dotted import name."),
    ] = (),
    only: Annotated[str, Parameter(help="Only variants with this in their name.")] = "",
    json: Annotated[Path | None, Parameter(help="Write the figures there.")] = None,
    check: Annotated[
        Path | None, Parameter(help="Fail if figures got worse than in this table.")
    ] = None,
) -> int:
    """Compile kernels and judge them."""
    if interpreting():
        raise CompileProofError("TRITON_INTERPRET is set: nothing can be compiled; unset it")
    known = find_modules()
    chosen = [name if "." in name else f"{PACKAGE}.{name}" for name in module] or known
    for name in chosen:
        if name.startswith(f"{PACKAGE}.") and name not in known:
            there = ", ".join(each.removeprefix(f"{PACKAGE}.") for each in known)
            raise CompileProofError(f"no module {name}; there is {there}")
    with Workers(NUM_PROCESSES) as workers:
        compiler = workers.run(_describe, [None], lambda _: "triton cannot be loaded")[0]
        if not isinstance(compiler, Compiler):
            raise CompileProofError(compiler)
        table = {} if check is None else read_table(check, compiler)
        listings = workers.run(
            list_variants, chosen, lambda name: Listing(name, error="importing it ends the process")
        )
        variants = [v for listing in listings for v in listing.variants if only in v.name]
        outcomes = workers.run(
            compile_variant, variants, lambda v: Outcome(v, error="it ends the compiler's process")
        )
    problems = [f"{each.module}: {each.error}" for each in listings if each.error is not None]
    if not (variants or problems) and (module or only):
        raise CompileProofError("--module and --only leave no variant")
    for outcome in outcomes:
        problems += judge(outcome)
    if check is not None:
        asked = [key for key in table if only in key[1] and (not module or key[0] in chosen)]
        problems += compare(outcomes, table, asked)
    print(f"triton {compiler.triton}, cache {compiler.cache_folder}", file=sys.stderr)
    print(as_table(outcomes), file=sys.stderr)
    for problem in problems:
        print(problem, file=sys.stderr)
    if json is not None:
        json.write_text(json_format.dumps(as_document(compiler, outcomes), indent=1) + "\n")
    return int(bool(problems))


def main(arguments: list[str]) -> int:
    """Run one command line. Returns the exit code."""
    try:
        return int(app(arguments, exit_on_error=False, print_error=False) or 0)
    except (CycloptsError, CompileProofError, OSError) as error:
        print(f"compile_kernels: {' '.join(str(error).split())}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
