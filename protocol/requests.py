"""What a client sends: HELLO, requests, aborts, calls, GOODBYE; and the model's limits."""

import dataclasses
import sys
from collections.abc import Collection, Sequence
from typing import cast

from protocol.base import Message
from protocol.calls import AnyCall
from protocol.errors import InvalidParameter, PromptTooLong
from protocol.multimodal import MultiModalInput
from protocol.pooling import PoolingParams
from protocol.prompt_embeds import EmbeddedSpan
from protocol.sampling import MAX_PROMPT_LOGPROBS, BeamSearchParams, SamplingParams

_MAX_NAME_CHARS = 256
_MAX_TIMEOUT_S = sys.float_info.max


class Hello(Message, frozen=True, tag=1):
    """A client's first message. Tag and `wire_version` keep their place in every version, so that
    two different versions can refuse each other by number."""

    wire_version: int
    client_name: str = ""
    wants_tokenizer: bool = True


class EngineRequest(Message, frozen=True, tag=2):
    """One prompt to complete.

    `output_token_ids` are tokens that the client received in an earlier, interrupted run of the
    same request: the engine continues after them, and they count against `max_tokens`."""

    request_id: str
    prompt_token_ids: list[int]
    sampling_params: SamplingParams
    output_token_ids: list[int] = []
    num_sequences: int = 1
    """Samples of the same prompt; sequence i draws with `sequence_seed(seed, i)`."""
    beam_search: BeamSearchParams | None = None
    """If given, `num_sequences` is its beam width, and nothing is sent until all beams are done:
    then one terminal output a beam, best first."""
    priority: int = 0
    """Smaller is more urgent: of all under policy priority, of its tenant's under fair."""
    tenant: str | None = None
    """Whose service policy fair counts; None: the client's own. What stands behind a slash divides
    the tenant's share among its users."""
    cache_salt: str | None = None
    adapter: str | None = None
    """The name of one of the engine's adapters."""
    prompt_embeds: tuple[EmbeddedSpan, ...] = ()
    """By rising positions, without overlap; the prompt's token ids there are not looked at."""
    multimodal_inputs: tuple[MultiModalInput, ...] = ()
    timeout_s: float | None = None
    """Seconds from its arrival at the engine after which it ends with reason TIMEOUT. What was sent
    before an interruption counts: a resumed request has what is left."""
    is_resumed: bool = False
    """Sent again after the engine was lost: a full queue takes it."""
    adapter_fingerprint: str | None = None
    """The fingerprint that the adapter must have, in a request that is sent again."""
    kv_source: str | None = None
    """The address at which another engine gives blocks of this prompt away, which it has computed;
    one of the engine's `kv_sources`."""
    pooling_params: PoolingParams | None = None
    """If given, `sampling_params` are POOLING_SAMPLING, and the answer is one terminal output with
    `pooled` or a reason why not."""
    weights_fingerprint: str | None = None
    """That the weights must have: of a request that another engine began. It is refused where they
    are others, or may be soon: by an engine that has paused."""

    @property
    def generates(self) -> bool:
        """Whether it asks for tokens."""
        return self.pooling_params is None


class Abort(Message, frozen=True, tag=3):
    """End these requests of this client, and single samples of others. Unknown and finished ones
    are ignored."""

    request_ids: tuple[str, ...]
    samples: tuple[tuple[str, int], ...] = ()
    """(request id, index) each; the request's other samples continue. Beams depend on each other:
    theirs are ignored."""
    are_complete: bool = False
    """Their answers are: a stop string, which the engine does not know, ended them. They finish
    with reason STOP, not ABORT."""


class Call(Message, frozen=True, tag=4):
    """A typed call; answered by exactly one CallResult or CallFailed with the same `call_id`."""

    call_id: int
    call: AnyCall


class Goodbye(Message, frozen=True, tag=5):
    """The client disconnects; the engine aborts its requests."""


ClientMessage = Hello | EngineRequest | Abort | Call | Goodbye


@dataclasses.dataclass(frozen=True, slots=True)
class ModelLimits:
    """What a model can serve: checked by the client before it sends, and by the engine.

    Each check raises InvalidParameter with the value, the limit and the next action."""

    max_model_len: int
    """Most tokens, prompt and output together."""
    vocab_size: int
    max_logprobs: int
    """-1 means no limit."""
    max_num_seqs: int
    """Most sequences of a request: all of them run at once."""

    def check_sequences(
        self, num_sequences: int, beam_search: BeamSearchParams | None, name: str = "num_sequences"
    ) -> None:
        if not 1 <= num_sequences <= self.max_num_seqs:
            raise InvalidParameter(
                f"{name} is {num_sequences}, it must be from 1 to max_num_seqs "
                f"{self.max_num_seqs}; ask for fewer or start the engine with a larger "
                "--max-num-seqs"
            )
        if beam_search is not None and 2 * beam_search.beam_width > self.vocab_size:
            raise InvalidParameter(
                f"beam_width is {beam_search.beam_width}, the limit is half the vocabulary, "
                f"{self.vocab_size // 2}; lower it"
            )

    def check_prompt(
        self, token_ids: Sequence[int], name: str = "prompt", *, num_generated: int = 1
    ) -> None:
        if not token_ids:
            raise InvalidParameter(f"{name} is empty; give at least one token")
        if len(token_ids) + num_generated > self.max_model_len:
            raise PromptTooLong(
                len(token_ids), self.max_model_len, name, num_generated=num_generated
            )
        self.check_token_ids(name, token_ids)

    def check_sampling(self, params: SamplingParams, num_prompt_tokens: int) -> None:
        for name in ("stop_token_ids", "allowed_token_ids", "logit_bias", "logprob_token_ids"):
            token_ids = getattr(params, name) or ()
            if len(token_ids) > self.vocab_size:
                raise InvalidParameter(
                    f"{name} has {len(token_ids)} entries, the limit is the vocabulary, "
                    f"{self.vocab_size}; name each token once"
                )
            self.check_token_ids(name, token_ids)
        for word in params.bad_words:
            self.check_token_ids("bad_words", word)
        if params.generation_rules is not None:
            self.check_token_ids("generation_rules", params.generation_rules.token_ids)
        if (thinking := params.thinking) is not None:
            markers = (thinking.start_token_id, thinking.end_token_id)
            self.check_token_ids("thinking_token_budget's markers", markers)
        limit = self.vocab_size if self.max_logprobs < 0 else self.max_logprobs
        for name in ("logprobs", "prompt_logprobs"):
            wanted = getattr(params, name) or 0
            if wanted > limit or (wanted < 0 <= self.max_logprobs):
                raise InvalidParameter(
                    f"{name} is {wanted}, the limit is {limit}; ask for fewer or start the engine "
                    "with a larger --max-logprobs"
                )
        number = params.num_prompt_logprobs(num_prompt_tokens)
        if number > MAX_PROMPT_LOGPROBS:
            raise InvalidParameter(
                f"prompt_logprobs is {params.prompt_logprobs}, which is {number} numbers for a "
                f"prompt of {num_prompt_tokens} tokens, the limit is {MAX_PROMPT_LOGPROBS}; ask "
                "for fewer, or shorten the prompt"
            )

    def check_token_ids(self, name: str, token_ids: Collection[int]) -> None:
        if token_ids and not (min(token_ids) >= 0 and max(token_ids) < self.vocab_size):
            wrong = next(token for token in token_ids if not 0 <= token < self.vocab_size)
            raise InvalidParameter(
                f"{name} holds token id {wrong}, the vocabulary ends at {self.vocab_size - 1}; "
                "use this model's own tokenizer"
            )


def check_name(name: str, value: str) -> None:
    """Raises InvalidParameter if an id, a tenant or a salt is empty or too long."""
    if not 0 < len(value) <= _MAX_NAME_CHARS:
        raise InvalidParameter(
            f"{name} has {len(value)} characters, it must have from 1 to {_MAX_NAME_CHARS}"
        )


def check_timeout(timeout_s: object) -> None:
    """Raises InvalidParameter unless this is None, or a finite number of seconds above 0."""
    is_number = isinstance(timeout_s, int | float) and not isinstance(timeout_s, bool)
    if timeout_s is None or (is_number and 0 < cast("float", timeout_s) <= _MAX_TIMEOUT_S):
        return
    is_printed = not isinstance(timeout_s, int) or timeout_s.bit_length() <= 512
    shown = timeout_s if is_printed else "too large"
    raise InvalidParameter(
        f"timeout_s is {shown!r}, it must be a finite number of seconds above 0; omit it for no "
        "limit"
    )
