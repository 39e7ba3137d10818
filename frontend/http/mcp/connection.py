"""A connection to one server of tools, by the official `mcp` package: only this file uses it."""

import asyncio
import contextlib
import json
import logging
import os
import re
import sys
from collections.abc import AsyncIterator, Iterable
from contextlib import AsyncExitStack
from hashlib import sha256
from pathlib import Path
from typing import Any

import httpx2
from mcp import Client, StdioServerParameters
from mcp.client.stdio import stdio_client
from mcp.client.streamable_http import streamable_http_client

from frontend.http.api_keys import KEY_VARIABLE
from frontend.http.mcp.bodies import Picture, Tool, ToolResult
from frontend.http.mcp.options import ToolServerOption

_FOLLOW_S = 10.0
"""A list of tools that can no longer be followed is followed again after so long."""
_MAX_NAME = 64
_MAX_TEXT = 65_536
"""Characters of a result's text."""
_MAX_PICTURES = 4 * 1024**2
"""Characters of a result's pictures, in base64."""

logging.getLogger("mcp").setLevel(logging.CRITICAL)  # a stack for each line that is no message


class Doubt(asyncio.Event):
    """Set when a server may have ended, or its tools may have changed."""

    last_line = ""
    """The last line of a child's standard error."""

    async def read(self, stream: int) -> None:
        """Follow a child's standard error. Its end is that of the child and all that it started."""
        reader = asyncio.StreamReader()
        transport, _ = await asyncio.get_running_loop().connect_read_pipe(
            lambda: asyncio.StreamReaderProtocol(reader), os.fdopen(stream, "rb", buffering=0)
        )
        try:
            while chunk := await reader.read(4096):
                lines = chunk.decode(errors="replace").split("\n")
                self.last_line = next(filter(str.strip, reversed(lines)), self.last_line)
            self.set()
        finally:
            transport.close()


@contextlib.asynccontextmanager
async def connected(option: ToolServerOption, doubt: Doubt) -> AsyncIterator[Any]:
    """A client of the server, which is started unless it has a URL."""

    async def heard(_message: Any) -> None:
        doubt.set()

    async with AsyncExitStack() as stack:
        if option.url is not None:
            headers = {"authorization": f"Bearer {option.token}"} if option.token else {}
            timeout = httpx2.Timeout(30, read=300)
            http = httpx2.AsyncClient(headers=headers, timeout=timeout, follow_redirects=True)
            await stack.enter_async_context(http)
            transport = streamable_http_client(option.url, http_client=http)
            errors = None
        else:
            read, write = os.pipe()
            errors = stack.enter_context(os.fdopen(write, "w"))
            reading = asyncio.create_task(doubt.read(read))
            stack.callback(reading.cancel)
            transport = stdio_client(_child(option), errors)
        client = Client(transport, message_handler=heard, cache=None)
        await stack.enter_async_context(client)
        if errors is not None:
            errors.close()  # now only the child can write
        following = asyncio.create_task(_follow(client, doubt))
        try:
            yield client
        finally:
            following.cancel()
            await asyncio.wait([following])


def _child(option: ToolServerOption) -> StdioServerParameters:
    """It gets this process' environment without the key of our own callers."""
    command = list(option.command)
    if sys.platform == "linux":
        guard = Path(__file__).with_name("child.py")
        command = [sys.executable, "-IS", str(guard), str(os.getpid()), *command]
    variables = {name: value for name, value in os.environ.items() if name != KEY_VARIABLE}
    return StdioServerParameters(command=command[0], args=command[1:], env=variables)


async def _follow(client: Any, doubt: Doubt) -> None:
    """Protocol 2026-07-28 tells changes to whoever listens; older ones tell them unasked."""
    tools = client.server_capabilities.tools
    if tools is None or not tools.list_changed or client.session.initialize_result is not None:
        return
    while True:
        with contextlib.suppress(Exception):  # what came of it shows when the tools are listed
            async with client.listen(tools_list_changed=True) as changes:
                async for _ in changes:
                    doubt.set()
        doubt.set()
        await asyncio.sleep(_FOLLOW_S)


async def list_tools(client: Any, server: str) -> dict[str, Tool]:
    """All tools of the server, by the names that models call them by."""
    found: list[Any] = []
    cursor = None
    while True:
        page = await client.list_tools(cursor=cursor)
        found += page.tools
        cursor = page.next_cursor
        if cursor is None:
            break
    tools: dict[str, Tool] = {}
    for each in found:
        name = _name(f"{server}__{each.name}", tools)
        tools[name] = Tool(
            name=name,
            tool=each.name,
            description=each.description or each.title or "",
            parameters=each.input_schema,
        )
    return tools


def _name(full: str, taken: Iterable[str]) -> str:
    name = re.sub(r"\W", "_", full, flags=re.ASCII)
    if len(name) > _MAX_NAME or name in taken:
        digest = sha256(full.encode()).hexdigest()[:8]
        name = f"{name[: _MAX_NAME - len(digest) - 1]}_{digest}"
    return name


async def call_tool(client: Any, tool: str, arguments: dict[str, Any]) -> ToolResult:
    """The result, cut to its limits, which is said in the text."""
    result = await client.call_tool(tool, arguments)
    texts: list[str] = []
    pictures: list[Picture] = []
    left = _MAX_PICTURES
    for part in result.content:
        match part.type:
            case "text":
                texts.append(part.text)
            case "image" if len(part.data) <= left:
                left -= len(part.data)
                pictures.append(Picture(part.mime_type, part.data))
                texts.append(f"[a picture, {part.mime_type}, that the user may see]")
            case "image" | "audio":
                texts.append(f"[{part.mime_type} of {len(part.data)} characters, left out]")
            case "resource_link":
                texts.append(f"{part.name}: {part.uri}")
            case "resource":
                text = getattr(part.resource, "text", None)
                texts.append(f"[{part.resource.uri}, left out]" if text is None else text)
    if not texts and result.structured_content is not None:
        texts.append(json.dumps(result.structured_content, ensure_ascii=False))
    text = "\n".join(texts)
    if len(text) > _MAX_TEXT:
        text = f"{text[:_MAX_TEXT]}\n[cut: {len(text)} characters, the limit is {_MAX_TEXT}]"
    return ToolResult(is_error=result.is_error, text=text, images=pictures)
