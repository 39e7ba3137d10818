"""Finding stop strings in a text that arrives in pieces.

Owns what may be shown: text that could still turn out to be the beginning of a stop string is
held back. Must not know tokens, requests, or why a request stops.
"""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class StopResult:
    """`text` may be shown now. `matched` is the stop string that was found, if one was; then
    `text` is the last text of the stream."""

    text: str
    matched: str | None = None


class StopStringMatcher:
    """Searches one text for several stop strings.

    The stop string that is complete first wins; of two that are complete with the same character,
    the longer. So the result depends on the text alone, never on how it was cut into pieces.

    Args:
        stop: the stop strings, none of them empty.
        include_in_output: end the text behind the stop string, not before it. Nothing has to be
            held back then.

    Raises:
        ValueError: an empty stop string.
    """

    def __init__(self, stop: Sequence[str], *, include_in_output: bool = False) -> None:
        if "" in stop:
            raise ValueError("a stop string is empty, it would match at once; leave it out")
        # longest first: of the matches with one end, the first one found is the longest
        self._stop = sorted(set(stop), key=len, reverse=True)
        self._include_in_output = include_in_output
        self._open = ""
        """The end of the text so far that could be the beginning of a stop string."""
        self._is_over = False

    def append(self, text: str) -> StopResult:
        """Takes the next piece of the text. After a match, nothing more may be appended."""
        assert not self._is_over, "text appended after a stop string was found"
        if not self._stop or not text:
            return StopResult(text)
        num_shown = len(self._open) if self._include_in_output else 0
        joined = self._open + text
        match = self._first_match(joined)
        if match is not None:
            start, matched = match
            self._is_over = True
            self._open = ""
            end = start + len(matched) if self._include_in_output else start
            return StopResult(joined[num_shown:end], matched)
        open_start = self._open_start(joined)
        self._open = joined[open_start:]
        return StopResult(joined[num_shown:] if self._include_in_output else joined[:open_start])

    def flush(self) -> str:
        """What was held back, at the end of the text."""
        held, self._open = self._open, ""
        return "" if self._include_in_output else held

    def _first_match(self, text: str) -> tuple[int, str] | None:
        best: tuple[int, str] | None = None
        best_end = len(text) + 1
        for stop in self._stop:
            # a match must end before the best one so far, or it is not better
            start = text.find(stop, 0, best_end - 1)
            if start >= 0:
                best, best_end = (start, stop), start + len(stop)
        return best

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
