"""What a simulated schedule may contain, and what is told of it."""

import dataclasses
from typing import Any


class Violation(AssertionError):
    """The oracle says no; the text ends with the trace."""


@dataclasses.dataclass
class Settings:
    """What a schedule may contain; a test of one defect turns the rest off."""

    num_kills: tuple[int, ...] = (0, 0, 1, 2, 3)
    num_cuts: tuple[int, ...] = (0, 0, 1, 2)
    num_pauses: tuple[int, ...] = (0, 1, 2)
    num_client_kills: tuple[int, ...] = (0, 0, 0, 1)
    num_garbled: tuple[int, ...] = (0, 0, 0, 1)
    num_drains: tuple[int, ...] = (0, 0, 1)
    num_jumps: tuple[int, ...] = (0, 0, 1)
    fault_rate: tuple[float, ...] = (0.0, 0.0, 0.02)
    """Of steps that fail, and do not fail again."""
    poison_rate: tuple[float, ...] = (0.0, 0.0, 0.1)
    """Of requests that make their steps fail, from some token on."""
    num_lost_devices: tuple[int, ...] = (0,) * 9 + (1,)
    """From then on all steps of this engine fail."""
    max_queued: tuple[int | None, ...] = (None, None, 4)
    away_s: tuple[float, ...] = (0.05, 0.5, 3.0)
    stays_away: tuple[bool, ...] = (False, False, False, True)
    """Behind a drain the engine is started again only when all clients have given up."""
    is_tight: tuple[bool, ...] = (False, False, True)
    """Little memory for many small requests: they preempt each other."""
    event_fault_rate: tuple[float, ...] = (0.0, 0.3)
    """Of messages on what caches hold: lost, late or doubled."""
    engines: tuple[int, ...] = (1,)
    """Of one model, each at an address of its own."""
    num_clients: tuple[int, ...] = (1, 2, 3)
    num_requests: tuple[int, ...] = (1, 3, 6)
    """Of each client."""
    num_closes: tuple[int, ...] = (0, 0, 0, 1)
    num_controls: tuple[int, ...] = (0, 0, 1, 3)
    """Of an operator: pauses, sleeps and new weights, each ended after a while."""
    num_rolling: tuple[int, ...] = (0,)
    """Updates of the weights of all engines. Then tokens are those of one set of weights."""
    drain_timeout_s: tuple[float, ...] = (60.0,)
    num_floods: tuple[int, ...] = (0,) * 9 + (1,)
    num_corrupted: tuple[int, ...] = (0,) * 9 + (1,)
    """Spans of time in which all requests of a client arrive as garbage."""
    send_queue: tuple[int, ...] = (2, 128)
    """Messages to a client before they are merged."""
    backlog_bytes: tuple[int, ...] = (2**24, 2**24, 2**24, 2000)
    """With which a client is dropped."""
    pause_s: tuple[float, ...] = (0.01, 0.2, 2.0)
    long_pauses_s: tuple[float, ...] = (0.0,) * 5 + (10.0,)
    """Of a client."""


def only(**what: tuple[Any, ...]) -> Settings:
    """No faults but those."""
    flags = ("is_tight", "stays_away")
    nothing = {
        field.name: (False,) if field.name in flags else (0,)
        for field in dataclasses.fields(Settings)
        if field.name.startswith("num_")
        or field.name in ("fault_rate", "poison_rate", "event_fault_rate", *flags)
    }
    kept = {"num_clients": (3,), "num_requests": (6,), "max_queued": (None,)}
    return Settings(**(nothing | kept | what))


@dataclasses.dataclass
class Report:
    seed: int
    num_requests: int = 0
    num_finished: int = 0
    num_errors: int = 0
    num_messages: int = 0
    num_lives: int = 0
    virtual_s: float = 0.0
    largest_gap_s: float = 0.0
    """Between two outputs of a request."""
    num_merged: int = 0
    """Times that a client's queue was full, and its messages were merged."""
    num_dropped: int = 0
    """Slow clients."""
    num_views: int = 0
    """Clients that knew at the end what an engine's cache holds."""
    num_event_gaps: int = 0
    """Times that a client found messages on caches missing."""
    num_resumptions: int = 0
    """Times that an interrupted request was sent again."""
    num_stopped_updates: int = 0
    num_new: int = 0
    """Answers of other weights than the first."""
    trace: str = ""
