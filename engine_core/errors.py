"""What can go wrong in the daemon, as exceptions: EngineError is the base of all."""

from protocol.errors import ErrorCode


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


class RequestRefused(EngineError):
    """This engine cannot serve a request; the others go on.

    Attributes:
        code: why, for programs; the message says it for people.
    """

    def __init__(self, code: ErrorCode, message: str) -> None:
        super().__init__(message)
        self.code = code
