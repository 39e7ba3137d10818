"""What a request over HTTP can be refused with: status codes, and bodies in each API's form."""

import http
import re
from typing import Any, Literal

import msgspec
from starlette.responses import Response

from frontend.errors import (
    CallRefused,
    ClientClosed,
    EngineClientError,
    EngineDied,
    EngineRefused,
    EngineStartError,
    EngineUnavailable,
    InvalidInput,
    PromptTooLong,
    QueueFull,
    RequestRejected,
    UnknownAdapter,
)
from protocol.errors import ErrorCode

_RETRY_AFTER_S = 1

_STATUS_OF_CODE = {
    ErrorCode.DRAINING: 503,
    ErrorCode.INTERNAL: 500,
    ErrorCode.SLOW_CONSUMER: 503,
    ErrorCode.KILLED_ENGINE: 422,
    ErrorCode.UNKNOWN_ADAPTER: 404,
    ErrorCode.PERMISSION_DENIED: 403,
}
"""Of an engine's refusal; any other is the request's own fault."""

_TYPE_OF_STATUS = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    429: "rate_limit_error",
    501: "not_supported_error",
    503: "service_unavailable_error",
}
_ANTHROPIC_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}
_OVERLOADED = 529
"""Anthropic's status of that error."""


class ErrorBody(msgspec.Struct, frozen=True):
    """`code` is the status code, as vLLM has it."""

    message: str
    type: str
    param: str | None
    code: int | str


class ErrorResponse(msgspec.Struct, frozen=True):
    """The body of every refusal."""

    error: ErrorBody


class AnthropicErrorBody(msgspec.Struct, frozen=True):
    type: str
    message: str


class AnthropicErrorResponse(msgspec.Struct, frozen=True, kw_only=True):
    type: Literal["error"] = "error"
    error: AnthropicErrorBody


class OllamaErrorResponse(msgspec.Struct, frozen=True):
    error: str


AnyErrorResponse = ErrorResponse | AnthropicErrorResponse | OllamaErrorResponse


class ApiError(Exception):
    """
    Args:
        status: of HTTP.
        param: the field of the request that is at fault.
        code: default: the status.
        retry_after_s: told to the client as Retry-After.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        retry_after_s: int | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.param = param
        self.code = code
        self.retry_after_s = retry_after_s
        self.anthropic_message = message
        """The message in Anthropic's API, where clients look for its words."""

    @property
    def headers(self) -> dict[str, str]:
        headers = {}
        if self.retry_after_s is not None:
            headers["retry-after"] = str(self.retry_after_s)
        if self.status == http.HTTPStatus.UNAUTHORIZED:
            headers["www-authenticate"] = "Bearer"
        return headers

    def body(self) -> ErrorResponse:
        kind = _TYPE_OF_STATUS.get(
            self.status, "invalid_request_error" if self.status < 500 else "internal_server_error"
        )
        return ErrorResponse(ErrorBody(self.message, kind, self.param, self.code or self.status))


def api_error(error: BaseException) -> ApiError | None:
    """The refusal that an exception of the client library means; None: it is a defect."""
    match error:
        case ApiError():
            return error
        case QueueFull():
            return ApiError(429, str(error), code="queue_full", retry_after_s=_RETRY_AFTER_S)
        case RequestRejected() | CallRefused():
            status = _STATUS_OF_CODE.get(error.code, 400)
            field = re.match(r"([\w.\[\]]+) cannot be used: ", str(error))
            param = None if field is None else field[1]
            return ApiError(status, str(error), param=param, code=error.code.value)
        case PromptTooLong():
            told = ApiError(400, str(error), code="context_length_exceeded")
            told.anthropic_message = _too_long(error)
            return told
        case UnknownAdapter():
            return ApiError(404, str(error), param="model", code="model_not_found")
        case InvalidInput():
            return ApiError(400, str(error))
        case EngineUnavailable() | EngineDied() | EngineStartError() | ClientClosed():
            return ApiError(503, str(error), code="engine_unavailable", retry_after_s=5)
        case EngineRefused():
            return ApiError(503, str(error), code="engine_refused")
        case EngineClientError():
            return ApiError(500, str(error))
    return None


def _too_long(error: PromptTooLong) -> str:
    begin = "prompt is too long"
    if error.num_tokens is not None:
        return f"{begin}: {error.num_tokens} tokens > {error.most} maximum; {error}"
    return str(error) if str(error).startswith(begin) else f"{begin}: {error}"


def unknown_model(name: str, known: list[str]) -> ApiError:
    return ApiError(
        404,
        f"the model {name!r:.200} does not exist; this server has {', '.join(known)}",
        param="model",
        code="model_not_found",
    )


def not_supported(param: str, value: Any, action: str) -> ApiError:
    return ApiError(400, f"{param} is {value!r}, which is not supported; {action}", param=param)


def error_type(path: str) -> type[AnyErrorResponse]:
    """The form of the errors under `path`."""
    if path.startswith("/v1/messages"):
        return AnthropicErrorResponse
    if path.startswith("/api/"):
        return OllamaErrorResponse
    return ErrorResponse


def error_body(error: ApiError, path: str) -> AnyErrorResponse:
    form = error_type(path)
    if form is OllamaErrorResponse:
        return OllamaErrorResponse(error.message)
    if form is AnthropicErrorResponse:
        other = "invalid_request_error" if error.status < 500 else "api_error"
        kind = _ANTHROPIC_TYPES.get(error.status, other)
        return AnthropicErrorResponse(error=AnthropicErrorBody(kind, error.anthropic_message))
    return error.body()


def error_response(error: ApiError, path: str) -> Response:
    body = msgspec.json.encode(error_body(error, path))
    is_overloaded = error.status == 503 and error_type(path) is AnthropicErrorResponse
    status = _OVERLOADED if is_overloaded else error.status
    return Response(body, status, error.headers, media_type="application/json")
