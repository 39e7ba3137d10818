"""Long texts: what may be read at all, and where it costs nobody else time."""

import ctypes
import json
import os
import threading
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any, TypeVar

from frontend.errors import InvalidInput, PromptTooLong
from frontend.shared_threads import LARGE_TEXTS, TEXTS

if TYPE_CHECKING:
    import tokenizers

T = TypeVar("T")

LONG_CHARS = 2048
"""Shorter texts are read in a few milliseconds: handing them to a thread would take longer."""
MAX_CHARS = 2**21
"""Of a text that may become more tokens than a prompt: it is counted, or cut. While it is read it
takes up to 165 times its size."""
_MANY_CHARS = 2**18
_MAX_COMPOSED = 4
"""Most characters that NFC makes one of: no canonical decomposition is longer."""


@dataclass(frozen=True, slots=True)
class TokenSize:
    """How much of a text one token stands for, at most."""

    longest: int
    """The longest token, in characters; of a byte-level vocabulary in bytes."""
    dropped: bytes = b""
    """Bytes that such a vocabulary has no token for: they vanish."""

    def fewest_tokens(self, text: str) -> int:
        """The fewest tokens that the text can be."""
        num_known = len(text)
        if self.dropped:
            num_known = len(text.encode("utf-8", "surrogatepass").translate(None, self.dropped))
        return num_known // self.longest


def check_chars(num_chars: int, name: str, max_model_len: int, *, is_cut: bool) -> None:
    """Raises PromptTooLong, with `is_cut` InvalidInput: too many to be read at all."""
    most = max(MAX_CHARS, 8 * max_model_len)
    if num_chars > most:
        kind = InvalidInput if is_cut else PromptTooLong
        raise kind(
            f"{name} is too long: it has {num_chars} characters, the limit is {most}; shorten it, "
            "or send it in parts"
        )


def check_length(
    text: str, name: str, max_model_len: int, token_size: TokenSize | None, *, is_cut: bool
) -> None:
    """Raises PromptTooLong: the text cannot fit, as its length alone says; InvalidInput: it is too
    long to be read, even to cut or count its tokens (`is_cut`)."""
    check_chars(len(text), name, max_model_len, is_cut=is_cut)
    fewest = 0 if is_cut or token_size is None else token_size.fewest_tokens(text)
    if fewest > max_model_len:
        raise PromptTooLong(
            f"{name} is too long: it has {len(text)} characters, which are {fewest} tokens or "
            f"more, max_model_len is {max_model_len}; shorten it, set truncate_prompt_tokens, or "
            "start the engine with a larger --max-model-len"
        )


def token_size(backend: "tokenizers.Tokenizer") -> TokenSize | None:
    """None where it is not known: where characters may be left out, or any number of unknown ones
    be one token."""
    added = backend.get_added_tokens_decoder().values()
    if any(token.lstrip or token.rstrip for token in added):
        return None
    composed = 1
    for step in steps_of(backend.normalizer, "normalizers"):
        match step:
            case {"type": "NFC" | "NFKC"}:
                composed *= _MAX_COMPOSED
            case {"type": "Replace", "pattern": {"String": str(old)}, "content": str(new)}:
                if len(new) < len(old):
                    return None
            case {"type": "NFD" | "NFKD" | "Lowercase" | "Prepend"}:
                pass
            case _:
                return None
    cuts = steps_of(backend.pre_tokenizer, "pretokenizers")
    for step in cuts:
        keeps_all = step["type"] == "Split" and step["behavior"] != "Removed"
        if not keeps_all and step["type"] not in ("ByteLevel", "Digits", "Metaspace"):
            return None
    known = backend.get_vocab(with_added_tokens=False)
    longest = composed * max(map(len, (*known, *(token.content for token in added))))
    if getattr(backend.model, "byte_fallback", False):
        is_whole = all(f"<0x{byte:02X}>" in known for byte in range(256))
        return TokenSize(longest) if is_whole else None
    from tokenizers import models

    is_byte_level = bool(cuts) and cuts[-1]["type"] == "ByteLevel"
    if not (is_byte_level and isinstance(backend.model, models.BPE)):
        return None
    dropped = bytes(byte for letter, byte in LEVEL_TABLE.items() if letter not in known)
    if dropped and (composed > 1 or backend.model.unk_token is not None):
        return None
    longest = composed * max(map(len, (*known, *(t.content.encode() for t in added))))
    return TokenSize(longest, dropped)


def steps_of(part: Any, plural: str) -> list[dict[str, Any]]:
    """A normalizer, pre-tokenizer or decoder as its own document says, taken apart: that of the
    whole tokenizer takes a second to write."""
    if part is None:
        return []

    def flat(step: dict[str, Any]) -> list[dict[str, Any]]:
        if step["type"] != "Sequence":
            return [step]
        return [each for inner in step[plural] for each in flat(inner)]

    return flat(json.loads(part.__getstate__()))


def give_back_memory(num_chars: int) -> None:
    """To the system, what reading so many characters took: the allocator would keep it. In a
    thread, as it may take a while."""
    if num_chars > _MANY_CHARS and _malloc_trim() is not None:
        threading.Thread(target=_malloc_trim(), args=(0,), name="memory").start()


@cache
def _malloc_trim() -> Callable[[int], int] | None:
    """glibc alone has it, and needs it."""
    return getattr(ctypes.CDLL(None) if os.name == "posix" else None, "malloc_trim", None)


async def read_texts(call: Callable[[], T], num_chars: int) -> T:
    """What `call` returns, which turns texts into tokens: in a thread if they are long, of those
    for texts as long. There `tokenizers` lets go of the interpreter's lock, and the interpreter
    itself switches threads. Raises QueueFull: see `SharedThreads.run`."""
    if num_chars <= LONG_CHARS:
        return call()
    try:
        return await (TEXTS if num_chars <= _MANY_CHARS else LARGE_TEXTS).run(call)
    finally:
        give_back_memory(num_chars)


def _level_table() -> dict[str, int]:
    """GPT-2's bytes_to_unicode, inverted: printable bytes stand for themselves, the others for
    the code points from 256 up."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    table = {chr(byte): byte for byte in printable}
    others = (byte for byte in range(256) if byte not in set(printable))
    table.update({chr(256 + rank): byte for rank, byte in enumerate(others)})
    return table


LEVEL_TABLE = _level_table()
