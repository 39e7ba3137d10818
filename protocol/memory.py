"""Memory of this machine and of a process, in bytes."""

import contextlib
import os
from pathlib import Path

_GROUPS = (
    ("/sys/fs/cgroup", "memory.max", "memory.current", "inactive_file "),
    (
        "/sys/fs/cgroup/memory",
        "memory.limit_in_bytes",
        "memory.usage_in_bytes",
        "total_inactive_file ",
    ),
)
"""Of control groups, versions 2 and 1: folder, limit, usage, and in memory.stat what is given up
first: files that were read."""


def available_memory_bytes() -> int:
    """Memory that this process may still take: the system's or the control group's, whichever
    is less."""
    return min(_system_available_bytes(), _cgroup_available_bytes())


def total_memory_bytes() -> int:
    """Memory that the system has."""
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def group_limit_bytes() -> int | None:
    """What this process's control group may take in all. None: as much as the system has."""
    for folder, limit, *_ in _GROUPS:
        with contextlib.suppress(OSError, ValueError):  # no such group, or the limit is "max"
            num_bytes = int((Path(folder) / limit).read_text())
            return num_bytes if num_bytes < total_memory_bytes() else None
    return None


def process_memory_bytes(pid: int) -> int | None:
    """What it has in memory, shared pages by their share. None: it is gone, or not ours."""
    folder = Path(f"/proc/{pid}")
    for name, field in (("smaps_rollup", "Pss:"), ("status", "VmRSS:")):
        try:
            for line in (folder / name).read_text().splitlines():
                if line.startswith(field):
                    return int(line.split()[1]) * 1024
        except OSError:
            continue
    return None


def _system_available_bytes() -> int:
    try:
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _cgroup_available_bytes() -> int:
    for folder, limit, usage, inactive in _GROUPS:
        group = Path(folder)
        try:
            free = int((group / limit).read_text()) - int((group / usage).read_text())
            for line in (group / "memory.stat").read_text().splitlines():
                if line.startswith(inactive):
                    free += int(line.removeprefix(inactive))
            return max(0, free)
        except (OSError, ValueError):  # no such group, or the limit is "max"
            continue
    return 2**62
