"""What passes between scheduler and model runner: plain data, a step each.

The order of `num_scheduled_tokens` is the batch order. It matters: a request may read blocks that
one before it fills in the same step.
"""

import dataclasses

from engine_core.kv_cache import BlockIds
from protocol.outputs import Logprobs
from protocol.requests import MultiModalInput
from protocol.sampling import SamplingParams


@dataclasses.dataclass(frozen=True, slots=True)
class NewRequestData:
    """All that the runner must know of a request it sees for the first time."""

    req_id: str
    prompt_token_ids: list[int]
    output_token_ids: list[int]
    """Delivered by an earlier, interrupted run; the tokens are prompt + output."""
    mm_features: list[MultiModalInput]
    sampling_params: SamplingParams
    block_ids: BlockIds
    num_computed_tokens: int
    """In the cache already, before this step's tokens."""
    lora_request: str | None
    """The adapter's name."""


@dataclasses.dataclass(frozen=True, slots=True)
class CachedRequestData:
    """What changed of requests that the runner knows, as columns of equal length."""

    req_ids: list[str] = dataclasses.field(default_factory=list)
    resumed_from_preemption: list[bool] = dataclasses.field(default_factory=list)
    new_block_ids: list[BlockIds | None] = dataclasses.field(default_factory=list)
    """To be appended to the tables, None for nothing; for a resumed request its whole tables,
    which replace. Blocks that fell out of a sliding window since are not told: the runner masks
    by the window."""
    num_computed_tokens: list[int] = dataclasses.field(default_factory=list)
    """In the cache, before this step's tokens."""
    num_output_tokens: list[int] = dataclasses.field(default_factory=list)
    """Before this step."""
    resumed_token_ids: list[list[int] | None] = dataclasses.field(default_factory=list)
    """Of a resumed request prompt and output, else None."""


@dataclasses.dataclass(frozen=True, slots=True)
class SchedulerOutput:
    """The plan of one step."""

    step_id: int
    scheduled_new_reqs: list[NewRequestData]
    scheduled_cached_reqs: CachedRequestData
    num_scheduled_tokens: dict[str, int]
    """By request id in batch order, each at least 1, drafts included."""
    total_num_scheduled_tokens: int
    """0 means that nothing runs; finished and preempted ids still count."""
    scheduled_spec_decode_tokens: dict[str, list[int]]
    """Drafts to verify, the last of the request's tokens in this step."""
    scheduled_encoder_inputs: dict[str, list[int]]
    """Multimodal inputs to encode; always empty, such requests are refused."""
    num_common_prefix_blocks: list[int]
    """For each group, leading blocks that all running requests share."""
    finished_req_ids: list[str]
    """Gone since the last step: drop their rows first. An id may come back in this very plan."""
    preempted_req_ids: list[str]
    """Lost their blocks in this step: drop their rows, keep what else is known of them."""


@dataclasses.dataclass(frozen=True, slots=True)
class DraftTokenIds:
    """Speculated tokens for the next step, as columns."""

    req_ids: list[str]
    draft_token_ids: list[list[int]]


@dataclasses.dataclass(frozen=True, slots=True)
class ModelRunnerOutput:
    """What one step brought, as columns in any order."""

    req_ids: list[str]
    sampled_token_ids: list[list[int]]
    """Empty while the prompt is not finished; else accepted drafts and one token more."""
    logprobs: dict[str, Logprobs] | None = None
    """Of the requests that asked, one position a sampled token."""
    draft_token_ids: DraftTokenIds | None = None
    failures: dict[str, str] = dataclasses.field(default_factory=dict)
    """Requests whose result is no result, and why; they end with an error, no others."""
