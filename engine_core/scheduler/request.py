"""One request, and its sequences: the streams of tokens that go on from its prompt."""

import dataclasses
import enum
from array import array
from collections.abc import Sequence as AnySequence
from math import nan
from typing import Protocol

import msgspec
import numpy as np

from engine_core.kv_cache import ContentSpan, Transfer
from engine_core.pooler_config import PoolerConfig
from engine_core.scheduler.batch_state import BatchState, Int32Array
from engine_core.scheduler.beam_search import BeamSearch
from engine_core.scheduler.mm_features import MultiModalFeature
from engine_core.scheduler.prompt_embeds import EmbeddedRows
from protocol.explanations import CacheLookup, Preemption
from protocol.outputs import FinishReason
from protocol.pooling import PoolingParams
from protocol.requests import EngineRequest
from protocol.sampling import BeamSearchParams, SamplingParams, sequence_seed

_MAX_TOKEN_ID = 2**31 - 1


class Grammar(Protocol):
    """What a request's output must follow; see `constraints.py`."""

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
    """Not admitted yet."""
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
    """Can never fit."""
    FINISHED_ERROR = 8
    FINISHED_TIMEOUT = 9
    FINISHED_REFUSED = 10
    """Its grammar cannot be used."""
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
    """Starts with one sequence; one of n samples forks into n when the prompt is computed. It is
    admitted, preempted and finished as a unit.
    Raises ValueError: a field outside its limits, or two that contradict each other.

    Args:
        request_id: unique among unfinished requests.
        prompt_token_ids: at least one.
        client_index: which client gets the outputs.
        arrival_time: seconds on the caller's clock.
        eos_token_ids: the model's; they end a sequence unless `ignore_eos`.
        output_token_ids: delivered by an earlier, interrupted run; they count against `max_tokens`.
        cache_salt, adapter: only requests that agree in both share cached blocks. An adapter is
            named by the fingerprint of its weights.
        priority: smaller is more urgent.
        tenant: which service counter policy fair charges; None for the client's own.
        num_sequences: samples of the prompt.
        beam_search: if given, the sequences are beams, `num_sequences` of them.
        timeout_s: seconds after `arrival_time` at which it ends, finished or not.
        is_resumed: sent again after the engine was lost: a full queue takes it.
        pooling_params: if given, it ends when its prompt is computed, with what the runner pooled.
        pools_all_states: its hidden states are all pooled, so no cached prefix is used.
        num_held_values: numbers that are held of it until then.
        prompt_embeds: hidden states in place of embeddings, by rising positions.
        content_spans: what of the prompt is more than its tokens, likewise.
        mm_features: images and sounds of the prompt, in order, without overlap.
        kv_source: where blocks of the prompt may be fetched from.
    """

    def __init__(
        self,
        *,
        request_id: str,
        prompt_token_ids: AnySequence[int],
        sampling_params: SamplingParams,
        client_index: int = 0,
        arrival_time: float = 0.0,
        eos_token_ids: AnySequence[int] = (),
        output_token_ids: AnySequence[int] = (),
        cache_salt: str | None = None,
        adapter: str | None = None,
        priority: int = 0,
        tenant: str | None = None,
        num_sequences: int = 1,
        beam_search: BeamSearchParams | None = None,
        timeout_s: float | None = None,
        is_resumed: bool = False,
        pooling_params: PoolingParams | None = None,
        pools_all_states: bool = False,
        num_held_values: int = 0,
        prompt_embeds: tuple[EmbeddedRows, ...] = (),
        content_spans: AnySequence[ContentSpan] = (),
        mm_features: AnySequence[MultiModalFeature] = (),
        kv_source: str | None = None,
    ) -> None:
        if not request_id:
            raise ValueError("request_id is empty; give each request an id of its own")
        if not isinstance(sampling_params, SamplingParams):
            raise ValueError(
                f"sampling_params is {sampling_params!r}, it must be "
                "protocol.sampling.SamplingParams"
            )
        self.request_id = request_id
        self.prompt: array[int] = _checked_ids("prompt_token_ids", prompt_token_ids)
        self.num_prompt_tokens = len(self.prompt)
        if not self.num_prompt_tokens:
            raise ValueError("the prompt is empty; send at least one token")
        if num_sequences < 1:
            raise ValueError(f"num_sequences is {num_sequences}, it must be at least 1")
        if num_sequences > 1 and output_token_ids:
            raise ValueError(
                f"output_token_ids are given for num_sequences {num_sequences}; send one request a "
                "sequence to go on with"
            )
        if beam_search is not None and beam_search.beam_width != num_sequences:
            raise ValueError(
                f"num_sequences is {num_sequences}, the beam width {beam_search.beam_width}; make "
                "them equal"
            )
        if pooling_params is not None and (num_sequences > 1 or beam_search or output_token_ids):
            raise ValueError("a pooling request has one sequence and no output; send it alone")
        self.pooling_params = pooling_params
        self.pools_all_states = pools_all_states
        self.num_held_values = num_held_values
        self.sampling_params = sampling_params
        self.client_index = client_index
        self.is_resumed = is_resumed
        self.arrival_time = arrival_time
        self.eos_token_ids = frozenset(eos_token_ids)
        self.cache_salt = cache_salt
        self.adapter = adapter
        self.prompt_embeds = prompt_embeds
        self.mm_features = tuple(mm_features)
        inputs = (ContentSpan(each.start, each.stop, each.identifier) for each in mm_features)
        self.content_spans = tuple(sorted((*content_spans, *inputs)))
        self.priority = priority
        self.tenant = tenant
        self.num_sequences = num_sequences
        self.timeout_s = timeout_s
        self.beam_search: BeamSearch | None = None
        if beam_search is not None:
            self.beam_search = BeamSearch(
                beam_search,
                max_tokens=sampling_params.max_tokens,
                eos_token_ids=() if sampling_params.ignore_eos else self.eos_token_ids,
                stop_token_ids=sampling_params.stop_token_ids,
                min_tokens=sampling_params.min_tokens,
            )
        self.sequences = [Sequence(self)]
        """Those that exist, finished ones included, by index; one until the prompt is computed."""
        if output_token_ids:
            self.sequences[0].set_output(_checked_ids("output_token_ids", output_token_ids))
        self._status = RequestStatus.WAITING
        self.num_finished_sequences = 0
        self.num_queued_tokens = 0
        """Its tokens when it last joined the waiting queue."""
        self.num_preemptions = 0
        self.num_cached_tokens: int | None = None
        """Prompt tokens found in the cache at the first admission; None before it."""
        self.cache_lookup: CacheLookup | None = None
        self.preemptions: list[Preemption] = []
        self.num_draft_tokens = 0
        """Verified."""
        self.num_accepted_tokens = 0
        """Drafts that are in the output."""
        self.num_prompt_logprobs = 0
        """Tokens of the prompt whose log-probabilities were sent; the first has none."""
        self.transfer = None if kv_source is None else Transfer(kv_source)
        self.first_output_sent = False
        self.runs_alone = False
        """Whether no other request may run beside it."""
        self.num_passed = 0
        """Requests with adapters that started before it, while it waited for an adapter slot."""
        self.grammar: Grammar | None = None
        """What its output must follow; of all its sequences."""
        self.tenant_number = 0
        self.first_step_id = 0
        """The first step that was planned while it waited."""

    @classmethod
    def from_engine_core_request(
        cls,
        message: EngineRequest,
        *,
        client_index: int,
        arrival_time: float,
        eos_token_ids: AnySequence[int],
        pooler: PoolerConfig | None = None,
        prompt_embeds: tuple[EmbeddedRows, ...] = (),
        content_spans: AnySequence[ContentSpan] = (),
        mm_features: AnySequence[MultiModalFeature] = (),
    ) -> "Request":
        """A request as a client sent it. What the model or the engine cannot serve is refused
        before (`server.validation`). Raises ValueError: a field outside its limits."""
        params, pools_all_states, num_held_values = message.pooling_params, False, 0
        if params is not None and pooler is not None:
            pools_all_states = pooler.needs_all_states(params)
            num_held_values = pooler.num_held_values(params, len(message.prompt_token_ids))
        return cls(
            request_id=message.request_id,
            prompt_token_ids=message.prompt_token_ids,
            sampling_params=message.sampling_params,
            client_index=client_index,
            arrival_time=arrival_time,
            eos_token_ids=eos_token_ids,
            output_token_ids=message.output_token_ids,
            cache_salt=message.cache_salt,
            adapter=message.adapter,
            priority=message.priority,
            tenant=message.tenant,
            num_sequences=message.num_sequences,
            beam_search=message.beam_search,
            timeout_s=message.timeout_s,
            is_resumed=message.is_resumed,
            kv_source=message.kv_source,
            pooling_params=params,
            pools_all_states=pools_all_states,
            num_held_values=num_held_values,
            prompt_embeds=prompt_embeds,
            content_spans=content_spans,
            mm_features=mm_features,
        )

    @property
    def status(self) -> RequestStatus:
        return self._status

    @status.setter
    def status(self, status: RequestStatus) -> None:
        """Also of all its sequences that are not finished."""
        self._status = status
        for sequence in self.sequences:
            if not sequence.status.is_finished:
                sequence.status = status

    @property
    def is_finished(self) -> bool:
        return self._status.is_finished

    @property
    def max_len(self) -> int:
        """Tokens with which it ends at the latest, by its own wish."""
        generates = self.pooling_params is None
        return self.num_prompt_tokens + (self.sampling_params.max_tokens if generates else 0)

    @property
    def computes_whole_prompt(self) -> bool:
        """Whether no cached prefix is used."""
        return self.pools_all_states or self.lacks_prompt_logprobs

    @property
    def num_reported_values(self) -> int:
        """Numbers that the runner holds or reports of its prompt, beside an answer's own."""
        num_logprobs = 0
        if self.lacks_prompt_logprobs:
            num_logprobs = self.sampling_params.num_prompt_logprobs(self.num_prompt_tokens)
        return num_logprobs + self.num_held_values

    @property
    def lacks_prompt_logprobs(self) -> bool:
        """Whether more of its prompt is to be reported."""
        return (
            self.sampling_params.prompt_logprobs is not None
            and self.num_prompt_logprobs < self.num_prompt_tokens - 1
        )

    @property
    def embeds_stop(self) -> int:
        """Behind the last position that has a hidden state in place of a token; 0 without any."""
        return self.prompt_embeds[-1].stop if self.prompt_embeds else 0

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
    def num_encoder_tokens(self) -> int:
        """What encoders make of its inputs."""
        return sum(each.num_rows for each in self.mm_features)

    @property
    def scope(self) -> tuple[str | None, str | None]:
        """Requests of different scopes know nothing of each other's tokens."""
        return self.cache_salt, self.adapter

    # ------------------------------------------------------------------ its first sequence

    @property
    def prompt_token_ids(self) -> list[int]:
        """A copy of `prompt`."""
        return self.prompt.tolist()

    @property
    def num_tokens(self) -> int:
        return self.sequences[0].num_tokens

    @property
    def num_tokens_with_spec(self) -> int:
        return self.num_tokens + len(self.sequences[0].spec_token_ids)

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
class Sequence:
    """One stream of tokens. While it runs, its numbers and tokens are in its row of the batch
    state; before and after, they are here.

        |---- prompt ----|---- output ----|-- drafts --|
        0 .. num_computed .. num_tokens ..  num_tokens_with_spec
    """

    request: Request
    index: int = 0
    """Which of the request's sequences."""
    serial: int = 0
    """Tells apart the sequences that had the same index in turn (beams)."""
    sequence_id: str = ""
    status: RequestStatus = RequestStatus.WAITING
    """Its request's, unless it finished before it."""
    stop_reason: int | str | None = None
    """The stop token that ended it, or a word for its repetition; None for end-of-sequence."""
    block_hashes: list[bytes] = dataclasses.field(default_factory=list)
    first_token_s: float = nan
    """When its first output token was there, on the scheduler's clock."""
    is_known_to_runner: bool = False
    has_runner_row: bool = False
    """Whether the runner has exactly these tokens in its row."""
    row: int | None = None
    _batch: BatchState | None = None
    _output: "array[int]" = dataclasses.field(default_factory=lambda: array("i"))
    _num_computed: int = 0
    _drafts: list[int] = dataclasses.field(default_factory=list)
    has_forced_drafts: bool = False
    """Whether its last drafts are those that a grammar forces."""

    def __post_init__(self) -> None:
        request_id = self.request.request_id
        self.sequence_id = f"{request_id}#{self.serial}" if self.serial else request_id

    # ------------------------------------------------------------------ numbers

    @property
    def num_prompt_tokens(self) -> int:
        return self.request.num_prompt_tokens

    @property
    def num_tokens(self) -> int:
        """Prompt and output."""
        if self._batch is None:
            return self.request.num_prompt_tokens + len(self._output)
        return int(self._batch.num_tokens[self.row])

    @property
    def num_output_tokens(self) -> int:
        return self.num_tokens - self.request.num_prompt_tokens

    @property
    def num_computed_tokens(self) -> int:
        """Scheduled tokens count."""
        if self._batch is None:
            return self._num_computed
        return int(self._batch.num_computed_tokens[self.row])

    @num_computed_tokens.setter
    def num_computed_tokens(self, value: int) -> None:
        if self._batch is None:
            self._num_computed = value
        else:
            self._batch.num_computed_tokens[self.row] = value

    @property
    def is_prefill(self) -> bool:
        """Whether tokens other than the last sampled one are to be computed."""
        num_computed = self.num_computed_tokens
        return num_computed < self.num_prompt_tokens or self.num_tokens - num_computed > 1

    @property
    def cache_salt(self) -> str | None:
        return self.request.cache_salt

    @property
    def adapter(self) -> str | None:
        return self.request.adapter

    @property
    def request_id(self) -> str:
        return self.request.request_id

    @property
    def num_encoder_tokens(self) -> int:
        return self.request.num_encoder_tokens

    @property
    def content_spans(self) -> tuple[ContentSpan, ...]:
        return self.request.content_spans

    @property
    def sampling_params(self) -> SamplingParams:
        """The request's, with a seed of its own; for a beam, with the likeliest tokens reported."""
        request, params = self.request, self.request.sampling_params
        if request.beam_search is not None:
            return msgspec.structs.replace(
                params, temperature=0.0, logprobs=request.beam_search.num_candidates, min_tokens=0
            )
        if self.index == 0 or params.seed is None:
            return params
        return msgspec.structs.replace(params, seed=sequence_seed(params.seed, self.index))

    # ------------------------------------------------------------------ tokens

    @property
    def output_token_ids(self) -> list[int]:
        """A copy."""
        if self._batch is None:
            return self._output.tolist()
        start, stop = self.request.num_prompt_tokens, self.num_tokens
        output: list[int] = self._batch.token_ids[self.row, start:stop].tolist()
        return output

    @property
    def all_token_ids(self) -> list[int]:
        """Prompt and output, a copy."""
        return self.request.prompt.tolist() + self.output_token_ids

    @property
    def last_token_id(self) -> int:
        if self._batch is None:
            return self._output[-1] if self._output else self.request.prompt[-1]
        return int(self._batch.token_ids[self.row, self.num_tokens - 1])

    def known_tokens(self) -> Int32Array:
        """Prompt and output. Not to be changed."""
        if self._batch is None:
            return np.array(self.all_token_ids, np.int32)
        known: Int32Array = self._batch.token_ids[self.row, : self.num_tokens]
        return known

    def token_bytes(self, start: int, stop: int) -> bytes:
        """Tokens [start, stop) as int32, little-endian."""
        if self._batch is not None:
            tokens: np.ndarray = self._batch.token_ids[self.row, start:stop]
            return tokens.tobytes()
        prompt, num_prompt = self.request.prompt, self.request.num_prompt_tokens
        if stop <= num_prompt:
            return memoryview(prompt)[start:stop].tobytes()
        tail = self._output[max(0, start - num_prompt) : stop - num_prompt].tobytes()
        return memoryview(prompt)[start:num_prompt].tobytes() + tail

    def output_from(self, start: int) -> list[int]:
        """Output tokens from this one on."""
        if self._batch is None:
            return self._output[start:].tolist()
        batch, row = self._batch, self.row
        first = self.request.num_prompt_tokens + start
        return batch.token_ids[row, first : batch.num_tokens[row]].tolist()  # type: ignore[no-any-return]

    def append_output_token(self, token_id: int) -> None:
        if self._batch is None:
            self._output.append(token_id)
        else:
            batch, row = self._batch, self.row
            batch.token_ids[row, batch.num_tokens[row]] = token_id
            batch.num_tokens[row] += 1

    def set_output(self, token_ids: AnySequence[int]) -> None:
        """All of the output, of a sequence without a row."""
        assert self._batch is None
        self._output = array("i", token_ids)

    def drop_placeholders(self) -> None:
        """What steps in flight sample for it is dropped: its last token is to be computed again if
        the sequence goes on."""
        if self._batch is not None and self._batch.num_steps_in_flight:
            self.num_computed_tokens = min(self.num_computed_tokens, self.num_tokens - 1)

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
        """As many as may all be accepted: one sampled token follows them in any case."""
        max_tokens = self.request.sampling_params.max_tokens
        num_tokens = self.num_tokens
        return min(
            self.num_prompt_tokens + max_tokens - num_tokens - 1, max_model_len - num_tokens - 1
        )

    # ------------------------------------------------------------------ rows

    def enter_row(self, batch: BatchState, row: int) -> None:
        """From here on its numbers and tokens are in that row."""
        num_tokens, num_prompt = self.num_tokens, self.request.num_prompt_tokens
        batch.token_ids[row, :num_prompt] = self.request.prompt
        if self._output:
            batch.token_ids[row, num_prompt:num_tokens] = self._output
        batch.num_tokens[row] = num_tokens
        batch.num_prompt_tokens[row] = num_prompt
        batch.num_computed_tokens[row] = self._num_computed
        batch.num_allocated_slots[row] = 0
        batch.next_drop[row] = 0
        features = self.request.mm_features
        batch.encoder_stop[row] = features[-1].stop if features else 0
        batch.num_output_placeholders[row] = 0
        batch.is_blocked[row] = False
        batch.first_token_s[row] = self.first_token_s
        batch.sequence_index[row] = self.index
        batch.sequence_ids[row] = self.sequence_id
        batch.request_ids[row] = self.request.request_id
        self.row = row
        self._batch = batch

    def leave_row(self) -> int:
        """Take numbers and tokens out of the row. Returns it; to free it is the caller's."""
        batch, row = self._batch, self.row
        assert batch is not None
        assert row is not None
        self.has_runner_row = False
        self.spec_token_ids = []
        self.first_token_s = float(batch.first_token_s[row])
        self._output = array("i", self.token_bytes(self.num_prompt_tokens, self.num_tokens))
        self._num_computed = self.num_computed_tokens
        self._batch = None
        self.row = None
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


def _checked_ids(name: str, token_ids: AnySequence[int]) -> "array[int]":
    """Token ids as a flat array of 4 bytes each.
    Raises ValueError: an id below 0 or above 2**31 - 1, or no whole number."""
    try:
        flat = array("I", token_ids)  # faster than "i", and the bytes are the same
        is_valid = not flat or int(np.frombuffer(flat, np.uint32).max()) <= _MAX_TOKEN_ID
    except OverflowError:
        is_valid = False
    except TypeError as error:
        raise ValueError(f"{name} holds something that is not a token id: {error}") from error
    if not is_valid:
        raise ValueError(
            f"{name} holds ids from {min(token_ids)} to {max(token_ids)}, they must be from 0 to "
            f"{_MAX_TOKEN_ID}; use the model's own tokenizer"
        )
    return flat
