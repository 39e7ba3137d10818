"""Tools of a response that this server runs: `mcp`, of servers that its operator named."""

from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import msgspec

from frontend.http.answer_parts import AnswerFormat
from frontend.http.api_errors import ApiError
from frontend.http.mcp.bodies import Tool, ToolResult
from frontend.http.mcp.servers import ToolServer
from frontend.http.responses import bodies
from frontend.http.responses.input_items import conversation_of
from frontend.http.responses.truncation import Outputs
from frontend.http.responses.writer import ResponseWriter
from frontend.http.tools.calls import load_json

_MOST_CALLS = 16


class ToolNames(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    tool_names: list[str] = []


class Approvals(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """Tools that are in neither are asked for."""

    always: ToolNames | None = None
    never: ToolNames | None = None


class McpTool(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """All tools of a server, or some. It has the operator's credentials, and takes no others."""

    type: str
    server_label: str
    server_url: str | None = None
    server_description: str | None = None
    """Taken and of no effect, as are `defer_loading` and `allowed_callers`."""
    allowed_tools: list[str] | ToolNames | None = None
    require_approval: Literal["always", "never"] | Approvals | None = None
    """Default: always."""
    defer_loading: bool | None = None
    allowed_callers: list[Literal["direct", "programmatic"]] | None = None


@dataclass(frozen=True)
class LabelledServer:
    """A server under the request's name for it."""

    label: str
    server: ToolServer
    asked: McpTool

    @property
    def tools(self) -> list[Tool]:
        """Those that the request allows."""
        allowed = self.asked.allowed_tools
        names = allowed.tool_names if isinstance(allowed, ToolNames) else allowed
        return [each for each in self.server.tools.values() if names is None or each.tool in names]

    def asks_for(self, tool: str) -> bool:
        """Whether a call of the tool needs the client's approval."""
        rule = self.asked.require_approval
        if isinstance(rule, Approvals):
            return rule.never is None or tool not in rule.never.tool_names
        return rule != "never"

    async def call(self, name: str, arguments: str) -> ToolResult:
        given = load_json(arguments)
        if not isinstance(given, dict):
            return ToolResult(is_error=True, text="The arguments are no JSON object.")
        try:
            return await self.server.call(name, given)
        except ApiError as error:
            return ToolResult(is_error=True, text=error.message)


def labelled_server(
    asked: McpTool, where: str, servers: Mapping[str, ToolServer]
) -> LabelledServer:
    """Raises ApiError: the operator did not name it. Whoever asks must not have this server connect
    to where it likes."""
    by_url = {each.url: each for each in servers.values() if each.url is not None}
    known = servers.get(asked.server_label)
    found = known if asked.server_url is None else by_url.get(asked.server_url)
    if found is None:
        field = "server_label" if asked.server_url is None else "server_url"
        raise ApiError(
            400,
            f"{where}.{field} is {getattr(asked, field)!r:.200}, and tools are run only of servers "
            f"that --mcp names; give one as server_label: {', '.join(servers)}",
            param=f"{where}.{field}",
        )
    return LabelledServer(asked.server_label, found, asked)


class ServerTools:
    """The servers of one request, and the calls that are run for it.

    Args:
        items: of the conversation.
        most_calls: `max_tool_calls`; further calls fail, and the model answers without tools.
        say: what the model says to messages, with a `tool_choice`.
    """

    def __init__(
        self,
        servers: Mapping[str, LabelledServer],
        items: Sequence[bodies.InputItem],
        most_calls: int | None,
        say: Callable[..., Awaitable[tuple[AnswerFormat, Outputs]]],
    ) -> None:
        self._servers = servers
        self._items = items
        self._num_left = most_calls or _MOST_CALLS
        self._say = say
        self._approved: list[bodies.McpCallItem] = []
        self._num_seen = 0

    async def run_approved(self, num_before: int) -> bool:
        """Whether the client approves of calls in items from that with a number on; they are run.

        Raises:
            ApiError: it approves of what was not asked for, or is not offered now.
        """
        requests = {each.id: each for each in self._items if each.type == "mcp_approval_request"}
        done = {each.approval_request_id for each in self._items if each.type == "mcp_call"}
        for number, item in enumerate(self._items[num_before:]):
            is_new = item.approve and item.approval_request_id not in done
            if item.type != "mcp_approval_response" or not is_new:
                continue
            request = requests.get(item.approval_request_id)
            server = request and self._servers.get(request.server_label or "")
            if not request or not server or request.name not in [t.tool for t in server.tools]:
                what = f"input[{number}] approves of {item.approval_request_id!r:.100}"
                why = "which is no request here, or of a tool that `tools` does not have"
                raise ApiError(400, f"{what}, {why}", param=f"input[{number}]")
            call = bodies.McpCallItem(
                id=request.id or "",
                status="in_progress",
                server_label=server.label,
                name=request.name or "",
                arguments=str(request.arguments),
                approval_request_id=request.id,
            )
            self._approved.append(call)
        for call in self._approved:
            await self._run(call)
        return bool(self._approved)

    def begin(self, writer: ResponseWriter) -> Iterator[bodies.ResponseEvent]:
        """Lists of tools that the conversation does not have, and the calls that were approved."""
        listed = {each.server_label for each in self._items if each.type == "mcp_list_tools"}
        for label, each in self._servers.items():
            if label not in listed:
                problem = each.server.problem
                item = bodies.McpListToolsItem(
                    id=writer.next_id("mcpl"),
                    server_label=label,
                    tools=[
                        {"name": t.tool, "description": t.description, "input_schema": t.parameters}
                        for t in each.tools
                    ],
                    error=problem,
                )
                kinds = ("in_progress", "completed" if problem is None else "failed")
                yield from writer.add_whole(item, *(f"mcp_list_tools.{kind}" for kind in kinds))
        for call in self._approved:
            call.id = writer.next_id("mcp")
            yield from writer.add_whole(call, "mcp_call.in_progress", f"mcp_call.{call.status}")
        self._num_seen = len(writer.response.output)

    async def run(self, writer: ResponseWriter) -> AsyncGenerator[bodies.ResponseEvent, None]:
        """Run the calls of what the model has just said."""
        for each in writer.close():
            yield each
        for index, call in enumerate(writer.response.output):
            if index >= self._num_seen and isinstance(call, bodies.McpCallItem):
                await self._run(call)
                for event in writer.end_call(index, call):
                    yield event

    async def next(self, writer: ResponseWriter) -> tuple[AnswerFormat, Outputs] | None:
        """The answer goes on with what the model says to the results. None: it is over."""
        output = writer.response.output
        said, self._num_seen = output[self._num_seen :], len(output)
        waits = any(isinstance(each, bodies.CallItem | bodies.McpApprovalItem) for each in said)
        if waits or not any(isinstance(each, bodies.McpCallItem) for each in said):
            return None
        return await self.generate(output)

    async def generate(
        self, answered: Sequence[bodies.OutputItem] | None = None
    ) -> tuple[AnswerFormat, Outputs]:
        """What the model says behind items of the answer; default: those that were approved."""
        choice = None if answered is None else "auto" if self._num_left else "none"
        done = msgspec.to_builtins(self._approved if answered is None else answered)
        items = [*self._items, *msgspec.convert(done, list[bodies.InputItem])]
        return await self._say(conversation_of(items, lambda _where, _kind: None), choice)

    async def _run(self, call: bodies.McpCallItem) -> None:
        result = ToolResult(is_error=True, text="It was not run: max_tool_calls is reached.")
        if self._num_left:
            self._num_left -= 1
            result = await self._servers[call.server_label].call(call.name, call.arguments)
        call.status = "failed" if result.is_error else "completed"
        if result.is_error:
            part = {"type": "text", "text": result.text}
            call.error = {"type": "mcp_tool_execution_error", "content": [part]}
        else:
            call.output = result.text
