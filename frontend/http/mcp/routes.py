"""GET /v1/mcp/servers and POST /v1/mcp/call: tools that the server runs."""

from urllib.parse import urlsplit

from starlette.requests import Request
from starlette.responses import Response

from frontend.http.api_errors import ApiError
from frontend.http.event_stream import json_response, until_disconnect
from frontend.http.exchange import exchange_of
from frontend.http.mcp.bodies import ToolRequest, ToolResult, ToolServerList
from frontend.http.mcp.servers import tool_servers
from frontend.http.operations import operation


@operation("GET", "/v1/mcp/servers", gives=ToolServerList)
async def list_servers(request: Request) -> Response:
    """Servers of tools that this server was started with, and their tools."""
    return json_response(ToolServerList([each.state for each in tool_servers(request).values()]))


@operation("POST", "/v1/mcp/call", takes=ToolRequest, gives=ToolResult)
async def call(request: Request, asked: ToolRequest) -> Response:
    """Run a tool."""
    check_origin(request)
    servers = tool_servers(request)
    if (server := servers.get(asked.server)) is None:
        known = ", ".join(servers) or "none; name it with --mcp"
        what = f"there is no server {asked.server!r:.200} of tools; there is {known}"
        raise ApiError(404, what, param="server")
    result = await until_disconnect(request, server.call(asked.tool, asked.arguments))
    return json_response(result)


def check_origin(request: Request) -> None:
    """Tools run for our own page, and for pages that `--cors-origin` names; the door lets others of
    this machine in, too.

    Raises:
        ApiError: a page of another origin asks, without a key.
    """
    origin = request.headers.get("origin")
    if origin is None or exchange_of(request).key is not None:
        return
    own = urlsplit(origin).netloc == request.headers.get("host")
    if not own and origin not in request.app.state.settings.cors_origin:
        raise ApiError(
            403, f"pages of {origin:.200} may not run tools; allow it with --cors-origin {origin}"
        )
