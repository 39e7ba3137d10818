"""Presets by Ollama's routes: /api/create, copy and delete; files for them: /api/blobs."""

import asyncio
import contextlib
import functools
from collections.abc import AsyncGenerator, Callable, Iterator
from typing import Any, TypeVar

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from frontend.http.api_errors import ApiError, not_supported, unknown_model
from frontend.http.event_stream import LineStream, ending_with_errors, json_response, line
from frontend.http.exchange import exchange_of
from frontend.http.ollama import bodies
from frontend.http.ollama.models import fetched, find_model, model_to_fetch, not_found
from frontend.http.on_demand.model import OnDemandModel
from frontend.http.operations import operation
from frontend.http.served_models import ServedModel, ServedModels, ServedPreset, served_models
from frontend.presets import files
from frontend.shared_threads import REQUEST_TEMPLATES
from frontend.text.chat_template import render_chat
from protocol.presets import (
    Parameters,
    Preset,
    PresetError,
    find_preset,
    preset_file,
    remove_preset,
    write_preset,
)

T = TypeVar("T")


@operation(
    "POST", "/api/create", takes=bodies.CreateRequest, gives=bodies.Status, line=bodies.Status
)
async def create(request: Request, asked: bodies.CreateRequest) -> Response:
    """Make a model of another one or of files that were sent, with a system text, parameters, a
    template, messages, an adapter."""
    name = asked.model or asked.name or ""
    _check(request, name)
    await _on_disk(preset_file, name)
    if asked.quantize:
        raise not_supported("quantize", asked.quantize, "send files that are quantised")
    if not asked.from_ and not asked.files:
        raise ApiError(400, "from is missing; name a model, or send files", param="from")
    texts, models = asked.license, served_models(request)
    try:
        preset = Preset(
            from_=asked.from_ or name,
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
    if asked.adapters:
        adapter = await _on_disk(files.adapter_of_files, asked.adapters, param="adapters")
        preset = msgspec.structs.replace(preset, adapter=adapter)
    if not asked.files:
        model = await model_to_fetch(request, preset.from_)
    elif models.new is None:
        what = "start one that does: engine-client http --model NAME"
        raise ApiError(400, f"files need a server that starts models; {what}", param="files")
    else:
        path = await _on_disk(files.model_of_files, asked.files, param="files")
        model = next((each for each in models if each.is_of(path)), None) or models.new(path)
    preset = await _of_model(preset, model)
    lines = _created(served_models(request), name, preset, model)
    if asked.stream is not False:
        return LineStream(ending_with_errors(request, lines))
    async for _ in lines:
        pass
    return json_response(bodies.Status(status="success"))


async def _created(
    models: ServedModels, name: str, preset: Preset, model: ServedModel
) -> AsyncGenerator[bytes, None]:
    if model not in [*models] and not isinstance(model, ServedPreset):
        async for status in fetched(models, model):
            yield line(status)
    yield line(bodies.Status(status="writing manifest"))
    before = await _found(name)
    await _on_disk(write_preset, name, preset)
    await _forget(models, before)
    daemon = model.model if isinstance(model, ServedPreset) else model
    if preset.adapter is not None and isinstance(daemon, OnDemandModel) and daemon.is_idle:
        await daemon.stop()  # the next request starts it with the adapter
    yield line(bodies.Status(status="success"))


@operation("POST", "/api/copy", takes=bodies.CopyRequest)
async def copy(request: Request, asked: bodies.CopyRequest) -> Response:
    """Give a model another name."""
    _check(request, asked.destination)
    model = await find_model(request, asked.source)
    preset = await _of_model(Preset(from_=asked.source), model)
    await _on_disk(write_preset, asked.destination, preset)
    return Response()


@operation("DELETE", "/api/delete", takes=bodies.ModelRequest)
async def delete(request: Request, asked: bodies.ModelRequest) -> Response:
    """Delete a name that was created or copied, and files that were sent for it alone; those of
    other models stay."""
    name, models = asked.model or asked.name or "", served_models(request)
    _check(request, name)
    preset = await _found(name)
    if not await _on_disk(remove_preset, name):
        raise not_found(unknown_model(name, models.known_names()))
    await _forget(models, preset)
    return Response()


async def _found(name: str) -> Preset | None:
    """None: there is none of this name, or it cannot be read."""
    with contextlib.suppress(PresetError):
        return await asyncio.to_thread(find_preset, name)
    return None


async def _forget(models: ServedModels, preset: Preset | None) -> None:
    """Delete the files that were sent for a preset, if no other has them."""
    if preset is not None:
        await _on_disk(files.remove_unused, preset.adapter)
        if await _on_disk(files.remove_unused, preset.from_):
            await models.remove([each for each in models if each.is_of(preset.from_)])


@operation("HEAD", "/api/blobs/{digest}")
async def has_blob(request: Request) -> Response:
    """Whether a file is here."""
    _check(request, "")
    there = (await _on_disk(files.blob_file, request.path_params["digest"])).exists()
    return Response(status_code=200 if there else 404)


@operation("POST", "/api/blobs/{digest}")
async def send_blob(request: Request) -> Response:
    """Send a file, by its SHA-256, for /api/create."""
    _check(request, "")
    digest = request.path_params["digest"]
    length = int(request.headers.get("content-length") or 0)
    with _told("digest"):
        if not files.blob_file(digest).exists():
            await files.receive_blob(digest, request.stream(), length)
    return Response(status_code=201)


@operation("POST", "/api/push", takes=bodies.ModelRequest, gives=bodies.Status)
async def push(_request: Request, _asked: bodies.ModelRequest) -> Response:
    """Refuse to send a model away."""
    raise ApiError(400, "models are not pushed: this server knows no registry that takes them")


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


async def _of_model(preset: Preset, model: ServedModel) -> Preset:
    """The preset as it is kept. Raises ApiError: its model is an adapter."""
    if isinstance(model, ServedPreset):
        return preset.over(model.preset)
    if preset.from_ in model.adapters:
        raise ApiError(400, f"{preset.from_!r} is an adapter; name its model", param="from")
    return msgspec.structs.replace(preset, from_=await model.source())


async def _on_disk(call: Callable[..., T], *args: Any, param: str = "model") -> T:
    with _told(param):
        return await asyncio.to_thread(call, *args)


@contextlib.contextmanager
def _told(param: str) -> Iterator[None]:
    """Raises ApiError: what is wrong with `param`, or with the disk."""
    try:
        yield
    except files.NoSpace as error:
        raise ApiError(507, str(error)) from None
    except PresetError as error:
        raise ApiError(400, str(error), param=param) from None
    except OSError as error:
        raise ApiError(500, f"{error.filename} cannot be changed: {error.strerror}") from error
