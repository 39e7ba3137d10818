"""Files of conversations: ShareGPT's JSON, and JSON lines."""

import itertools
from pathlib import Path
from typing import Any

import msgspec

from frontend.load.requests import Message

_BYTES_A_TOKEN = 4
_USERS = ("human", "user")
Conversation = list[tuple[Any, int | None]]
"""What the user says in each turn, and the tokens of the recorded answer."""


class _Said(msgspec.Struct):
    speaker: str = msgspec.field(name="from")
    value: str


class _ShareGPT(msgspec.Struct):
    conversations: list[_Said] = []


class _Custom(msgspec.Struct):
    prompt: str | list[int] | None = None
    messages: list[Message] | None = None
    turns: list[str] | None = None
    output_tokens: int | None = None


def read_sharegpt(path: Path, max_turns: int) -> list[Conversation]:
    """Conversations from their first user on; of those without an answer there is nothing to
    send."""
    try:
        found = msgspec.json.decode(path.read_bytes(), type=list[_ShareGPT])
    except msgspec.MsgspecError as error:
        raise ValueError(f"{path} is no ShareGPT file: {error}") from None
    conversations: list[Conversation] = []
    for one in found:
        said = list(itertools.dropwhile(lambda one: one.speaker not in _USERS, one.conversations))
        pairs = zip(said[::2], said[1::2], strict=False)
        turns = list(itertools.takewhile(_is_exchange, pairs))[:max_turns]
        if turns:
            conversations.append(
                [
                    (asked.value, -(-len(said.value.encode()) // _BYTES_A_TOKEN))
                    for asked, said in turns
                ]
            )
    return _some(path, conversations)


def _is_exchange(pair: tuple[_Said, _Said]) -> bool:
    asked, said = pair
    is_pair = asked.speaker in _USERS and said.speaker in ("gpt", "chatgpt", "assistant")
    return is_pair and bool(asked.value and said.value)


def read_custom(path: Path, max_turns: int) -> list[Conversation]:
    conversations: list[Conversation] = []
    for number, line in enumerate(path.read_bytes().splitlines(), start=1):
        if not line.strip():
            continue
        try:
            found = msgspec.json.decode(line, type=_Custom)
        except msgspec.MsgspecError as error:
            raise ValueError(f"{path}, line {number}: {error}") from None
        turns = found.turns[:max_turns] if found.turns else [found.prompt or found.messages]
        if not all(turns):
            raise ValueError(f"{path}, line {number} has none of prompt, messages and turns")
        conversations.append([(text, found.output_tokens) for text in turns])
    return _some(path, conversations)


def _some(path: Path, conversations: list[Conversation]) -> list[Conversation]:
    if not conversations:
        raise ValueError(f"{path} holds no conversation with a question and an answer")
    return conversations
