"""Errors that cross the wire, and the exceptions of this package.

ProtocolError                 a peer sent something that is not this protocol
├── MalformedMessage          bytes that do not decode to a known message
└── WireVersionMismatch       a peer of another wire version
InvalidParameter (ValueError) a parameter outside its limits; the text says which and what to do
└── PromptTooLong
"""

import enum


class ErrorCode(enum.StrEnum):
    """Why the engine refused something. Stable names: clients may branch on them."""

    MALFORMED_MESSAGE = "malformed_message"
    WIRE_VERSION = "wire_version"
    HELLO_REQUIRED = "hello_required"
    INVALID_REQUEST = "invalid_request"
    DUPLICATE_REQUEST_ID = "duplicate_request_id"
    PROMPT_TOO_LONG = "prompt_too_long"
    NOT_SUPPORTED = "not_supported"
    DRAINING = "draining"
    QUEUE_FULL = "queue_full"
    """The waiting queue is at its limit; try again later."""
    UNKNOWN_REQUEST = "unknown_request"
    SLOW_CONSUMER = "slow_consumer"
    """The client did not read what it was sent, and was dropped."""
    TOO_MANY_CLIENTS = "too_many_clients"
    """As many clients are connected as the engine takes; try again later."""
    KILLED_ENGINE = "killed_engine"
    """The engine died of this request again and again; do not send it again."""
    WRONG_STATE = "wrong_state"
    """The engine is asleep, or was resumed meanwhile."""
    WEIGHTS_REFUSED = "weights_refused"
    """New weights, or those of before, cannot be served; the message says why."""
    UNKNOWN_ADAPTER = "unknown_adapter"
    """There is none of this name, or with other weights than the request began with."""
    ADAPTER_REFUSED = "adapter_refused"
    """An adapter cannot be loaded; the message says why."""
    PERMISSION_DENIED = "permission_denied"
    """It needs an admin's key."""
    INTERNAL = "internal"


class ProtocolError(Exception):
    """A peer sent something that is not this protocol."""


class MalformedMessage(ProtocolError):
    """Bytes that do not decode to a message of the expected union."""


class WireVersionMismatch(ProtocolError):
    """A peer speaks another wire version."""

    def __init__(self, *, ours: int, theirs: int) -> None:
        super().__init__(
            f"the peer speaks wire version {theirs}, this side speaks {ours}; "
            "install the same release of engine-core on both sides"
        )


class InvalidParameter(ValueError):
    """A parameter is outside its limits; the message names value, limit and next action."""


class PromptTooLong(InvalidParameter):
    """The prompt leaves no room for an output token, if any is generated."""

    def __init__(
        self, num_tokens: int, max_model_len: int, name: str = "prompt", *, num_generated: int = 1
    ) -> None:
        less = " less one for the answer" if num_generated else ""
        self.num_tokens, self.most = num_tokens, max_model_len - num_generated
        super().__init__(
            f"{name} has {num_tokens} tokens, the limit is {self.most} "
            f"(max_model_len {max_model_len}{less}); shorten it, set truncate_prompt_tokens, "
            "or, if the model was made for more, start the engine with a larger --max-model-len"
        )
