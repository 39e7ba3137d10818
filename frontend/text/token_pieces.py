"""What single tokens add to a text, as the tokenizer's decoder joins them."""

from __future__ import annotations

import enum
import re
import weakref
from functools import cache, partial
from typing import TYPE_CHECKING, Any

from frontend.text.long_texts import LEVEL_TABLE, steps_of

if TYPE_CHECKING:
    import tokenizers

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


class Joining(enum.Enum):
    """How a decoder makes one text of tokens.

    BYTE_LEVEL  a token is bytes; the text is their UTF-8           GPT-2, Llama 3, Qwen, SmolLM
    PIECES      a token is text, the same after any other token;    Llama 2, Gemma, Mistral, T5
                tokens like <0xE6> are single bytes (ByteFallback)
    WINDOW      anything else: only decoding neighbours together tells
    """

    BYTE_LEVEL = enum.auto()
    PIECES = enum.auto()
    WINDOW = enum.auto()


class TokenPieces:
    """Texts and bytes of single tokens, found once each and kept.

    Attributes:
        joining: the family of this tokenizer's decoder.
        has_byte_tokens: tokens like <0xE6> stand for single bytes.
        special_token_ids: what `skip_special_tokens` leaves out.
    """

    def __init__(
        self, backend: tokenizers.Tokenizer, special_token_ids: frozenset[int] = frozenset()
    ) -> None:
        self._backend = backend
        self.special_token_ids = special_token_ids
        steps = steps_of(backend.decoder, "decoders")
        self.has_byte_tokens = any(step["type"] == "ByteFallback" for step in steps)
        self.joining = _joining_of(steps)
        this = weakref.proxy(self)  # else only a full collection would free it
        self.text = cache(partial(TokenPieces._text, this))
        self.level_bytes = cache(partial(TokenPieces._level_bytes, this))
        self.fallback_byte = cache(partial(TokenPieces._fallback_byte, this))
        self._neighbour_id, self._neighbour_text = self._find_neighbour()

    def is_known(self, token_id: int) -> bool:
        """Unknown ids (a model's padding rows) add nothing to a text."""
        return token_id >= 0 and self._backend.id_to_token(token_id) is not None

    def decode(self, token_ids: list[int]) -> str:
        """The text of `token_ids` at the start of a text, special tokens kept."""
        return self._backend.decode(token_ids, skip_special_tokens=False)

    def decode_after_text(self, token_ids: list[int]) -> str:
        """The text of `token_ids` in the middle of a text. PIECES and WINDOW only."""
        joined = self.decode([self._neighbour_id, *token_ids])
        return joined[len(self._neighbour_text) :]

    def bytes_of(self, token_id: int) -> bytes:
        """What one token adds to a text, also if that is only a part of a character."""
        if self.joining is Joining.BYTE_LEVEL:
            return self.level_bytes(token_id)
        byte = self.fallback_byte(token_id)
        return self.text(token_id).encode() if byte is None else byte

    def _text(self, token_id: int) -> str:
        """What one token reads like in the middle of a text, its leading space kept. A token that
        is part of a character only gives U+FFFD; an unknown id gives the empty text."""
        if not self.is_known(token_id):
            return ""
        if self.joining is Joining.BYTE_LEVEL:
            return self.level_bytes(token_id).decode("utf-8", errors="replace")
        return self.decode_after_text([token_id])

    def _level_bytes(self, token_id: int) -> bytes:
        """The bytes of a token of a BYTE_LEVEL tokenizer; empty for an unknown id.

        Characters stand for bytes by GPT-2's table. A token with any character outside the table
        (an added one) stands for its own UTF-8, as in the decoder of `tokenizers`."""
        token = (self._backend.id_to_token(token_id) if token_id >= 0 else None) or ""
        try:
            return bytes([LEVEL_TABLE[character] for character in token])
        except KeyError:
            return token.encode()

    def _fallback_byte(self, token_id: int) -> bytes | None:
        """The single byte that a token like <0xE6> stands for; None for every other token."""
        token = self._backend.id_to_token(token_id) if self.has_byte_tokens else None
        match = None if token is None else _BYTE_TOKEN.fullmatch(token)
        return None if match is None else bytes([int(match[1], 16)])

    def _find_neighbour(self) -> tuple[int, str]:
        """A token that can stand before any other to show what that one adds in mid-text."""
        for token_id in range(self._backend.get_vocab_size(with_added_tokens=True)):
            token = self._backend.id_to_token(token_id)
            if token is None or _BYTE_TOKEN.fullmatch(token):
                continue
            alone = self.decode([token_id])
            if alone and self.decode([token_id, token_id]).startswith(alone):
                return token_id, alone
        return 0, ""


def _joining_of(steps: list[dict[str, Any]]) -> Joining:
    kinds = [step["type"] for step in steps]
    if kinds == ["ByteLevel"]:
        return Joining.BYTE_LEVEL
    fused = False
    for step in steps:
        match step["type"]:
            case "Fuse":
                fused = True
            case "Strip":
                # before Fuse it trims every token by itself; behind it, the ends of the whole text
                if fused and step["stop"] != 0:
                    return Joining.WINDOW
            case "Replace" | "WordPiece" | "Metaspace" | "ByteFallback":
                if fused:
                    return Joining.WINDOW
            case _:
                return Joining.WINDOW
    return Joining.PIECES
