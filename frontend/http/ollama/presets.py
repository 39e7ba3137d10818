"""Presets by Ollama's routes: /api/create, /api/copy, /api/delete."""

import asyncio
import functools
from collections.abc import Callable
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from frontend.http.api_errors import ApiError, not_supported, unknown_model
from frontend.http.event_stream import json_response
from frontend.http.exchange import exchange_of
from frontend.http.ollama import bodies
from frontend.http.ollama.models import find_model
from frontend.http.operations import operation
from frontend.http.served_models import ServedPreset, served_models
from frontend.shared_threads import REQUEST_TEMPLATES
from frontend.text.chat_template import render_chat
from protocol.presets import Parameters, Preset, PresetError, remove_preset, write_preset

_INSTEAD = "serve the model by its path, and create from its name"


@operation("POST", "/api/create", takes=bodies.CreateRequest, gives=bodies.Status)
async def create(request: Request, asked: bodies.CreateRequest) -> Response:
    """Give a served model another name with a system text, parameters, a template, messages."""
    _check(request, asked.model or asked.name or "")
    for name in ("files", "adapters", "quantize"):
        if value := getattr(asked, name):
            raise not_supported(name, value, _INSTEAD)
    if not asked.from_:
        raise ApiError(400, "from is missing; name a model of this server", param="from")
    texts = asked.license
    try:
        preset = Preset(
            from_=asked.from_,
            system=asked.system,
            template=asked.template or None,
            messages=asked.messages or [],
            parameters=asked.parameters or Parameters(),
            license="\n".join(texts) if isinstance(texts, list) else texts,
        )
    except ValueError as error:
        raise ApiError(400, str(error), param="template") from None
    if preset.template is not None:
        trial = [{"role": "user", "content": "Hello"}]
        await REQUEST_TEMPLATES.run(functools.partial(render_chat, preset.template, trial))
    await _keep(request, asked.model or asked.name or "", preset)
    return json_response(bodies.Status(status="success"))  # it is the only line of a stream, too


@operation("POST", "/api/copy", takes=bodies.CopyRequest)
async def copy(request: Request, asked: bodies.CopyRequest) -> Response:
    """Give a model another name."""
    _check(request, asked.destination)
    await _keep(request, asked.destination, Preset(from_=asked.source))
    return Response()


@operation("DELETE", "/api/delete", takes=bodies.ModelRequest)
async def delete(request: Request, asked: bodies.ModelRequest) -> Response:
    """Delete a name that was created or copied; the model's files stay."""
    name = asked.model or asked.name or ""
    _check(request, name)
    if not _on_disk(remove_preset, name):
        raise unknown_model(name, served_models(request).known_names())
    return Response()


@operation("POST", "/api/blobs/{digest}")
async def blobs(_request: Request) -> Response:
    """Refuse a file."""
    raise ApiError(400, f"files cannot be sent to this server; {_INSTEAD}")


def _check(request: Request, name: str) -> None:
    """Raises ApiError: the caller may not change names, or not this one."""
    if not exchange_of(request).is_admin:
        raise ApiError(403, "models are created, copied and deleted with an admin's key only")
    if {name, name.removesuffix(":latest")} & {*served_models(request).names()}:
        raise ApiError(
            400,
            f"{name!r} is a model that this server serves, and only names that were created or "
            "copied may change; give another one",
            param="model",
        )


async def _keep(request: Request, name: str, preset: Preset) -> None:
    """Raises ApiError: no name of a preset, or its model is not served."""
    model = await find_model(request, preset.from_)
    if isinstance(model, ServedPreset):
        preset = preset.over(model.preset)
    elif preset.from_ in model.adapters:
        raise ApiError(400, f"{preset.from_!r} is an adapter; name its model", param="from")
    else:
        preset = msgspec.structs.replace(preset, from_=await model.source())
    await asyncio.to_thread(_on_disk, write_preset, name, preset)


def _on_disk(call: Callable[..., bool | None], *args: Any) -> bool | None:
    try:
        return call(*args)
    except PresetError as error:
        raise ApiError(400, str(error), param="model") from None
    except OSError as error:
        raise ApiError(500, f"{error.filename} cannot be changed: {error.strerror}") from error
