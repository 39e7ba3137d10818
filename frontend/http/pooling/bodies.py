"""Bodies of requests for vectors, classes and scores, and of their answers."""

from typing import Annotated, Any, Literal

import msgspec
from msgspec import UNSET, Meta, UnsetType

from frontend.http.generation.answer_bodies import Usage
from frontend.http.generation.requests import ChatMessage


class PoolingRequest(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """The fields that all requests of vectors and scores share."""

    model: str | None = None
    """None: the server's first."""
    user: str | None = None
    """Divides its caller's share of the engine."""
    request_id: Annotated[str, Meta(max_length=256)] | None = None
    priority: int | None = None
    cache_salt: str | None = None
    truncate_prompt_tokens: Annotated[int, Meta(ge=-1)] | None = None
    """Most tokens of each prompt; -1: the model's limit. None: longer ones are refused."""
    truncation_side: Literal["left", "right"] | None = None
    """The end that is cut; default: right."""
    use_activation: bool | None = None
    padding: Literal["do_not_pad"] | None = None


class InputRequest(PoolingRequest, forbid_unknown_fields=True, kw_only=True):
    """A request of single texts, or of one conversation."""

    input: str | list[str | int | list[int]] | None = None
    """A text, token ids, or a list of those."""
    messages: list[ChatMessage] | None = None
    """A conversation in place of `input`; what follows is for its template."""
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_special_tokens: bool | None = None
    """Default: for `input`."""


class EncodingRequest(InputRequest, forbid_unknown_fields=True, kw_only=True):
    encoding_format: Literal["float", "base64"] | None = None
    """base64: of float32, little-endian."""
    embed_dtype: Literal["float32"] | None = None
    endianness: Literal["native", "little"] | None = None
    dimensions: int | None = None


class EmbeddingsRequest(EncodingRequest, forbid_unknown_fields=True, kw_only=True):
    """POST /v1/embeddings."""

    prompt_name: str | None = None
    """The name of the model's prompt that goes before each text."""
    input_type: str | None = None
    """The same: "query", "document" or "passage", as the model names them."""


class EncodeRequest(EncodingRequest, forbid_unknown_fields=True, kw_only=True):
    """POST /pooling."""

    task: str | None = None


class ClassifyRequest(InputRequest, forbid_unknown_fields=True, kw_only=True):
    """POST /classify."""


class ScoreRequest(PoolingRequest, forbid_unknown_fields=True, kw_only=True):
    """POST /score. Two of these: vLLM has three pairs of names."""

    text_1: str | list[str] | None = None
    text_2: str | list[str] | None = None
    data_1: str | list[str] | None = None
    data_2: str | list[str] | None = None
    queries: str | list[str] | None = None
    documents: str | list[str] | None = None
    items: str | list[str] | None = None


class TextDocument(msgspec.Struct, forbid_unknown_fields=True):
    """A document, in requests and in answers."""

    text: str


class RerankRequest(PoolingRequest, forbid_unknown_fields=True, kw_only=True):
    """POST /rerank, by Jina's and Cohere's shapes."""

    query: str
    documents: list[str | TextDocument]
    top_n: Annotated[int, Meta(ge=0)] | None = None
    """Most results; 0 and None: all."""
    return_documents: bool | None = None
    """Default: yes."""


class CohereContent(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    type: Literal["text"]
    text: str


class CohereInput(msgspec.Struct, forbid_unknown_fields=True):
    content: Annotated[list[CohereContent], Meta(min_length=1)]


class CohereEmbedRequest(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """POST /v2/embed."""

    model: str | None = None
    input_type: str | None = None
    """Of a model with such a prompt, what goes before each text: "search_query" is its "query"."""
    texts: list[str] | None = None
    inputs: list[CohereInput] | None = None
    output_dimension: int | None = None
    embedding_types: list[Literal["float", "base64", "binary", "ubinary"]] | None = None
    truncate: Literal["NONE", "START", "END"] | None = None
    """Default: END."""
    max_tokens: Annotated[int, Meta(ge=1)] | None = None
    priority: int | None = None


# ---------------------------------------------------------------------- answers


class PoolingAnswer(msgspec.Struct, frozen=True, kw_only=True):
    id: str
    object: Literal["list"] = "list"
    created: int
    model: str
    usage: Usage


class Embedding(msgspec.Struct, frozen=True, kw_only=True):
    object: Literal["embedding"] = "embedding"
    index: int
    embedding: list[float] | str


class Embeddings(PoolingAnswer, frozen=True, kw_only=True):
    data: list[Embedding]


class PooledData(msgspec.Struct, frozen=True, kw_only=True):
    object: Literal["pooling"] = "pooling"
    index: int
    data: list[list[float] | float] | str


class PooledAnswer(PoolingAnswer, frozen=True, kw_only=True):
    data: list[PooledData]


class Classified(msgspec.Struct, frozen=True, kw_only=True):
    index: int
    label: str | None
    """The name of the largest class; None: the model has no names."""
    probs: list[float]
    num_classes: int


class Classes(PoolingAnswer, frozen=True, kw_only=True):
    data: list[Classified]


class Score(msgspec.Struct, frozen=True, kw_only=True):
    object: Literal["score"] = "score"
    index: int
    score: float


class Scores(PoolingAnswer, frozen=True, kw_only=True):
    data: list[Score]


class RerankResult(msgspec.Struct, frozen=True, kw_only=True):
    index: int
    document: TextDocument | UnsetType = UNSET
    relevance_score: float


class Ranking(msgspec.Struct, frozen=True, kw_only=True):
    """Best first."""

    id: str
    model: str
    usage: Usage
    results: list[RerankResult]


class CohereEmbeddings(msgspec.Struct, frozen=True, kw_only=True):
    """float32; bits are packed, the first one highest, in signed or unsigned bytes."""

    float_: list[list[float]] | UnsetType = msgspec.field(name="float", default=UNSET)
    base64: list[str] | UnsetType = UNSET
    binary: list[list[int]] | UnsetType = UNSET
    ubinary: list[list[int]] | UnsetType = UNSET


class CohereEmbedAnswer(msgspec.Struct, frozen=True, kw_only=True):
    id: str
    embeddings: CohereEmbeddings
    texts: list[str]
    meta: dict[str, dict[str, Any]]
