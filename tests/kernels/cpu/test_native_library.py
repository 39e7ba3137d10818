"""The native library: built once, found again, refused with one line, and its pool of threads."""

import ctypes
import os
import shutil
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest

from kernels.cpu import library as native
from kernels.cpu.library import (
    NativeLibrary,
    NativeLibraryUnavailable,
    build_library,
    find_prebuilt,
    library_name,
)

SOURCE = """#include "answer.h"
extern "C" __attribute__((visibility("default"))) int answer() { return ANSWER; }
"""


@pytest.fixture
def sources(tmp_path: Path) -> Path:
    folder = tmp_path / "src"
    folder.mkdir()
    (folder / "answer.cpp").write_text(SOURCE)
    (folder / "answer.h").write_text("#define ANSWER 41\n")
    return folder


def answer(path: Path) -> int:
    return int(ctypes.CDLL(str(path)).answer())


@pytest.mark.usefixtures("library")
def test_a_library_is_built_once_and_again_when_a_header_changes(
    tmp_path: Path, sources: Path
) -> None:
    cache = tmp_path / "cache"
    built = build_library(cache, sources)
    made_at = built.stat().st_mtime_ns
    assert build_library(cache, sources) == built
    assert built.stat().st_mtime_ns == made_at
    assert answer(built) == 41
    (sources / "answer.h").write_text("#define ANSWER 42\n")
    changed = build_library(cache, sources)
    assert changed != built
    assert answer(changed) == 42
    assert not list(cache.glob("build-*"))


@pytest.mark.usefixtures("library")
def test_a_build_drops_binaries_of_a_month_ago(tmp_path: Path, sources: Path) -> None:
    cache = tmp_path / "cache"
    first = build_library(cache, sources)
    recent = cache / "recent.so"
    recent.write_bytes(b"")
    for path in (first, *cache.glob("*.o")):
        os.utime(path, (0, 0))
    (sources / "answer.h").write_text("#define ANSWER 43\n")
    second = build_library(cache, sources)
    assert sorted(cache.glob("*.so")) == sorted([recent, second])
    assert len(list(cache.glob("*.o"))) == 1


@pytest.mark.usefixtures("library")
def test_a_build_says_each_file_that_it_has_compiled_and_nothing_where_it_is_built(
    tmp_path: Path, sources: Path
) -> None:
    (sources / "other.cpp").write_text("int other() { return 0; }\n")
    lines: list[str] = []
    for _ in range(2):
        build_library(tmp_path / "cache", sources, report=lines.append)
    assert "building the native CPU kernels, once" in lines[0]
    assert [line.partition(":")[0] for line in lines[1:]] == ["compiled 1 of 2", "compiled 2 of 2"]
    assert {line.partition(": ")[2] for line in lines[1:]} == {"answer.cpp", "other.cpp"}


@pytest.mark.usefixtures("library")
def test_two_builders_at_once_make_one_library(tmp_path: Path, sources: Path) -> None:
    built: list[Path] = []
    builders = [
        threading.Thread(target=lambda: built.append(build_library(tmp_path / "cache", sources)))
        for _ in range(3)
    ]
    for builder in builders:
        builder.start()
    for builder in builders:
        builder.join()
    assert len(built) == 3
    assert len(set(built)) == 1
    assert answer(built[0]) == 41


@pytest.mark.usefixtures("library")
def test_a_compiler_error_is_one_line_with_its_place(tmp_path: Path, sources: Path) -> None:
    (sources / "answer.cpp").write_text(SOURCE.replace("return", "retrun"))
    with pytest.raises(
        NativeLibraryUnavailable, match=r"failed with 1: .*answer.cpp:2.*error"
    ) as e:
        build_library(tmp_path / "cache", sources)
    assert "\n" not in str(e.value)
    assert not list((tmp_path / "cache").glob("*.so"))


@pytest.mark.usefixtures("library")
def test_without_a_compiler_an_earlier_build_serves_and_else_one_line_says_why(
    tmp_path: Path, sources: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = tmp_path / "cache"
    built = build_library(cache, sources)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    assert build_library(cache, sources) == built
    with pytest.raises(NativeLibraryUnavailable, match=r"no C\+\+ compiler.*install g\+\+"):
        build_library(tmp_path / "other", sources)


@pytest.mark.usefixtures("library")
def test_a_cache_that_cannot_be_written_names_the_variable(tmp_path: Path, sources: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(NativeLibraryUnavailable, match="ENGINE_CORE_NATIVE_CACHE"):
        build_library(tmp_path / "file", sources)


def test_a_variable_switches_the_library_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ENGINE_CORE_NATIVE", "0")
    with pytest.raises(NativeLibraryUnavailable, match="ENGINE_CORE_NATIVE=0"):
        native.load_library.__wrapped__()


def test_a_wrong_number_of_threads_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ENGINE_CORE_NATIVE_THREADS", "two")
    with pytest.raises(NativeLibraryUnavailable, match=r"'two'.*whole number"):
        native.load_library.__wrapped__()


def test_every_task_runs_once_also_in_nested_calls(library: NativeLibrary) -> None:
    prove = library.function("ec_pool_prove", ctypes.c_int64, ctypes.c_void_p, ctypes.c_void_p)
    seen = np.zeros(library.num_threads, np.int64)
    done = 0
    for num_tasks in (0, 1, 2, 3, 100, 5000):
        for _ in range(50):
            out = np.zeros(max(num_tasks, 1), np.int64)
            assert prove(num_tasks, out.ctypes.data, seen.ctypes.data) is None
            assert np.array_equal(out[:num_tasks], 2 * np.arange(1, num_tasks + 1))
            done += num_tasks
    assert seen.sum() == done


def test_calls_from_several_threads_do_not_mix(library: NativeLibrary) -> None:
    prove = library.function("ec_pool_prove", ctypes.c_int64, ctypes.c_void_p, ctypes.c_void_p)
    wrong: list[int] = []

    def call() -> None:
        for num_tasks in range(300):
            out = np.zeros(max(num_tasks, 1), np.int64)
            seen = np.zeros(library.num_threads, np.int64)
            prove(num_tasks, out.ctypes.data, seen.ctypes.data)
            if not np.array_equal(out[:num_tasks], 2 * np.arange(1, num_tasks + 1)):
                wrong.append(num_tasks)

    callers = [threading.Thread(target=call, daemon=True) for _ in range(3)]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join()
    assert not wrong


def test_idle_threads_use_no_cpu() -> None:
    """In a process without other threads."""
    program = """
import ctypes, time
import numpy as np
from kernels.cpu.library import load_library

library = load_library()
prove = library.function("ec_pool_prove", ctypes.c_int64, ctypes.c_void_p, ctypes.c_void_p)
out, seen = np.zeros(64, np.int64), np.zeros(library.num_threads, np.int64)
prove(64, out.ctypes.data, seen.ctypes.data)
time.sleep(0.05)
before_s = time.process_time()
time.sleep(0.5)
print(time.process_time() - before_s)
"""
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert float(done.stdout) < 0.005  # 1 % of a core


def test_a_helper_leaves_the_cpu_that_its_caller_was_moved_to(library: NativeLibrary) -> None:
    if library.num_threads < 2:
        pytest.skip("this machine gives one thread")
    prove = library.function("ec_pool_prove", ctypes.c_int64, ctypes.c_void_p, ctypes.c_void_p)
    out, seen = np.zeros(64, np.int64), np.zeros(library.num_threads, np.int64)
    caller = threading.get_native_id()
    allowed = os.sched_getaffinity(0)

    def pinned_others() -> list[set[int]]:
        threads = [int(path.name) for path in Path("/proc/self/task").iterdir()]
        places = [os.sched_getaffinity(thread) for thread in threads if thread != caller]
        return [place for place in places if len(place) == 1]

    try:
        for cpu in sorted(allowed):
            os.sched_setaffinity(caller, {cpu})
            prove(64, out.ctypes.data, seen.ctypes.data)
            assert pinned_others(), "the pool's threads are pinned"
            assert {cpu} not in pinned_others()
    finally:
        os.sched_setaffinity(caller, allowed)


_POOL = """
import ctypes, os, sys, threading, time
from pathlib import Path
import numpy as np
from kernels.cpu.library import build_library, cache_folder

dll = ctypes.CDLL(str(build_library(cache_folder())))
allowed = sorted(os.sched_getaffinity(0))
out, seen = np.zeros(64, np.int64), np.zeros(64, np.int64)

def start(num_threads, places, nodes=None):
    numbers = ctypes.c_int * len(places)
    nodes = numbers(*(nodes or [0] * len(places)))
    assert not dll.ec_pool_start(num_threads, numbers(*places), nodes, len(places))

def prove(num_jobs):
    out[:] = seen[:] = 0
    for _ in range(num_jobs):
        dll.ec_pool_prove(ctypes.c_int64(64), ctypes.c_void_p(out.ctypes.data),
                          ctypes.c_void_p(seen.ctypes.data))
    assert np.array_equal(out, 2 * num_jobs * np.arange(1, 65)) and seen.sum() == 64 * num_jobs

def helpers():
    own = threading.get_native_id()
    tasks = [int(path.name) for path in Path("/proc/self/task").iterdir()]
    return [os.sched_getaffinity(task) for task in tasks if task != own]
"""


def run_with_pool(program: str) -> None:
    command = [sys.executable, "-c", _POOL + program]
    only_ours = os.environ | {"OPENBLAS_NUM_THREADS": "1"}  # numpy's threads would be counted
    done = subprocess.run(command, timeout=60, check=False, env=only_ours)
    assert done.returncode == 0


@pytest.mark.usefixtures("library")
@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="needs two CPUs")
def test_threads_of_a_node_take_its_share_first_and_then_help_the_others() -> None:
    run_with_pool("""
places, nodes = [-1] * (allowed[-1] + 1), [0] * (allowed[-1] + 1)
first, second = allowed[:2]
places[first], places[second], nodes[second] = 0, 1, 1
start(2, places, nodes)
os.sched_setaffinity(0, {first})
prove(500)
taken, own = np.zeros(40, np.int64), 0
for _ in range(20):
    assert not dll.ec_pool_show(ctypes.c_int64(40), ctypes.c_void_p(taken.ctypes.data), 0)
    own += (taken[:20] == 0).sum() + (taken[20:] == 1).sum()
assert own > 500, own  # of 800; without nodes a half
assert not dll.ec_pool_show(ctypes.c_int64(40), ctypes.c_void_p(taken.ctypes.data), 1)
assert (taken[:20] == 0).all() and (taken == 0).sum() > 25, taken  # the other one sleeps longer
""")


@pytest.mark.usefixtures("library")
def test_a_pool_of_more_threads_than_cpus_wakes_no_more_than_there_are() -> None:
    """A container's CPUs may become fewer while the engine runs."""
    run_with_pool("""
places = [-1] * (allowed[-1] + 1)
for number, cpu in enumerate(allowed):
    places[cpu] = number
start(16, places)
prove(500)
for task in Path("/proc/self/task").iterdir():
    os.sched_setaffinity(int(task.name), {allowed[0]})
dll.ec_pool_wake()
prove(500)
time.sleep(0.05)
dll.ec_pool_wake()
prove(500)
assert not seen[1:].any(), "the one CPU is the caller's"
""")


@pytest.mark.usefixtures("library")
def test_threads_are_pinned_only_where_they_take_every_place() -> None:
    """Other engines may have the other places."""
    run_with_pool("""
cpus = {allowed[0], allowed[-1]}
places = [-1] * (allowed[-1] + 3)
for number, cpu in enumerate(sorted(cpus)):
    places[cpu] = number
places[-1] = 2
start(2, places)
assert helpers().count(cpus) == 1, helpers()
prove(10)
start(3, places)
assert [len(each) for each in helpers()].count(1) >= 1, helpers()
prove(10)
""")


@pytest.mark.usefixtures("library")
def test_a_forked_child_computes_without_its_parents_threads() -> None:
    program = """
import ctypes, os, numpy as np
from kernels.cpu.library import load_library
library = load_library()
prove = library.function("ec_pool_prove", ctypes.c_int64, ctypes.c_void_p, ctypes.c_void_p)
out, seen = np.zeros(50, np.int64), np.zeros(64, np.int64)
prove(50, out.ctypes.data, seen.ctypes.data)
child = os.fork()
if child == 0:
    prove(50, out.ctypes.data, seen.ctypes.data)
    os._exit(0 if np.array_equal(out, 4 * np.arange(1, 51)) else 3)
raise SystemExit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""
    done = subprocess.run([sys.executable, "-c", program], timeout=60, check=False)
    assert done.returncode == 0


def test_an_unknown_instruction_set_is_refused(library: NativeLibrary) -> None:
    force = library.function("ec_force_isa", ctypes.c_int)
    assert b"not in [-1, " in (force(7) or b"")


@pytest.mark.skipif(os.getuid() != 0, reason="only root can make files of others")
def test_code_that_another_user_may_have_put_there_is_not_run(
    tmp_path: Path, sources: Path
) -> None:
    """Also where what is built would be put by a link."""
    cache = tmp_path / "cache"
    cache.mkdir(mode=0o700)
    cache.chmod(0o1777)
    library = build_library(cache, sources)
    before = library.read_bytes()
    for each in cache.iterdir():
        os.lchown(each, 12_345, 12_345)
    (tmp_path / "victim").write_text("mine")
    (cache / "build.lock").unlink()
    (cache / "build.lock").symlink_to(tmp_path / "victim")
    with pytest.raises(NativeLibraryUnavailable, match="cannot write"):
        build_library(cache, sources)
    assert (tmp_path / "victim").read_text() == "mine"
    (cache / "build.lock").unlink()
    assert build_library(cache, sources).stat().st_uid == 0
    assert library.read_bytes()[:4] == before[:4]
    for mode, owner in ((0o777, 0), (0o700, 12_345)):
        cache.chmod(mode)
        os.chown(cache, owner, owner)
        with pytest.raises(NativeLibraryUnavailable, match="other users may replace"):
            build_library(cache, sources)


@pytest.mark.packages
def test_the_sources_compile_for_aarch64() -> None:
    compiler = shutil.which("aarch64-linux-gnu-g++")
    if compiler is None:
        pytest.skip("needs Debian's g++-aarch64-linux-gnu")
    sources = sorted((Path(native.__file__).parent / "src").glob("*.cpp"))
    command = [compiler, "-std=c++17", "-fsyntax-only", "-Wall", "-Werror", *map(str, sources)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.usefixtures("library")
@pytest.mark.parametrize("num_bytes", [0, 5000, -1])
def test_a_damaged_library_is_built_again(tmp_path: Path, sources: Path, num_bytes: int) -> None:
    """Loading one that is cut short ends the process by SIGBUS."""
    cache = tmp_path / "cache"
    built = build_library(cache, sources)
    whole = built.read_bytes()
    built.write_bytes(whole[:num_bytes])
    assert build_library(cache, sources) == built
    assert built.read_bytes() == whole
    assert answer(built) == 41


@pytest.fixture
def prebuilt(tmp_path: Path, sources: Path) -> Path:
    """As a wheel holds it."""
    folder = tmp_path / "prebuilt"
    folder.mkdir()
    built = build_library(tmp_path / "cache", sources)
    return built.rename(folder / f"{library_name(sources)}-wheel.so")


@pytest.mark.usefixtures("library")
def test_what_the_wheel_brings_is_found_by_its_sources(
    prebuilt: Path, sources: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert find_prebuilt(prebuilt.parent, sources) == prebuilt
    monkeypatch.setenv("ENGINE_CORE_NATIVE", "build")
    assert find_prebuilt(prebuilt.parent, sources) is None
    monkeypatch.delenv("ENGINE_CORE_NATIVE")
    assert find_prebuilt(prebuilt.parent / "none", sources) is None
    (sources / "answer.h").write_text("#define ANSWER 42\n")
    assert find_prebuilt(prebuilt.parent, sources) is None


@pytest.mark.usefixtures("library")
def test_a_damaged_library_of_the_wheel_is_not_loaded(prebuilt: Path, sources: Path) -> None:
    prebuilt.write_bytes(prebuilt.read_bytes()[:-1])
    assert find_prebuilt(prebuilt.parent, sources) is None


@pytest.mark.skipif(os.getuid() != 0, reason="only root can make files of others")
@pytest.mark.usefixtures("library")
def test_a_library_of_the_wheel_is_of_who_installed_it_or_not_loaded(
    prebuilt: Path, sources: Path
) -> None:
    os.chown(prebuilt, 12_345, 12_345)
    assert find_prebuilt(prebuilt.parent, sources) is None


@pytest.mark.usefixtures("library")
def test_where_the_wheels_library_does_not_load_one_is_built(
    tmp_path: Path, library: NativeLibrary, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a system whose libc is older, or where no code is run from its folder."""
    other = tmp_path / "other.so"
    other.write_bytes(b"for another system")
    monkeypatch.setattr(native, "find_prebuilt", lambda: other)
    lines: list[str] = []
    assert native.load_library.__wrapped__(report=lines.append).path == library.path
    assert "other.so does not load" in lines[0]
