"""POST /api/embed, and the older /api/embeddings."""

import time

from starlette.requests import Request
from starlette.responses import Response

from frontend.errors import PromptTooLong
from frontend.http.api_errors import ApiError
from frontend.http.event_stream import built, in_pieces, json_response
from frontend.http.exchange import exchange_of
from frontend.http.ollama import bodies
from frontend.http.ollama.context import TOO_LONG
from frontend.http.ollama.models import served_model
from frontend.http.on_demand.options import keep_alive_seconds
from frontend.http.operations import operation
from frontend.http.pooling.bodies import EncodingRequest
from frontend.http.pooling.embeddings import inputs, num_values, pool, pooled, usage
from frontend.outputs import RequestOutput
from protocol.pooling import PoolingTask


@operation("POST", "/api/embed", takes=bodies.EmbedRequest, gives=bodies.EmbedAnswer)
async def embed(request: Request, asked: bodies.EmbedRequest) -> Response:
    """A vector for each text. Without one the model is only loaded."""
    started_s = time.monotonic()
    found, loaded_s = await _found(request, asked, asked.input)
    now_s = time.monotonic()

    def make() -> Response:
        return json_response(
            bodies.EmbedAnswer(
                model=asked.model,
                embeddings=in_pieces((pooled(each).rows()[0] for each in found), 1),
                total_duration=int((now_s - started_s) * 1e9),
                load_duration=int((loaded_s - started_s) * 1e9),
                prompt_eval_count=usage(request, found).prompt_tokens if found else 0,
            )
        )

    return await built(make, num_values(found))


@operation("POST", "/api/embeddings", takes=bodies.OldEmbedRequest, gives=bodies.OldEmbedAnswer)
async def old_embed(request: Request, asked: bodies.OldEmbedRequest) -> Response:
    """The vector of one text. Without one the model is only loaded."""
    found, _ = await _found(request, asked, asked.prompt)
    if found:
        usage(request, found)
    return json_response(bodies.OldEmbedAnswer(pooled(found[0]).rows()[0] if found else []))


async def _found(
    request: Request, asked: bodies.AnyEmbedRequest, texts: str | list[str]
) -> tuple[list[RequestOutput], float]:
    """The vectors, and when the model was there."""
    keep_alive_s = None if asked.keep_alive is None else keep_alive_seconds(asked.keep_alive)
    model, llm = await served_model(request, asked.model)
    if keep_alive_s is not None:
        model.keep_alive(keep_alive_s, by_admin=exchange_of(request).is_admin)
    loaded_s = time.monotonic()
    if not texts:
        return [], loaded_s
    is_cut = asked.truncate is not False
    num_ctx = asked.options and asked.options.num_ctx
    most = min(int(num_ctx or 2**62), llm.model.max_model_len)
    like_ours = EncodingRequest(
        input=[*texts] if isinstance(texts, list) else texts,
        dimensions=asked.dimensions,
        truncate_prompt_tokens=most if is_cut else None,
    )
    try:
        prompts = [llm.with_prompt(each, None) for each in await inputs(like_ours, llm)]
        found = await pool(request, llm, like_ours, prompts, PoolingTask.EMBED)
    except PromptTooLong as error:
        raise ApiError(400, f"{TOO_LONG}: {error}", code="context_length_exceeded") from None
    longest = max(len(each.prompt_token_ids) for each in found)
    if longest > most:
        raise ApiError(
            400,
            f"{TOO_LONG}: a text has {longest} tokens and options.num_ctx is {num_ctx}; shorten "
            "it, raise num_ctx, or omit truncate",
        )
    return found, loaded_s
