"""Why a request is where it is: the answer to GetRequestInfo. Numbers and reasons, never tokens."""

import enum

from protocol.base import Message


class WaitReason(enum.StrEnum):
    """What a waiting request waits for."""

    NOT_LOOKED_AT = "not looked at"
    """It came after the last step was planned."""
    QUEUE = "queue"
    """Requests in front of it, the first of which waits for something else."""
    TOKEN_BUDGET = "token budget"
    """The step's tokens were all given to others."""
    SEQUENCES = "sequences"
    """max_num_seqs are running."""
    BLOCKS = "blocks"
    """KV blocks, for all its tokens and the head-room of those that run."""
    PREEMPTION = "preemption"
    """Somebody was preempted in this step: nobody is admitted."""
    PARTIAL_PREFILLS = "partial prefills"
    """As many unfinished prompts (or long ones) as allowed are being computed."""
    ADAPTERS = "adapters"
    """As many adapters as allowed are in use."""
    DECODES = "decodes"
    """Composition prefill-first: this step is for decoding, or the delay has not passed."""


class LookupEnd(enum.StrEnum):
    """Why a prompt's look-up in the prefix cache found no more than it did."""

    COMPLETE = "complete"
    """All whole blocks before the last token were found."""
    TOO_SHORT = "too short"
    """The prompt has no whole block before its last token."""
    NEVER_SEEN = "never seen"
    EVICTED = "evicted"
    """The next block was there once."""
    OTHER_SALT_OR_ADAPTER = "other salt or adapter"
    """The same tokens are known under another salt or adapter."""
    OFF = "off"
    """Prefix caching is off."""


class CacheLookup(Message, frozen=True):
    """What the first admission's look-up found, in tokens of the prompt."""

    num_tokens: int
    """Found, in device and host memory."""
    num_host_tokens: int
    """Of those, in host memory."""
    ended: LookupEnd


class Preemption(Message, frozen=True):
    step_id: int
    mode: str
    """recompute or swap."""
    reason: str
    """In words: who needed what."""
    num_tokens: int
    """Computed tokens that it lost (recompute) or that were moved (swap)."""
    num_blocks: int
    """Blocks that it gave back."""


class RequestInfo(Message, frozen=True, tag=5):
    request_id: str
    status: str
    """waiting, running, preempted, swapped or finished."""
    priority: int
    tenant: str | None
    num_sequences: int
    num_prompt_tokens: int
    num_output_tokens: int
    """Of all its sequences."""
    num_computed_tokens: int
    """Of its first sequence."""
    waits_for: WaitReason | None = None
    """None unless it waits."""
    why: str | None = None
    """`waits_for` in words, with the numbers; or why it ended."""
    num_ahead: int | None = None
    """Requests in front of it in the waiting queue; None unless it waits."""
    cache_lookup: CacheLookup | None = None
    """None before the first admission."""
    preemptions: list[Preemption] = []
    finish_reason: str | None = None
