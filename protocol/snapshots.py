"""What WatchScheduler shows: steps, requests and KV blocks at one moment. Bounded, and without text
or token ids."""

from array import array
from collections.abc import Callable

from msgspec.structs import replace

from protocol.base import Message

MAX_STEPS = 128
MAX_CHUNKS = 12
MAX_REQUESTS = 128
"""Running ones, and as many waiting ones."""
MAX_CELLS = 2000
MAX_PREFIXES = 64

EMPTY, CACHED, IN_USE, FIRST_REQUEST, FIRST_PREFIX = 0, 1, 2, 3, 0x8000
"""Owners of a cell: nothing; the prefix cache alone; a request that is not listed; requests[n - 3];
prefixes[n - 0x8000]."""


class StepSummary(Message, frozen=True):
    """One step that computed tokens, or preempted a request."""

    step_id: int
    token_budget: int
    num_decode_tokens: int
    """Tokens of sequences with one token in the step, drafts included."""
    prefill_chunks: list[tuple[int, int]]
    """(`RequestSummary.number`, tokens); the last may be (0, tokens) of all others."""
    num_preempted: int
    duration_s: float


class RequestSummary(Message, frozen=True):
    number: int
    """The request's number: above 0, and the same in every snapshot."""
    request_id: str
    tenant: str | None
    status: str
    """waiting, running, preempted or swapped."""
    num_sequences: int
    num_prompt_tokens: int
    num_cached_tokens: int | None
    """Prompt tokens found in the prefix cache; None before its first start."""
    num_computed_tokens: int
    """Computed tokens of its first sequence, as `num_output_tokens`."""
    num_output_tokens: int
    max_tokens: int
    num_preemptions: int
    num_blocks: int
    """References to KV blocks on the device."""
    why: str | None = None
    """Why it waits; only of the first in the queue."""


class BlockMap(Message, frozen=True):
    """The device's KV blocks in the order of their ids, as at most MAX_CELLS cells. Those behind
    the last cell are empty."""

    blocks_per_cell: int
    owners: bytes
    """uint16, little-endian, a cell: see EMPTY. Of several blocks the largest."""
    levels: bytes
    """uint8 a cell: the share of its blocks that are not empty, 255 for all."""
    prefixes: list[tuple[int, int]]
    """(sequences, blocks) of each run of blocks that several sequences share."""


class SchedulerView(Message, frozen=True):
    steps: list[StepSummary]
    """Steps since this client's last snapshot, the last MAX_STEPS of them."""
    requests: list[RequestSummary]
    """The running ones, then the waiting ones in the order of the queue."""
    blocks: BlockMap

    def of_owner(self, owns: Callable[[RequestSummary], bool]) -> "SchedulerView":
        """What the owner of some of the requests may see: of the others no more than that they
        compute tokens and hold blocks."""
        kept = [index for index, request in enumerate(self.requests) if owns(request)]
        numbers = {self.requests[index].number for index in kept}
        shown = {FIRST_REQUEST + old: FIRST_REQUEST + new for new, old in enumerate(kept)}
        shown |= {state: state for state in (EMPTY, CACHED)}
        owners = array("H", self.blocks.owners)
        return SchedulerView(
            steps=[replace(step, prefill_chunks=_own(step, numbers)) for step in self.steps],
            requests=[self.requests[index] for index in kept],
            blocks=replace(
                self.blocks,
                owners=array("H", [shown.get(owner, IN_USE) for owner in owners]).tobytes(),
                prefixes=[],
            ),
        )


def _own(step: StepSummary, numbers: set[int]) -> list[tuple[int, int]]:
    own = [chunk for chunk in step.prefill_chunks if chunk[0] in numbers]
    num_others = sum(tokens for _, tokens in step.prefill_chunks) - sum(each for _, each in own)
    return [*own, (0, num_others)] if num_others else own
