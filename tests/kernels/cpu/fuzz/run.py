"""Random calls of every exported function of the native library, under its sanitizers.

    python tests/kernels/cpu/fuzz/run.py --seconds 60
    python tests/kernels/cpu/fuzz/run.py --seed 1234 --seconds 0      # one round again

The library is built with AddressSanitizer and UndefinedBehaviorSanitizer into the cache (a minute,
the first time), and called in a child process, with every instruction set of the machine in turn.
A right call must return; a wrong index, length or weight must raise ValueError before any memory is
touched. Whether values are right is for tests/kernels/cpu to say. Exit code 0; 1 if a sanitizer
reported, a wrong call was not refused or a function was never called: the report and the round's
seed are printed; 2 if the compiler has no sanitizers.
"""

import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

from cyclopts import App, Parameter

sys.path.insert(0, str(Path(__file__).resolve().parents[4]))

from kernels.cpu.library import (
    NativeFunction,
    NativeLibrary,
    NativeLibraryUnavailable,
    build_library,
    cache_folder,
    find_compiler,
)
from kernels.cpu.threads import Threads, choose_threads

_FLAGS = ("-O1", "-g1", "-fsanitize=address,undefined", "-fno-sanitize-recover=all")
_ASKED_BY_LOADING = {"ec_num_threads", "ec_isa", "ec_machine_isa", "ec_machine_has_avx_vnni"}
_CANNOT_RUN = 2


class CountedLibrary(NativeLibrary):
    """Remembers which functions were looked up."""

    def __init__(self, path: Path, threads: Threads) -> None:
        self.used = set(_ASKED_BY_LOADING)
        super().__init__(path, threads)

    def function(self, name: str, *argument_types: object) -> NativeFunction:
        self.used.add(name)
        return super().function(name, *argument_types)


def fuzz(path: Path, seconds: float, seed: int) -> None:
    """In the child: rounds of all operations until the time is over, one at least."""
    from tests.kernels.cpu.fuzz import products, rows, steps
    from tests.kernels.cpu.fuzz.random_case import ExactMemory, RandomCase

    operations: tuple[Callable[[NativeLibrary, RandomCase], None], ...] = (
        products.packed_rows,
        products.linear,
        products.wrong_linear,
        products.gather,
        products.quantised_activations,
        products.lora,
        products.experts,
        rows.embedding,
        rows.norms_and_activations,
        rows.sampling,
        rows.token_logprobs,
        rows.threads_and_instructions,
        rows.tiles,
        steps.attention,
        steps.chosen_keys,
        steps.rotary,
        steps.captured_step,
    )
    library = CountedLibrary(path, choose_threads(2))
    library.memory = ExactMemory()
    stop = time.monotonic() + seconds
    rounds = 0
    while rounds == 0 or time.monotonic() < stop:
        for isa in library.isas:
            with library.forced_isa(isa):
                for operation in operations:
                    print(f"{operation.__name__} on {isa}, --seed {seed + rounds}", flush=True)
                    operation(library, RandomCase(seed + rounds))
        rounds += 1
    never = exported_functions(path) - library.used
    if never:
        raise SystemExit(f"never called: {', '.join(sorted(never))}; write a case for each")
    print(f"{rounds} rounds of {len(operations)} cases, {len(library.used)} functions")


def exported_functions(path: Path) -> set[str]:
    """What the library gives to Python, by `nm`."""
    clean = {name: value for name, value in os.environ.items() if name != "LD_PRELOAD"}
    command = ["nm", "-D", "--defined-only", str(path)]
    lines = subprocess.run(command, capture_output=True, text=True, check=True, env=clean).stdout
    names = {line.split()[-1] for line in lines.splitlines()}
    return {name for name in names if name.startswith("ec_")}


def run_child(path: Path, runtime: str, seconds: float, seed: int) -> int:
    """Exit code of the whole; says what the child found."""
    child = subprocess.run(
        [sys.executable, __file__, "--child", str(path), f"--seconds={seconds}", f"--seed={seed}"],
        capture_output=True,
        text=True,
        check=False,
        env={
            **os.environ,
            "LD_PRELOAD": runtime,
            # Python's own allocations at exit are not ours
            "ASAN_OPTIONS": "detect_leaks=0:allocator_may_return_null=1",
            "UBSAN_OPTIONS": "print_stacktrace=1",
            "OMP_NUM_THREADS": "1",
        },
    )
    last = (child.stdout.splitlines() or ["nothing was called"])[-1]
    if child.returncode == 0:
        print(last)
        return 0
    print(child.stderr, file=sys.stderr)
    print(f"failed with {child.returncode} in: {last}", file=sys.stderr)
    return 1


def find_sanitizer() -> str:
    """Path of AddressSanitizer's runtime, which must be loaded before Python's.

    Raises:
        NativeLibraryUnavailable: no compiler, or one without it.
    """
    compiler = find_compiler()
    if compiler is None:
        raise NativeLibraryUnavailable("no C++ compiler, install g++ to fuzz the library")
    command = [compiler, "-print-file-name=libasan.so"]
    found = subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()
    if not Path(found).is_absolute():
        raise NativeLibraryUnavailable(f"{compiler} has no AddressSanitizer (libasan.so)")
    return found


app = App(name="fuzz", help=__doc__, help_format="plaintext", result_action="return_value")


@app.default
def main(
    *,
    seconds: Annotated[float, Parameter(help="How long.")] = 30.0,
    seed: Annotated[int, Parameter(help="Of the first round.")] = 0,
    child: Annotated[Path | None, Parameter(show=False)] = None,
) -> int:
    """Exit code, see above."""
    if child is not None:
        fuzz(child, seconds, seed)
        return 0
    try:
        runtime = find_sanitizer()
        path = build_library(cache_folder() / "sanitized", extra_flags=_FLAGS)
    except NativeLibraryUnavailable as error:
        print(error, file=sys.stderr)
        return _CANNOT_RUN
    return run_child(path, runtime, seconds, seed)


if __name__ == "__main__":
    sys.exit(app())
