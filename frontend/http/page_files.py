"""GET / and /page/...: the chat in a browser. The files come with the package."""

from pathlib import Path

from starlette.requests import Request
from starlette.responses import FileResponse, PlainTextResponse, Response
from starlette.staticfiles import StaticFiles
from starlette.types import Message, Receive, Scope, Send

FOLDER = Path(__file__).parent / "page"

_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src data:; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
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


class PageFiles(StaticFiles):
    """What the page loads, with the page's headers."""

    def __init__(self) -> None:
        super().__init__(directory=FOLDER)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                extra = [(name.encode(), value.encode()) for name, value in _HEADERS.items()]
                message["headers"] = [*message["headers"], *extra]
            await send(message)

        await super().__call__(scope, receive, with_headers)
