"""Bodies of /v1/mcp: servers of tools, calls and their results."""

from typing import Any

import msgspec


class Tool(msgspec.Struct, frozen=True, kw_only=True):
    """A tool of a server.

    Args:
        name: what models call it by, of letters, digits and _ in every format of calls.
        tool: its own name.
        parameters: the JSON schema of its arguments.
    """

    name: str
    tool: str
    description: str
    parameters: dict[str, Any]


class ToolServerState(msgspec.Struct, frozen=True, kw_only=True):
    """A server that `--mcp` names. Without tools while there is a `problem`."""

    name: str
    problem: str | None
    tools: list[Tool]


class ToolServerList(msgspec.Struct, frozen=True):
    """GET /v1/mcp/servers."""

    servers: list[ToolServerState]


class ToolRequest(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """POST /v1/mcp/call: the names of a server and of its tool, as the list has them."""

    server: str
    tool: str
    arguments: dict[str, Any] = {}


class Picture(msgspec.Struct, frozen=True):
    """A picture of a result.

    Args:
        data: base64.
    """

    mime_type: str
    data: str


class ToolResult(msgspec.Struct, frozen=True, kw_only=True):
    """The result of a call, or in words why there is none.

    Args:
        text: for the model: all parts, pictures by their kind only.
    """

    is_error: bool
    text: str
    images: list[Picture] = []
