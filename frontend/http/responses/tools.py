"""What the tools of a request are to the model: functions, all of them. Who runs a tool of another
kind than a function is its client; what nobody here runs is passed over, or refused."""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, Literal, TypeVar

import msgspec

from frontend.http.api_errors import ApiError, not_supported
from frontend.http.decoding import refusal
from frontend.http.generation.requests import FunctionDefinition, Tool
from frontend.http.mcp.servers import ToolServer
from frontend.http.responses.call_forms import CallForm, ToolKind, visible_name
from frontend.http.responses.lark import regex_of_lark
from frontend.http.responses.server_tools import LabelledServer, McpTool, labelled_server

T = TypeVar("T")

logger = logging.getLogger(__name__)


class ToolFields(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """Fields that functions and custom tools share."""

    type: str
    name: str = msgspec.field(default="")
    description: str | None = None
    defer_loading: bool | None = None
    """Taken; the tool is offered at once all the same."""
    allowed_callers: list[Literal["direct", "programmatic"]] | None = None
    is_async: Literal[False] | None = msgspec.field(default=None, name="async")


class FunctionTool(ToolFields, kw_only=True):
    parameters: dict[str, Any] | None = None
    strict: bool | None = None
    output_schema: dict[str, Any] | None = None
    """Taken; results are not checked."""


class InputFormat(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    type: Literal["text", "grammar"] = "text"
    syntax: Literal["lark", "regex"] | None = None
    definition: str = ""


class CustomTool(ToolFields, kw_only=True):
    format: InputFormat | None = None


class NamespaceTool(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    type: str
    name: str
    description: str | None = None
    tools: list[dict[str, Any]]


class ClientTool(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """A tool of the API's own that the client runs."""

    type: str
    environment: dict[str, Any] | None = None
    execution: str | None = None
    description: str | None = None
    parameters: dict[str, Any] | None = None
    allowed_callers: list[Literal["direct", "programmatic"]] | None = None


class AllowedTools(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """A choice of some of the tools."""

    type: str
    mode: Literal["auto", "required"] = "auto"
    tools: list[dict[str, Any]]


def _object_schema(required: Sequence[str], **properties: Any) -> dict[str, Any]:
    schema = {"type": "object", "properties": properties, "required": [*required]}
    return schema | {"additionalProperties": False}


_TEXT, _NUMBER = {"type": "string"}, {"type": "integer"}
_TEXTS = {"type": "array", "items": _TEXT}
_OF_CLIENTS: dict[ToolKind, FunctionDefinition] = {
    "local_shell": FunctionDefinition(
        name="local_shell",
        description="Runs a command on the user's machine and returns its output.",
        parameters=_object_schema(
            ["command"], command=_TEXTS, working_directory=_TEXT, timeout_ms=_NUMBER
        ),
    ),
    "shell": FunctionDefinition(
        name="shell",
        description="Runs shell commands on the user's machine and returns their output.",
        parameters=_object_schema(
            ["commands"], commands=_TEXTS, timeout_ms=_NUMBER, max_output_length=_NUMBER
        ),
    ),
    "apply_patch": FunctionDefinition(
        name="apply_patch",
        description="Creates, updates or deletes a file; diff is in the V4A format.",
        parameters=_object_schema(
            ["type", "path"],
            type={"enum": ["create_file", "update_file", "delete_file"]},
            path=_TEXT,
            diff=_TEXT,
        ),
    ),
    "tool_search": FunctionDefinition(
        name="tool_search",
        description="Searches for further tools, which can be called afterwards.",
        parameters=_object_schema(["query"], query=_TEXT),
    ),
}


@dataclass
class OfferedTools:
    """
    Args:
        refuses: whether a tool that nobody here runs is an error.
        servers: of tools, that the operator named.
    """

    refuses: bool = False
    servers: Mapping[str, ToolServer] = field(default_factory=dict)
    asked_servers: dict[str, LabelledServer] = field(default_factory=dict)
    """Servers whose tools are offered, by the request's labels."""
    functions: list[Tool] = field(default_factory=list)
    """The tools that the model sees."""
    forms: dict[str, CallForm] = field(default_factory=dict)
    """Forms of calls, by the names of `functions`."""
    fields: list[str] = field(default_factory=list)
    """Names of the schemas of `functions` in errors."""

    def add_all(self, tools: Sequence[dict[str, Any]], where: str = "tools") -> None:
        """
        Raises:
            ApiError: a tool without what its type needs, two of one name, or one that is refused.
        """
        for number, given in enumerate(tools):
            tool = {name: value for name, value in given.items() if value is not None}
            self._add(tool, f"{where}[{number}]", None)

    def _add(self, tool: dict[str, Any], where: str, group: NamespaceTool | None) -> None:
        """The one place that knows the types of tools."""
        namespace = msgspec.UNSET if group is None else group.name
        match tool.get("type"):
            case "function":
                function = _converted(tool, FunctionTool, where)
                definition = FunctionDefinition(
                    name=_named(function, where),
                    description=function.description,
                    parameters=function.parameters,
                    strict=function.strict,
                )
                self._offer(definition, CallForm(function.name, "function", namespace), where)
            case "custom":
                custom = _converted(tool, CustomTool, where)
                form = CallForm(_named(custom, where), "custom", namespace)
                self._offer(self._custom_function(custom), form, where)
            case "namespace" if group is None:
                group = _converted(tool, NamespaceTool, where)
                first = len(self.functions)
                for number, each in enumerate(group.tools):
                    own = {name: value for name, value in each.items() if value is not None}
                    self._add(own, f"{where}.tools[{number}]", group)
                if group.description and first < len(self.functions):
                    opening = self.functions[first].function
                    texts = filter(None, (group.description, opening.description))
                    opening.description = "\n\n".join(texts)
            case "local_shell" | "shell" | "apply_patch" | "tool_search" as kind if _is_local(tool):
                own_tool = _converted(tool, ClientTool, where)
                definition = msgspec.structs.replace(_OF_CLIENTS[kind])
                definition.description = own_tool.description or definition.description
                definition.parameters = own_tool.parameters or definition.parameters
                self._offer(definition, CallForm(kind, kind), where)
            case "mcp" if self.servers:
                self._add_server(_converted(tool, McpTool, where), where)
            case other:
                self.pass_over(f"{where}.type", other)

    def _add_server(self, asked: McpTool, where: str) -> None:
        found = labelled_server(asked, where, self.servers)
        if self.asked_servers.setdefault(found.label, found) is not found:
            what = f"{where}.server_label: there are two of {found.label!r:.100}; rename one"
            raise ApiError(400, what, param=f"{where}.server_label")
        for each in found.tools:
            definition = FunctionDefinition(
                name=each.tool, description=each.description, parameters=each.parameters
            )
            kind: ToolKind = "mcp_approval" if found.asks_for(each.tool) else "mcp"
            self._offer(definition, CallForm(each.tool, kind, found.label), where)

    def pass_over(self, where: str, kind: object) -> None:
        """A tool, or a call of one, that means nothing to a model here.
        Raises ApiError: such are refused."""
        if self.refuses:
            raise not_supported(where, kind, "nobody here runs it; omit it")
        _tell_once(f"{kind!r:.100}: nobody here runs such tools; they are left out")

    def _offer(self, definition: FunctionDefinition, form: CallForm, where: str) -> None:
        name = visible_name(form.namespace, definition.name)
        if name in self.forms:
            if form == self.forms[name] and not where.startswith("tools"):
                return  # found by a search a second time
            what = f"{where}: there are two tools of the name {name!r:.100}; rename one"
            raise ApiError(400, what, param=where)
        self.functions.append(Tool(function=msgspec.structs.replace(definition, name=name)))
        self.forms[name] = form
        self.fields.append(f"{where}.parameters" if form.kind == "function" else where)

    def _custom_function(self, tool: CustomTool) -> FunctionDefinition:
        """Free text as the one argument of a function; a grammar of it is told, and where a regular
        expression says the same, enforced."""
        form = tool.format or InputFormat()
        text: dict[str, Any] = {"type": "string"}
        description = tool.description or ""
        pattern = None
        if form.type == "grammar":
            description += f"\n\nThe input follows this grammar ({form.syntax}):\n{form.definition}"
            pattern = regex_of_lark(form.definition) if form.syntax == "lark" else form.definition
            if pattern is None:
                _tell_once(f"the grammar of the input of {tool.name!r:.100} is not enforced")
        if pattern is not None:
            text["pattern"] = f"^(?:{pattern})$"
        return FunctionDefinition(
            name=tool.name,
            description=description or None,
            parameters=_object_schema(["input"], input=text),
            strict=pattern is not None,
        )

    def choice(self, asked: str | dict[str, Any] | None) -> str | dict[str, Any] | None:
        """`tool_choice` by the names that the model sees; other tools than those that are allowed
        are left out.

        Raises:
            ApiError: it names no tool of the request.
        """
        if not isinstance(asked, dict):
            return asked
        visible = self._visible_names()
        if asked.get("type") == "allowed_tools":
            choice = _converted(asked, AllowedTools, "tool_choice")
            allowed = {visible.get(_chosen(each)) for each in choice.tools}
            kept = [at for at, each in enumerate(self.functions) if each.function.name in allowed]
            self.functions = [self.functions[at] for at in kept]
            self.fields = [self.fields[at] for at in kept]
            return choice.mode
        name = visible.get(_chosen(asked))
        if name is None:
            action = '"none", "auto", "required", allowed_tools, or one of the tools'
            raise not_supported("tool_choice", asked, action)
        return {"type": "function", "name": name}

    def _visible_names(self) -> dict[tuple[str, str, str | None], str]:
        """Names that the model sees, by kinds, own names and namespaces, which may be left out."""
        found: dict[tuple[str, str, str | None], str] = {}
        for visible, form in self.forms.items():
            kind = form.kind.removesuffix("_approval")
            found.setdefault((kind, form.name, form.namespace or None), visible)
            found.setdefault((kind, form.name, None), visible)
        return found


def _chosen(asked: dict[str, Any]) -> tuple[str, str, str | None]:
    kind = str(asked.get("type"))
    namespace = asked.get("server_label", asked.get("namespace"))
    name = str(asked.get("name", kind))
    return kind, name, None if namespace is None else str(namespace)


def _is_local(tool: dict[str, Any]) -> bool:
    environment = tool.get("environment") or {"type": "local"}
    if tool["type"] == "tool_search":
        return tool.get("execution") == "client"
    return isinstance(environment, dict) and environment.get("type") == "local"


@lru_cache(maxsize=1024)
def _tell_once(text: str) -> None:
    logger.warning("%s", text)


def _named(tool: ToolFields, where: str) -> str:
    if not tool.name:
        raise ApiError(400, f"{where}.name is missing; give it", param=f"{where}.name")
    return tool.name


def _converted(tool: dict[str, Any], kind: type[T], where: str) -> T:
    try:
        return msgspec.convert(tool, kind)
    except msgspec.ValidationError as error:
        raise refusal(error, where) from None
