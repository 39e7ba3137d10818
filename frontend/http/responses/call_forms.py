"""How a call of one of a request's tools stands in the answer, and in the conversation again."""

import re
from dataclasses import dataclass
from typing import Any, Literal

from msgspec import UNSET, UnsetType

from frontend.http.responses import bodies
from frontend.http.tools.calls import load_json

ToolKind = Literal[
    "function", "custom", "local_shell", "shell", "apply_patch", "tool_search",
    "mcp", "mcp_approval",
]  # fmt: skip

_PREFIXES: dict[ToolKind, str] = {
    "function": "fc",
    "custom": "ctc",
    "local_shell": "lsh",
    "shell": "sh",
    "apply_patch": "apc",
    "tool_search": "tsc",
    "mcp": "mcp",
    "mcp_approval": "mcpr",
}
_EVENTS: dict[ToolKind, str] = {
    "function": "function_call_arguments",
    "custom": "custom_tool_call_input",
    "mcp": "mcp_call_arguments",
}
_INPUT_BEGIN = re.compile(r'\s*\{\s*"input"\s*:\s*"')
_WHOLE_PART = re.compile(r'[^"\\]*(?:\\(?:[^u]|u[0-9a-fA-F]{4})[^"\\]*)*')
_LONGEST_ESCAPE = 12
_HALF_PAIR = re.compile(r"\\u[dD][89abAB][0-9a-fA-F]{2}\Z")


def visible_name(namespace: str | UnsetType | None, name: str) -> str:
    """The one name that the model knows a tool by; `functions` is where tools are without one."""
    if not namespace or namespace == "functions":
        return name
    return namespace + ("" if namespace.endswith("__") else "__") + name


@dataclass(frozen=True, slots=True)
class CallForm:
    """
    Args:
        kind: the tool's type.
        name: the tool's own, in its namespace.
    """

    name: str
    kind: ToolKind = "function"
    namespace: str | UnsetType = UNSET

    @property
    def prefix(self) -> str:
        """How the ids of its items begin."""
        return _PREFIXES[self.kind]

    @property
    def event(self) -> str | None:
        """The events that pass on what stands in the call; None: it comes whole."""
        return _EVENTS.get(self.kind)

    def item(
        self, item_id: str, status: bodies.ItemStatus, call_id: str, text: str
    ) -> bodies.OutputItem:
        """
        Args:
            text: of a custom tool its input, of all others the arguments in JSON.
        """
        same: dict[str, Any] = {"id": item_id, "status": status, "call_id": call_id}
        named: dict[str, Any] = {"name": self.name, "namespace": self.namespace}
        served: dict[str, Any] = {"id": item_id, "name": self.name, "server_label": self.namespace}
        match self.kind:
            case "function":
                return bodies.FunctionCallItem(**same, **named, arguments=text)
            case "custom":
                return bodies.CustomToolCallItem(**same, **named, input=text)
            case "local_shell":
                action = {"type": "exec", "command": [], "env": {}, **_object(text)}
                return bodies.LocalShellCallItem(**same, action=action)
            case "shell":
                return bodies.ShellCallItem(**same, action={"commands": [], **_object(text)})
            case "apply_patch":
                return bodies.ApplyPatchCallItem(**same, operation=_object(text))
            case "tool_search":
                return bodies.ToolSearchCallItem(**same, arguments=_object(text))
            case "mcp":
                return bodies.McpCallItem(**served, status=status, arguments=text)
            case "mcp_approval":
                return bodies.McpApprovalItem(**served, arguments=text)


def _object(text: str) -> dict[str, Any]:
    found = load_json(text)
    return found if isinstance(found, dict) else {}


class InputText:
    """The input of a custom tool: the model writes it as `{"input": "..."}`, in pieces."""

    def __init__(self) -> None:
        self._held = ""
        self._is_begun = self._is_over = False

    def feed(self, arguments: str) -> str:
        """The next piece of it that is certain by now."""
        self._held += arguments
        if not self._is_begun:
            begin = _INPUT_BEGIN.match(self._held)
            if begin is None:
                return ""
            self._is_begun, self._held = True, self._held[begin.end() :]
        if self._is_over:
            return ""
        part = _WHOLE_PART.match(self._held)
        assert part is not None
        certain = _HALF_PAIR.sub("", part[0])
        self._is_over = self._held[part.end() : part.end() + 1] == '"'
        self._held = self._held[len(certain) :]
        text = load_json(f'"{certain}"')
        return text if isinstance(text, str) else certain

    def close(self) -> str:
        """The rest, where the model wrote something else: the one text in it, or all of it."""
        if self._is_over or (self._is_begun and len(self._held) < _LONGEST_ESCAPE):
            return ""
        if self._is_begun:
            return self._held
        texts = [value for value in _object(self._held).values() if isinstance(value, str)]
        return texts[0] if len(texts) == 1 else self._held
