"""A model's reasoning, parted from its answer: `<think>...</think>` at the start of the text."""

from frontend.http.tools.calls import ToolCallFormat, find_marker, is_scanned_enough
from frontend.reasoning_formats import ReasoningFormat


class ReasoningStream:
    """One answer.

    Args:
        is_open: the block is open already.
        calls: models write calls inside of the block, too: these are content.
    """

    def __init__(
        self, markers: ReasoningFormat, *, is_open: bool, calls: ToolCallFormat | None = None
    ) -> None:
        self._markers = markers
        self._calls = calls
        self._held = ""
        self._parsed_at = 0
        """Length of what may be a call when it was parsed last."""
        self._is_start = True
        self._answer: AnswerMarkers | None = None
        self.is_reasoning = is_open

    def feed(self, text: str) -> tuple[str, str]:
        """Reasoning and content that are certain by now."""
        self._held += text
        if self._is_start:
            begin = self._held.lstrip()
            if begin.startswith(self._markers.start):
                self._held = begin[len(self._markers.start) :]
                self.is_reasoning = True
            elif begin.startswith(self._markers.end) and not self.is_reasoning:
                self._held = begin[len(self._markers.end) :]  # MiniMax M3 closes what it left out
            elif any(each.startswith(begin) for each in (self._markers.start, self._markers.end)):
                return "", ""
            self._is_start = False
        reasoning = content = ""
        while self.is_reasoning:
            passed, called = self._pass_reasoning()
            reasoning, content = reasoning + passed, content + called
            if self.is_reasoning and not passed and not called:
                return reasoning, content
        more, self._held = self._held, ""
        return reasoning, content + self._of_answer(more)

    def _pass_reasoning(self) -> tuple[str, str]:
        """What is certain of the block: text, or a call in it; neither: more must come, or the
        block is over."""
        end = find_marker(self._held, self._markers.end)
        call = end if self._calls is None else self._calls.find(self._held, "-")
        if call < end:
            if call:
                passed, self._held = self._held[:call], self._held[call:]
                return passed, ""
            length, is_call = self._called()
            found, self._held = self._held[:length], self._held[length:]
            return ("", found) if is_call else (found, "")
        passed, self._held = self._held[:end], self._held[end:]
        if not passed and self._held.startswith(self._markers.end):
            self._held = self._held[len(self._markers.end) :]
            self.is_reasoning = False
        return passed, ""

    def _called(self) -> tuple[int, bool]:
        """How many of the characters that are held are a call, or certainly none."""
        assert self._calls is not None
        if is_scanned_enough(len(self._held), self._parsed_at):
            return 0, False
        parsed = self._calls.parse(self._held, at_end=False)
        self._parsed_at = len(self._held) if parsed is None else 0
        return (0, False) if parsed is None else (parsed.length, bool(parsed.calls))

    def _of_answer(self, text: str) -> str:
        if self._markers.answer is None:
            return text
        if self._answer is None:
            self._answer = AnswerMarkers(*self._markers.answer)
        return self._answer.feed(text)

    def close(self) -> tuple[str, str]:
        """The rest of it."""
        held, self._held = self._held, ""
        if self.is_reasoning:
            return held, ""
        return "", self._of_answer(held) + ("" if self._answer is None else self._answer.close())


class AnswerMarkers:
    """Leaves out the marks that stand around an answer, as `<answer>` and `</answer>`."""

    def __init__(self, start: str, end: str) -> None:
        self._start, self._end = start, end
        self._held = ""
        self._is_start = True
        self._is_marked = False
        self._is_blank = False
        """Line breaks behind the first marker are none of it."""

    def feed(self, text: str) -> str:
        """The characters of the answer that are certain by now, without its marks."""
        self._held += text
        if self._is_start:
            begin = self._held.lstrip()
            if begin.startswith(self._start):
                self._held, self._is_marked = begin[len(self._start) :], True
                self._is_blank = True
            elif self._start.startswith(begin):
                return ""
            self._is_start = False
        if self._is_blank:
            self._held = self._held.lstrip("\n")
            self._is_blank = not self._held
        end = find_marker(self._held, self._end) if self._is_marked else len(self._held)
        if self._is_marked:
            end = len(self._held[:end].rstrip("\n"))
        answer, self._held = self._held[:end], self._held[end:]
        rest = self._held.lstrip("\n")
        if self._is_marked and rest.startswith(self._end):
            self._held, self._is_marked = rest[len(self._end) :], False
        return answer

    def close(self) -> str:
        """The rest of it."""
        held, self._held = self._held, ""
        return held
