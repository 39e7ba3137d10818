"""All exceptions of the client library.

EngineClientError
├── EngineUnavailable             no engine answers at the address
├── EngineRefused                 an engine answered and refuses this client
│   └── TooManyClients            because it has as many as it takes
├── EngineDied                    the engine was there, is gone, and did not come back in time
├── EngineStartError              an engine started by this process did not get ready
├── RequestRejected               the engine refused one request; the others continue
│   └── QueueFull                 because its queue is full; the text has the queue's state
├── RequestFailed                 the engine ended a pooling request without an answer
├── CallRefused                   the engine refused a call such as `statistics`
├── ClientClosed                  this client was closed while, or before, it was used
└── InvalidInput (ValueError)     a prompt, parameter or option that cannot be served; nothing
    │                             was sent
    ├── UnknownAdapter            the engine has no adapter of this name
    ├── ChatTemplateError         a conversation cannot be made into a prompt
    └── PromptTooLong             for the model's length
"""

from protocol.errors import ErrorCode


class EngineClientError(Exception):
    """Base of all errors of the client library."""


class EngineUnavailable(EngineClientError):
    """No engine answers at the address."""


class EngineRefused(EngineClientError):
    """The engine answered the greeting with a refusal, such as another wire version."""


class TooManyClients(EngineRefused):
    """As many clients are connected as the engine takes. Connect again later; the text has the
    limit."""


class EngineDied(EngineClientError):
    """The engine is gone; `address` says which."""

    def __init__(self, message: str, *, address: str) -> None:
        super().__init__(message)
        self.address = address


class EngineStartError(EngineClientError):
    """An engine started by this process did not get ready; the text holds its last lines.
    `exit_code`: its own, if it ended by itself."""

    def __init__(self, message: str, *, exit_code: int | None = None) -> None:
        super().__init__(message)
        self.exit_code = exit_code


class RequestRejected(EngineClientError):
    """The engine refused this request."""

    def __init__(self, message: str, *, request_id: str, code: ErrorCode) -> None:
        super().__init__(message)
        self.request_id = request_id
        self.code = code


class QueueFull(RequestRejected):
    """As many requests or tokens wait as the engine allows. Send the request again later; the text
    has the queue's state."""


class RequestFailed(EngineClientError):
    """A pooling request has no answer; `reason` is its finish reason, such as "timeout"."""

    def __init__(self, message: str, *, reason: str) -> None:
        super().__init__(message)
        self.reason = reason


class CallRefused(EngineClientError):
    """The engine refused a call."""

    def __init__(self, message: str, *, code: ErrorCode) -> None:
        super().__init__(message)
        self.code = code


class ClientClosed(EngineClientError):
    """The client is closed."""


class InvalidInput(EngineClientError, ValueError):
    """Refused before anything was sent; the text names the value, the limit and what to do."""


class PromptTooLong(InvalidInput):
    """The prompt leaves no room for an answer. `num_tokens`, of which there may be `most`: None
    where they were not counted."""

    def __init__(
        self, message: str, num_tokens: int | None = None, most: int | None = None
    ) -> None:
        super().__init__(message)
        self.num_tokens = num_tokens
        self.most = most


class UnknownAdapter(InvalidInput):
    """The engine has no adapter of this name; the text says which there are."""


class ChatTemplateError(InvalidInput):
    """A conversation cannot be made into a prompt; the text says what to change."""
