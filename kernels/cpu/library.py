"""The native library: found in the wheel or in the user's cache, or built there from `src/` when
first used.

A binary is named by hashes of sources, flags and the compiler's version, and ends in its own
digest. Processes that start at once build once (a lock on a file). Loads no torch."""

import ctypes
import fcntl
import hashlib
import itertools
import os
import platform
import shutil
import stat
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from typing import Any

import platformdirs

from kernels.cpu.threads import Threads, WrongNumberOfThreads, choose_threads
from kernels.cpu.weight_memory import WEIGHT_MEMORY

SWITCH_VARIABLE = "ENGINE_CORE_NATIVE"
CACHE_VARIABLE = "ENGINE_CORE_NATIVE_CACHE"

AVX2_VNNI = "avx2_vnni"
"""What `forced_isa` calls avx2 with AVX-VNNI: without that name a forced avx2 has none."""

# the last is for tests: the kernels of "amx", whose instructions are computed in C++
X86_ISA_NAMES = ("portable", "avx2", "avx512", "avx512_bf16", "amx", "amx_emulated")
ARM_ISA_NAMES = ("portable", "neon", "neon_dot", "neon_i8mm")
ISA_NAMES = ARM_ISA_NAMES if platform.machine() in ("aarch64", "arm64") else X86_ISA_NAMES
"""The sets of this machine's architecture; each has what those before it have."""

_SOURCES = Path(__file__).parent / "src"
_PREBUILT = Path(__file__).parent / "prebuilt"
"""What `make wheel` puts into a wheel for one processor. A source tree has none."""
_FLAGS = ("-std=c++17", "-O3", "-fPIC", "-fvisibility=hidden", "-ffp-contract=off", "-pthread")
_LINK_FLAGS = ("-shared", "-pthread")
_BUILD_LIMIT_S = 600
_DIGEST_BYTES = hashlib.sha256().digest_size
_KEPT_S = 30 * 24 * 3600

POINTER, INT, INT64, FLOAT = ctypes.c_void_p, ctypes.c_int, ctypes.c_int64, ctypes.c_float
Members = list[tuple[str, Any]]

NativeFunction = Callable[..., "bytes | None"]
"""A call gives None, or the text of a refusal."""


def members(kind: Any, *names: str) -> Members:
    """Members of a `ctypes.Structure` that are of one type and follow one another."""
    return [(name, kind) for name in names]


class NativeLibraryUnavailable(Exception):
    """The library is switched off, or cannot be built or loaded; the text says why in one line."""


class NativeLibrary:
    """The loaded library.

    Attributes:
        path: of the file.
        build: tells sources, flags and compiler from others.
        num_threads: what an operation may use, the caller's included.
        memory: where packed weights lie.
    """

    def __init__(self, path: Path, threads: Threads) -> None:
        self._functions: dict[str, NativeFunction] = {}
        self.path, self.build = path, path.stem
        self.memory = WEIGHT_MEMORY
        try:
            self._dll = ctypes.CDLL(str(path))
        except OSError as error:
            raise NativeLibraryUnavailable(
                f"{path} does not load ({error}); remove it to have another built"
            ) from error
        start = self.function("ec_pool_start", INT, POINTER, POINTER, INT)
        num_cpus = len(threads.place_of_cpu)
        places, nodes = (
            (INT * num_cpus)(*of) for of in (threads.place_of_cpu, threads.node_of_cpu)
        )
        check(start(threads.count, places, nodes, num_cpus))
        self.num_threads = int(self._dll.ec_num_threads())

    def function(self, name: str, *argument_types: Any) -> NativeFunction:
        """An exported operation. The same object at every call with its name: look it up once."""
        found = self._functions.get(name)
        if found is None:
            function = self._dll[name]
            function.argtypes = argument_types
            function.restype = ctypes.c_char_p
            found = self._functions[name] = function
        return found

    @property
    def isa(self) -> str:
        """The instruction set in use: one of `ISA_NAMES`."""
        return ISA_NAMES[self._dll.ec_isa()]

    @property
    def machine_isa(self) -> str:
        """The best that this machine has."""
        return ISA_NAMES[self._dll.ec_machine_isa()]

    @property
    def has_bfloat16(self) -> bool:
        """Whether the set in use multiplies bfloat16."""
        return self.isa in ("avx512_bf16", "amx", "amx_emulated", "neon_i8mm")

    @property
    def isas(self) -> tuple[str, ...]:
        """Those that `forced_isa` takes on this machine."""
        found = ISA_NAMES[: ISA_NAMES.index(self.machine_isa) + 1]
        return (*found, "amx_emulated") if "avx512_bf16" in found else found

    @property
    def has_avx_vnni(self) -> bool:
        """Whether the set avx2 has AVX-VNNI on this machine."""
        return bool(self._dll.ec_machine_has_avx_vnni())

    @contextmanager
    def forced_isa(self, name: str) -> Iterator[None]:
        """For tests: another instruction set for all threads of the process, until it is left.
        Raises ValueError: the machine does not have it."""
        force = self.function("ec_force_isa", INT)
        check(force(257 if name == AVX2_VNNI else ISA_NAMES.index(name)))
        try:
            yield
        finally:
            check(force(-1))


def check(refusal: bytes | None) -> None:
    """Raise what an operation has refused, as ValueError."""
    if refusal is not None:
        raise ValueError(refusal.decode())


@lru_cache(maxsize=2)
def load_library(
    num_threads: int | None = None,
    report: Callable[[str], None] = lambda _line: None,
    *,
    by_node: bool = False,
) -> NativeLibrary:
    """The library of this process: the wheel's (`find_prebuilt`), or the cache's, built if it has
    none, which takes seconds.
    Raises NativeLibraryUnavailable: switched off by ENGINE_CORE_NATIVE=0, no compiler and nothing
    built before, or the compiler has failed.

    Args:
        num_threads: most that an operation may use; None: as `choose_threads` says. A process has
            one pool, which never shrinks.
        report: gets a line before the library is built, and one for each file.
        by_node: each node of memory has its own part of every operation.
    """
    if os.environ.get(SWITCH_VARIABLE, "1") == "0":
        raise NativeLibraryUnavailable(f"switched off by {SWITCH_VARIABLE}=0")
    try:
        threads = choose_threads(num_threads, by_node=by_node)
    except WrongNumberOfThreads as error:
        raise NativeLibraryUnavailable(str(error)) from error
    if prebuilt := find_prebuilt():
        try:
            return NativeLibrary(prebuilt, threads)
        except NativeLibraryUnavailable as error:  # an old libc, or code may not be run from there
            report(str(error))
    return NativeLibrary(build_library(cache_folder(), report=report), threads)


def find_prebuilt(folder: Path = _PREBUILT, sources: Path = _SOURCES) -> Path | None:
    """The shared object that came in the wheel; None: there is none, it is of other sources or
    damaged, or ENGINE_CORE_NATIVE=build asks for one of this machine's compiler."""
    if os.environ.get(SWITCH_VARIABLE) == "build" or not folder.is_dir():
        return None
    # whoever installed the wheel wrote this file, too
    return _find_built(folder, library_name(sources), owner=Path(__file__).stat().st_uid)


def build_library(
    cache: Path,
    sources: Path = _SOURCES,
    extra_flags: Sequence[str] = (),
    report: Callable[[str], None] = lambda _line: None,
) -> Path:
    """Path of the shared object for `sources`; compiled into `cache` if it is not there.
    Raises NativeLibraryUnavailable: no compiler, a compiler that fails, or a folder not writable.

    Args:
        extra_flags: for the compiler and the linker, such as a sanitizer's.
        report: gets a line before the compiler runs, and one for each file, from threads.
    """
    library = library_place(cache, sources, extra_flags)
    if is_whole(library):
        return library
    flags, headers, texts = _inputs(sources, extra_flags)
    compiler = find_compiler()
    assert compiler is not None, "library_place has found none"
    version = _run([compiler, "--version"])
    try:
        cache.mkdir(mode=0o700, parents=True, exist_ok=True)
        with (
            _locked(cache / "build.lock"),
            tempfile.TemporaryDirectory(dir=cache, prefix="build-") as folder,
        ):
            if not is_whole(library):
                report("building the native CPU kernels, once: this takes 10 s or more")
                compiled = [
                    cache / f"{_digest(flags, version.encode(), headers, texts[path])}.o"
                    for path in texts
                ]
                number = itertools.count(1)

                def compile_unit(unit: Path, made: Path) -> None:
                    _compile([compiler, *_FLAGS, *extra_flags], Path(folder), unit, made)
                    report(f"compiled {next(number)} of {len(texts)}: {unit.name}")

                with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
                    list(pool.map(compile_unit, texts, compiled))
                linked = Path(folder) / "linked.so"
                link = [compiler, *_LINK_FLAGS, *extra_flags, "-o", str(linked)]
                _run([*link, *map(str, compiled)])
                digest = hashlib.sha256(linked.read_bytes()).digest()
                with linked.open("ab") as file:
                    file.write(digest)  # the loader does not look behind the sections
                linked.replace(library)
                _drop_old(cache)
    except OSError as error:
        raise NativeLibraryUnavailable(
            f"cannot write the native library to {cache} ({error}); set {CACHE_VARIABLE} to a "
            "folder that is writable"
        ) from error
    return library


def library_place(cache: Path, sources: Path = _SOURCES, extra_flags: Sequence[str] = ()) -> Path:
    """Where in `cache` the shared object for `sources` is, or will be when it is built.
    Raises NativeLibraryUnavailable: no compiler and nothing built before, or a folder of others."""
    name = library_name(sources, extra_flags)
    compiler = find_compiler()
    _check_folder(cache)
    if compiler is None:
        if built := _find_built(cache, name):
            return built
        raise NativeLibraryUnavailable(
            "no C++ compiler (looked for $CXX, g++, clang++ and c++): install g++ for the native "
            "kernels (apt-get install g++)"
        )
    version = _run([compiler, "--version"])
    return cache / f"{name}-{_digest(version.encode())}.so"


def library_name(
    sources: Path = _SOURCES, extra_flags: Sequence[str] = (), machine: str = platform.machine()
) -> str:
    """How the names of shared objects of these sources for such a machine begin; a compiler's
    digest follows."""
    flags, headers, texts = _inputs(sources, extra_flags, machine)
    return _digest(flags, headers, *(path.name.encode() + text for path, text in texts.items()))


def _find_built(folder: Path, name: str, owner: int = 0) -> Path | None:
    built = sorted(folder.glob(f"{name}-*.so"))
    return next((each for each in built if is_whole(each, owner)), None)


def _inputs(
    sources: Path, extra_flags: Sequence[str], machine: str = platform.machine()
) -> tuple[bytes, bytes, dict[Path, bytes]]:
    """Flags and headers, and the text of each file to compile."""
    flags = " ".join((*_FLAGS, *_LINK_FLAGS, *extra_flags, machine)).encode()
    headers = b"".join(path.read_bytes() for path in sorted(sources.glob("*.h")))
    return flags, headers, {path: path.read_bytes() for path in sorted(sources.glob("*.cpp"))}


def is_whole(library: Path, owner: int = 0) -> bool:
    """Whether it is there, as this user, root or `owner` wrote it. Loading half a file ends the
    process by SIGBUS."""
    if not _is_ours(library, owner):
        return False
    try:
        content = library.read_bytes()
    except OSError:
        return False
    return hashlib.sha256(content[:-_DIGEST_BYTES]).digest() == content[-_DIGEST_BYTES:]


def _is_ours(path: Path, owner: int = 0) -> bool:
    """Whether it is a file that this user, root or `owner` wrote: its code is run."""
    try:
        status = path.lstat()
    except OSError:
        return False
    return stat.S_ISREG(status.st_mode) and status.st_uid in (os.getuid(), 0, owner)


def _check_folder(cache: Path) -> None:
    """Raises NativeLibraryUnavailable: others may replace what is in it."""
    if not cache.exists():
        return
    status = cache.stat()
    is_shared = bool(status.st_mode & stat.S_IWOTH and not status.st_mode & stat.S_ISVTX)
    if is_shared or status.st_uid not in (os.getuid(), 0):
        raise NativeLibraryUnavailable(
            f"other users may replace the code in {cache}; set {CACHE_VARIABLE} to a folder of "
            "your own"
        )


def _compile(command: Sequence[str], folder: Path, source: Path, compiled: Path) -> None:
    """Make `compiled`, unless an earlier build with the same texts has."""
    if not _is_ours(compiled):
        made = folder / f"{source.stem}.o"
        _run([*command, "-c", "-o", str(made), str(source)])
        made.replace(compiled)


def _drop_old(cache: Path) -> None:
    """Remove binaries of earlier versions; a process that has loaded one keeps it."""
    oldest = time.time() - _KEPT_S
    for path in [*cache.glob("*.o"), *cache.glob("*.so")]:
        if path.stat().st_mtime < oldest:
            path.unlink(missing_ok=True)


def cache_folder() -> Path:
    """Where binaries are kept: ENGINE_CORE_NATIVE_CACHE, or else below the user's cache.
    Raises NativeLibraryUnavailable: this user has no home folder."""
    chosen = os.environ.get(CACHE_VARIABLE)
    try:
        return Path(chosen) if chosen else platformdirs.user_cache_path("engine-core") / "native"
    except RuntimeError as error:
        raise NativeLibraryUnavailable(
            f"there is no folder to keep it in ({error}); set {CACHE_VARIABLE} to one"
        ) from error


def find_compiler() -> str | None:
    """$CXX, or else the first of g++, clang++ and c++ that is installed."""
    names = [os.environ.get("CXX"), "g++", "clang++", "c++"]
    return next((found for name in names if name and (found := shutil.which(name))), None)


def _run(command: Sequence[str]) -> str:
    try:
        done = subprocess.run(
            command,
            capture_output=True,
            text=True,
            timeout=_BUILD_LIMIT_S,
            check=False,
            env={**os.environ, "LC_ALL": "C"},  # the words below are English
        )
    except subprocess.TimeoutExpired as error:
        raise NativeLibraryUnavailable(
            f"{command[0]} took more than {_BUILD_LIMIT_S} s; build on a quieter machine"
        ) from error
    if done.returncode:
        lines = (done.stderr or done.stdout).splitlines()
        first = next((line for line in lines if "error:" in line), "no message")
        raise NativeLibraryUnavailable(f"{command[0]} failed with {done.returncode}: {first}")
    return done.stdout


def _digest(*parts: bytes) -> str:
    # a length before each part: moving a byte from one to the next changes the digest
    joined = b"".join(len(part).to_bytes(8, "little") + part for part in parts)
    return hashlib.sha256(joined).hexdigest()[:16]


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    flags = os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW
    with os.fdopen(os.open(path, flags, 0o600), "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
