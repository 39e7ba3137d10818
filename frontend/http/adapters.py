"""POST /v1/load_lora_adapter and /v1/unload_lora_adapter, as vLLM has them."""

from collections.abc import Awaitable, Callable

import msgspec
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response

from frontend.engine_calls import Engine
from frontend.http.api_errors import ApiError
from frontend.http.exchange import exchange_of
from frontend.http.operations import operation
from frontend.http.served_models import served_models


class LoadLoRAAdapter(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """`lora_path`: below the engine's --adapter-dir. `model`: where the server has several."""

    lora_name: str
    lora_path: str
    load_inplace: bool = False
    model: str | None = None


class UnloadLoRAAdapter(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """`lora_int_id` is not used."""

    lora_name: str
    lora_int_id: int | None = None
    model: str | None = None


@operation("POST", "/v1/load_lora_adapter", takes=LoadLoRAAdapter)
async def load_lora_adapter(request: Request, asked: LoadLoRAAdapter) -> Response:
    """Serve an adapter from now on, under a model name of its own; with an admin's key."""
    name, path, in_place = asked.lora_name, asked.lora_path, asked.load_inplace
    await _on_each(
        request, asked.model, lambda engine: engine.load_adapter(name, path, load_inplace=in_place)
    )
    return PlainTextResponse(f"Success: LoRA adapter {name!r} added successfully.")


@operation("POST", "/v1/unload_lora_adapter", takes=UnloadLoRAAdapter)
async def unload_lora_adapter(request: Request, asked: UnloadLoRAAdapter) -> Response:
    """Take no more requests for an adapter; with an admin's key."""
    name = asked.lora_name
    await _on_each(request, asked.model, lambda engine: engine.unload_adapter(name))
    return PlainTextResponse(f"Success: LoRA adapter {name!r} removed successfully.")


async def _on_each(
    request: Request, model: str | None, change: Callable[[Engine], Awaitable[object]]
) -> None:
    """Every engine of the model, one after another; the first refusal ends it."""
    if not exchange_of(request).is_admin:
        raise ApiError(403, "adapters are changed with an admin's key only")
    llm = await served_models(request).get(model)
    for engine in llm.engines:
        await change(engine)
