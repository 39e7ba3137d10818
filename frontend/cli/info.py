"""`engine-client info`: the daemon's model and statistics, or one request's state."""

import datetime
import json as json_module
import re
import sys
from typing import Any

import msgspec

from frontend.async_llm import AsyncLLM
from frontend.cli.connected import connected
from frontend.cli.options import DAEMON, DaemonOptions, Flag, UsageError
from frontend.event_loop import run
from frontend.text.tokenizer import Tokenizer
from protocol.calls import EngineStatistics
from protocol.explanations import PromptChange, RequestInfo
from protocol.outputs import ModelInfo

_OF_ANSWER = re.compile("^(chatcmpl-|cmpl-|msg_|resp_)")
"""Put before a request's id in answers over HTTP."""


def info(
    *,
    request: str | None = None,
    requests: Flag = False,
    json: Flag = False,
    daemon: DaemonOptions = DAEMON,
) -> int:
    """
    Args:
        request: Show instead this request's state and its reasons: an id that --requests lists, or
            of one of the last that finished; for an answer over HTTP its id will do, if it is new.
        requests: Show instead the ids of all unfinished requests.
        json: Print one JSON document; with every counter.

    Raises:
        UsageError: options that contradict each other.
        EngineClientError: no engine answers, or it does not know the request.
    """
    if request is not None and requests:
        raise UsageError("--request shows one and --requests lists all; give one of them")
    sys.stdout.writelines(f"{line}\n" for line in run(_lines(daemon, request, requests, json)))
    return 0


async def _lines(
    daemon: DaemonOptions, request_id: str | None, lists_requests: bool, prints_json: bool
) -> list[str]:
    async with connected(daemon, "info") as llm:
        if lists_requests:
            request_ids = await llm.request_ids()
            return [_as_json(request_ids)] if prints_json else request_ids
        if request_id is not None:
            info = await llm.request_info(_OF_ANSWER.sub("", request_id))
            document = request_document(info, by_name=prints_json)
            if (change := info.prompt_change) is not None:
                tokenizer = llm.input_processor.optional_tokenizer
                document["advice"] = _advice(change, info.num_prompt_tokens, tokenizer)
        elif prints_json:
            document = await _daemon_document(llm)
        else:
            document = daemon_table(llm.address, llm.model, await llm.statistics())
    return [_as_json(document) if prints_json else as_lines(document)]


def _as_json(document: Any) -> str:
    return json_module.dumps(document, ensure_ascii=False)


def drafts_by_method(now: EngineStatistics) -> str:
    """What became of drafts, by what made them; empty if there were none."""
    accepted = now.num_accepted_tokens_by_method
    return ", ".join(
        f"{method}: {number:,} verified, {accepted.get(method, 0) / number:.0%} accepted"
        for method, number in now.num_draft_tokens_by_method.items()
    )


def daemon_table(address: str, model: ModelInfo, now: EngineStatistics) -> dict[str, str]:
    """What a person asks first, a line each; `--json` has every counter."""
    finished = ", ".join(
        f"{number:,} {reason}" for reason, number in now.num_finished.items() if number
    )
    waiting = f", the oldest for {now.max_wait_s:.1f} s" if now.num_waiting else ""
    cached_share = now.num_cached_prompt_tokens / max(1, now.num_prompt_tokens)
    host = f"; host memory: {now.num_host_blocks:,} blocks" if now.num_host_blocks else ""
    disk = f"; on disk: {now.num_disk_blocks:,} blocks" if now.num_disk_blocks else ""
    drafts = {}
    if now.num_drafts:
        length = 1 + now.num_accepted_tokens / now.num_drafts
        drafts["drafts"] = f"{drafts_by_method(now)}; {length:.2f} tokens a step that had any"
    return {
        "model": f"{model.name} ({model.architecture}, {model.formats or model.dtype})",
        "state": f"{now.state}, weights version {now.weights_version}",
        "address": address,
        "longest": f"{model.max_model_len:,} tokens, prompt and answer",
        "uptime": f"{datetime.timedelta(seconds=round(now.uptime_s))}",
        "clients": f"{now.num_clients}",
        "requests": f"{now.num_running:,} running, {now.num_waiting:,} waiting{waiting}",
        "finished": finished or "none",
        "tokens": f"{now.num_prompt_tokens:,} of prompts ({cached_share:.0%} from the cache), "
        f"{now.num_generated_tokens:,} generated",
        "KV cache": f"{now.num_blocks_in_use:,} of {now.num_blocks:,} blocks in use, "
        f"{now.num_blocks_cached:,} cached; {now.block_size} tokens each{host}{disk}",
        "preemptions": f"{now.num_preemptions:,}",
        **drafts,
        "more": "engine-client info --json has every counter",
    }


async def _daemon_document(llm: AsyncLLM) -> dict[str, Any]:
    model = msgspec.structs.asdict(llm.model)
    tokenizer = llm.model.tokenizer
    if tokenizer is not None:
        model["tokenizer"] = {
            "fingerprint": tokenizer.fingerprint,
            "has_chat_template": tokenizer.chat_template is not None,
            "special_tokens": tokenizer.special_tokens,
        }
    statistics = msgspec.structs.asdict(await llm.statistics())
    return {"address": llm.address, "model": model, "statistics": statistics}


def request_document(info: RequestInfo, *, by_name: bool) -> dict[str, Any]:
    """Every field of the explanation; for reading without the empty ones and the ids of tokens, and
    with the preemptions numbered."""
    document: dict[str, Any] = _as_builtins(info)
    if by_name:
        return document
    del document["prompt_change"]
    document["preemptions"] = {
        str(number): preemption for number, preemption in enumerate(document["preemptions"], 1)
    }
    return {name: value for name, value in document.items() if value not in (None, {}, [])}


def _advice(change: PromptChange, num_tokens: int, tokenizer: Tokenizer | None) -> str:
    """What a client can do that its next prompts are found in the cache."""
    text = ""
    if tokenizer is not None:
        before, was, now = (
            " ".join(tokenizer.decode(ids, skip_special_tokens=False).splitlines())
            for ids in (change.before, change.was, change.now)
        )
        text = f": '...{before}|{now}...', which was '|{was}...'"
    return (
        f"the prompt differs from the one before at token {change.position:,} of {num_tokens:,}"
        f"{text}; the {change.num_same:,} tokens behind it are the same, and were computed again: "
        "what changes each turn belongs at the prompt's end"
    )


def request_lines(info: RequestInfo) -> str:
    """The explanation for people: its fields that are not empty, a line each."""
    return as_lines(request_document(info, by_name=False))


def _as_builtins(value: Any) -> Any:
    """The value with its fields' names: on the wire structs are arrays."""
    if isinstance(value, msgspec.Struct):
        return {name: _as_builtins(field) for name, field in msgspec.structs.asdict(value).items()}
    if isinstance(value, list):
        return [_as_builtins(item) for item in value]
    return value


def as_lines(document: dict[str, Any], indent: str = "") -> str:
    """Indented `name  value` lines; names are aligned within a level."""
    width = max(map(len, document), default=0)
    lines = []
    for name, value in document.items():
        if isinstance(value, dict) and value:
            lines.append(f"{indent}{name}")
            lines.append(as_lines(value, indent + "  "))
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
