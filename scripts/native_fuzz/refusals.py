"""What a wrong call into the native library must do: raise ValueError before it touches memory."""

from collections.abc import Callable


class NotRefused(AssertionError):
    """A wrong call that returned."""


def must_refuse(what: str, call: Callable[[], object]) -> None:
    """Raise NotRefused unless `call` raises ValueError."""
    try:
        call()
    except ValueError:
        return
    raise NotRefused(what)
