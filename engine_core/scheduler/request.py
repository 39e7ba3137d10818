"""One request, and its sequences: the streams of tokens that go on from its prompt."""

import dataclasses
import enum
from collections.abc import Sequence as AnySequence
from math import nan
from typing import Protocol

import msgspec

from engine_core.kv_cache import ContentSpan
from engine_core.scheduler.batch_state import BatchState
from engine_core.scheduler.counters import Account
from engine_core.scheduler.records.beam_search import BeamSearch
from engine_core.scheduler.records.prompt_content import TOKENS_ONLY, PromptContent
from engine_core.scheduler.records.prompt_report import PromptReport
from engine_core.scheduler.token_stream import TokenStream, checked_ids
from protocol.outputs import FinishReason
from protocol.requests import EngineRequest
from protocol.sampling import SamplingParams, sequence_seed


class Grammar(Protocol):
    """A grammar that a request's output must follow; see `constraints.py`."""

    @property
    def is_ready(self) -> bool:
        """Whether the request may start."""


class RequestStatus(enum.IntEnum):
    """Ordered: all final states come last.

    WAITING ──> RUNNING ──> FINISHED_*
                 │   ^
                 v   │
        PREEMPTED | SWAPPED       every state may go to FINISHED_* (abort, fault)
    """

    WAITING = 0
    """It has not been admitted yet."""
    RUNNING = 1
    """Has blocks; may or may not be part of a given step."""
    PREEMPTED = 2
    """Lost its blocks; at the head of the waiting queue, to be recomputed."""
    SWAPPED = 3
    """Its blocks are in host memory; ahead of all waiting requests that are not swapped."""
    FINISHED_STOPPED = 4
    FINISHED_LENGTH = 5
    FINISHED_ABORTED = 6
    FINISHED_IGNORED = 7
    """The request can never fit."""
    FINISHED_ERROR = 8
    FINISHED_TIMEOUT = 9
    FINISHED_REFUSED = 10
    """Its grammar cannot be used, or its parameters allow no token."""
    FINISHED_REPETITION = 11

    @property
    def is_finished(self) -> bool:
        return self >= RequestStatus.FINISHED_STOPPED

    @property
    def finish_reason(self) -> FinishReason:
        """Its name on the wire. Only for final states."""
        return _FINISH_REASONS[self]


_FINISH_REASONS = {
    RequestStatus.FINISHED_STOPPED: FinishReason.STOP,
    RequestStatus.FINISHED_LENGTH: FinishReason.LENGTH,
    RequestStatus.FINISHED_ABORTED: FinishReason.ABORT,
    RequestStatus.FINISHED_IGNORED: FinishReason.LENGTH,
    RequestStatus.FINISHED_ERROR: FinishReason.ERROR,
    RequestStatus.FINISHED_TIMEOUT: FinishReason.TIMEOUT,
    RequestStatus.FINISHED_REPETITION: FinishReason.REPETITION,
    RequestStatus.FINISHED_REFUSED: FinishReason.REFUSED,
}


class Request:
    """A request as a client sent it. It starts with one sequence; one of n samples forks into n
    when the prompt is computed. It is admitted, preempted and finished as a unit.
    Raises ValueError: a field outside its limits, or two that contradict each other.

    Args:
        message: what the model or the engine cannot serve is refused before (`server.validation`);
            its adapter is named by the fingerprint of its weights.
        client_index: which client gets the outputs.
        arrival_time: seconds on the caller's clock.
        eos_token_ids: the model's; they end a sequence unless `ignore_eos`.
        report: what is reported of the prompt itself, of a model that pools.
        content: what the prompt has beside its tokens.
    """

    def __init__(
        self,
        message: EngineRequest,
        *,
        client_index: int = 0,
        arrival_time: float = 0.0,
        eos_token_ids: AnySequence[int] = (),
        report: PromptReport | None = None,
        content: PromptContent = TOKENS_ONLY,
    ) -> None:
        _check(message)
        self.request_id = message.request_id
        self.prompt = checked_ids("prompt_token_ids", message.prompt_token_ids)
        self.num_prompt_tokens = len(self.prompt)
        self.sampling_params = message.sampling_params
        self.client_index = client_index
        self.arrival_time = arrival_time
        self.eos_token_ids = frozenset(eos_token_ids)
        self.content = content
        self.num_sequences = message.num_sequences
        self.account = Account()
        self.report = report or PromptReport.of(message)
        """Reports of the prompt itself; None if there are none."""
        self.beam_search = BeamSearch.of(message, self.eos_token_ids)
        self.sequences = [Sequence(self)]
        """Those that exist, finished ones included, by index; one until the prompt is computed."""
        if message.output_token_ids:
            self.sequences[0].set_output(checked_ids("output_token_ids", message.output_token_ids))
        # token ids as objects take nine times the memory of arrays
        self.message = msgspec.structs.replace(message, prompt_token_ids=[], output_token_ids=[])
        """The client's message without its tokens."""
        self._status = RequestStatus.WAITING
        self.num_finished_sequences = 0
        self.num_queued_tokens = 0
        """Its tokens when it last joined the waiting queue."""
        self.runs_alone = False
        """Whether no other request may run beside it."""
        self.num_passed = 0
        """Requests with adapters that started before it, while it waited for an adapter slot."""
        self.grammar: Grammar | None = None
        """Must be followed by the output of each of its sequences."""
        self.tenant_number = 0
        self.first_step_id = 0
        """The first step that was planned while it waited."""

    @property
    def status(self) -> RequestStatus:
        return self._status

    @status.setter
    def status(self, status: RequestStatus) -> None:
        """Sets the status of all its unfinished sequences, too."""
        self._status = status
        for sequence in self.sequences:
            if not sequence.status.is_finished:
                sequence.status = status

    @property
    def is_finished(self) -> bool:
        return self._status.is_finished

    @property
    def adapter(self) -> str | None:
        """The fingerprint of its adapter's weights; None: it has no adapter."""
        return self.message.adapter

    @property
    def generates(self) -> bool:
        """Whether it samples tokens; else it ends when its prompt is pooled."""
        return self.message.generates

    @property
    def max_len(self) -> int:
        """Tokens with which it ends at the latest, by its own wish."""
        return self.num_prompt_tokens + (self.sampling_params.max_tokens if self.generates else 0)

    @property
    def computes_whole_prompt(self) -> bool:
        """Whether no cached prefix is used."""
        return self.report is not None and self.report.computes_whole_prompt

    @property
    def num_reported_values(self) -> int:
        """Numbers that the runner holds or reports of its prompt, beside an answer's own."""
        return 0 if self.report is None else self.report.num_values

    @property
    def unfinished(self) -> list["Sequence"]:
        """Its sequences that are not finished, by index."""
        return [seq for seq in self.sequences if not seq.status.is_finished]

    @property
    def num_running_sequences(self) -> int:
        """Most sequences that run at once for the rest of its life."""
        return self.num_sequences - self.num_finished_sequences

    @property
    def has_pending_forks(self) -> bool:
        """Whether it runs and has sequences without a row: they are forked when its first one has
        caught up."""
        if self.num_sequences == 1:
            return False
        if self.beam_search is None and len(self.sequences) < self.num_sequences:
            return True
        return any(sequence.row is None for sequence in self.unfinished)

    @property
    def tenant_name(self) -> str:
        """The tenant without the user that divides its share; empty for none."""
        return (self.message.tenant or "").partition("/")[0]

    @property
    def scope(self) -> tuple[str | None, str | None]:
        """Requests of different scopes know nothing of each other's tokens."""
        return self.message.cache_salt, self.message.adapter

    # ------------------------------------------------------------------ its first sequence

    @property
    def prompt_token_ids(self) -> list[int]:
        """A copy of `prompt`."""
        return self.prompt.tolist()

    @property
    def num_tokens(self) -> int:
        return self.sequences[0].num_tokens

    @property
    def num_output_tokens(self) -> int:
        return self.sequences[0].num_output_tokens

    @property
    def num_computed_tokens(self) -> int:
        return self.sequences[0].num_computed_tokens

    @property
    def output_token_ids(self) -> list[int]:
        return self.sequences[0].output_token_ids

    @property
    def all_token_ids(self) -> list[int]:
        return self.sequences[0].all_token_ids

    def __repr__(self) -> str:
        return (
            f"Request({self.request_id!r}, {self._status.name}, "
            f"computed {self.num_computed_tokens} of {self.num_tokens})"
        )


@dataclasses.dataclass(slots=True, eq=False, repr=False)
class Sequence(TokenStream):
    """One stream of tokens of a request."""

    request: Request
    index: int = 0
    """Its number among the request's sequences."""
    serial: int = 0
    """Tells apart the sequences that had the same index in turn (beams)."""
    sequence_id: str = ""
    status: RequestStatus = RequestStatus.WAITING
    """Its request's, unless it finished before it."""
    stop_reason: int | str | None = None
    """The stop token that ended it, or a word for its repetition; None for end-of-sequence."""
    block_hashes: list[bytes] = dataclasses.field(default_factory=list)
    checkpoints: tuple[int, ...] = ()
    first_token_s: float = nan
    """When its first output token was there, on the scheduler's clock."""
    is_known_to_runner: bool = False
    has_runner_row: bool = False
    """Whether the runner has exactly these tokens in its row."""
    _drafts: list[int] = dataclasses.field(default_factory=list)
    has_forced_drafts: bool = False
    """Whether its last drafts are those that a grammar forces."""

    def __post_init__(self) -> None:
        self.prompt, request_id = self.request.prompt, self.request.request_id
        self.sequence_id = f"{request_id}#{self.serial}" if self.serial else request_id

    @property
    def cache_salt(self) -> str | None:
        return self.request.message.cache_salt

    @property
    def adapter(self) -> str | None:
        return self.request.message.adapter

    @property
    def request_id(self) -> str:
        return self.request.request_id

    @property
    def num_encoder_tokens(self) -> int:
        return self.request.content.num_encoder_tokens

    @property
    def content_spans(self) -> tuple[ContentSpan, ...]:
        return self.request.content.spans

    @property
    def sampling_params(self) -> SamplingParams:
        """The request's, with a seed of its own; for a beam, with the likeliest tokens reported."""
        request, params = self.request, self.request.sampling_params
        if request.beam_search is not None:
            return request.beam_search.sampling_params(params)
        if self.index == 0 or params.seed is None:
            return params
        return msgspec.structs.replace(params, seed=sequence_seed(params.seed, self.index))

    @property
    def spec_token_ids(self) -> list[int]:
        """Drafts to verify in the next step."""
        return self._drafts

    @spec_token_ids.setter
    def spec_token_ids(self, drafts: list[int]) -> None:
        self._drafts = drafts
        if drafts:
            self.has_forced_drafts = False
        if self._batch is not None and self.row is not None:
            rows = self._batch.rows_with_drafts
            (rows.add if drafts else rows.discard)(self.row)

    def max_drafts(self, max_model_len: int) -> int:
        """Most drafts that may all be accepted: one sampled token follows them in any case."""
        max_tokens = self.request.sampling_params.max_tokens
        max_len = min(self.num_prompt_tokens + max_tokens, max_model_len)
        return max_len - self.num_tokens - 1

    def enter_row(self, batch: BatchState, row: int) -> None:
        """Its numbers and tokens are in that row from here on."""
        self._move_to_row(batch, row)
        batch.num_allocated_slots[row] = 0
        batch.next_drop[row] = 0
        batch.encoder_stop[row] = self.request.content.encoder_stop
        batch.num_output_placeholders[row] = 0
        batch.is_blocked[row] = False
        batch.first_token_s[row] = self.first_token_s
        batch.sequence_index[row] = self.index
        batch.sequence_ids[row] = self.sequence_id
        batch.request_ids[row] = self.request.request_id

    def leave_row(self) -> int:
        """Take numbers and tokens out of the row. Returns it; to free it is the caller's."""
        batch, row = self._batch, self.row
        assert batch is not None
        assert row is not None
        self.has_runner_row = False
        self.spec_token_ids = []
        self.first_token_s = float(batch.first_token_s[row])
        self._move_out_of_row()
        return row

    def __repr__(self) -> str:
        return (
            f"Sequence({self.sequence_id!r}, {self.status.name}, "
            f"computed {self.num_computed_tokens} of {self.num_tokens})"
        )


def request_of(sequence_id: str) -> str:
    """ "ID" and "ID#1" are sequences of request "ID"; no request's id ends like the latter."""
    request_id, _, serial = sequence_id.rpartition("#")
    return request_id if request_id and serial.isdecimal() else sequence_id


def _check(message: EngineRequest) -> None:
    """Raises ValueError if the message cannot be served as it is."""
    num_sequences, beam_search = message.num_sequences, message.beam_search
    if not message.request_id:
        raise ValueError("request_id is empty; give each request an id of its own")
    if not message.prompt_token_ids:
        raise ValueError("the prompt is empty; send at least one token")
    if num_sequences < 1:
        raise ValueError(f"num_sequences is {num_sequences}, it must be at least 1")
    if num_sequences > 1 and message.output_token_ids:
        raise ValueError(
            f"output_token_ids are given for num_sequences {num_sequences}; send one request a "
            "sequence to go on with"
        )
    if beam_search is not None and beam_search.beam_width != num_sequences:
        raise ValueError(
            f"num_sequences is {num_sequences}, the beam width {beam_search.beam_width}; make "
            "them equal"
        )
