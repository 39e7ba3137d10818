"""How many threads an operation may use, and where: the CPUs of this process's affinity, one a
physical core, cut by the quotas of its control groups."""

import dataclasses
import math
import os
from collections.abc import Iterator
from pathlib import Path

THREADS_VARIABLE = "ENGINE_CORE_NATIVE_THREADS"
_OPENMP = "OMP_NUM_THREADS"
_ROOT = Path("/")


@dataclasses.dataclass(frozen=True, slots=True)
class Threads:
    count: int
    """How many there are, the caller's included."""
    reason: str
    """What has made them fewer than the process's CPUs, such as "2 of 4 CPUs: hyper-threads", and
    how many nodes of memory are told apart."""
    place_of_cpu: tuple[int, ...]
    """The number of the place that each CPU belongs to: a core's, or with more threads than cores
    its own; -1 for CPUs that the process may not use."""
    node_of_cpu: tuple[int, ...]
    """The number of each CPU's node of memory, among those that the process's CPUs have; 0 for all
    if the nodes are not told apart."""


class WrongNumberOfThreads(ValueError):
    """A variable that is not a whole number above 0."""


def choose_threads(
    wanted: int | None = None,
    allowed: frozenset[int] | None = None,
    root: Path = _ROOT,
    *,
    by_node: bool = False,
) -> Threads:
    """The threads of this process. Raises WrongNumberOfThreads.

    Args:
        wanted: at most that many, hyper-threads included; None: one a core. The variable
            ENGINE_CORE_NATIVE_THREADS says the same; without it OMP_NUM_THREADS lowers the number.
        allowed: the CPUs; None: those of the process's affinity.
        root: of the file system that /proc and /sys are in.
        by_node: tell the nodes of memory apart.
    """
    cpus = sorted(os.sched_getaffinity(0) if allowed is None else allowed)
    core_of = {cpu: _first_sibling(cpu, root) for cpu in cpus}
    num_cores = len(set(core_of.values()))
    limits = [(len(cpus), "")]
    if wanted is not None:
        limits.append((wanted, "--num-threads"))
    variable = next((name for name in (THREADS_VARIABLE, _OPENMP) if _number_in(name)), None)
    if variable is not None:
        limits.append((_number_in(variable) or 1, variable))
    if wanted is None and variable != THREADS_VARIABLE:
        limits.append((num_cores, "hyper-threads"))
    if (quota := cpu_quota(root)) is not None:
        limits.append((max(1, math.floor(quota + 0.5)), f"a quota of {quota:.4g} CPUs"))
    count, why = min(limits, key=lambda limit: limit[0])
    places = [core_of[cpu] if count <= num_cores else cpu for cpu in cpus]
    numbers = {place: number for number, place in enumerate(dict.fromkeys(places))}
    place_of_cpu = [-1] * (cpus[-1] + 1)
    for cpu, place in zip(cpus, places, strict=True):
        place_of_cpu[cpu] = numbers[place]
    reason = why and f"{count} of {len(cpus)} CPUs: {why}"
    # fewer threads than cores are not pinned, and so of no node
    node_of = {cpu: _node(cpu, root) for cpu in cpus if by_node and count == len(numbers)}
    node_numbers = {node: number for number, node in enumerate(sorted({*node_of.values()}))}
    nodes = [node_numbers.get(node_of.get(cpu, -1), 0) for cpu in range(len(place_of_cpu))]
    if len(node_numbers) > 1:
        reason = ", ".join(filter(None, [reason, f"{len(node_numbers)} nodes of memory"]))
    return Threads(count, reason, tuple(place_of_cpu), tuple(nodes))


def _first_sibling(cpu: int, root: Path) -> int:
    """The first hyper-thread of its core, which names the core; itself where none is stated."""
    path = root / f"sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list"
    try:
        return int(path.read_text().strip().replace("-", ",").partition(",")[0])
    except (OSError, ValueError):
        return cpu


def _node(cpu: int, root: Path) -> int:
    """The node of memory that a CPU is nearest to; 0 where none is stated."""
    folders = (root / f"sys/devices/system/cpu/cpu{cpu}").glob("node[0-9]*")
    return next((int(folder.name.removeprefix("node")) for folder in folders), 0)


def _number_in(variable: str) -> int | None:
    # OpenMP takes a list, a number for each level of nesting
    text = os.environ.get(variable, "").partition(",")[0].strip()
    if not text:
        return None
    if not text.isdecimal() or int(text) < 1:
        raise WrongNumberOfThreads(
            f"{variable} is {text!r}, it must be a whole number of threads from 1 on"
        )
    return int(text)


def cpu_quota(root: Path = _ROOT) -> float | None:
    """The CPUs that this process's control groups give it together; None: no quota.

    That of a group holds for those below it, so the least on the way up counts. A container may
    show its own group as the root, under a path that is only its host's."""
    quotas: list[float] = []
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        lines = []
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if not controllers:
            mounts, read = ("sys/fs/cgroup", "sys/fs/cgroup/unified"), _quota_of_v2
        elif "cpu" in controllers.split(","):
            mounts, read = (f"sys/fs/cgroup/{controllers}", "sys/fs/cgroup/cpu"), _quota_of_v1
        else:
            continue
        for mount in mounts:
            for folder in _upwards(root / mount, path):
                quotas += read(folder)
    return min(quotas, default=None)


def _upwards(mount: Path, path: str) -> Iterator[Path]:
    group = Path(path.lstrip("/"))
    for each in (group, *group.parents):
        if ".." not in each.parts:
            yield mount / each


def _quota_of_v2(folder: Path) -> list[float]:
    try:
        quota, period = (folder / "cpu.max").read_text().split()
        return [] if quota == "max" else [int(quota) / int(period)]
    except (OSError, ValueError, ZeroDivisionError):
        return []


def _quota_of_v1(folder: Path) -> list[float]:
    try:
        quota = int((folder / "cpu.cfs_quota_us").read_text())
        return [quota / int((folder / "cpu.cfs_period_us").read_text())] if quota > 0 else []
    except (OSError, ValueError, ZeroDivisionError):
        return []
