"""Random calls of every exported function of the native library, under its sanitizers.

    python scripts/fuzz_native.py --seconds 60
    python scripts/fuzz_native.py --seed 1234 --seconds 0      # one round again

The library is built with AddressSanitizer and UndefinedBehaviorSanitizer into the cache (a minute,
the first time), and called in a child process, with every instruction set of the machine in turn.
Exit code 0; 1 if a sanitizer reported, a wrong call was not refused or a function was never
called: the report and the round's seed are printed; 2 if the compiler has no sanitizers.
"""

import argparse
import os
import subprocess
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from kernels.cpu.library import (
    ISA_NAMES,
    NativeFunction,
    NativeLibrary,
    NativeLibraryUnavailable,
    build_library,
    cache_folder,
    find_compiler,
)

_FLAGS = ("-O1", "-g1", "-fsanitize=address,undefined", "-fno-sanitize-recover=all")
_ASKED_BY_LOADING = {"ec_num_threads", "ec_isa", "ec_machine_isa"}
_CANNOT_RUN = 2


class CountedLibrary(NativeLibrary):
    """Remembers which functions were looked up."""

    def __init__(self, path: Path, num_threads: int) -> None:
        self.used = set(_ASKED_BY_LOADING)
        super().__init__(path, num_threads)

    def function(self, name: str, *argument_types: object) -> NativeFunction:
        self.used.add(name)
        return super().function(name, *argument_types)


def fuzz(path: Path, seconds: float, seed: int) -> None:
    """In the child: rounds of all cases until the time is over, one at least."""
    from scripts.native_fuzz.cases import CASES
    from scripts.native_fuzz.chance import Chance, ExactMemory

    library = CountedLibrary(path, 2)
    library.memory = ExactMemory()
    stop = time.monotonic() + seconds
    rounds = 0
    while rounds == 0 or time.monotonic() < stop:
        for isa in ISA_NAMES[: ISA_NAMES.index(library.machine_isa) + 1]:
            with library.forced_isa(isa):
                for case in CASES:
                    print(f"{case.__name__} on {isa}, --seed {seed + rounds}", flush=True)
                    case(library, Chance(seed + rounds))
        rounds += 1
    never = exported_functions(path) - library.used
    if never:
        raise SystemExit(f"never called: {', '.join(sorted(never))}; write a case for each")
    print(f"{rounds} rounds of {len(CASES)} cases, {len(library.used)} functions")


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


def main() -> int:
    """Exit code, see above."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seconds", type=float, default=30.0)
    parser.add_argument("--seed", type=int, default=0, help="of the first round")
    parser.add_argument("--child", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child is not None:
        fuzz(options.child, options.seconds, options.seed)
        return 0
    try:
        runtime = find_sanitizer()
        path = build_library(cache_folder() / "sanitized", extra_flags=_FLAGS)
    except NativeLibraryUnavailable as error:
        print(error, file=sys.stderr)
        return _CANNOT_RUN
    return run_child(path, runtime, options.seconds, options.seed)


if __name__ == "__main__":
    sys.exit(main())
