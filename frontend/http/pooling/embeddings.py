"""POST /v1/embeddings, /pooling, /classify, and Cohere's /v2/embed."""

import base64
import math
import time
from collections.abc import Sequence
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from frontend.async_llm import AsyncLLM
from frontend.http.api_errors import ApiError
from frontend.http.event_stream import built, in_pieces, json_response, until_disconnect
from frontend.http.exchange import exchange_of
from frontend.http.generation.answer_bodies import PromptTokensDetails, Usage
from frontend.http.generation.tokenize import TokenizeRequest, has_images, tokens_of
from frontend.http.operations import operation
from frontend.http.pooling import bodies
from frontend.http.served_models import served_models
from frontend.outputs import RequestOutput
from frontend.pooling import PoolingRequestOutput
from frontend.pooling_params import PoolingParams
from protocol.pooling import Pooled, PoolingTask

MAX_INPUTS = 2048
"""Most inputs of one request: OpenAI's limit."""
_SAME_PROMPTS = {
    "passage": ("passage", "document"),
    "document": ("document", "passage"),
    "search_query": ("search_query", "query"),
    "search_document": ("search_document", "document", "passage"),
}
"""Names for one thing: what a request may say, and what the model may call it."""


@operation("POST", "/v1/embeddings", takes=bodies.EmbeddingsRequest, gives=bodies.Embeddings)
async def embeddings(request: Request, asked: bodies.EmbeddingsRequest) -> Response:
    """A vector for each text."""
    llm = await served_models(request).get(asked.model)
    named = prompt_name(llm, asked.prompt_name or asked.input_type)
    prompts = [llm.with_prompt(each, named) for each in await inputs(asked, llm)]
    found = await pool(request, llm, asked, prompts, PoolingTask.EMBED)
    data = (
        bodies.Embedding(index=index, embedding=_encoded(each, asked))
        for index, each in enumerate(found)
    )
    rest = head("embd", request, asked, found)

    def make() -> Response:
        return json_response(bodies.Embeddings(data=in_pieces(data, 1), **rest))

    return await built(make, num_values(found))


@operation("POST", "/pooling", takes=bodies.EncodeRequest, gives=bodies.PooledAnswer)
async def encode(request: Request, asked: bodies.EncodeRequest) -> Response:
    """Answer with what `task` names of each text, as the model gives it."""
    llm = await served_models(request).get(asked.model)
    task = llm.pooling_task(asked.task)
    found = await pool(request, llm, asked, await inputs(asked, llm), task)
    data = (
        bodies.PooledData(index=index, data=_encoded(each, asked))
        for index, each in enumerate(found)
    )
    rest = head("pool", request, asked, found)

    def make() -> Response:
        return json_response(bodies.PooledAnswer(data=in_pieces(data, 1), **rest))

    return await built(make, num_values(found))


@operation("POST", "/classify", takes=bodies.ClassifyRequest, gives=bodies.Classes)
async def classify(request: Request, asked: bodies.ClassifyRequest) -> Response:
    """Probabilities of the model's labels for each text."""
    llm = await served_models(request).get(asked.model)
    found = await pool(request, llm, asked, await inputs(asked, llm), PoolingTask.CLASSIFY)
    labels, data = llm.model.labels, []
    for index, each in enumerate(found):
        probs = pooled(each).rows()[0]
        best = probs.index(max(probs))
        label = labels[best] if best < len(labels) else None
        data.append(
            bodies.Classified(index=index, label=label, probs=probs, num_classes=len(probs))
        )
    return json_response(bodies.Classes(data=data, **head("classify", request, asked, found)))


@operation("POST", "/v2/embed", takes=bodies.CohereEmbedRequest, gives=bodies.CohereEmbedAnswer)
async def cohere_embed(request: Request, asked: bodies.CohereEmbedRequest) -> Response:
    """Vectors by Cohere's shape."""
    llm = await served_models(request).get(asked.model)
    texts = list(asked.texts or ())
    texts += ["\n".join(part.text for part in each.content) for each in asked.inputs or ()]
    _check_number(texts, "texts")
    truncate = asked.truncate or "END"
    like_ours = bodies.EncodingRequest(
        priority=asked.priority,
        dimensions=asked.output_dimension,
        truncate_prompt_tokens=None if truncate == "NONE" else asked.max_tokens or -1,
        truncation_side="left" if truncate == "START" else "right",
    )
    has_prompts = bool(llm.model.prompts)
    named = prompt_name(llm, asked.input_type) if has_prompts else None
    prompts = [llm.with_prompt(each, named) for each in texts]
    outputs = await pool(request, llm, like_ours, prompts, PoolingTask.EMBED)
    found = [pooled(each) for each in outputs]
    num_tokens = usage(request, outputs).prompt_tokens

    def make() -> Response:
        kinds: dict[str, Any] = {
            kind.replace("float", "float_"): in_pieces(as_cohere(kind, found), 1)
            for kind in asked.embedding_types or ["float"]
        }
        return json_response(
            bodies.CohereEmbedAnswer(
                id=exchange_of(request).request_id,
                embeddings=bodies.CohereEmbeddings(**kinds),
                texts=texts,
                meta={
                    "api_version": {"version": "2"},
                    "billed_units": {"input_tokens": num_tokens},
                },
            )
        )

    return await built(make, num_values(outputs))


def as_cohere(kind: str, found: Sequence[Pooled]) -> list[Any]:
    if kind == "base64":
        return [base64.b64encode(each.data).decode() for each in found]
    vectors = [each.rows()[0] for each in found]
    if kind == "float":
        return vectors
    if len(vectors[0]) % 8:
        raise ApiError(
            400,
            f"embedding type {kind} packs 8 numbers a byte, a vector has {len(vectors[0])}; use "
            "float, or an output_dimension that 8 divides",
            param="embedding_types",
        )
    offset = 128 if kind == "binary" else 0
    return [
        [
            sum((value >= 0) << (7 - bit) for bit, value in enumerate(vector[at : at + 8])) - offset
            for at in range(0, len(vector), 8)
        ]
        for vector in vectors
    ]


# ---------------------------------------------------------------------- what these routes share


async def inputs(asked: bodies.InputRequest, llm: AsyncLLM) -> list[Any]:
    """Each prompt by itself. Raises ApiError: none, or too many."""
    if (asked.input is None) == (asked.messages is None):
        raise ApiError(400, "give input or messages, and not both", param="input")
    if asked.messages is not None:
        conversation = TokenizeRequest(
            messages=asked.messages,
            add_generation_prompt=bool(asked.add_generation_prompt),
            continue_final_message=asked.continue_final_message,
            chat_template=asked.chat_template,
            chat_template_kwargs=asked.chat_template_kwargs,
            add_special_tokens=asked.add_special_tokens,
        )
        if has_images(conversation):
            raise ApiError(400, "embeddings are of text; leave images out", param="messages")
        return [await tokens_of(conversation, llm)]
    for name in ("add_generation_prompt", "continue_final_message", "chat_template"):
        if getattr(asked, name) is not None:
            raise ApiError(400, f"{name} needs messages; omit it", param=name)
    given: list[Any] = asked.input if isinstance(asked.input, list) else [asked.input]
    if given and isinstance(given[0], int):
        given = [given]
    _check_number(given, "input")
    return given


def _check_number(given: Sequence[object], name: str) -> None:
    if not 0 < len(given) <= MAX_INPUTS:
        raise ApiError(400, f"{name} has {len(given)} entries, give 1 to {MAX_INPUTS}", param=name)


def prompt_name(llm: AsyncLLM, asked: str | None) -> str | None:
    """The model's own name of that prompt."""
    names = _SAME_PROMPTS.get(asked or "", (asked,))
    return next((name for name in names if name in llm.model.prompts), asked)


async def pool(
    request: Request,
    llm: AsyncLLM,
    asked: bodies.PoolingRequest,
    prompts: Sequence[object],
    task: PoolingTask,
) -> list[RequestOutput]:
    """All of them, or an error: then the others are aborted, as when the client leaves.
    Raises EngineClientError, ClientDisconnect."""
    add_special = getattr(asked, "add_special_tokens", None)
    sent = exchange_of(request).sent_as(asked.user, asked.priority)
    answer = llm.pool(
        prompts,
        params_of(asked),
        task,
        cache_salt=asked.cache_salt,
        add_special_tokens=add_special is not False,
        **sent,
    )
    return await until_disconnect(request, answer)


def params_of(asked: bodies.PoolingRequest) -> PoolingParams:
    return PoolingParams(
        dimensions=getattr(asked, "dimensions", None),
        use_activation=asked.use_activation,
        truncate_prompt_tokens=asked.truncate_prompt_tokens,
        truncation_side=asked.truncation_side or "right",
    )


def num_values(outputs: Sequence[RequestOutput]) -> int:
    """The number of values of all vectors together."""
    return sum(math.prod(pooled(each).shape) for each in outputs)


def pooled(output: RequestOutput) -> Pooled:
    assert output.pooled is not None
    return output.pooled


def _encoded(output: RequestOutput, asked: bodies.EncodingRequest) -> Any:
    found = pooled(output)
    if asked.encoding_format == "base64":
        return base64.b64encode(found.data).decode()
    rows = found.rows()
    return rows if len(found.shape) > 1 else rows[0]


def usage(request: Request, outputs: Sequence[RequestOutput | PoolingRequestOutput]) -> Usage:
    """The access log has it too."""
    number = sum(len(each.prompt_token_ids) for each in outputs)
    exchange_of(request).num_prompt_tokens = number
    cached = sum(each.num_cached_tokens or 0 for each in outputs)
    return Usage(
        prompt_tokens=number,
        completion_tokens=0,
        total_tokens=number,
        prompt_tokens_details=PromptTokensDetails(cached),
    )


def head(
    kind: str,
    request: Request,
    asked: bodies.PoolingRequest,
    outputs: Sequence[RequestOutput | PoolingRequestOutput],
) -> dict[str, Any]:
    """The fields of an answer beside its data."""
    exchange = exchange_of(request)
    return {
        "id": f"{kind}-{asked.request_id or exchange.request_id}",
        "created": int(time.time()),
        "model": exchange.model,
        "usage": usage(request, outputs),
    }
