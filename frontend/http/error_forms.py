"""The body of a refusal, in the form of the API that its path belongs to."""

from typing import Literal

import msgspec
from starlette.responses import Response

from frontend.http.api_errors import ApiError, ErrorResponse

_ANTHROPIC_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}


class AnthropicErrorBody(msgspec.Struct, frozen=True):
    type: str
    message: str


class AnthropicErrorResponse(msgspec.Struct, frozen=True, kw_only=True):
    type: Literal["error"] = "error"
    error: AnthropicErrorBody


class OllamaErrorResponse(msgspec.Struct, frozen=True):
    error: str


AnyErrorResponse = ErrorResponse | AnthropicErrorResponse | OllamaErrorResponse


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
        return AnthropicErrorResponse(error=AnthropicErrorBody(kind, error.message))
    return error.body()


def error_response(error: ApiError, path: str) -> Response:
    body = msgspec.json.encode(error_body(error, path))
    return Response(body, error.status, error.headers, media_type="application/json")
