"""The answer to GetRequestInfo: a request's state and its reasons."""

import enum

from protocol.base import Message


class WaitReason(enum.StrEnum):
    """The thing that a waiting request waits for."""

    NOT_CONSIDERED = "not considered yet"
    """It arrived after the last step was planned."""
    QUEUE = "queue"
    """Requests ahead of it, the first of which waits for something else."""
    TOKEN_BUDGET = "token budget"
    """The step's token budget was spent on other requests."""
    SEQUENCES = "sequences"
    """max_num_seqs sequences are running."""
    BLOCKS = "blocks"
    """KV blocks for all its tokens and for the reserve of running requests."""
    PREEMPTION = "preemption"
    """A request was preempted in this step, so none is started."""
    PARTIAL_PREFILLS = "partial prefills"
    """The limit of partial prefills, or of long ones, is reached."""
    ADAPTERS = "adapters"
    """The limit of adapters in use is reached."""
    ADAPTER_LOADING = "adapter loading"
    """The weights of its adapter are being loaded."""
    ALONE = "alone"
    """It, or the running request, may have killed the engine, or a step failed and its requests run
    in groups: others wait."""
    PAUSED = "paused"
    """The engine is paused or asleep."""
    PROMPT_LOGPROBS = "prompt logprobs"
    """Running requests report as many log-probabilities of prompts as one step may."""
    DISK = "disk"
    """Blocks of its prompt are being read from disk."""
    TRANSFER = "transfer"
    """Blocks of its prompt are being fetched from the engine that computed them."""
    ENCODER = "encoder"
    """Its next image or sound is to be encoded: the step's budget for that is spent, or the encoder
    cache is full of what running requests need."""
    STATE = "state"
    """Another request is computing the state of recurrent layers that it starts from."""
    GRAMMAR = "grammar"
    """Its structured output is being compiled."""
    DECODES = "decodes"
    """Batching prefill-first: this step decodes only, or the prefill delay has not passed."""


class LookupEnd(enum.StrEnum):
    """Why a prompt's look-up in the prefix cache found no more than it did."""

    COMPLETE = "complete"
    """All full blocks before the last token were found."""
    TOO_SHORT = "too short"
    """The prompt has no full block before its last token."""
    NEVER_SEEN = "never seen"
    EVICTED = "evicted"
    """The next block was cached once."""
    NO_STATE = "no state"
    """Keys and values go on, and no state of the recurrent layers was kept where they end."""
    OTHER_SALT_OR_ADAPTER = "other salt or adapter"
    """The same tokens are cached under another salt or adapter."""
    OFF = "off"
    """Prefix caching is off."""
    WHOLE_PROMPT = "whole prompt"
    """The request reports its whole prompt (`prompt_logprobs`) or pools all of it, which is
    computed for it."""


class PreemptionCause(enum.StrEnum):
    BLOCKS = "blocks"
    """A running request needed a KV block, and none was free."""
    PRIORITY = "priority"
    """A more urgent request took its place."""
    FAULT = "fault"
    """A step failed: its requests are computed again, in groups."""
    PAUSED = "paused"
    """The engine went to sleep or took other weights."""


class CacheLookup(Message, frozen=True):
    """What the look-up at the request's first start found, in tokens of the prompt."""

    num_tokens: int
    """Found, in device and host memory and on disk."""
    num_host_tokens: int
    """Cached tokens that are in host memory."""
    num_disk_tokens: int
    """Cached tokens that are on disk."""
    ended: LookupEnd
    num_key_tokens: int = 0
    """Tokens whose keys and values were found; more than `num_tokens` where recurrent layers lack a
    state."""


class PromptChange(Message, frozen=True):
    """The first token that differs from an earlier prompt of the same caller, and token ids around
    it: `before` it in both, what `was` and is `now` behind. Only for who may see all requests."""

    position: int
    num_same: int
    """Tokens in a row that are equal again soon behind it, and had to be computed again."""
    before: list[int]
    was: list[int]
    now: list[int]


class Preemption(Message, frozen=True):
    step_id: int
    mode: str
    """recompute or swap."""
    reason: str
    """The reason in words: which request needed what."""
    num_tokens: int
    """Computed tokens that it lost (recompute) or that were moved (swap)."""
    num_blocks: int
    """Blocks that it freed."""


class RequestInfo(Message, frozen=True, tag=5):
    request_id: str
    status: str
    """waiting, running, preempted, swapped or finished."""
    priority: int
    tenant: str | None
    num_sequences: int
    num_prompt_tokens: int
    num_output_tokens: int
    """Output tokens of all its sequences."""
    max_tokens: int
    """Most output tokens of each of its sequences."""
    num_computed_tokens: int
    """Computed tokens of its first sequence."""
    waits_for: WaitReason | None = None
    """None unless it waits, or its engine is paused."""
    why: str | None = None
    """`waits_for` in words, with the numbers; or why it ended."""
    num_requests_ahead: int | None = None
    """Requests ahead of it in the waiting queue; None unless it waits."""
    cache_lookup: CacheLookup | None = None
    """None before its first start."""
    preemptions: list[Preemption] = []
    finish_reason: str | None = None
    age_s: float | None = None
    """Seconds since it arrived; None of one that has finished."""
    num_draft_tokens: int = 0
    """Verified so far, of all its sequences."""
    num_accepted_tokens: int = 0
    """Drafts that became tokens of its output."""
    num_embedded_tokens: int = 0
    """Positions of the prompt that have a hidden state in place of a token."""
    prompt_change: PromptChange | None = None
    """None: the prompt goes on from the one before, or nothing like it is remembered."""
