"""The calls that a client may make, and their results. There are no others."""

import enum

from protocol.base import Message
from protocol.explanations import RequestInfo
from protocol.snapshots import SchedulerView


class Ping(Message, frozen=True, tag=1):
    """Answered by Pong between two steps: a round trip through the engine's loop."""


class GetStatistics(Message, frozen=True, tag=2):
    """Answered by EngineStatistics."""


class ResetPrefixCache(Message, frozen=True, tag=3):
    """Evict every cached block that no request uses. Answered by PrefixCacheReset."""


class Drain(Message, frozen=True, tag=4):
    """Accept no more requests, finish those there are, exit with 0. Answered by Draining."""


class GetRequestInfo(Message, frozen=True, tag=5):
    """Answered by RequestInfo, or by CallFailed with code UNKNOWN_REQUEST. Live requests and the
    last ones that finished are known, of all clients."""

    request_id: str


class ListRequests(Message, frozen=True, tag=6):
    """Answered by RequestList."""


class PauseGeneration(Message, frozen=True, tag=7):
    """Plan no more steps; requests are accepted, and wait. Answered by EngineStatus, for mode
    "wait" when the requests that run have ended."""

    mode: str
    """What becomes of unfinished requests: keep (they go on afterwards), wait (those that have
    started end first), abort."""


class ResumeGeneration(Message, frozen=True, tag=8):
    """The end of a pause. Answered by EngineStatus, or by CallFailed if the engine is asleep."""


class Sleep(Message, frozen=True, tag=9):
    """Give back the cache's memory, at level 2 the weights' too; requests wait. Answered by
    EngineStatus."""

    level: int


class WakeUp(Message, frozen=True, tag=10):
    """The end of a sleep. Answered by EngineStatus, or by CallFailed: then it sleeps on."""


class UpdateWeights(Message, frozen=True, tag=11):
    """Serve other weights of the same model from the next step on. Answered by EngineStatus, or by
    CallFailed: then the weights are the old ones."""

    model: str
    """The weights to load, named as for `--model`, on the engine's machine."""
    version: int | None = None
    """None: the largest so far and 1."""


class WatchScheduler(Message, frozen=True, tag=13):
    """Answered by SchedulerSnapshot after a step, at most 10 times a second. While a client asks
    again, and for 2 s, the steps between are noted. A client has one such call at a time: a second
    one takes the place of the first, which is answered by CallFailed."""

    after_step_id: int = -1
    """The last step that the client knows."""


class GetRequests(Message, frozen=True, tag=12):
    """Answered by RequestInfos. Over TCP a client without an admin's key gets those of its key."""

    tenant: str | None = None
    """Lists the requests of this tenant and its users alone, if given."""


class LoadAdapter(Message, frozen=True, tag=14):
    """Read an adapter and serve it from now on. Answered by AdapterList when it is known, or by
    CallFailed: then nothing has changed."""

    name: str
    path: str
    """Within the folder of `--adapter-dir`, on the engine's machine."""
    load_inplace: bool = False
    """Another adapter of this name gives way; requests that began with it end with it."""


class UnloadAdapter(Message, frozen=True, tag=15):
    """Take no more requests for an adapter. Answered by AdapterList."""

    name: str


class WatchCache(Message, frozen=True, tag=16):
    """Answered by CacheWatched; CacheEvents follow, the first with all that is cached. Asked again
    it does the same. Over TCP it needs an admin's key: what others have sent could be guessed."""


AnyCall = (
    Ping
    | GetStatistics
    | ResetPrefixCache
    | Drain
    | GetRequestInfo
    | ListRequests
    | PauseGeneration
    | ResumeGeneration
    | Sleep
    | WakeUp
    | UpdateWeights
    | WatchScheduler
    | GetRequests
    | LoadAdapter
    | UnloadAdapter
    | WatchCache
)

ADMIN_CALLS = (
    ResetPrefixCache,
    Drain,
    PauseGeneration,
    ResumeGeneration,
    Sleep,
    WakeUp,
    UpdateWeights,
    LoadAdapter,
    UnloadAdapter,
)
"""Calls that change what the engine does for all clients. Over TCP they need an admin's key."""


STEP_TOKENS_BOUNDS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)


class EngineState(enum.StrEnum):
    RUNNING = "running"
    PAUSED = "paused"
    ASLEEP = "asleep"


class Pong(Message, frozen=True, tag=1):
    uptime_s: float
    step_id: int
    """The last step that is over; -1 before the first."""
    progress_age_s: float
    """Seconds since a step was over or there was nothing to do."""
    state: EngineState = EngineState.RUNNING


class EngineStatistics(Message, frozen=True, tag=2):
    """The engine's numbers at one moment. Counters grow from the start of the daemon."""

    uptime_s: float
    num_clients: int
    num_running: int
    num_waiting: int
    # KV cache, in blocks; total = in use + cached (free, in the prefix cache) + empty
    num_blocks: int
    num_blocks_in_use: int
    num_blocks_cached: int
    block_size: int
    # counters
    num_steps: int
    num_prompt_tokens: int
    """Prompt tokens of all started requests, cached ones included."""
    num_cached_prompt_tokens: int
    """Prompt tokens that were found in the prefix cache."""
    num_generated_tokens: int
    num_preemptions: int
    num_finished: dict[str, int]
    """Finished requests by reason (the names of FinishReason)."""
    step_time_s: float
    """Seconds spent in steps, all together."""
    model_time_s: float
    """The model runner's share of `step_time_s`."""
    num_workers: int = 1
    """Ranks that run the model, this engine's own process included."""
    num_collective_bytes: dict[str, int] = {}
    """Sent by rank 0 to other ranks, by part of the model."""
    collective_time_s: dict[str, float] = {}
    """Of `model_time_s`, what rank 0 spent in that, the wait for other ranks included."""
    num_swapped: int = 0
    """Waiting requests whose KV blocks are in host memory."""
    num_queued_tokens: int = 0
    """Prompt and output tokens of the waiting requests."""
    num_host_blocks: int = 0
    num_host_blocks_in_use: int = 0
    """Host blocks with the contents of swapped requests."""
    num_host_blocks_cached: int = 0
    num_host_cached_prompt_tokens: int = 0
    """Prompt tokens found in host memory; part of num_cached_prompt_tokens."""
    num_disk_blocks: int = 0
    """Blocks of this model and cache on disk."""
    num_disk_cached_prompt_tokens: int = 0
    """Prompt tokens found on disk; part of num_cached_prompt_tokens."""
    num_blocks_shared: int = 0
    """Block references saved by sharing now: references less blocks in use."""
    num_slots_wasted: int = 0
    """Unused slots behind the last token of each sequence, in blocks in use."""
    num_preemptions_by_swap: int = 0
    """Those of `num_preemptions` that swapped."""
    num_preemptions_forced: int = 0
    """Of `num_preemptions`, by a more urgent request while memory was free."""
    num_refused: int = 0
    """Requests refused because the queue was full."""
    num_deduplicated_blocks: int = 0
    """Full blocks that were freed because an equal one was cached."""
    max_wait_s: float = 0.0
    """Seconds since the arrival of the oldest waiting request."""
    service_by_tenant: dict[str, float] = {}
    """Policy fair: weighted tokens served, of tenants with unfinished requests."""
    num_refused_messages: int = 0
    """Messages that could not be decoded, were of another wire version or came without a HELLO."""
    state: EngineState = EngineState.RUNNING
    weights_version: int = 0
    """0 from the start to the first update_weights."""
    num_prefill_tokens: int = 0
    """Computed by sequences with several tokens in a step: prompts, and what is computed again."""
    num_decode_tokens: int = 0
    """Computed by sequences with one token in a step, or with one and drafts."""
    num_drafts: int = 0
    """Times that a sequence had drafts to verify."""
    num_draft_tokens: int = 0
    """Drafts that were verified."""
    num_accepted_tokens: int = 0
    """Drafts that are in an output."""
    num_steps_by_tokens: list[int] = []
    """Steps of at most as many tokens as the entry of STEP_TOKENS_BOUNDS says, and more than the
    entry before; the last: of more than all."""
    num_lookups_by_end: dict[str, int] = {}
    """First look-ups of prompts in the prefix cache, by why they ended (the names of LookupEnd)."""
    num_lookup_hits_by_end: dict[str, int] = {}
    """Look-ups that found something, by how they ended."""
    num_preemptions_by_cause: dict[str, int] = {}
    """The names of PreemptionCause."""
    num_slo_requests: int = 0
    """Finished requests that were measured against SLOs; 0 without `--slo-tpot-ms`. Not those that
    were aborted, or failed."""
    num_slo_met: int = 0
    """Finished requests that met every SLO."""
    num_slo_ttft_violations: int = 0
    num_slo_tpot_violations: int = 0
    num_encoder_inputs: int = 0
    """Images and sounds that were encoded."""
    num_encoder_cache_hits: int = 0
    """Those whose output the encoder cache had."""
    num_encoder_cache_tokens: int = 0
    """Tokens whose encoder outputs are cached now."""
    num_compilations_after_ready: int = 0
    """Kernels that were compiled while serving, each of which made requests wait; 0 unless there is
    a defect."""
    num_first_tokens: int = 0
    """Requests that got their first token."""
    queue_time_s: float = 0.0
    """Seconds from arrival to first step of those, all together."""
    ttft_s: float = 0.0
    """Seconds from arrival to first token of those, all together."""
    num_draft_tokens_by_method: dict[str, int] = {}
    """As `--speculative` names the methods; grammar: tokens that a grammar forces."""
    num_accepted_tokens_by_method: dict[str, int] = {}
    max_loras: int = 0
    """Most adapters at once; 0: it serves none."""
    num_running_by_adapter: dict[str, int] = {}
    """Running requests by the adapter that they ask for."""
    num_waiting_by_adapter: dict[str, int] = {}
    """Waiting requests by the adapter that they ask for."""
    num_kv_blocks_sent: int = 0
    """KV blocks given to engines that decode."""
    num_kv_bytes_sent: int = 0
    num_kv_blocks_received: int = 0
    """KV blocks taken of prompts that other engines have computed."""
    num_kv_bytes_received: int = 0
    kv_receive_s: float = 0.0
    """Seconds of all transfers together, each from its begin to its end."""
    num_kv_blocks_failed: dict[str, int] = {}
    """Asked for and not moved, by reason: absent, corrupt, late, lost, refused, unknown source."""


class PrefixCacheReset(Message, frozen=True, tag=3):
    num_blocks_evicted: int


class Draining(Message, frozen=True, tag=4):
    num_requests_left: int


class RequestList(Message, frozen=True, tag=6):
    request_ids: list[str]
    """Of all unfinished requests of all clients, each client's in order of arrival."""


MAX_LISTED_REQUESTS = 256
"""The engine explains them between two steps."""


class RequestInfos(Message, frozen=True, tag=8):
    requests: list[RequestInfo]
    """Unfinished ones, at most MAX_LISTED_REQUESTS: running, then waiting in the queue's order."""
    num_unfinished: int
    """Those that are too many to be listed, too."""


class EngineStatus(Message, frozen=True, tag=7):
    """The engine's state once a call that changes it is done."""

    state: EngineState
    weights_version: int
    num_requests: int
    """Unfinished ones, of all clients."""


class SchedulerSnapshot(Message, frozen=True, tag=9):
    statistics: EngineStatistics
    view: SchedulerView


class AdapterInfo(Message, frozen=True):
    name: str
    fingerprint: str
    """A hash of its files: other weights, another fingerprint."""


class AdapterList(Message, frozen=True, tag=10):
    """The adapters that requests may name."""

    adapters: tuple[AdapterInfo, ...]


class CacheWatched(Message, frozen=True, tag=11):
    """CacheEvents follow."""


AnyResult = (
    Pong
    | EngineStatistics
    | PrefixCacheReset
    | Draining
    | RequestInfo
    | RequestList
    | EngineStatus
    | SchedulerSnapshot
    | RequestInfos
    | AdapterList
    | CacheWatched
)
