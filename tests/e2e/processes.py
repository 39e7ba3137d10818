"""Processes of a test's daemons, as the system sees them. Not a test."""

import contextlib
import time
from pathlib import Path


def children_of(pid):
    """Those that run, of all its threads."""
    found = []
    for tasks in Path(f"/proc/{pid}/task").glob("*/children"):
        with contextlib.suppress(OSError):
            found += map(int, tasks.read_text().split())
    return [child for child in found if is_running(child)]


def descendants_of(pid):
    return [each for child in children_of(pid) for each in (child, *descendants_of(child))]


def is_running(pid):
    """And no zombie."""
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    return False


def command_of(pid):
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ")
    return ""


def maps(pid, library):
    """Whether the process has loaded it."""
    with contextlib.suppress(OSError):
        return library in Path(f"/proc/{pid}/maps").read_text()
    return False


def wait_until(condition, within_s=60, *, why=lambda: ""):
    """Its first true value."""
    deadline_s = time.monotonic() + within_s
    while not (found := condition()):
        assert time.monotonic() < deadline_s, why()
        time.sleep(0.005)
    return found


def wait_until_gone(*pids):
    def left():
        return [(pid, command_of(pid)) for pid in pids if is_running(pid)]

    wait_until(lambda: not left(), why=left)
