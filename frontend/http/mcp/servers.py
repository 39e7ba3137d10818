"""The servers of tools that `--mcp` names: kept running, asked for their tools, and called."""

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from starlette.requests import Request

from frontend.http.api_errors import ApiError
from frontend.http.mcp.bodies import Tool, ToolResult, ToolServerState
from frontend.http.mcp.options import ToolServerOption

if TYPE_CHECKING:
    from frontend.http.mcp.connection import Doubt

logger = logging.getLogger(__name__)

_START_S = 60.0
"""For a server to start, with what its command downloads, and list its tools."""
_LONGEST_WAIT_S = 60.0
"""Between two starts; a server that ran for so long is started again after 1 s."""


class ToolServer:
    """One server. What becomes of it costs its tools, and nothing else.

    Args:
        timeout_s: a call may take so long.
    """

    def __init__(self, option: ToolServerOption, timeout_s: float) -> None:
        self.name, self.url = option.name, option.url
        self.tools: Mapping[str, Tool] = {}
        """The tools by the names that models call them by."""
        self.problem: str | None = "it starts"
        self._option = option
        self._timeout_s = timeout_s
        self._client: Any = None
        self._doubt: Doubt | None = None

    @property
    def state(self) -> ToolServerState:
        return ToolServerState(name=self.name, problem=self.problem, tools=[*self.tools.values()])

    async def run(self) -> None:
        """Start it, again and again, until this is cancelled."""
        wait_s = 1.0
        while True:
            began_s = time.monotonic()
            try:
                await self._serve()
            except Exception as error:
                # once it was called, its last line may be of a call
                said = self._doubt.last_line if self._doubt and self.problem else ""
                self.problem = f"it does not answer: {_reason(error)}"
                self.problem += f"; its last line: {said.strip():.300}" if said else ""
            finally:
                self._client, self.tools = None, {}
            wait_s = 1.0 if time.monotonic() - began_s > _LONGEST_WAIT_S else wait_s
            logger.warning("mcp %s: %s; it is tried again in %g s", self.name, self.problem, wait_s)
            await asyncio.sleep(wait_s)
            wait_s = min(2 * wait_s, _LONGEST_WAIT_S)

    async def _serve(self) -> None:
        """Ends with what the server's tools could not be listed for."""
        from frontend.http.mcp.connection import Doubt, connected, list_tools

        self._doubt = doubt = Doubt()
        async with (
            asyncio.timeout(_START_S) as limit,
            connected(self._option, doubt) as client,
        ):
            while True:
                doubt.clear()
                self.tools = await list_tools(client, self.name)
                self._client, self.problem = client, None
                limit.reschedule(None)
                await doubt.wait()
                limit.reschedule(asyncio.get_running_loop().time() + self._timeout_s)

    async def call(self, tool: str, arguments: dict[str, Any]) -> ToolResult:
        """What the tool gives, or in words why there is nothing.

        Raises:
            ApiError: the server is away, or has no such tool.
        """
        from frontend.http.mcp.connection import call_tool

        if self._client is None:
            raise ApiError(503, f"the server {self.name!r} of tools is away: {self.problem}")
        if all(each.tool != tool for each in self.tools.values()):
            known = ", ".join(each.tool for each in self.tools.values())
            raise ApiError(
                404, f"{self.name!r} has no tool {tool!r:.200}; it has {known}", param="tool"
            )
        try:
            async with asyncio.timeout(self._timeout_s):
                return await call_tool(self._client, tool, arguments)
        except TimeoutError:
            why = f"no answer within {self._timeout_s:g} s; ask for less, or raise --mcp-timeout"
        except Exception as error:  # whatever a foreign server makes of it
            why = _reason(error)
        if self._doubt is not None:
            self._doubt.set()
        logger.warning("mcp %s: a call of %r failed", self.name, tool)
        return ToolResult(is_error=True, text=f"The call failed: {why}")


@contextlib.asynccontextmanager
async def running(
    options: Sequence[ToolServerOption], timeout_s: float
) -> AsyncIterator[dict[str, ToolServer]]:
    """Servers by their names, which run for as long as the context lasts."""
    servers = {each.name: ToolServer(each, timeout_s) for each in options}
    tasks = [asyncio.create_task(each.run()) for each in servers.values()]
    try:
        yield servers
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def tool_servers(request: Request) -> dict[str, ToolServer]:
    found: dict[str, ToolServer] = request.app.state.tool_servers
    return found


def _reason(error: BaseException) -> str:
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return f"{error}" or "it took too long"
