"""What the text of an answer must be. A schema travels as text: nothing on the wire is nested."""

import enum

from protocol.base import Message
from protocol.errors import InvalidParameter

MAX_GRAMMAR_CHARS = 256 * 1024


class StructuredOutputKind(enum.StrEnum):
    """The kind of thing that `StructuredOutput.text` is."""

    JSON = "json"
    """A JSON schema, as JSON."""
    REGEX = "regex"
    """A regular expression that the whole text matches (Rust's syntax, no look-around)."""
    CHOICE = "choice"
    """A JSON list of strings, one of which the text is."""
    GRAMMAR = "grammar"
    """A context-free grammar: Lark's format as llguidance has it, or GBNF (with `::=`)."""
    STRUCTURAL_TAG = "structural_tag"
    """JSON: free text in which triggers begin structures, by vLLM's format."""


class ReasoningMarkers(Message, frozen=True):
    """Of a block of reasoning that may stand before the text that is to follow a grammar."""

    start: str
    end: str
    is_open: bool = False
    """The prompt has begun the block."""


class StructuredOutput(Message, frozen=True):
    """Raises InvalidParameter: a text that is empty or beyond the limit."""

    kind: StructuredOutputKind
    text: str
    disable_any_whitespace: bool = False
    """Allow no white space between the tokens of JSON; otherwise there may be some."""
    whitespace_pattern: str | None = None
    """A regular expression of the white space that may stand there."""
    reasoning: ReasoningMarkers | None = None
    """None: the text begins at once."""
    field: str | None = None
    """What the user calls it, where that is not `structured_outputs` and its kind."""

    @property
    def name(self) -> str:
        """The field's name in errors."""
        return self.field or f"structured_outputs.{self.kind.value}"

    def __post_init__(self) -> None:
        size = len(self.text) + len(self.whitespace_pattern or "") + len(self.field or "")
        if self.reasoning is not None:
            if not self.reasoning.start or not self.reasoning.end:
                raise InvalidParameter("a marker of reasoning is empty; it must be a text")
            size += len(self.reasoning.start) + len(self.reasoning.end)
        if not self.text or size > MAX_GRAMMAR_CHARS:
            raise InvalidParameter(
                f"{self.name} has {size} characters, it must have from 1 "
                f"to {MAX_GRAMMAR_CHARS}; give a smaller one"
            )
        if self.disable_any_whitespace and self.whitespace_pattern is not None:
            raise InvalidParameter(
                "disable_any_whitespace and whitespace_pattern contradict each other; omit one"
            )
