"""Whose kills the kernel's counters tell, from folders that look like /proc and /sys."""

import pytest

from engine_core.process.oom_kills import count_oom_kills

VMSTAT = "pgfault 12\noom_kill 90\n"
EVENTS = "low 0\nhigh 3\nmax 9\noom 2\noom_kill 4\noom_group_kill 1\n"
CONTROL = "oom_kill_disable 0\nunder_oom 0\noom_kill 5\n"


@pytest.mark.parametrize(
    ("cgroup", "files", "expected"),
    [
        ("0::/\n", {"sys/fs/cgroup/memory.events": EVENTS}, 4),
        ("0::/a/b\n", {"sys/fs/cgroup/a/b/memory.events": EVENTS}, 4),
        ("0::/a/b\n", {"sys/fs/cgroup/memory.events": EVENTS}, 4),
        ("0::/a\n", {}, 90),
        ("4:memory:/x\n0::/\n", {"sys/fs/cgroup/memory/x/memory.oom_control": CONTROL}, 5),
        ("4:cpu,memory:/x\n0::/\n", {"sys/fs/cgroup/memory/memory.oom_control": CONTROL}, 5),
        ("4:cpu:/x\n", {"sys/fs/cgroup/cpu/x/memory.oom_control": CONTROL}, 90),
        (None, {}, 90),
    ],
)
def test_the_groups_own_counter_comes_before_the_machines(tmp_path, cgroup, files, expected):
    own = {} if cgroup is None else {"proc/self/cgroup": cgroup}
    for name, text in ({"proc/vmstat": VMSTAT} | own | files).items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    assert count_oom_kills(tmp_path) == expected


def test_a_system_without_counters_counts_none(tmp_path):
    assert count_oom_kills(tmp_path) == 0
