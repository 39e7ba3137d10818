"""The schedule of faults, drawn from a seed: what happens to the daemon and to client processes,
and after how long."""

import dataclasses
from collections.abc import Iterator
from random import Random

SHORT_PAUSE_S = (0.2, 3.0)
LONG_PAUSE_S = (9.0, 12.0)
"""Longer than the 8 s after which ZMQ takes the other side for lost."""


@dataclasses.dataclass(frozen=True)
class Fault:
    """`after_s` seconds after the daemon was ready (launched, if `at_start`), or for a client after
    the fault before. `lasts_s`: the pause, or until the process is started again; of a drain that
    is killed, until that."""

    kind: str
    after_s: float
    lasts_s: float = 0.0
    at_start: bool = False
    pick: float = 0.0
    """Of the client processes, as a share."""


@dataclasses.dataclass(frozen=True)
class Launch:
    """The next daemon of the driver, and its faults: the last of them ends it."""

    is_supervised: bool
    faults: tuple[Fault, ...]


def daemon_faults(seed: int) -> Iterator[Launch]:
    random = Random(f"daemon {seed}")
    while True:
        is_supervised = random.random() < 0.5
        faults = []
        # few restarts of one supervisor: its back-off grows to 15 s
        for _ in range(random.choice([0, 0, 1, 2])):
            if is_supervised and random.random() < 0.6:
                faults.append(_fault(random, "kill engine"))
            else:
                faults.append(_fault(random, "pause", _pause_s(random)))
        kind = random.choice(
            ["kill", "kill", "kill", "kill paused", "drain", "drain", "drain, kill"]
        )
        at_start = kind == "kill" and not faults and random.random() < 0.4
        lasts_s = random.uniform(0.0, 1.0)
        faults.append(dataclasses.replace(_fault(random, kind, lasts_s), at_start=at_start))
        yield Launch(is_supervised, tuple(faults))


def client_faults(seed: int) -> Iterator[Fault]:
    random = Random(f"clients {seed}")
    while True:
        kind = random.choice(["kill", "pause"])
        lasts_s = random.uniform(0.0, 1.0) if kind == "kill" else _pause_s(random)
        yield _fault(random, kind, lasts_s)


def _fault(random: Random, kind: str, lasts_s: float = 0.0) -> Fault:
    after_s = random.choice([random.uniform(0.2, 2.0), random.uniform(2.0, 6.0)])
    return Fault(kind, after_s, lasts_s, pick=random.random())


def _pause_s(random: Random) -> float:
    return random.uniform(*(LONG_PAUSE_S if random.random() < 0.1 else SHORT_PAUSE_S))
