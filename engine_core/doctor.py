"""`engine-core doctor`: what this machine has, what the engine will use of it, and what would help.
Loads no torch; a question that fails is a line, and the others still have their answers."""

import contextlib
import json as json_format
import os
import platform
import re
import shutil
import subprocess
import sys
import textwrap
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from engine_core.model_commands import Json, check_engine_installed, print_line, until_nobody_reads
from engine_core.startup.before_torch import (
    are_gpus_hidden,
    check_kernels_package,
    has_nvidia_driver,
)
from kernels.cpu import library as native
from kernels.cpu.threads import WrongNumberOfThreads, choose_threads
from protocol.memory import available_memory_bytes, group_limit_bytes, total_memory_bytes
from protocol.running_daemons import running_daemons

Answer = tuple[dict[str, Any], list[str]]
"""Facts by name, and what would help."""

_PORTS = (8000, 11434)
"""The port of `engine-core serve`, and Ollama's."""
_ASKED_S = 10.0
"""Seconds that another program has for its answer."""
_LEAST_FREE_BYTES = 2 << 30
_POPULATES = (5, 14)
"""The first Linux that takes pages of a KV cache ahead (`startup/cache_pages.py`)."""
_MOST_LINES = 20


@until_nobody_reads
def doctor(*, json: Json = False) -> int:
    """Returns 1 if the engine could not run here."""
    found = examine()
    if json:
        helps = [line for _, lines in found.values() for line in lines]
        facts = {name: its for name, (its, _) in found.items()}
        print_line(json_format.dumps(facts | {"would_help": helps}))
    else:
        print_line("\n".join(as_text(found, shutil.get_terminal_size((100, 24)).columns)))
    return 0 if found["versions"][0].get("can_run") else 1


def examine(root: Path = Path("/")) -> dict[str, Answer]:
    """What each question gave, in the order of reading. `root`: of the files of /proc and /sys."""
    gpu, kernels = _asked(_gpu), _asked(_kernels)
    return {
        "versions": _asked(_versions),
        "processor": _asked(lambda: _processor(root)),
        "threads": _asked(lambda: _threads(root)),
        "memory": _asked(lambda: _memory(root)),
        "gpu": gpu,
        "kernels": kernels,
        "models": _asked(lambda: _stored("models")),
        "packed_weights": _asked(lambda: _stored("weights")),
        "native_kernels": _asked(lambda: _folder(native.cache_folder())),
        "hub": _asked(_hub),
        "ports": _asked(lambda: _ports(root)),
        "engines": _asked(_engines),
        "will_use": _asked(lambda: _choice(gpu[0], kernels[0])),
    }


def as_text(found: dict[str, Answer], width: int) -> list[str]:
    """Lines, of what would help as many as there is room for."""
    lines: list[str] = []
    for name, (facts, _) in found.items():
        said = ", ".join(_said(*fact) for fact in facts.items() if fact[1] not in (None, "", []))
        lines += _wrapped(name, said or "none", width)
    helps = [_wrapped("would_help", line, width) for _, its in found.values() for line in its]
    num_stops = len(found["versions"][1])  # they are shown, whatever else there is
    for number, its in enumerate(helps):
        is_full = len(lines) + len(its) > _MOST_LINES - (number < len(helps) - 1)
        if is_full and number >= num_stops:
            return [*lines, f"and {len(helps) - number} more: engine-core doctor --json"]
        lines += its
    return lines


def _wrapped(name: str, said: str, width: int) -> list[str]:
    label = f"{name.replace('_', ' '):<16}"
    return textwrap.TextWrapper(width, label, " " * 16, break_on_hyphens=False).wrap(said)


def _said(name: str, value: Any) -> str:
    if name.endswith("_bytes"):
        size = f"{value / 1e9:.1f} GB" if value >= 1e9 else f"{value / 1e6:.0f} MB"
        return f"{name.removesuffix('_bytes')} {size}"
    value = {True: "yes", False: "no"}[value] if isinstance(value, bool) else value
    return f"{name} {'; '.join(value) if isinstance(value, list) else value}"


def _asked(question: Callable[[], Answer]) -> Answer:
    try:
        return question()
    except Exception as error:
        return {"unknown": " ".join(f"{error}".split()) or type(error).__name__}, []


def _versions() -> Answer:
    facts: dict[str, Any] = {"python": platform.python_version()}
    for name in ("engine-core", "torch", "triton", "transformers"):
        with contextlib.suppress(PackageNotFoundError):
            facts[name] = version(name)
    stops = []
    if sys.platform != "linux":
        stops.append(f"the engine needs Linux, this is {sys.platform}: use WSL or a container")
    try:
        check_engine_installed()
        from engine_core.model_files.download import cache_folder
        from engine_core.server.descriptors import limit_clients

        check_kernels_package()
        limit_clients(1)
        cache_folder()
        choose_threads()
    except Exception as error:
        stops.append(str(error))
    return facts | {"can_run": not stops}, stops


def _processor(root: Path) -> Answer:
    named = re.search(r"^model name\s*: (.*)", _read(root / "proc/cpuinfo"), re.M)
    governor = _read(root / "sys/devices/system/cpu/cpu0/cpufreq/scaling_governor")
    driver = _read(root / "sys/devices/system/cpu/cpu0/cpufreq/scaling_driver")
    facts = {
        "model": named[1] if named else platform.machine(),
        "cpus": os.cpu_count(),
        "allowed": len(os.sched_getaffinity(0)),
        "cores": len({*choose_threads(1, root=root).place_of_cpu} - {-1}),
        "nodes": len([*(root / "sys/devices/system/node").glob("node[0-9]*")]) or 1,
        "governor": governor,
    }
    # these drivers' powersave is the usual one, which raises frequencies at once
    is_slow = governor == "powersave" and driver not in ("intel_pstate", "amd-pstate-epp")
    slow = "the CPUs stay slow (powersave), as root: cpupower frequency-set -g performance"
    return facts, [slow] if is_slow else []


def _threads(root: Path) -> Answer:
    threads = choose_threads(root=root)
    helps = []
    if variable := re.search(r"\w+_THREADS$", threads.reason):
        helps.append(f"fewer threads than there could be: unset {variable[0]}")
    if "quota" in threads.reason:
        helps.append("fewer threads than cores: raise the group's cpu.max (docker's --cpus)")
    return {"num_threads": threads.count, "num_threads_reason": threads.reason}, helps


def _memory(root: Path) -> Answer:
    total = total_memory_bytes()
    kilobytes = dict(re.findall(r"(\w+): +(\d+) kB", _read(root / "proc/meminfo")))
    swapped = 1024 * (int(kilobytes.get("SwapTotal", 0)) - int(kilobytes.get("SwapFree", 0)))
    facts: dict[str, Any] = {"free_bytes": available_memory_bytes(), "total_bytes": total}
    facts |= {"limit_of_group_bytes": group_limit_bytes(), "swapped_bytes": swapped}
    helps, switch = [], root / "sys/kernel/mm/transparent_hugepage/enabled"
    if "[never]" in _read(switch):
        helps.append(f"weights of floats on huge pages are read faster: echo madvise >{switch}")
    if swapped > total // 20:
        helps.append("what is swapped out is slow; free memory, then: swapoff -a; swapon -a")
    release = re.match(r"(\d+)\.(\d+)", platform.release())
    if release and (int(release[1]), int(release[2])) < _POPULATES:
        helps.append("first prompts wait for memory: a Linux from 5.14 on takes its pages ahead")
    return facts, helps


def _gpu() -> Answer:
    """By nvidia-smi and, where there is one, by torch in a process of its own."""
    query = ["nvidia-smi", "--query-gpu=name,memory.total,driver_version", "--format=csv,noheader"]
    gpus = [line for line in _output(query).splitlines() if line.count(",") == 2]
    if not gpus and not has_nvidia_driver():
        return {}, []
    if are_gpus_hidden():
        why = "hidden on purpose: unset CUDA_VISIBLE_DEVICES"
    else:
        code = "from engine_core.startup.device import refused_gpu; print(refused_gpu() or 'ok')"
        said = _output([sys.executable, "-c", code]).strip().splitlines()
        why = said[-1] if said else f"no answer in {_ASKED_S:.0f} s: python -c 'import torch'"
    helps = [] if why == "ok" else [f"the GPU is not used: {why}"]
    return {"nvidia_smi": gpus or "says nothing", "torch_can_use_it": why == "ok"}, helps


def _kernels() -> Answer:
    """Those that `kernels.backends` would choose for a CPU; nothing is built."""
    facts: dict[str, Any] = {"kind": "native", "compiler": native.find_compiler() or "none"}
    facts["built"] = False
    try:
        is_off = os.environ.get(native.SWITCH_VARIABLE) == "0"
        if not is_off and native.find_prebuilt() is None:
            place = native.library_place(native.cache_folder())
            if not native.is_whole(place):
                return facts, ["the first start builds the native kernels: engine-core pull NAME"]
        library = native.load_library()
    except (native.NativeLibraryUnavailable, WrongNumberOfThreads) as error:
        why = f"torch runs models, slower than native kernels would: {error}"
        return facts | {"kind": "torch"}, [why]
    facts |= {"built": True, "by": _builder(library.path), "instruction_set": library.isa}
    facts |= {"best_instruction_set": library.machine_isa, "has_bfloat16": library.has_bfloat16}
    return facts, []


def _builder(library: Path) -> str:
    is_prebuilt = library == native.find_prebuilt()
    return "the wheel" if is_prebuilt else "this machine's compiler"


def _folder(folder: Path) -> Answer:
    taken = 0
    for place, _, names in os.walk(folder):
        for name in names:
            with contextlib.suppress(OSError):  # it is gone by now
                taken += (Path(place) / name).lstat().st_blocks * 512
    there = next(each for each in (folder, *folder.absolute().parents) if each.exists())
    free = shutil.disk_usage(there).free
    full = f"the disk of {there} is nearly full: engine-core list, then engine-core rm NAME"
    facts = {"folder": str(folder), "taken_bytes": taken, "free_bytes": free}
    return facts, [full] if free < _LEAST_FREE_BYTES else []


def _stored(part: str) -> Answer:
    from engine_core.model_files.download import cache_folder

    return _folder(cache_folder() / part)


def _hub() -> Answer:
    from huggingface_hub.constants import HF_HUB_CACHE

    return _folder(Path(HF_HUB_CACHE))


def _ports(root: Path) -> Answer:
    """Which processes listen at the ports, as far as this user may see."""
    tables = [_read(root / name).splitlines()[1:] for name in ("proc/net/tcp", "proc/net/tcp6")]
    rows = [line.split() for table in tables for line in table]
    sockets = {int(row[1].rpartition(":")[2], 16): row[9] for row in rows if row[3] == "0A"}
    return {str(each): _holder(root, sockets.get(each)) for each in _PORTS}, []


def _holder(root: Path, inode: str | None) -> str:
    """The name and pid of the process whose socket it is: its arguments may be secrets."""
    if inode is None:
        return "free"
    for descriptor in (root / "proc").glob("[0-9]*/fd/*"):
        with contextlib.suppress(OSError):
            if str(descriptor.readlink()) == f"socket:[{inode}]":
                process = descriptor.parents[1]
                return f"used by {_read(process / 'comm')}, pid {process.name}"
    return "used by another user"


def _engines() -> Answer:
    return {
        str(each.pid): f"{each.model}{'' if each.is_ready else ' (starting)'} at {each.address}"
        for each in running_daemons()
    }, []


def _choice(gpu: dict[str, Any], kernels: dict[str, Any]) -> Answer:
    """Device, kernels and dtype that `auto` means here, as `startup/device.py` chooses them."""
    chosen = "cpu", kernels.get("kind", "torch"), "float32", "this CPU has no units for bfloat16"
    if gpu.get("torch_can_use_it"):
        chosen = "cuda", "triton", "bfloat16", "or the checkpoint's: a GPU computes in 16 bits"
    elif kernels.get("has_bfloat16"):
        why = "of checkpoints of 16 bits: this CPU has units for bfloat16"
        chosen = *chosen[:2], "bfloat16", why
    elif chosen[1] == "torch":
        chosen = *chosen[:3], "there are no native kernels"
    elif not kernels["built"]:
        chosen = *chosen[:3], "or bfloat16: known when the native kernels are built"
    return dict(zip(("device", "kernels", "dtype", "dtype_reason"), chosen, strict=True)), []


def _output(command: list[str]) -> str:
    """What a program says on standard output; nothing if it is not there or takes too long."""
    with contextlib.suppress(OSError, subprocess.TimeoutExpired):
        return subprocess.run(command, capture_output=True, text=True, timeout=_ASKED_S).stdout
    return ""


def _read(file: Path) -> str:
    with contextlib.suppress(OSError):
        return file.read_text().strip()
    return ""
