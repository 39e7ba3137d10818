"""One request: a prompt, its parameters, and the sequences that go on from it.

Must not know queues, blocks or the wire's framing. A request starts with one sequence, the prompt;
one that asked for n branches into n when the prompt is computed. It is admitted, preempted and
finished as a unit.
"""

from array import array
from collections.abc import Sequence as AnySequence

from engine_core.scheduler.beam_search import BeamSearch
from engine_core.scheduler.request_checks import check_request, checked_token_ids
from engine_core.scheduler.request_status import RequestStatus
from engine_core.scheduler.sequence import Sequence
from protocol.explanations import CacheLookup, Preemption
from protocol.requests import EngineRequest
from protocol.sampling import BeamSearchParams, SamplingParams


class Request:
    """Counters are the scheduler's.

    Args:
        request_id: unique among live requests.
        prompt_token_ids: at least one.
        sampling_params: checked already, on construction.
        client_index: who gets the outputs.
        arrival_time: seconds on the caller's clock.
        eos_token_ids: the model's; they end a sequence unless `ignore_eos`.
        output_token_ids: delivered by an earlier, interrupted run; the request goes on behind
            them and they count against `max_tokens`.
        cache_salt: only requests with the same salt share cached blocks.
        adapter: likewise.
        priority: smaller is more urgent.
        tenant: whose service policy fair counts; None for the client's own.
        num_sequences: samples of the prompt.
        beam_search: if given, the sequences are beams, `num_sequences` of them.
        max_model_len: if given, the prompt is checked against it here.

    Raises:
        ValueError: a field outside its limits.
    """

    __slots__ = (
        "_status",
        "adapter",
        "arrival_time",
        "beam_params",
        "beam_search",
        "cache_lookup",
        "cache_salt",
        "client_index",
        "eos_token_ids",
        "first_output_sent",
        "first_step_id",
        "num_cached_tokens",
        "num_finished_sequences",
        "num_preemptions",
        "num_prompt_tokens",
        "num_queued_tokens",
        "num_sequences",
        "preemptions",
        "priority",
        "prompt",
        "request_id",
        "sampling_params",
        "sequences",
        "tenant",
        "tenant_number",
    )

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
        max_model_len: int | None = None,
    ) -> None:
        self.request_id = request_id
        self.prompt: array[int] = checked_token_ids("prompt_token_ids", prompt_token_ids)
        output = checked_token_ids("output_token_ids", output_token_ids)
        self.sampling_params = sampling_params
        self.num_sequences = num_sequences
        check_request(self, beam_search, len(output), max_model_len)
        self.client_index = client_index
        self.arrival_time = arrival_time
        self.priority = priority
        self.tenant = tenant
        self.eos_token_ids = frozenset(eos_token_ids)
        self.cache_salt = cache_salt
        self.adapter = adapter
        self.num_prompt_tokens = len(self.prompt)
        self.beam_params = beam_search
        self.beam_search = None if beam_search is None else self._new_beam_search(max_model_len)
        self.sequences = [Sequence(self)]
        """Those that exist, finished ones included, by index; one until the prompt is computed."""
        if output:
            self.sequences[0].set_output(output.tolist())
        self._status = RequestStatus.WAITING
        self.num_finished_sequences = 0
        self.num_queued_tokens = 0
        """Its tokens when it joined the waiting queue last."""
        self.num_preemptions = 0
        self.num_cached_tokens: int | None = None
        """Prompt tokens found in the cache at the first admission; None before it."""
        self.cache_lookup: CacheLookup | None = None
        self.preemptions: list[Preemption] = []
        self.first_output_sent = False
        """Whether an output has gone to the client."""
        self.tenant_number = 0
        self.first_step_id = 0
        """The first step that was planned with this request waiting."""

    def _new_beam_search(self, max_model_len: int | None) -> BeamSearch:
        assert self.beam_params is not None
        params = self.sampling_params
        max_tokens = params.max_tokens
        if max_model_len is not None:
            max_tokens = min(max_tokens, max_model_len - self.num_prompt_tokens)
        return BeamSearch(
            self.beam_params,
            max_tokens=max_tokens,
            eos_token_ids=() if params.ignore_eos else self.eos_token_ids,
            stop_token_ids=params.stop_token_ids,
            min_tokens=params.min_tokens,
        )

    def limit_beams(self, max_model_len: int) -> None:
        """Beams end where the model's length ends. Before the request runs."""
        if self.beam_params is not None:
            self.beam_search = self._new_beam_search(max_model_len)

    @classmethod
    def from_engine_core_request(
        cls,
        message: EngineRequest,
        *,
        client_index: int,
        arrival_time: float,
        eos_token_ids: AnySequence[int],
        max_model_len: int | None = None,
    ) -> "Request":
        """A request as a client sent it.

        Raises:
            ValueError: a field outside its limits, or a feature that is not supported.
        """
        unsupported = {
            "prompt_embeds": message.prompt_embeds is not None,
            "multimodal_inputs": bool(message.multimodal_inputs),
        }
        for name, is_asked in unsupported.items():
            if is_asked:
                raise ValueError(f"{name} is not supported; omit it and send prompt_token_ids")
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
            max_model_len=max_model_len,
        )

    # ------------------------------------------------------------------ the request as a unit

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
    def max_tokens(self) -> int:
        return self.sampling_params.max_tokens

    @property
    def is_finished(self) -> bool:
        return self._status.is_finished

    @property
    def is_prefill(self) -> bool:
        """Whether the prompt is not computed."""
        return self.sequences[0].num_computed_tokens < self.num_prompt_tokens

    @property
    def has_branches_due(self) -> bool:
        """Whether it runs and has sequences without a row: they branch off when its first one has
        caught up."""
        if self.num_sequences == 1:
            return False
        if self.beam_search is None and len(self.sequences) < self.num_sequences:
            return True
        return any(sequence.row is None for sequence in self.unfinished)

    def get_seqs(self, status: RequestStatus | None = None) -> list[Sequence]:
        """Its sequences, those of one status if given."""
        return [seq for seq in self.sequences if status is None or seq.status is status]

    @property
    def unfinished(self) -> list[Sequence]:
        """Its sequences that are not finished, by index."""
        return [seq for seq in self.sequences if not seq.status.is_finished]

    def get_max_num_running_seqs(self) -> int:
        """Most sequences that run at once for the rest of its life."""
        return self.num_sequences - self.num_finished_sequences

    # ------------------------------------------------------------------ its first sequence

    @property
    def prompt_token_ids(self) -> list[int]:
        """A copy."""
        return self.prompt.tolist()

    @property
    def output_token_ids(self) -> list[int]:
        return self.sequences[0].output_token_ids

    @property
    def all_token_ids(self) -> list[int]:
        return self.sequences[0].all_token_ids

    @property
    def num_tokens(self) -> int:
        """Prompt and output."""
        return self.sequences[0].num_tokens

    @property
    def num_output_tokens(self) -> int:
        return self.sequences[0].num_output_tokens

    @property
    def num_computed_tokens(self) -> int:
        return self.sequences[0].num_computed_tokens

    @property
    def spec_token_ids(self) -> list[int]:
        return self.sequences[0].spec_token_ids

    @spec_token_ids.setter
    def spec_token_ids(self, drafts: list[int]) -> None:
        self.sequences[0].spec_token_ids = drafts

    @property
    def num_tokens_with_spec(self) -> int:
        """Prompt, output and drafts."""
        return self.num_tokens + len(self.spec_token_ids)

    @property
    def block_hashes(self) -> list[bytes]:
        return self.sequences[0].block_hashes

    @property
    def stop_reason(self) -> int | None:
        """The stop token that ended it; None for end-of-sequence."""
        return self.sequences[0].stop_reason

    def append_output_token(self, token_id: int) -> None:
        """A sampled token."""
        self.sequences[0].append_output_token(token_id)

    def __repr__(self) -> str:
        return (
            f"Request({self.request_id!r}, {self._status.name}, "
            f"computed {self.num_computed_tokens} of {self.num_tokens})"
        )
