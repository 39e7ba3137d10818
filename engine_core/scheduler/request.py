"""One request: its tokens, its parameters, and how far it has been computed.

Must not know queues, blocks or the wire's framing. In tokens:

    |---- prompt ----|---- output ----|-- drafts --|
    0 .. num_computed .. num_tokens ..  num_tokens_with_spec
"""

from collections.abc import Sequence

from engine_core.scheduler.request_status import RequestStatus
from protocol.requests import EngineRequest
from protocol.sampling import SamplingParams

_MAX_TOKEN_ID = 2**31 - 1


class Request:
    """Counters are the scheduler's; `block_hashes` is the cache's.

    Args:
        request_id: unique among live requests.
        prompt_token_ids: at least one.
        sampling_params: checked already, on construction.
        client_index: who gets the outputs.
        arrival_time: seconds on the caller's clock.
        eos_token_ids: the model's; they end the request unless `ignore_eos`.
        output_token_ids: delivered by an earlier, interrupted run; the request goes on behind
            them and they count against `max_tokens`.
        cache_salt: only requests with the same salt share cached blocks.
        adapter: likewise.
        priority: smaller is more urgent.
        max_model_len: if given, the prompt is checked against it here.

    Raises:
        ValueError: a field outside its limits.
    """

    __slots__ = (
        "adapter",
        "all_token_ids",
        "arrival_time",
        "block_hashes",
        "cache_salt",
        "client_index",
        "eos_token_ids",
        "num_cached_tokens",
        "num_computed_tokens",
        "num_preemptions",
        "num_prompt_tokens",
        "num_tokens",
        "output_token_ids",
        "priority",
        "prompt_token_ids",
        "request_id",
        "sampling_params",
        "spec_token_ids",
        "status",
        "stop_reason",
        "told_num_cached",
    )

    def __init__(
        self,
        *,
        request_id: str,
        prompt_token_ids: Sequence[int],
        sampling_params: SamplingParams,
        client_index: int = 0,
        arrival_time: float = 0.0,
        eos_token_ids: Sequence[int] = (),
        output_token_ids: Sequence[int] = (),
        cache_salt: str | None = None,
        adapter: str | None = None,
        priority: int = 0,
        max_model_len: int | None = None,
    ) -> None:
        _check(request_id, prompt_token_ids, sampling_params, output_token_ids, max_model_len)
        self.request_id = request_id
        self.client_index = client_index
        self.arrival_time = arrival_time
        self.priority = priority
        self.sampling_params = sampling_params
        self.eos_token_ids = frozenset(eos_token_ids)
        self.cache_salt = cache_salt
        self.adapter = adapter
        self.prompt_token_ids = list(prompt_token_ids)
        self.output_token_ids = list(output_token_ids)
        self.all_token_ids = self.prompt_token_ids + self.output_token_ids
        self.num_prompt_tokens = len(self.prompt_token_ids)
        self.num_tokens = len(self.all_token_ids)
        """Prompt and output."""
        self.spec_token_ids: list[int] = []
        """Drafts to verify in the next step."""
        self.num_computed_tokens = 0
        """Scheduled tokens count: a step that is planned is going to run."""
        self.num_preemptions = 0
        self.num_cached_tokens: int | None = None
        """Prompt tokens found in the cache at the first admission; None before it."""
        self.told_num_cached = False
        self.block_hashes: list[bytes] = []
        self.status = RequestStatus.WAITING
        self.stop_reason: int | None = None
        """The stop token that ended it; None for end-of-sequence."""

    @classmethod
    def from_engine_core_request(
        cls,
        message: EngineRequest,
        *,
        client_index: int,
        arrival_time: float,
        eos_token_ids: Sequence[int],
        max_model_len: int | None = None,
    ) -> "Request":
        """A request as a client sent it.

        Raises:
            ValueError: a field outside its limits, or a feature that is not supported.
        """
        unsupported = {
            "num_sequences above 1": message.num_sequences != 1,
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
            max_model_len=max_model_len,
        )

    @property
    def max_tokens(self) -> int:
        return self.sampling_params.max_tokens

    @property
    def num_output_tokens(self) -> int:
        return self.num_tokens - self.num_prompt_tokens

    @property
    def num_tokens_with_spec(self) -> int:
        """Prompt, output and drafts."""
        return self.num_tokens + len(self.spec_token_ids)

    @property
    def is_finished(self) -> bool:
        return self.status.is_finished

    def append_output_token(self, token_id: int) -> None:
        """A sampled token."""
        self.output_token_ids.append(token_id)
        self.all_token_ids.append(token_id)
        self.num_tokens += 1

    def reset_for_recompute(self) -> None:
        """After a preemption: all tokens are kept, none is computed."""
        self.num_computed_tokens = 0
        self.num_preemptions += 1
        self.spec_token_ids = []
        self.status = RequestStatus.PREEMPTED

    def __repr__(self) -> str:
        return (
            f"Request({self.request_id!r}, {self.status.name}, "
            f"computed {self.num_computed_tokens} of {self.num_tokens})"
        )


def _check(
    request_id: str,
    prompt_token_ids: Sequence[int],
    sampling_params: SamplingParams,
    output_token_ids: Sequence[int],
    max_model_len: int | None,
) -> None:
    if not request_id:
        raise ValueError("request_id is empty; give each request an id of its own")
    if not isinstance(sampling_params, SamplingParams):
        raise ValueError(
            f"sampling_params is {sampling_params!r}, it must be protocol.sampling.SamplingParams"
        )
    if not prompt_token_ids:
        raise ValueError("the prompt is empty; send at least one token")
    if max_model_len is not None and len(prompt_token_ids) >= max_model_len:
        raise ValueError(prompt_too_long(len(prompt_token_ids), max_model_len))
    for name, ids in (
        ("prompt_token_ids", prompt_token_ids),
        ("output_token_ids", output_token_ids),
    ):
        if ids and not (min(ids) >= 0 and max(ids) <= _MAX_TOKEN_ID):
            raise ValueError(
                f"{name} holds ids from {min(ids)} to {max(ids)}, they must be from 0 to "
                f"{_MAX_TOKEN_ID}; use the model's own tokenizer"
            )


def prompt_too_long(num_tokens: int, max_model_len: int) -> str:
    """Why a prompt that leaves no room for one output token is refused."""
    return (
        f"prompt has {num_tokens} tokens, the limit is {max_model_len - 1} (max_model_len "
        f"{max_model_len} less one for the answer); shorten it or raise --max-model-len"
    )
