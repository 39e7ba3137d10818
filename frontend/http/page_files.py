"""GET /, /page/... and /v1: the chat in a browser. The files come with the package."""

from pathlib import Path
from typing import Any

from starlette.requests import Request
from starlette.responses import FileResponse, PlainTextResponse, RedirectResponse, Response
from starlette.routing import Mount, Route
from starlette.staticfiles import StaticFiles

from frontend.http.api_errors import ApiError

FOLDER = Path(__file__).parent / "page"

_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; font-src 'self'; "
    "connect-src 'self'; img-src 'self' data:; base-uri 'none'; form-action 'none'; "
    "frame-ancestors 'none'"
)
_HEADERS = {
    "content-security-policy": _POLICY,
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cache-control": "no-cache",
}


async def page(request: Request) -> Response:
    """The chat, for a browser; clients of Ollama know the server by the text."""
    if "text/html" not in request.headers.get("accept", ""):
        return PlainTextResponse("Ollama is running", headers={"vary": "accept"})
    return FileResponse(FOLDER / "index.html", headers=_HEADERS)


async def base_url(request: Request) -> Response:
    """What clients are given as their base URL, when a person opens it: the page, in a browser."""
    path = request.url.path
    if "text/html" in request.headers.get("accept", ""):  # relative: a proxy may serve below a path
        return RedirectResponse(".." if path.endswith("/") else ".", headers={"vary": "accept"})
    what = f"{path} is the base URL of the API; clients add /models, /chat/completions and others"
    raise ApiError(404, f"{what}, which /openapi.json lists; / is a chat for browsers")


async def icon(_request: Request) -> Response:
    """The icon where browsers look for it beside answers of the API, too."""
    return FileResponse(FOLDER / "icon.svg", headers=_HEADERS)


class PageFiles(StaticFiles):
    """The files that the page loads, with the page's headers."""

    def __init__(self) -> None:
        super().__init__(directory=FOLDER)

    def file_response(self, *args: Any, **kwargs: Any) -> Response:
        response = super().file_response(*args, **kwargs)
        response.headers.update(_HEADERS)
        return response


ROUTES = [
    *(Route("/", page), Route("/v1", base_url), Route("/v1/", base_url)),
    *(Route("/favicon.ico", icon), Mount("/page", PageFiles())),
]
OPEN_PATHS = frozenset({"/", "/v1", "/v1/", "/favicon.ico"})
"""Answered without a key; the door knows of what is below /page/."""
