"""The application: every route, and what holds for all of them."""

import asyncio
import difflib
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import msgspec
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route

from frontend.batch.files import FileStore
from frontend.batch.jobs import Jobs
from frontend.errors import EngineClientError
from frontend.http import adapters, health, page_files
from frontend.http.anthropic import messages as anthropic
from frontend.http.api_errors import ApiError, api_error, error_response
from frontend.http.api_keys import ApiKeys
from frontend.http.door import Door
from frontend.http.generation import tokenize
from frontend.http.live_requests import list_requests
from frontend.http.llama_cpp import completion, server
from frontend.http.mcp import routes as mcp
from frontend.http.mcp.servers import running
from frontend.http.metrics.exposition import Metrics, get_metrics
from frontend.http.ollama import embeddings as ollama_embeddings
from frontend.http.ollama import generation as ollama
from frontend.http.ollama import models as ollama_models
from frontend.http.ollama import presets as ollama_presets
from frontend.http.openai import batches, files, models, token_ids
from frontend.http.openai.chat import chat_completions, render_chat
from frontend.http.openai.completions import completions, render_completions
from frontend.http.openai.transcriptions import transcriptions, translations
from frontend.http.operations import openapi_document
from frontend.http.pooling import embeddings, scores
from frontend.http.responses import route as responses
from frontend.http.responses import stored as stored_responses
from frontend.http.responses.background import BackgroundRuns
from frontend.http.responses.store import ResponseStore
from frontend.http.scheduler_stream import watch_scheduler
from frontend.http.served_models import ServedModels
from frontend.http.settings import ServerSettings
from frontend.http.traces import Traces

logger = logging.getLogger(__name__)

_SETTINGS = ServerSettings()

OPERATIONS = [
    *(chat_completions, render_chat, completions, render_completions, token_ids.generate),
    *(tokenize.tokenize, tokenize.detokenize),
    *(transcriptions, translations),
    *(models.list_models, models.get_model),
    *(files.upload, files.list_files, files.get_file, files.get_content, files.delete_file),
    *(batches.create_batch, batches.list_batches, batches.get_batch, batches.cancel_batch),
    *(embeddings.embeddings, embeddings.encode, embeddings.classify, embeddings.cohere_embed),
    *scores.OPERATIONS,
    *(responses.create_response, *stored_responses.OPERATIONS),
    *(anthropic.messages, anthropic.count_tokens),
    *(ollama.chat, ollama.generate, ollama_models.pull, ollama_models.show),
    *(ollama_embeddings.embed, ollama_embeddings.old_embed),
    *(ollama_models.tags, ollama_models.ps, ollama_models.version),
    *(ollama_presets.create, ollama_presets.copy, ollama_presets.delete, ollama_presets.push),
    *(ollama_presets.has_blob, ollama_presets.send_blob),
    *(*completion.OPERATIONS, *server.OPERATIONS),
    *(health.health, health.ready, health.get_version),
    *(adapters.load_lora_adapter, adapters.unload_lora_adapter),
    *(mcp.list_servers, mcp.call),
    *(list_requests, watch_scheduler, get_metrics),
]


async def openapi(_request: Request) -> Response:
    """This document."""
    return Response(
        msgspec.json.encode(openapi_document(OPERATIONS)), media_type="application/json"
    )


def make_app(
    served: ServedModels, settings: ServerSettings = _SETTINGS, keys: ApiKeys | None = None
) -> Starlette:
    """
    Args:
        served: closed when the application stops.
        keys: None: everybody is answered.

    Raises:
        InvalidInput: the folder of files cannot be used.
    """
    files_kept = FileStore(settings.files_dir, settings.max_files_size)
    endpoint = settings.otlp_traces_endpoint
    responses_kept = ResponseStore(folder=settings.responses_dir)
    traces = None if endpoint is None else Traces(endpoint)
    door = Middleware(
        Door,
        settings=settings,
        keys=keys,
        open_paths=page_files.OPEN_PATHS | {each.path for each in OPERATIONS if not each.needs_key},
        tracer=None if traces is None else traces.begin,
    )
    middleware = [door]
    if settings.cors_origin:
        cors = Middleware(
            CORSMiddleware,
            allow_origins=settings.cors_origin,
            allow_methods=["*"],
            allow_headers=["*"],
            expose_headers=["x-request-id", "retry-after"],
        )
        middleware.insert(0, cors)

    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        served.media_sources = settings.media_sources
        app.state.models = served
        app.state.settings = settings
        app.state.responses = responses_kept
        app.state.background_responses = BackgroundRuns()
        app.state.files = files_kept
        app.state.jobs = Jobs(app.state.files, batches.answerers(app))
        if settings.files_dir is not None:
            app.state.jobs.resume()
        app.state.feeds = {}
        app.state.slots = {}
        app.state.metrics = Metrics(served, settings.metrics_names)
        async with running(settings.tool_servers, settings.mcp_timeout) as app.state.tool_servers:
            yield
            await app.state.jobs.close()
            await app.state.background_responses.close()
        responses_kept.close()
        app.state.files.close()
        await served.close()
        if traces is not None:
            await asyncio.to_thread(traces.close)

    return Starlette(
        routes=[
            *(each.route() for each in OPERATIONS),
            Route("/openapi.json", openapi),
            *page_files.ROUTES,
        ],
        lifespan=lifespan,
        middleware=middleware,
        exception_handlers={
            HTTPException: _http_error,
            ApiError: _error,
            ClientDisconnect: _left,
            EngineClientError: _error,
            Exception: _error,
        },
    )


async def _http_error(request: Request, error: Exception) -> Response:
    """No such route, or another method."""
    assert isinstance(error, HTTPException)
    path = request.url.path
    what = f"{request.method} {path}: {error.detail}{_what_is_there(path, error.status_code)}"
    response = error_response(ApiError(error.status_code, what), request.url.path)
    response.headers.update(error.headers or {})
    return response


def _what_is_there(path: str, status: int) -> str:
    """What is served near a path or method that is not. Clients often have /v1 twice, or not."""
    if status == 405:
        methods = {each.method for each in OPERATIONS if each.route().path_regex.match(path)}
        return f"; it takes {', '.join(sorted(methods))}" if methods else ""
    known = [each.path for each in OPERATIONS]
    meant = [each for each in (f"/v1{path}", path.removeprefix("/v1")) if each in known]
    near = meant or difflib.get_close_matches(path[:100], known, n=1, cutoff=0.8)
    return f"; did you mean {near[0]}?" if near else "; /openapi.json lists what is served"


async def _left(_request: Request, _error: Exception) -> Response:
    """Answer a client that left before its request was whole."""
    return Response(status_code=499)


async def _error(request: Request, error: Exception) -> Response:
    told = api_error(error)
    if told is None:
        logger.error("%s failed", request.url.path, exc_info=error)
        told = ApiError(500, f"the server failed: {type(error).__name__}; see its log")
    return error_response(told, request.url.path)
