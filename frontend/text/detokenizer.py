"""Text of a stream of tokens, as early as it is certain, and stop strings in it. Released text
never changes; all of it joined equals decoding all tokens at once."""

import codecs
from collections.abc import Iterable, Sequence

from frontend.text.token_pieces import Joining, TokenPieces
from frontend.text.tokenizer import Tokenizer

MAX_WITHHELD_BYTES = 16
"""Longest run of byte tokens that is withheld while it is valid so far."""
MAX_WITHHELD_TOKENS = 8
"""Most tokens withheld for an unknown kind of decoder."""
PROMPT_TAIL = 8
"""The last prompt tokens, which may influence the output's first text."""

_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
_Utf8Decoder = codecs.getincrementaldecoder("utf-8")


class IncrementalDetokenizer:
    """Detokenizes one sequence.

    The output's text follows the prompt's: a leading space is kept unless the prompt is empty. If
    the prompt ends inside a character, the whole character counts as output.

    Args:
        tokenizer: of the model.
        prompt_token_ids: the prompt, or at least its last `PROMPT_TAIL` tokens.
        skip_special_tokens: leave special tokens out of the text.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        prompt_token_ids: Sequence[int],
        *,
        skip_special_tokens: bool = True,
    ) -> None:
        pieces = tokenizer.pieces
        self._pieces = pieces
        self._skipped = pieces.special_token_ids if skip_special_tokens else frozenset()
        tail = self._kept(prompt_token_ids[-PROMPT_TAIL:])
        self._joiner: _ByteLevelJoiner | _PieceJoiner | _WindowJoiner
        match pieces.joining:
            case Joining.BYTE_LEVEL:
                self._joiner = _ByteLevelJoiner(pieces, tail)
            case Joining.PIECES:
                self._joiner = _PieceJoiner(pieces, tail)
            case Joining.WINDOW:
                self._joiner = _WindowJoiner(pieces, tail)

    def append(self, token_ids: Sequence[int]) -> str:
        """The text that became certain with these tokens, often empty or several characters."""
        if self._skipped.isdisjoint(token_ids):
            return self._joiner.append(token_ids)
        return self._joiner.append(self._kept(token_ids))

    def flush(self) -> str:
        """The rest at the end of the output; unfinished characters become U+FFFD."""
        return self._joiner.flush()

    def _kept(self, token_ids: Iterable[int]) -> list[int]:
        skipped = self._skipped
        return [token_id for token_id in token_ids if token_id not in skipped]


class _ByteLevelJoiner:
    """Bytes through an incremental UTF-8 decoder: both it and `tokenizers` replace by the rule of
    maximal subparts (Unicode 15, section 3.9), so the texts are the same."""

    def __init__(self, pieces: TokenPieces, tail: list[int]) -> None:
        self._level_bytes = pieces.level_bytes
        self._utf8 = _Utf8Decoder(errors="replace")
        self.append(tail)  # the decoder keeps only an unfinished last character of the prompt

    def append(self, token_ids: Sequence[int]) -> str:
        if len(token_ids) == 1:
            data = self._level_bytes(token_ids[0])
        else:
            data = b"".join(map(self._level_bytes, token_ids))
        if data.isascii() and not self._utf8.buffer:  # the decoder is written in Python
            return data.decode("ascii")
        return self._utf8.decode(data)

    def flush(self) -> str:
        return self._utf8.decode(b"", final=True)


class _PieceJoiner:
    """Texts of tokens, one after the other; runs of byte tokens as `_ByteRun`.

    Until the first text appears, tokens are decoded from the start of the output, because there
    a decoder may trim a leading space."""

    def __init__(self, pieces: TokenPieces, tail: list[int]) -> None:
        self._pieces = pieces
        known = [token_id for token_id in tail if pieces.is_known(token_id)]
        self._leading: list[int] | None = None if known else []
        self._run: _ByteRun | None = None
        if pieces.has_byte_tokens:
            self._run = self._unfinished_run(known)

    def append(self, token_ids: Sequence[int]) -> str:
        pieces = self._pieces
        if self._leading is None and not pieces.has_byte_tokens:
            return "".join(map(pieces.text, token_ids))
        parts = []
        for token_id in token_ids:
            byte = pieces.fallback_byte(token_id)
            if byte is not None:
                self._run = self._run or _ByteRun()
                parts.append(self._released_text(self._run.append(token_id, byte)))
            elif pieces.is_known(token_id):
                if self._run is not None:
                    parts.append(self.flush())
                parts.append(self._released_text([token_id]))
        return "".join(parts)

    def flush(self) -> str:
        run, self._run = self._run, None
        return "" if run is None else self._released_text(run.finish())

    def _released_text(self, part: list[int] | str) -> str:
        if isinstance(part, str):
            if part:
                self._leading = None
            return part
        if not part:
            return ""
        if self._leading is None:
            if len(part) == 1:
                return self._pieces.text(part[0])
            return self._pieces.decode_after_text(part)
        self._leading.extend(part)
        text = self._pieces.decode(self._leading)
        if text or len(self._leading) >= MAX_WITHHELD_TOKENS:
            self._leading = None
        return text

    def _unfinished_run(self, tail: list[int]) -> "_ByteRun | None":
        """The run that the prompt's last bytes begin, if they end inside a character."""
        data: list[tuple[int, bytes]] = []
        for token_id in reversed(tail):
            byte = self._pieces.fallback_byte(token_id)
            if byte is None:
                break
            data.insert(0, (token_id, byte))
        utf8 = _Utf8Decoder(errors="replace")
        utf8.decode(b"".join(byte for _, byte in data))
        num_unfinished = len(utf8.getstate()[0])
        if num_unfinished == 0:
            return None
        run = _ByteRun()
        for token_id, byte in data[-num_unfinished:]:
            run.append(token_id, byte)
        return run


class _ByteRun:
    """Neighbouring byte tokens. `tokenizers` decodes a run as a whole: all of it, or one U+FFFD
    a byte. So it is withheld while it is valid so far, and released byte by byte once it is not."""

    def __init__(self) -> None:
        self._withheld: list[int] = []
        self._utf8 = _Utf8Decoder(errors="strict")
        self._is_released = False
        self._is_invalid = False

    def append(self, token_id: int, byte: bytes) -> list[int] | str:
        """Returns tokens to decode now, or text to release now."""
        if self._is_invalid:
            return _REPLACEMENT
        self._withheld.append(token_id)
        try:
            characters = self._utf8.decode(byte)
        except UnicodeDecodeError:
            self._is_invalid = True
            return self._take_replaced()
        num_unfinished = len(self._utf8.getstate()[0])
        if not self._is_released:
            if len(self._withheld) < MAX_WITHHELD_BYTES:
                return []
            self._is_released = True
            finished = self._withheld[: len(self._withheld) - num_unfinished]
            self._withheld = self._withheld[len(finished) :]
            return finished
        if num_unfinished == 0:
            self._withheld = []
        return characters

    def finish(self) -> list[int] | str:
        """The rest of the run, in the same terms."""
        if self._utf8.getstate()[0]:
            return self._take_replaced()
        finished, self._withheld = self._withheld, []
        return finished

    def _take_replaced(self) -> str:
        num_withheld, self._withheld = len(self._withheld), []
        return _REPLACEMENT * num_withheld


class _WindowJoiner:
    """For unknown decoders: decode the last few tokens with and without the new ones."""

    def __init__(self, pieces: TokenPieces, tail: list[int]) -> None:
        self._pieces = pieces
        self._context = list(filter(pieces.is_known, tail))
        self._withheld: list[int] = []

    def append(self, token_ids: Sequence[int]) -> str:
        # unknown ids add no text, and would push known ones out of the context
        return "".join(map(self._append_one, filter(self._pieces.is_known, token_ids)))

    def flush(self) -> str:
        return self._take() if self._withheld else ""

    def _append_one(self, token_id: int) -> str:
        self._withheld.append(token_id)
        if len(self._withheld) < MAX_WITHHELD_TOKENS:
            joined = self._pieces.decode([*self._context, *self._withheld])
            if joined.endswith(_REPLACEMENT):
                return ""
        return self._take()

    def _take(self) -> str:
        before = self._pieces.decode(self._context)
        joined = self._pieces.decode([*self._context, *self._withheld])
        self._context = [*self._context, *self._withheld][-PROMPT_TAIL:]
        self._withheld = []
        return joined[len(before) :]


class StopStringMatcher:
    """Searches one text for several stop strings.

    The stop string that is complete first wins; of two that are complete with the same character,
    the longer. So the result depends on the text alone, not on how it was cut into pieces.

    Args:
        stop: the stop strings, none of them empty.
        include_in_output: end the text behind the stop string, not before it. Nothing has to be
            withheld then.
    """

    def __init__(self, stop: Sequence[str], *, include_in_output: bool = False) -> None:
        assert "" not in stop, "an empty stop string matches at once"
        self._stop = tuple(stop)
        self._include_in_output = include_in_output
        self._open = ""
        """The end of the text so far that could be the beginning of a stop string."""

    def append(self, text: str, *, may_stop: bool = True) -> tuple[str, str | None]:
        """The text that may be shown now, and the stop string that was found, if one was: then the
        text is the last of the stream.
        `may_stop`: whether a stop string counts that this text completes."""
        if not self._stop or not text:
            return text, None
        num_open = len(self._open)
        num_shown = num_open if self._include_in_output else 0
        joined = self._open + text
        # one that the open text holds whole was complete before, when it did not count
        found = [
            (start, stop)
            for stop in self._stop
            if (start := joined.find(stop, max(0, num_open - len(stop) + 1))) >= 0
        ]
        if found and may_stop:
            start, stop = min(found, key=lambda match: (match[0] + len(match[1]), match[0]))
            self._open = ""
            end = start + len(stop) if self._include_in_output else start
            return joined[num_shown:end], stop
        open_start = self._open_start(joined)
        self._open = joined[open_start:]
        return joined[num_shown:] if self._include_in_output else joined[:open_start], None

    def flush(self) -> str:
        """The withheld text, at the end of the stream."""
        withheld, self._open = self._open, ""
        return "" if self._include_in_output else withheld

    def _open_start(self, text: str) -> int:
        """Where the longest suffix begins that is a beginning of some stop string."""
        earliest = len(text)
        for stop in self._stop:
            start = text.find(stop[0], max(0, len(text) - len(stop) + 1), earliest)
            while start >= 0:
                if stop.startswith(text[start:]):
                    earliest = start
                    break
                start = text.find(stop[0], start + 1, earliest)
        return earliest
