"""SIGTERM as Ctrl-C, for commands with processes of their own."""

import contextlib
import signal
from collections.abc import Iterator


@contextlib.contextmanager
def interrupted_by_sigterm() -> Iterator[None]:
    """SIGTERM raises KeyboardInterrupt, so that what was started ends, too."""
    before = signal.signal(signal.SIGTERM, _interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _interrupt(number: int, _frame: object) -> None:
    signal.signal(number, signal.SIG_IGN)  # a second one must not cut the cleaning up short
    raise KeyboardInterrupt
