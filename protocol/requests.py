"""What a client sends: HELLO, requests, aborts, calls, GOODBYE."""

from protocol.base import Message
from protocol.calls import AnyCall
from protocol.sampling import BeamSearchParams, SamplingParams


class TensorRef(Message, frozen=True):
    """A large binary part that travels as its own frame behind the message (no copy, no base64).

    `frame` counts the frames behind the message from 0; `dtype` is a little-endian name such as
    "float32"; the frame holds `prod(shape)` elements in row-major order.
    """

    frame: int
    dtype: str
    shape: tuple[int, ...]


class MultiModalInput(Message, frozen=True):
    """An image or sound, and the prompt positions `[start, stop)` that stand for it."""

    modality: str
    start: int
    stop: int
    content_hash: bytes
    data: TensorRef


class Hello(Message, frozen=True, tag=1):
    """A client's first message. Tag and `wire_version` keep their place in every version, so that
    two different versions can refuse each other by number."""

    wire_version: int
    client_name: str = ""
    wants_tokenizer: bool = True


class EngineRequest(Message, frozen=True, tag=2):
    """One prompt to complete.

    Exactly one of `prompt_token_ids` and `prompt_embeds` is given. `output_token_ids` are tokens
    that the client received in an earlier, interrupted run of the same request: the engine
    continues after them, and they count against `max_tokens`.
    """

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
    """Smaller is more urgent; only under policy priority."""
    tenant: str | None = None
    """Whose service policy fair counts; None: the client's own."""
    cache_salt: str | None = None
    adapter: str | None = None
    prompt_embeds: TensorRef | None = None
    multimodal_inputs: tuple[MultiModalInput, ...] = ()


class Abort(Message, frozen=True, tag=3):
    """Stop these requests of this client. Unknown and finished ids are ignored."""

    request_ids: tuple[str, ...]


class Call(Message, frozen=True, tag=4):
    """A typed call; answered by exactly one CallResult or CallFailed with the same `call_id`."""

    call_id: int
    call: AnyCall


class Goodbye(Message, frozen=True, tag=5):
    """The client disconnects; the engine aborts its requests."""


ClientMessage = Hello | EngineRequest | Abort | Call | Goodbye
