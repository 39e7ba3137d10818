"""How many threads there are, and where: affinity, cores, quotas, variables."""

from collections.abc import Mapping
from pathlib import Path

import pytest

from kernels.cpu.threads import WrongNumberOfThreads, choose_threads, cpu_quota


@pytest.fixture(autouse=True)
def without_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("ENGINE_CORE_NATIVE_THREADS", raising=False)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)


def system(root: Path, files: Mapping[str, str], siblings: tuple[str, ...] = ()) -> Path:
    """A root with these files and, for each CPU, the list of its core's hyper-threads."""
    topology = {
        f"sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list": text
        for cpu, text in enumerate(siblings)
    }
    for name, text in {**files, **topology}.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text + "\n")
    return root


FAR = ("0,4", "1,5", "2,6", "3,7", "0,4", "1,5", "2,6", "3,7")
NEAR = ("0-1", "0-1", "2-3", "2-3")


@pytest.mark.parametrize(
    ("siblings", "allowed", "wanted", "count", "reason", "places"),
    [
        (FAR, range(8), None, 4, "4 of 8 CPUs: hyper-threads", (0, 1, 2, 3, 0, 1, 2, 3)),
        (NEAR, range(4), None, 2, "2 of 4 CPUs: hyper-threads", (0, 0, 1, 1)),
        (NEAR, range(4), 4, 4, "", (0, 1, 2, 3)),
        (NEAR, range(4), 9, 4, "", (0, 1, 2, 3)),
        (NEAR, range(4), 1, 1, "1 of 4 CPUs: --num-threads", (0, 0, 1, 1)),
        # a mask that has one hyper-thread of each core, or all CPUs of two cores of four
        (FAR, (1, 2, 7), None, 3, "", (-1, 0, 1, -1, -1, -1, -1, 2)),
        (FAR, (1, 2, 5, 6), None, 2, "2 of 4 CPUs: hyper-threads", (-1, 0, 1, -1, -1, 0, 1)),
        ((), (3, 5), None, 2, "", (-1, -1, -1, 0, -1, 1)),
    ],
)
def test_threads_are_one_a_core_of_the_mask(
    siblings, allowed, wanted, count, reason, places, tmp_path: Path
) -> None:
    threads = choose_threads(wanted, frozenset(allowed), system(tmp_path, {}, siblings))
    assert (threads.count, threads.reason, threads.place_of_cpu) == (count, reason, places)


@pytest.mark.parametrize(
    ("wanted", "reason", "nodes"),
    [
        (None, "4 of 8 CPUs: hyper-threads, 2 nodes of memory", (0, 1, 0, 1, 0, 1, 0, 1)),
        (3, "3 of 8 CPUs: --num-threads", (0,) * 8),  # not pinned: of no node
    ],
)
def test_nodes_of_memory_are_told_apart_by_option(wanted, reason, nodes, tmp_path: Path) -> None:
    files = {
        f"sys/devices/system/cpu/cpu{cpu}/node{2 + 3 * (cpu % 2)}/cpulist": "" for cpu in range(8)
    }
    cpus, root = frozenset(range(8)), system(tmp_path, files, FAR)
    threads = choose_threads(wanted, cpus, root, by_node=True)
    assert (threads.reason, threads.node_of_cpu) == (reason, nodes)
    assert not any(choose_threads(wanted, cpus, root).node_of_cpu)


V2 = {"proc/self/cgroup": "0::/a/b", "sys/fs/cgroup/cpu.max": "max 100000"}
V1 = {"proc/self/cgroup": "4:cpu,cpuacct:/docker/x\n3:cpuset:/y\n0::/z"}


@pytest.mark.parametrize(
    ("files", "quota"),
    [
        ({}, None),
        (V2, None),
        # the least of the groups above counts
        (V2 | {"sys/fs/cgroup/a/cpu.max": "350000 100000"}, 3.5),
        (V2 | {"sys/fs/cgroup/a/b/cpu.max": "2 1", "sys/fs/cgroup/a/cpu.max": "max 1"}, 2),
        (V2 | {"sys/fs/cgroup/a/b/cpu.max": "9 1", "sys/fs/cgroup/a/cpu.max": "4 1"}, 4),
        # a container: its own group is the root, the path its host's
        (V2 | {"sys/fs/cgroup/cpu.max": "150000 100000"}, 1.5),
        ({"proc/self/cgroup": "0::/../../x", "sys/fs/cgroup/cpu.max": "5 1"}, 5),
        (V1, None),
        (
            V1 | {"sys/fs/cgroup/cpu,cpuacct/docker/x/cpu.cfs_quota_us": "600000",
                  "sys/fs/cgroup/cpu,cpuacct/docker/x/cpu.cfs_period_us": "100000"},
            6,
        ),
        (
            V1 | {"sys/fs/cgroup/cpu/cpu.cfs_quota_us": "50000",
                  "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000"},
            0.5,
        ),
        (V1 | {"sys/fs/cgroup/cpu/cpu.cfs_quota_us": "-1"}, None),
        # both versions at once, as systemd's hybrid mode has them
        (V1 | {"sys/fs/cgroup/unified/z/cpu.max": "3 1"}, 3),
        (V2 | {"sys/fs/cgroup/cpu.max": "nonsense"}, None),
    ],
)  # fmt: skip
def test_the_least_quota_of_nested_groups_counts(files, quota, tmp_path: Path) -> None:
    assert cpu_quota(system(tmp_path, files)) == quota


def test_a_quota_and_variables_lower_the_number(tmp_path: Path, monkeypatch) -> None:
    def chosen(quota: str, wanted: int | None = None) -> tuple[int, str]:
        files = {"proc/self/cgroup": "0::/", "sys/fs/cgroup/cpu.max": quota}
        threads = choose_threads(wanted, frozenset(range(8)), system(tmp_path, files, FAR))
        return threads.count, threads.reason

    assert chosen("250 100") == (3, "3 of 8 CPUs: a quota of 2.5 CPUs")
    assert chosen("225 100") == (2, "2 of 8 CPUs: a quota of 2.25 CPUs")
    assert chosen("50 100") == (1, "1 of 8 CPUs: a quota of 0.5 CPUs")
    assert chosen("700 100") == (4, "4 of 8 CPUs: hyper-threads")
    assert chosen("700 100", wanted=8) == (7, "7 of 8 CPUs: a quota of 7 CPUs")
    monkeypatch.setenv("OMP_NUM_THREADS", "2,4")  # of two levels of nesting
    assert chosen("max 100") == (2, "2 of 8 CPUs: OMP_NUM_THREADS")
    assert chosen("max 100", wanted=3) == (2, "2 of 8 CPUs: OMP_NUM_THREADS")
    monkeypatch.setenv("ENGINE_CORE_NATIVE_THREADS", "6")
    assert chosen("max 100") == (6, "6 of 8 CPUs: ENGINE_CORE_NATIVE_THREADS")
    monkeypatch.setenv("ENGINE_CORE_NATIVE_THREADS", "0")
    with pytest.raises(WrongNumberOfThreads, match="is '0'"):
        chosen("max 100")
