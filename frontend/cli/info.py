"""`engine-client info`: what the daemon serves and how busy it is."""

from __future__ import annotations

import json
import sys
from typing import Any

import msgspec

from frontend.async_llm import AsyncLLM


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
    text = json.dumps(document, ensure_ascii=False) if prints_json else _as_lines(document)
    sys.stdout.write(text + "\n")
    return 0


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
