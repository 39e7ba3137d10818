"""What the scheduler tells the model runner: plain data, a step each. The numbers of all scheduled
sequences are columns; what is rare (a new sequence, new blocks, copies) is listed apart, so a step
in which nothing is new costs no Python work a sequence, on either side."""

import dataclasses
import functools
from collections.abc import Collection
from collections.abc import Sequence as AnySequence
from typing import NamedTuple, Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt

from engine_core.kv_cache import BlockIds, CacheCopies
from engine_core.scheduler.batch_state import Int32Array, Int64Array
from engine_core.scheduler.records.prompt_content import EmbeddedRows, MultiModalFeature
from protocol.pooling import PoolingParams
from protocol.sampling import SamplingParams


@dataclasses.dataclass(slots=True)  # see SchedulerOutput
class ScheduledBatch:
    """All sequences of a step, as columns of equal length R in batch order. The order matters: a
    sequence may read blocks that one before it fills in the same step. Nothing in a plan changes
    once it is made; the receiver changes nothing either, for lists may be shared by plans.

    A request has one sequence, named by its request_id, or several: "ID", "ID#1", "ID#2" ..."""

    req_ids: list[str]
    rows: Int64Array
    """The row that each has from its admission until it is finished or preempted."""
    num_computed_tokens: Int32Array
    """Tokens of each sequence that are in the cache before this step's."""
    num_scheduled_tokens: Int32Array
    """Tokens of each sequence in this step, at least 1, drafts included. In a plan of several
    decode steps: as many steps, one token each."""


@dataclasses.dataclass(slots=True)  # see SchedulerOutput
class NewRequestData:
    """A sequence that is new to the runner."""

    req_id: str
    prompt_token_ids: AnySequence[int]
    """The request's own array: not to be changed."""
    output_token_ids: list[int]
    """Delivered by an earlier, interrupted run, or of the sequence that this one was forked from;
    the tokens are prompt + output."""
    mm_features: tuple[MultiModalFeature, ...]
    """The request's own; what the model runner reads of them travels once."""
    sampling_params: SamplingParams
    block_ids: BlockIds
    num_computed_tokens: int
    """Its tokens that are in the cache before this step's."""
    lora_request: str | None
    """The fingerprint of its adapter."""
    row: int = 0
    pooling_params: PoolingParams | None = None
    """If given, it is pooled when all of its prompt is computed, and nothing is sampled."""
    prompt_embeds: tuple[EmbeddedRows, ...] = ()
    """Hidden states in place of embeddings of its prompt's tokens; the request's own."""


@dataclasses.dataclass(frozen=True, slots=True)
class ResumedRequestData:
    """A sequence that the runner has seen and whose tokens and tables are new: it comes back from a
    preemption (it has no row then), or a beam went on from another beam (its row's contents are
    replaced, sampling state included)."""

    req_id: str
    row: int
    token_ids: list[int]
    """Prompt and output."""
    block_ids: BlockIds
    num_computed_tokens: int


class BlockUpdate(NamedTuple):
    """Ids to be written into a known sequence's block tables, from logical block `start` on. Mostly
    new blocks behind the last; also one that was copied before its first write, or was replaced by
    an equal one. Blocks that fell out of a sliding window are not listed: the runner masks."""

    req_id: str
    row: int
    start: int
    block_ids: BlockIds


@dataclasses.dataclass(frozen=True, slots=True)
class MaskRows:
    """M rows: for each the tokens that may be chosen.

    Attributes:
        place_M: the sequence's place in the batch.
        offset_M: how many of its drafts stand before the choice.
        bits_MW: int32, bit t % 32 of word t // 32 for each token t that is possible; bits beyond
            the vocabulary mean nothing.
    """

    place_M: npt.NDArray[np.int64]
    offset_M: npt.NDArray[np.int64]
    bits_MW: npt.NDArray[np.int32]


@runtime_checkable
class TokenMasks(Protocol):
    """The token masks of one step; made while it is computed."""

    def wait(self) -> MaskRows:
        """The masks, as soon as they are there. Every call gives the same."""

    def failures(self) -> dict[str, str]:
        """Why a sequence has no mask and cannot go on, by sequence; after `wait`."""

    def refused(self) -> Collection[str]:
        """Those of the `failures` whose own grammar is the cause."""


@dataclasses.dataclass  # one a step: frozen takes twice as long
class SchedulerOutput:
    """The plan of one step. The runner carries it out in this order: drop the rows of
    `finished_req_ids` and `preempted_req_ids`; `copies`; `scheduled_new_reqs`, `resumed_reqs`,
    `block_updates`; then the batch.

    A plan may be made before the result of the step before it is known. Then the tokens of that
    step count as computed, and the token that a sequence computes may be the one that it samples:
    its number is in no plan, the runner has it. A row whose sequence has ended meanwhile is
    computed once more, and finished in a later plan."""

    step_id: int
    batch: ScheduledBatch
    scheduled_new_reqs: list[NewRequestData]
    resumed_reqs: list[ResumedRequestData]
    block_updates: list[BlockUpdate]
    copies: CacheCopies
    """Copies between blocks, made before the forward pass."""
    total_num_scheduled_tokens: int
    """0 means that nothing runs; finished and preempted ids and copies still count."""
    scheduled_spec_decode_tokens: dict[str, list[int]]
    """Drafts to verify, the last of the sequence's tokens in this step."""
    finished_req_ids: list[str]
    """Sequences that ended since the last step: drop their rows first. An id may come back in the
    same plan."""
    preempted_req_ids: list[str]
    """Lost their blocks in this step: drop their rows, if they have any, and keep what else is
    known of them."""
    num_output_tokens: Int32Array
    """Output tokens of each sequence of the batch, before this step; placeholders count."""
    num_lookahead_slots: int = 0
    """Slots that each sequence has behind this step's tokens."""
    num_drafts_wanted: Int64Array | None = None
    """Drafts of each sequence that the runner is to make behind what it samples, if it can; None
    for none."""
    num_decode_steps: int = 1
    """If above 1, every sequence computes its last token, samples the next one, computes that one,
    and so on; the most that any of them does."""
    token_budget: int = 0
    """The token budget that the step was planned with; for those who watch."""
    token_masks: TokenMasks | None = None
    """Masks for sequences that follow a grammar and are to get a token; None: all is possible."""
    scheduled_encoder_inputs: dict[str, list[int]] = dataclasses.field(default_factory=dict)
    """Which of a sequence's inputs are encoded before this step's tokens are computed, by
    sequence. Outputs are kept, by identifier, for every sequence with an equal input."""
    free_encoder_mm_hashes: list[bytes] = dataclasses.field(default_factory=list)
    """Identifiers of encoder outputs to be dropped before this step's inputs are encoded."""

    @functools.cached_property
    def num_scheduled_tokens(self) -> dict[str, int]:
        """Tokens by sequence, in batch order. For tests and traces; a hot path reads `batch`."""
        batch = self.batch
        return dict(zip(batch.req_ids, batch.num_scheduled_tokens.tolist(), strict=True))
