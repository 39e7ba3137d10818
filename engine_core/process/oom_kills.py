"""How often the kernel's OOM killer has struck, for a parent that asks who sent SIGKILL."""

from pathlib import Path


def count_oom_kills(root: Path = Path("/")) -> int:
    """Processes killed for want of memory: in this process's control group, or where that has no
    counter on the whole machine. 0 where nothing counts.

    Source: memory.events and memory.oom_control of cgroups(7), /proc/vmstat."""
    for path in (*_counters_of_group(root), root / "proc/vmstat"):
        try:
            lines = path.read_text().splitlines()
        except OSError:
            continue
        for line in lines:
            name, _, number = line.partition(" ")
            if name == "oom_kill":
                return int(number)
    return 0


def _counters_of_group(root: Path) -> list[Path]:
    """Of version 2, then 1; in a container the group may be mounted as the root of all."""
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return []
    files = []
    for line in sorted(lines, key=lambda line: not line.startswith("0::")):
        _, controllers, group = line.split(":", 2)
        if not controllers:
            top, name = root / "sys/fs/cgroup", "memory.events"
        elif "memory" in controllers.split(","):
            top, name = root / "sys/fs/cgroup/memory", "memory.oom_control"
        else:
            continue
        files += [top / group.lstrip("/") / name, top / name]
    return files
