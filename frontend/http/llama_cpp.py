"""GET /props and /slots, as the server of llama.cpp has them, for its monitors and clients."""

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from frontend.http.api_errors import ApiError
from frontend.http.event_stream import json_response
from frontend.http.operations import operation
from frontend.http.served_models import served_models


class GenerationSettings(msgspec.Struct, frozen=True, kw_only=True):
    n_ctx: int
    params: dict[str, float]
    """The model's recommendations."""


class Props(msgspec.Struct, frozen=True, kw_only=True):
    default_generation_settings: GenerationSettings
    total_slots: int
    """Most sequences that run at once."""
    model_alias: str
    model_path: str
    chat_template: str
    chat_template_tool_use: str | msgspec.UnsetType = msgspec.UNSET
    """The chat template of conversations with tools, if it is another one."""
    bos_token: str
    eos_token: str
    build_info: str = "engine-core"


class Slot(msgspec.Struct, frozen=True, kw_only=True):
    id: int
    n_ctx: int
    is_processing: bool


@operation("GET", "/props", gives=Props)
async def props(request: Request) -> Response:
    """Facts about the server's model, or that of `?model=`."""
    model = await served_models(request).find(request.query_params.get("model"))
    llm = await model.ready()
    info = llm.model
    named = {} if info.tokenizer is None else info.tokenizer.named_chat_templates
    special = {} if info.tokenizer is None else info.tokenizer.special_tokens
    return json_response(
        Props(
            default_generation_settings=GenerationSettings(
                n_ctx=info.max_model_len, params=info.default_sampling
            ),
            total_slots=info.max_num_seqs,
            model_alias=model.names[0],
            model_path=info.name,
            chat_template=("" if info.tokenizer is None else info.tokenizer.chat_template) or "",
            chat_template_tool_use=named.get("tool_use", msgspec.UNSET),
            bos_token=special.get("bos_token", ""),
            eos_token=special.get("eos_token", ""),
        )
    )


@operation("GET", "/slots", gives=list[Slot])
async def slots(request: Request) -> Response:
    """One for each sequence that can run, and whether one does."""
    model = await served_models(request).find(request.query_params.get("model"))
    llm = await model.ready()
    engines = [each for each in llm.engines if each.session.is_connected]
    num_running = sum([(await each.statistics()).num_running for each in engines])
    num_slots = llm.model.max_num_seqs * len(engines)
    if "fail_on_no_slot" in request.query_params and num_running >= num_slots:
        raise ApiError(503, f"all {num_slots} slots are in use; try again later", retry_after_s=1)
    length = llm.model.max_model_len
    return json_response(
        [Slot(id=i, n_ctx=length, is_processing=i < num_running) for i in range(num_slots)]
    )
