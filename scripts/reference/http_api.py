"""Every route and body, from the OpenAPI document that a server has at /openapi.json."""

import json
from collections.abc import Iterator
from typing import Any

from frontend.http.app import OPERATIONS
from frontend.http.operations import Operation, openapi_document

_HEAD = """\
# HTTP
Routes, and the fields of bodies, as a server lists them at `/openapi.json`. A body with a field
that is not here is refused.
"""
_APIS = {
    "openai": "OpenAI and vLLM",
    "generation": "Tokens",
    "pooling": "Vectors and scores",
    "responses": "Responses",
    "anthropic": "Anthropic",
    "ollama": "Ollama",
    "llama_cpp": "llama.cpp",
    "mcp": "Tools (MCP)",
    "": "The server",
}
"""Headings by package of `frontend.http`; the last for what is in none of them."""
_LIMITS = {
    "minimum": "at least", "maximum": "at most", "exclusiveMinimum": "above",
    "exclusiveMaximum": "below", "minLength": "characters from", "maxLength": "characters up to",
}  # fmt: skip


def http_page() -> str:
    document = openapi_document(OPERATIONS)
    parts = [_HEAD]
    for package, title in _APIS.items():
        parts.append(f"\n## {title}\n")
        parts += [_route(each, document) for each in OPERATIONS if _package(each) == package]
    parts.append("\n## Bodies\n")
    parts += [_schema(name, each) for name, each in sorted(_bodies(document).items())]
    return "".join(parts)


def _package(operation: Operation) -> str:
    name = operation.handler.__module__.split(".")[2]
    return name if name in _APIS else ""


def _route(operation: Operation, document: dict[str, Any]) -> str:
    path = operation.path.replace(":path}", "}")
    described = document["paths"][path][operation.method.lower()]
    lines = [f"\n### {operation.method} {path}", described["summary"]]
    if not operation.needs_key:
        lines.append("Answered without a key.")
    if "requestBody" in described:
        asked = described["requestBody"]["content"]["application/json"]["schema"]
        lines.append(f"\nTakes {_type(asked)}")
    answers = described["responses"]["200"]["content"]
    kinds = [f"{_type(each['schema'])} (`{kind}`)" for kind, each in answers.items()]
    lines.append(f"\nGives {', or '.join(kinds)}")
    return "\n".join(lines) + "\n"


def _bodies(document: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {_short(name): each for name, each in document["components"]["schemas"].items()}


def _schema(name: str, schema: dict[str, Any]) -> str:
    lines = [f"\n### {name} {{ #{name} }}", schema.get("description", ""), ""]
    needed = schema.get("required", [])
    rows = list(_rows(schema.get("properties", {}), needed))
    if rows:
        lines += ["| field | type | default |", "|---|---|---|", *rows]
    elif "anyOf" in schema:
        lines.append(_type(schema))
    return "\n".join(lines) + "\n"


def _rows(fields: dict[str, Any], needed: list[str]) -> Iterator[str]:
    for name, field in fields.items():
        default = "needed" if name in needed else _default(field)
        yield f"| `{name}` | {_type(field)} | {default} |"


def _default(field: dict[str, Any]) -> str:
    value = json.dumps(field.get("default")).replace("|", "\\|")
    return "none" if value == "null" else f"`{value}`"


def _type(schema: dict[str, Any]) -> str:
    """A schema in words, with a link to the body that it names."""
    if "$ref" in schema:
        name = _short(schema["$ref"].rpartition("/")[2])
        return f"[{name}](#{name})"
    if "anyOf" in schema:
        kinds = [_type(each) for each in schema["anyOf"] if each.get("type") != "null"]
        return " or ".join(dict.fromkeys(kinds)) or "null"
    if "enum" in schema:
        return ", ".join(f"`{each}`" for each in schema["enum"] if each is not None)
    kind = schema.get("type", "any")
    if kind == "array":
        items = schema.get("items") or {}
        kind = f"array of {_type(items)}" if items else "array"
    elif kind == "object" and isinstance(schema.get("additionalProperties"), dict):
        kind = f"object of {_type(schema['additionalProperties'])}"
    limits = [f"{word} {schema[name]}" for name, word in _LIMITS.items() if name in schema]
    return f"{kind} ({', '.join(limits)})" if limits else kind


def _short(name: str) -> str:
    """`frontend.http.ollama.bodies.GenerateRequest`: ollama's, where another API has that name."""
    parts = name.split(".")
    return parts[-1] if len(parts) == 1 else f"{parts[-1]}-{parts[2]}"
