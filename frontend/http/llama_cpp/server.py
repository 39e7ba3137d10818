"""What llama.cpp's server tells of itself, for its monitors and clients, and its ways to ask for
templates and vectors."""

from typing import Any, Literal

import msgspec
from msgspec import UNSET, UnsetType
from starlette.requests import Request
from starlette.responses import Response

from frontend.engine_calls import Engine
from frontend.http import health
from frontend.http.api_errors import ApiError
from frontend.http.event_stream import built, in_pieces, json_response
from frontend.http.exchange import Exchange, exchange_of
from frontend.http.generation.tokenize import TokenizeRequest, conversation_prompt
from frontend.http.live_requests import visible_requests
from frontend.http.llama_cpp.bodies import CompletionRequest
from frontend.http.llama_cpp.parameters import generation_settings, sampling_params
from frontend.http.llama_cpp.slots import change_slot
from frontend.http.openai.models import list_models
from frontend.http.operations import Operation, operation
from frontend.http.pooling import bodies
from frontend.http.pooling.embeddings import inputs, num_values, pool, pooled
from frontend.http.served_models import served_models
from protocol.explanations import RequestInfo
from protocol.outputs import ModelInfo
from protocol.pooling import PoolingTask


class GenerationSettings(msgspec.Struct, frozen=True, kw_only=True):
    n_ctx: int
    params: dict[str, Any]
    """Those of a request that leaves all out."""


class Props(msgspec.Struct, frozen=True, kw_only=True):
    default_generation_settings: GenerationSettings
    total_slots: int
    """Most sequences that run at once."""
    model_alias: str
    model_path: str
    model_ftype: str
    modalities: dict[str, bool]
    chat_template: str
    chat_template_tool_use: str | UnsetType = UNSET
    """The chat template of conversations with tools, if it is another one."""
    chat_template_caps: dict[str, bool] = {}
    bos_token: str
    eos_token: str
    build_info: str = "engine-core"
    is_sleeping: bool
    endpoint_slots: bool = True
    endpoint_props: bool = False
    endpoint_metrics: bool = True


class Slot(msgspec.Struct, frozen=True, kw_only=True):
    """A sequence that can run. What stands behind `is_processing` is told of one that does, to
    whom /v1/requests shows it."""

    id: int
    n_ctx: int
    speculative: bool = False
    is_processing: bool
    n_prompt_tokens: int | UnsetType = UNSET
    n_prompt_tokens_processed: int | UnsetType = UNSET
    n_prompt_tokens_cache: int | UnsetType = UNSET
    next_token: list[dict[str, int | bool]] | UnsetType = UNSET


class Adapter(msgspec.Struct, frozen=True):
    """`scale` is 0: a request applies an adapter by naming it as its model."""

    id: int
    path: str
    scale: float = 0.0


class AppliedTemplate(msgspec.Struct, frozen=True):
    prompt: str


class EmbeddingRequest(bodies.EmbeddingsRequest, forbid_unknown_fields=True, kw_only=True):
    """POST /embedding."""

    content: str | list[str | int | list[int]] | None = None
    """The same as `input`."""
    encoding_format: Literal["float"] | None = None
    embd_normalize: Literal[-1, 2] | None = None
    """-1: vectors are as the model gives them."""


class TextVectors(msgspec.Struct, frozen=True):
    index: int
    embedding: list[list[float]]
    """One vector, or one a token."""


@operation("GET", "/props", gives=Props)
async def props(request: Request) -> Response:
    """Facts about the server's model, or that of `?model=`."""
    model = await served_models(request).find(request.query_params.get("model"))
    llm = await model.ready()
    engine = next(each for each in llm.engines if each.session.is_connected)
    info = llm.model
    named = {} if info.tokenizer is None else info.tokenizer.named_chat_templates
    special = {} if info.tokenizer is None else info.tokenizer.special_tokens
    media = {} if info.multimodal is None else info.multimodal.max_items
    asked = CompletionRequest()
    settings = generation_settings(asked, sampling_params(llm, asked))
    return json_response(
        Props(
            default_generation_settings=GenerationSettings(
                n_ctx=info.max_model_len, params=settings
            ),
            total_slots=info.max_num_seqs,
            model_alias=model.names[0],
            model_path=info.name,
            model_ftype=info.formats,
            modalities={
                name: ours in media
                for name, ours in (("vision", "image"), ("audio", "audio"), ("video", "video"))
            },
            chat_template=("" if info.tokenizer is None else info.tokenizer.chat_template) or "",
            chat_template_tool_use=named.get("tool_use", UNSET),
            bos_token=special.get("bos_token", ""),
            eos_token=special.get("eos_token", ""),
            is_sleeping=await engine.is_sleeping(),
        )
    )


@operation("POST", "/props")
async def change_props(_request: Request) -> Response:
    """Refuse to change them."""
    raise ApiError(501, "this server does not change properties; set options of its daemon")


@operation("GET", "/slots", gives=list[Slot])
async def slots(request: Request) -> Response:
    """One for each sequence that can run, and whether one does."""
    model = await served_models(request).find(request.query_params.get("model"))
    llm = await model.ready()
    engines = [each for each in llm.engines if each.session.is_connected]
    found: list[Slot] = []
    for engine in engines:
        found += await _slots(engine, llm.model, exchange_of(request), len(found))
    if "fail_on_no_slot" in request.query_params and all(each.is_processing for each in found):
        what = f"all {len(found)} slots are in use; try again later"
        raise ApiError(503, what, retry_after_s=1)
    return json_response(found)


async def _slots(engine: Engine, model: ModelInfo, caller: Exchange, first: int) -> list[Slot]:
    num_running = (await engine.statistics()).num_running
    requests, _ = await visible_requests(engine, caller)
    running = [each for each in requests if each.status == "running"]
    shown = [_progress(each) for each in running for _ in range(each.num_sequences)][:num_running]
    shown += [{}] * (model.max_num_seqs - len(shown))
    return [
        Slot(
            id=first + index,
            n_ctx=model.max_model_len,
            is_processing=index < num_running,
            **progress,
        )
        for index, progress in enumerate(shown)
    ]


def _progress(info: RequestInfo) -> dict[str, Any]:
    cached = 0 if info.cache_lookup is None else info.cache_lookup.num_tokens
    computed = min(info.num_computed_tokens, info.num_prompt_tokens)
    num_left = info.max_tokens - info.num_output_tokens
    return {
        "n_prompt_tokens": info.num_prompt_tokens,
        "n_prompt_tokens_processed": max(0, computed - cached),
        "n_prompt_tokens_cache": cached,
        "next_token": [
            {"has_next_token": True, "n_remain": num_left, "n_decoded": info.num_output_tokens}
        ],
    }


@operation("GET", "/lora-adapters", gives=list[Adapter])
async def lora_adapters(request: Request) -> Response:
    """The model's adapters."""
    model = await served_models(request).find(request.query_params.get("model"))
    await model.ready()
    return json_response([Adapter(index, name) for index, name in enumerate(model.adapters)])


@operation("POST", "/apply-template", takes=TokenizeRequest, gives=AppliedTemplate)
async def apply_template(request: Request, asked: TokenizeRequest) -> Response:
    """The prompt that a conversation becomes."""
    llm = await served_models(request).get(asked.model)
    prompt = await conversation_prompt(asked, llm)
    return json_response(AppliedTemplate(prompt["prompt"]))


async def embedding(request: Request, asked: EmbeddingRequest) -> Response:
    """A vector for each text, by llama.cpp's shapes."""
    llm = await served_models(request).get(asked.model)
    asked.input = asked.content if asked.input is None else asked.input
    if asked.embd_normalize == -1:
        asked.use_activation = False
    outputs = await pool(request, llm, asked, await inputs(asked, llm), PoolingTask.EMBED)
    data = (TextVectors(index, pooled(each).rows()) for index, each in enumerate(outputs))

    def make() -> Response:
        return Response(bytes(in_pieces(data, 1)), media_type="application/json")

    return await built(make, num_values(outputs))


OPERATIONS = [
    *(props, change_props, slots, change_slot, lora_adapters, apply_template),
    *(Operation("POST", path, embedding, EmbeddingRequest, list[TextVectors])
      for path in ("/embedding", "/embeddings")),
    msgspec.structs.replace(health.health, path="/v1/health"),
    msgspec.structs.replace(list_models, path="/models"),
]  # fmt: skip
