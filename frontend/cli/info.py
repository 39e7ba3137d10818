"""`engine-client info`: the daemon's model and statistics, or one request's state."""

from __future__ import annotations

import json
import sys
from typing import Any

import msgspec

from frontend.async_llm import AsyncLLM
from protocol.explanations import RequestInfo


async def run_info(address: str | None, *, prints_json: bool) -> int:
    """Returns the exit code.

    Raises:
        EngineClientError: no engine answers.
    """
    async with AsyncLLM(address, client_name="engine-client info") as llm:
        statistics = await llm.statistics()
        model = msgspec.structs.asdict(llm.model)
        tokenizer = llm.model.tokenizer
        model["tokenizer"] = (
            None
            if tokenizer is None
            else {
                "fingerprint": tokenizer.fingerprint,
                "has_chat_template": tokenizer.chat_template is not None,
                "special_tokens": tokenizer.special_tokens,
            }
        )
        document = {
            "address": llm.address,
            "model": model,
            "statistics": msgspec.structs.asdict(statistics),
        }
    _print(document, prints_json=prints_json)
    return 0


async def run_request_list(address: str | None, *, prints_json: bool) -> int:
    """One id a line. Returns the exit code.

    Raises:
        EngineClientError: no engine answers.
    """
    async with AsyncLLM(address, client_name="engine-client info") as llm:
        request_ids = await llm.request_ids()
    if prints_json:
        sys.stdout.write(json.dumps(request_ids, ensure_ascii=False) + "\n")
    else:
        sys.stdout.writelines(f"{request_id}\n" for request_id in request_ids)
    return 0


async def run_request_info(address: str | None, request_id: str, *, prints_json: bool) -> int:
    """Returns the exit code.

    Raises:
        EngineClientError: no engine answers, or it does not know the request.
    """
    async with AsyncLLM(address, client_name="engine-client info") as llm:
        info = await llm.request_info(request_id)
    _print(request_document(info, by_name=prints_json), prints_json=prints_json)
    return 0


def request_document(info: RequestInfo, *, by_name: bool) -> dict[str, Any]:
    """Every field of the explanation; for people without those that say nothing, and with the
    preemptions numbered."""
    document: dict[str, Any] = _as_builtins(info)
    if by_name:
        return document
    document["preemptions"] = {
        str(number): preemption for number, preemption in enumerate(document["preemptions"], 1)
    }
    return {name: value for name, value in document.items() if value not in (None, {}, [])}


def _as_builtins(value: Any) -> Any:
    """Structs travel as arrays; here their names are wanted."""
    if isinstance(value, msgspec.Struct):
        return {name: _as_builtins(field) for name, field in msgspec.structs.asdict(value).items()}
    if isinstance(value, list):
        return [_as_builtins(item) for item in value]
    return value


def _print(document: dict[str, Any], *, prints_json: bool) -> None:
    text = json.dumps(document, ensure_ascii=False) if prints_json else _as_lines(document)
    sys.stdout.write(text + "\n")


def _as_lines(document: dict[str, Any], indent: str = "") -> str:
    """Indented `name  value` lines; names are aligned within a level."""
    width = max(map(len, document), default=0)
    lines = []
    for name, value in document.items():
        if isinstance(value, dict) and value:
            lines.append(f"{indent}{name}")
            lines.append(_as_lines(value, indent + "  "))
        else:
            lines.append(f"{indent}{name:<{width}}  {_shown(value)}")
    return "\n".join(lines)


def _shown(value: Any) -> str:
    match value:
        case None | {}:
            return "-"
        case float():
            return f"{value:.3f}"
        case list() | tuple():
            return ", ".join(map(str, value)) or "-"
        case _:
            return str(value)
