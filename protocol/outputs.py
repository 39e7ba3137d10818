"""What the engine sends: WELCOME, outputs, results of calls, refusals, heartbeats."""

import enum
from collections.abc import Sequence

from protocol.base import Message
from protocol.cache_events import CacheEvents
from protocol.calls import AdapterInfo, AnyResult
from protocol.errors import ErrorCode
from protocol.multimodal import MultiModalInfo, TensorRef
from protocol.pooling import Pooled
from protocol.prompt_embeds import PromptEmbedsInfo
from protocol.sampling import GenerationRules

_ENTRY_BYTES = 4
"""Bytes of a token id or a log-probability in columns."""


class FinishReason(enum.StrEnum):
    STOP = "stop"
    """An end-of-sequence or stop token was sampled."""
    LENGTH = "length"
    """max_tokens or max_model_len was reached, or the request can never fit."""
    REPETITION = "repetition"
    """It repeated itself as often as its `repetition_detection` allows."""
    ABORT = "abort"
    """The client, or the end of the daemon, stopped it."""
    ERROR = "error"
    """A fault in the engine; `detail` says which."""
    TIMEOUT = "timeout"
    """It was not done within its `timeout_s`."""
    REFUSED = "refused"
    """It asks for what cannot be done, found after it was accepted, perhaps behind some tokens;
    `detail` says what."""


class Logprobs(Message, frozen=True):
    """Log-probabilities of a run of tokens, sampled or of a prompt, as columns.

    Each of the `num_positions` positions has `width` entries: first the token itself, then the
    likeliest tokens in falling order, or those that the request named. `token_ids` is int32 and
    `logprobs` float32, both little-endian, row-major [num_positions, width]. `ranks[i]` is the
    token's rank in the vocabulary, 1 for the likeliest. Natural logarithm of the softmax of the
    model's raw logits, before penalties, bias, temperature and truncation."""

    num_positions: int
    width: int
    token_ids: bytes
    logprobs: bytes
    ranks: list[int]

    def part(self, start: int, stop: int) -> "Logprobs":
        """Positions [start, stop)."""
        if start <= 0 and stop >= self.num_positions:
            return self
        row = slice(start * self.width * _ENTRY_BYTES, stop * self.width * _ENTRY_BYTES)
        ranks = self.ranks[start:stop]
        return Logprobs(
            num_positions=len(ranks),
            width=self.width,
            token_ids=self.token_ids[row],
            logprobs=self.logprobs[row],
            ranks=ranks,
        )

    @staticmethod
    def joined(parts: Sequence["Logprobs"]) -> "Logprobs | None":
        """Parts of equal width, one behind the other."""
        if len(parts) <= 1:
            return parts[0] if parts else None
        return Logprobs(
            num_positions=sum(part.num_positions for part in parts),
            width=parts[0].width,
            token_ids=b"".join([part.token_ids for part in parts]),
            logprobs=b"".join([part.logprobs for part in parts]),
            ranks=[rank for part in parts for rank in part.ranks],
        )


class RequestTimings(Message, frozen=True):
    """Seconds since the engine received the request. Sent with the terminal output."""

    first_scheduled_s: float | None
    first_token_s: float | None
    finished_s: float
    num_preemptions: int


class EngineCoreOutput(Message, frozen=True):
    """One step's output of one sequence. With a `finish_reason` it is the sequence's last."""

    request_id: str
    new_token_ids: list[int]
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    """The stop token that ended it, or "repetition_detected"; None for end-of-sequence."""
    index: int = 0
    """The number of the request's sequence."""
    logprobs: Logprobs | None = None
    num_cached_tokens: int | None = None
    """Prompt tokens found in the prefix cache; sent with the first token."""
    detail: str | None = None
    """Why it ended, in words, where the reason alone is not enough."""
    timings: RequestTimings | None = None
    cumulative_logprob: float | None = None
    """Of a beam: the sum of its tokens' log-probabilities; sent with its terminal output."""
    prompt_logprobs: Logprobs | None = None
    """Of the next prompt tokens: together of all but the first, each once, before the first token
    that is sampled."""
    num_draft_tokens: int = 0
    """Drafts that were verified for the whole request; with its last output."""
    num_accepted_tokens: int = 0
    """Drafts that are in its output; with its last output."""
    pooled: Pooled | None = None
    """The result of a pooling request; with its terminal output."""

    @property
    def finished(self) -> bool:
        return self.finish_reason is not None


class DecodedTokens(Message, frozen=True):
    """One new token and nothing else for each of these sequences: columns of equal length.

    A request may occur more than once, with its sequences in `indexes`; None: all are 0."""

    request_ids: list[str]
    token_ids: bytes
    """int32, little-endian."""
    indexes: list[int] | None = None


class EngineCoreOutputs(Message, frozen=True, tag=2):
    """One step's outputs for one client. A sequence is in `decoded` or in `other_outputs`, never in
    both."""

    other_outputs: list[EngineCoreOutput]
    """First tokens, several tokens at once, log-probabilities, terminal outputs."""
    finished_req_ids: list[str] = []
    """Requests all of whose sequences have finished. Each is listed exactly once."""
    step_id: int = 0
    decoded: DecodedTokens | None = None
    weights_version: int = 0
    """The version of the weights that made these tokens."""
    engine_ends: bool = False
    """This is all; what was not finished ends here."""


class TokenizerInfo(Message, frozen=True):
    """All that a client needs to turn text into tokens and back, without the model's files."""

    fingerprint: str
    tokenizer_json: TensorRef | None
    """A `tokenizers` JSON document as a uint8 frame; None if the client did not ask for it."""
    chat_template: str | None = None
    """Jinja2 source."""
    special_tokens: dict[str, str] = {}
    """Template variables such as bos_token and eos_token."""
    named_chat_templates: dict[str, str] = {}
    """Further ones, by name: "tool_use" is for conversations with tools."""


class EncoderInfo(Message, frozen=True):
    """Of an encoder-decoder model. A request has one `MultiModalInput` at [0, 1): the encoder's
    input, which is no part of the decoder's prompt."""

    modality: str
    """"text": the input's tensor is `input_ids`, int64 [length]; "audio": `input_features`."""
    max_tokens: int
    """Most that an input becomes."""
    decoder_start_token_ids: tuple[int, ...]
    """What a decoder's prompt begins with, unless the request gives one."""
    rules: GenerationRules | None = None
    """The rules of its generation config."""


class ModelInfo(Message, frozen=True):
    name: str
    architecture: str
    fingerprint: str
    """Of the weights that are served. Same files, same fingerprint."""
    max_model_len: int
    """Most tokens, prompt and output together."""
    vocab_size: int
    dtype: str
    num_blocks: int
    block_size: int
    eos_token_ids: tuple[int, ...]
    max_logprobs: int
    """Largest `logprobs` that a request may ask for; -1 means no limit."""
    max_num_seqs: int
    """Most sequences of a request."""
    default_sampling: dict[str, float] = {}
    """Recommended by the model's authors (temperature, top_k, top_p ...)."""
    weights_version: int = 0
    tokenizer: TokenizerInfo | None = None
    """None if the model came without a tokenizer: send token ids."""
    instruction_set: str = ""
    """Of the kernels: "native-cpu-avx512, torch AVX512", "triton sm_90"."""
    formats: str = ""
    """Of weights and KV cache, and whose model code: "Q8_0, KV cache bfloat16, native"."""
    file_format: str = ""
    """ "gguf" or "safetensors"."""
    file_bytes: int = 0
    """Bytes of the weights' files."""
    num_weights: int = 0
    """Elements of the model's tensors; 0: not known."""
    adapters: tuple[AdapterInfo, ...] = ()
    """At the time of the greeting; AdaptersUpdated says what becomes of them."""
    multimodal: MultiModalInfo | None = None
    """None: it takes text only."""
    encoder: EncoderInfo | None = None
    """None: it is a decoder alone."""
    prompt_embeds: PromptEmbedsInfo | None = None
    """None: it takes none."""
    tasks: tuple[str, ...] = ("generate",)
    """What requests may ask for: "generate", and values of `PoolingTask`."""
    prompts: dict[str, str] = {}
    """By name ("query", "document"), what goes before a text that is embedded."""
    default_prompt_name: str | None = None
    labels: tuple[str, ...] = ()
    """Names of what is classified, in order."""
    has_segments: bool = False
    """A pair of texts is one prompt of two segments, as cross-encoders take it; else one text."""
    has_priorities: bool = False

    @property
    def arithmetic(self) -> tuple[str, ...]:
        """Another engine may go on with a request, to the token, if this is the same. Some
        models' rotary scaling goes by the length."""
        return self.fingerprint, *self.numerics, str(self.max_model_len)

    @property
    def numerics(self) -> tuple[str, ...]:
        """What a model of the same weights computes in: others, other tokens."""
        return self.dtype, self.instruction_set, self.formats


class DisaggregationInfo(Message, frozen=True):
    """What an engine does for others, or others for it, when prompts are computed elsewhere."""

    mode: str
    """"prefill" or "decode"."""
    kv_address: str | None = None
    """The address at which it gives blocks away."""
    kv_sources: tuple[str, ...] = ()
    """Where it fetches them: values that a request's `kv_source` may have."""


class Welcome(Message, frozen=True, tag=1):
    """The answer to HELLO. `engine_id` differs after every start of the daemon."""

    wire_version: int
    engine_id: str
    heartbeat_s: float
    """The engine sends something at least this often, except during longer steps."""
    model: ModelInfo
    disaggregation: DisaggregationInfo | None = None
    """None: it computes prompts and decodes, and exchanges no blocks."""


class CallResult(Message, frozen=True, tag=3):
    call_id: int
    result: AnyResult


class CallFailed(Message, frozen=True, tag=4):
    call_id: int
    code: ErrorCode
    message: str


class Rejected(Message, frozen=True, tag=5):
    """The terminal event of a request that was never accepted. With code DUPLICATE_REQUEST_ID it is
    about the second request: the first one continues."""

    request_id: str
    code: ErrorCode
    message: str


class ErrorMessage(Message, frozen=True, tag=6):
    """A message of the client could not be decoded. Tag and layout are the same in every version,
    so that a client of any version can read why it was refused."""

    code: str
    message: str


class Heartbeat(Message, frozen=True, tag=7):
    """Nothing happened, and the engine is alive; or what it says of it has changed."""

    draining: bool = False
    paused: bool = False
    """It starts no request, by a pause or a sleep."""


class WeightsUpdated(Message, frozen=True, tag=8):
    """Other weights are served from the next step on; to every client."""

    weights_version: int
    fingerprint: str


class AdaptersUpdated(Message, frozen=True, tag=9):
    """Requests may name these adapters from now on; to every client."""

    adapters: tuple[AdapterInfo, ...]


EngineMessage = (
    Welcome
    | EngineCoreOutputs
    | CallResult
    | CallFailed
    | Rejected
    | ErrorMessage
    | Heartbeat
    | WeightsUpdated
    | AdaptersUpdated
    | CacheEvents
)
