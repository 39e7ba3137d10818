"""Which models there are: /api/tags, /api/show, /api/ps, /api/pull."""

import contextlib
import hashlib
import re
from collections.abc import AsyncGenerator, Iterable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import msgspec
from msgspec import UNSET
from starlette.requests import Request
from starlette.responses import Response

from frontend.async_llm import AsyncLLM
from frontend.errors import EngineClientError, InvalidInput
from frontend.http.api_errors import ApiError
from frontend.http.event_stream import (
    LineStream,
    built,
    ending_with_errors,
    in_pieces,
    json_response,
    line,
)
from frontend.http.exchange import exchange_of
from frontend.http.ollama import bodies
from frontend.http.operations import operation
from frontend.http.served_models import (
    ModelFacts,
    ServedModel,
    ServedModels,
    ServedPreset,
    served_models,
)
from frontend.http.settings import ServerSettings
from frontend.http.tools.stream import format_of_template
from frontend.inputs.fim import fim_format
from frontend.reasoning_formats import REASONING_FORMATS, reasoning_name_of_template
from frontend.text.tokenizer import Tokenizer
from protocol.known_names import meant_by
from protocol.modelfile import modelfile, parameter_lines
from protocol.outputs import ModelInfo
from protocol.presets import SAMPLING_NAMES, model_of

_VERSION = "0.13.0"
"""The version of Ollama whose API this is. Clients compare it."""
_NEVER = datetime(2300, 1, 1, tzinfo=UTC)
_LATEST = ":latest"
_NAME = re.compile(r"[A-Za-z0-9](?!.*//)[\w.:/@-]*")
"""Of a model to fetch: no path from the root or of a parent, no option, no address of a file."""
_OF_VOCABULARY = ("tokenizer.ggml.tokens", "tokenizer.ggml.token_type")
"""Shown if they are asked for."""
_KIND = re.compile(r"(LMHeadModel|For[A-Z]\w*|Model)$")
"""The end of a name of a class, behind the family's."""
_FLOATS = {"float32": "F32", "float16": "F16", "bfloat16": "BF16"}


async def served_model(request: Request, name: str) -> tuple[ServedModel, AsyncLLM]:
    """By its name, with ":latest" or without.

    Raises:
        ApiError: there is no such model.
        EngineClientError: its engine does not answer.
    """
    model = await find_model(request, name)
    exchange_of(request).model = name
    return model, await model.for_request()


async def find_model(request: Request, name: str) -> ServedModel:
    """The model that `served_model` finds, without starting its engine. Raises ApiError: there is
    none, in Ollama's words."""
    models = served_models(request)
    stem = name.removesuffix(_LATEST)
    given = next((each for each in (name, stem, stem + _LATEST) if each in models.names()), stem)
    try:
        return await models.find(given)
    except ApiError as error:
        if error.code != "model_not_found":
            raise
        meant = meant_by(name).lower()
        same = [each for each in models.names() if meant_by(each).lower() == meant]
        if same:
            return await models.find(same[0])
        raise not_found(error) from None


def not_found(error: ApiError) -> ApiError:
    """The error about an unknown model, in Ollama's words."""
    error.message = re.sub(r"^the (model .+) does not exist;", r"\1 not found;", error.message)
    return error


async def model_to_fetch(request: Request, name: str) -> ServedModel:
    """The model that `find_model` finds; where the server starts models, any known name or hub id.
    Raises ApiError: neither, or only an admin may."""
    models = served_models(request)
    try:
        return await find_model(request, name)
    except ApiError as error:
        is_fetched = models.new is not None and _NAME.fullmatch(name) and not Path(name).exists()
        if error.status != 404 or models.new is None or not is_fetched:
            if models.new is None:
                error.message += "; a server of `engine-core http --model NAME` fetches others"
            raise
        if not exchange_of(request).is_admin:
            raise ApiError(403, f"{name} is not served; only an admin's key adds it") from None
        return models.new(model_of(name.removesuffix(_LATEST)))


@operation("GET", "/api/tags", gives=bodies.ModelEntries)
async def tags(request: Request) -> Response:
    """The models of this server."""
    return json_response(
        bodies.ModelEntries(
            models=[entry async for entry, _, _ in _entries(served_models(request).with_presets())]
        )
    )


@operation("GET", "/api/ps", gives=bodies.LoadedModels)
async def ps(request: Request) -> Response:
    """The models whose engines run."""
    loaded = [
        bodies.LoadedModel(
            context_length=llm.model.max_model_len,
            expires_at=model.expires_at or _NEVER,
            size_vram=_bytes(model, entry) if "triton" in llm.model.instruction_set else 0,
            **{**msgspec.structs.asdict(entry), "size": _bytes(model, entry)},
        )
        async for entry, model, llm in _entries(served_models(request))
        if llm is not None
    ]
    return json_response(bodies.LoadedModels(models=loaded))


@operation("POST", "/api/show", takes=bodies.ModelRequest, gives=bodies.ShownModel)
async def show(request: Request, asked: bodies.ModelRequest) -> Response:
    """One model."""
    model = await find_model(request, asked.model or asked.name or "")
    settings: ServerSettings = request.app.state.settings
    tokenizer, template, of_tools = None, "", ""
    info: ModelInfo | ModelFacts
    if model.resting is None:
        model, llm = await served_model(request, asked.model or asked.name or "")
        info, tokenizer = llm.model, llm.input_processor.optional_tokenizer
        if tokenizer is not None:
            template = tokenizer.chat_template or ""
            of_tools = tokenizer.used_template(None, has_tools=True) or ""
        has_images = info.multimodal is not None and "image" in info.multimodal.max_items
    else:  # an editor shows every model: that starts none
        info = await model.read_facts()
        given = model.preset.template if isinstance(model, ServedPreset) else None
        template = info.chat_template if given is None else given
        of_tools = given or info.chat_templates.get("tool_use", template)
        has_images = info.takes_images
    family = _family(info)
    tasks = {"generate": "completion", "embed": "embedding"}
    capabilities = [name for task, name in tasks.items() if task in info.tasks]
    if "tools" in of_tools and (settings.tool_call_parser or format_of_template(of_tools)):
        capabilities.append("tools")
    parser = settings.reasoning_parser or reasoning_name_of_template(template)
    if template and parser is not None and REASONING_FORMATS[parser] is not None:
        capabilities.append("thinking")
    if has_images:
        capabilities.append("vision")
    if tokenizer is not None and "generate" in info.tasks:
        with contextlib.suppress(InvalidInput):
            fim_format(tokenizer, info.name)
            capabilities.append("insert")
    preset = None
    if isinstance(model, ServedPreset):  # callers are told no paths
        of, adapter = model.parent, model.preset.adapter
        adapter = None if adapter is None else Path(adapter).name
        preset = msgspec.structs.replace(model.preset, from_=of, adapter=adapter)
    parameters = [] if preset is None else parameter_lines(preset.parameters)
    own = {line.split()[0] for line in parameters}
    words = {name: word for word, name in SAMPLING_NAMES.items()}
    defaults = {words.get(name, name): value for name, value in info.default_sampling.items()}
    parameters += [f"{name} {value:g}" for name, value in defaults.items() if name not in own]
    model_info: dict[str, Any] = {
        "general.architecture": family,
        "general.basename": info.name,
        **({"general.parameter_count": info.num_weights} if info.num_weights else {}),
        f"{family}.context_length": info.max_model_len,
        f"{family}.vocab_size": info.vocab_size,
        "tokenizer.ggml.eos_token_id": next(iter(info.eos_token_ids), None),
        **dict.fromkeys(_OF_VOCABULARY),
    }

    def make() -> Response:
        if asked.verbose and tokenizer is not None:
            model_info.update(_vocabulary(tokenizer))
        return json_response(shown)

    shown = bodies.ShownModel(
        modelfile=f"FROM {info.name}\n" if preset is None else modelfile(preset),
        parameters="\n".join(parameters),
        template=template,
        system=UNSET if preset is None or preset.system is None else preset.system,
        license=UNSET if preset is None or preset.license is None else preset.license,
        messages=UNSET if preset is None else preset.messages,
        details=_details(info, model),
        model_info=model_info,
        capabilities=capabilities,
        modified_at=_since(model),
    )
    return await built(make, info.vocab_size if asked.verbose else 0)


@operation("POST", "/api/pull", takes=bodies.ModelRequest, gives=bodies.Status, line=bodies.Status)
async def pull(request: Request, asked: bodies.ModelRequest) -> Response:
    """Fetch a model, if its files are not here. Where the server starts models on demand that may
    be any known name or hub id, which is served from then on."""
    model = await model_to_fetch(request, asked.model or asked.name or "")
    model = model.model if isinstance(model, ServedPreset) else model
    lines = _pulled(served_models(request), model)
    if asked.stream is not False:
        return LineStream(ending_with_errors(request, lines))
    async for _ in lines:
        pass
    return json_response(bodies.Status(status="success"))


async def _pulled(models: ServedModels, model: ServedModel) -> AsyncGenerator[bytes, None]:
    async with contextlib.aclosing(fetched(models, model)) as statuses:
        async for status in statuses:
            yield line(status)
    yield line(bodies.Status(status="success"))


async def fetched(models: ServedModels, model: ServedModel) -> AsyncGenerator[bodies.Status, None]:
    """What is to be said while the files of a model are fetched, which is served from then on."""
    try:
        yield bodies.Status(status="pulling manifest")
        async with contextlib.aclosing(model.pull()) as statuses:
            async for status in statuses:
                for path in model.asked[:1]:  # callers are told no paths
                    status["status"] = status["status"].replace(path, model.names[0])
                yield msgspec.convert(status, bodies.Status)
        models.add(model)
    finally:
        if model not in [*models]:
            await model.close()


@operation("GET", "/api/version", gives=bodies.ApiVersion)
async def version(_request: Request) -> Response:
    """The version of Ollama whose API this is."""
    return json_response(bodies.ApiVersion(_VERSION))


async def _entries(
    models: Iterable[ServedModel],
) -> AsyncGenerator[tuple[bodies.ModelEntry, ServedModel, AsyncLLM | None], None]:
    """One for each name; of an engine that is away without its client."""
    for model in models:
        llm = None
        if model.resting is None:
            with contextlib.suppress(EngineClientError):
                llm = await model.ready()
        info = model.facts if llm is None else llm.model
        made = msgspec.json.encode(model.preset) if isinstance(model, ServedPreset) else b""
        digest = hashlib.sha256("".join(model.names[:1]).encode() + made).hexdigest()
        for name in model.names:
            tag = name if ":" in name else name + _LATEST
            yield (
                bodies.ModelEntry(
                    name=tag,
                    model=tag,
                    modified_at=_since(model),
                    size=model.size_bytes or (0 if info is None else info.file_bytes),
                    digest=digest,
                    details=_details(info, model),
                ),
                model,
                llm,
            )


def _details(info: ModelInfo | ModelFacts | None, model: ServedModel) -> bodies.ModelDetails:
    parent = model.parent if isinstance(model, ServedPreset) else ""
    if info is None or not info.architecture:
        return bodies.ModelDetails(parent_model=parent)
    family = _family(info)
    stored = re.match(r"\w*", info.formats)
    level = "" if stored is None else stored[0]
    return bodies.ModelDetails(
        parent_model=parent,
        format=info.file_format,
        family=family,
        families=[family],
        parameter_size=_rounded(info.num_weights) if info.num_weights else "",
        quantization_level=_FLOATS.get(level, level),
    )


def _rounded(number: int) -> str:
    """A number as Ollama writes it: 134.52M, 8.0B."""
    return f"{number / 1e9:.1f}B" if number >= 1e9 else f"{number / 1e6:.2f}M"


def _family(info: ModelInfo | ModelFacts) -> str:
    return _KIND.sub("", info.architecture).lower()


def _vocabulary(tokenizer: Tokenizer) -> dict[str, Any]:
    """Tokens in order, and what they are: 1 text, 3 special, 4 added."""
    backend, special = tokenizer.backend, tokenizer.special_token_ids
    added = backend.get_added_tokens_decoder()
    numbers = range(tokenizer.vocab_size)
    types = (3 if each in special else 4 if each in added else 1 for each in numbers)
    texts = (backend.id_to_token(each) or "" for each in numbers)
    return dict(zip(_OF_VOCABULARY, map(in_pieces, (texts, types)), strict=True))


def _bytes(model: ServedModel, entry: bodies.ModelEntry) -> int:
    return model.memory_bytes or entry.size


def _since(model: ServedModel) -> datetime:
    return datetime.fromtimestamp(model.created_s, UTC)
