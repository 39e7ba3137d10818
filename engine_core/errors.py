"""What can go wrong in the daemon, as exceptions: EngineError is the base of all;
and as exit codes."""

import enum

from protocol.errors import ErrorCode


class ExitCode(enum.IntEnum):
    """Why `engine-core` ended. What else ends a process, such as a signal, is a fault too."""

    DRAINED = 0
    """It was asked to stop."""
    FAULT = 1
    """A fault while it served; the log says what."""
    WRONG_OPTIONS = 2
    START_FAILED = 3
    """The model, the memory or the address; the last line says what."""
    TOO_MANY_RESTARTS = 4
    """Under --supervise."""
    NO_PROGRESS = 5
    """Under --supervise: the watchdog ended an engine that hung."""


class EngineError(Exception):
    """Base of the daemon's own errors."""


class StartupError(EngineError):
    """The daemon cannot start. The message is for the operator: what, the number, what to do."""


class ConfigurationError(StartupError):
    """An option, or a combination of options, cannot work."""


class AddressInUse(StartupError):
    """Another engine listens on the address."""


class CacheTooSmall(StartupError):
    """The memory given does not hold a useful KV cache."""


class WorkerLost(EngineError):
    """One of several workers has ended or failed, so the engine cannot go on. Names its rank."""

    def __init__(self, message: str, *, is_wrong_option: bool = False) -> None:
        super().__init__(message)
        self.is_wrong_option = is_wrong_option


class RequestRefused(EngineError):
    """This engine cannot serve a request; the others go on.
    `code`: why, for programs; the message says it for people."""

    def __init__(self, code: ErrorCode, message: str) -> None:
        # a path may hold what no message can: halves of surrogate pairs
        super().__init__(message.encode(errors="backslashreplace").decode())
        self.code = code
