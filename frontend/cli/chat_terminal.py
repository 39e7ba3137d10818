"""A chat at a terminal: lines with editing, history and whole pastes (prompt_toolkit), and answers
as Markdown while they stream (rich)."""

import contextlib
import os
import sys
from collections.abc import Callable, Iterator
from itertools import pairwise

import platformdirs
from markdown_it import MarkdownIt
from markdown_it.token import Token
from prompt_toolkit import PromptSession
from prompt_toolkit.enums import DEFAULT_BUFFER
from prompt_toolkit.filters import has_focus
from prompt_toolkit.history import FileHistory, History, InMemoryHistory
from prompt_toolkit.key_binding import KeyBindings, KeyPressEvent
from prompt_toolkit.keys import Keys
from rich.console import Console, RenderableType
from rich.live import Live
from rich.markdown import Markdown
from rich.segment import SegmentLines
from rich.spinner import Spinner
from rich.text import Text

from frontend.cli.options import print_fault

_MAX_HISTORY_BYTES = 1 << 20
_QUOTES = '"""'
_REFRESHES_PER_S = 8
# without HTML: rich would leave it out
_parser = MarkdownIt("commonmark", {"html": False}).enable(["strikethrough", "table"])


def open_prompt() -> Callable[[], str]:
    """Reads what the user sends with Enter. Alt-Enter, or Enter within a paste or between triple
    quotes, is a new line.

    Raises, when called:
        KeyboardInterrupt, EOFError: Ctrl-C; Ctrl-D on an empty line.
    """
    keys = KeyBindings()

    @keys.add("enter", filter=has_focus(DEFAULT_BUFFER))
    @keys.add("c-j", filter=has_focus(DEFAULT_BUFFER))
    def _(event: KeyPressEvent) -> None:
        # a terminal without bracketed paste gives all keys of a paste at once; commands have a line
        keys_left = any(each.key != Keys.CPRResponse for each in event.key_processor.input_queue)
        text = event.current_buffer.text
        is_open = text.startswith(_QUOTES) and _unquoted(text) == text
        if is_open or (keys_left and not text.startswith("/")):
            event.current_buffer.insert_text("\n")
        else:
            event.current_buffer.validate_and_handle()

    @keys.add("escape", "enter", filter=has_focus(DEFAULT_BUFFER))
    def _(event: KeyPressEvent) -> None:
        event.current_buffer.insert_text("\n")

    session: PromptSession[str] = PromptSession(
        history=_open_history(), multiline=True, key_bindings=keys, prompt_continuation="  "
    )
    return lambda: _unquoted(session.prompt("> "))


def _unquoted(text: str) -> str:
    """What stands between triple quotes, as Ollama's messages of several lines."""
    inner = text.strip().removeprefix(_QUOTES)
    is_quoted = inner != text.strip() and inner.endswith(_QUOTES)
    return inner.removesuffix(_QUOTES) if is_quoted else text


class _Kept(FileHistory):
    def store_string(self, string: str) -> None:
        with contextlib.suppress(OSError):  # a full disk ends no chat
            super().store_string(string)


def _open_history() -> History:
    """In a file that only the user can read; its older half goes when it is long."""
    path = platformdirs.user_state_path("engine-core") / "chat_history"
    try:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        os.close(os.open(path, os.O_RDWR | os.O_CREAT, 0o600))
        path.chmod(0o600)
        if path.stat().st_size > _MAX_HISTORY_BYTES:
            path.write_bytes(path.read_bytes()[-_MAX_HISTORY_BYTES // 2 :])
    except OSError as error:
        print_fault(f"the history of this chat is not kept: {path}: {error.strerror}")
        return InMemoryHistory()
    return _Kept(path)


@contextlib.contextmanager
def markdown_answer() -> Iterator[Callable[[str], None]]:
    """Prints each block of an answer when it is complete; the last one is shown as it grows."""
    answer = _MarkdownAnswer()
    try:
        with (
            _without_echo(),
            Live(
                console=answer.console,
                get_renderable=answer.last_lines,
                refresh_per_second=_REFRESHES_PER_S,
                transient=True,
            ),
        ):
            yield answer.write
    finally:
        answer.print_blocks(_blocks(_parser.parse(answer.unfinished)))


class _MarkdownAnswer:
    def __init__(self) -> None:
        self.console = Console()
        self.unfinished = ""
        self._is_empty = True
        self._spinner = Spinner("dots")

    def write(self, text: str) -> None:
        self.unfinished += text
        if "\n" not in text:
            return
        lines = self.unfinished.split("\n")
        *complete, last = _blocks(_parser.parse("\n".join(lines[:-1]))) or [[]]
        if complete:
            begin = last[0].map
            assert begin is not None
            self.unfinished = "\n".join(lines[begin[0] :])
            self._is_empty = False
            self.print_blocks(complete)
            self.console.print()

    def print_blocks(self, blocks: list[list[Token]]) -> None:
        """Print blocks with an empty line between two, however many come at once."""
        for number, tokens in enumerate(blocks):
            if number:
                self.console.print()
            self.console.print(self.rendered(tokens))

    def last_lines(self) -> RenderableType:
        """The last lines of the unfinished block, as many as the screen has."""
        source, height = self.unfinished, self.console.height - 2
        if not source.strip():
            return self._spinner if self._is_empty else Text("")
        lines = source.split("\n")
        if source.startswith("```") and len(lines) > height:
            source = "\n".join([lines[0], *lines[-height:]])  # long code costs time to colour
        return SegmentLines(self.rendered(_parser.parse(source)).lines[-height:], new_lines=True)

    def rendered(self, tokens: list[Token]) -> SegmentLines:
        """Without empty lines around it: rich has some around lists and tables."""
        lines = self.console.render_lines(_markdown(tokens), pad=False)
        full = [i for i, line in enumerate(lines) if any(each.text.strip() for each in line)]
        return SegmentLines(lines[full[0] : full[-1] + 1] if full else [], new_lines=True)


def _blocks(tokens: list[Token]) -> list[list[Token]]:
    """Paragraphs, lists, tables and the like, each with what is within it."""
    starts = [i for i, each in enumerate(tokens) if each.level == 0 and each.nesting >= 0]
    return [tokens[start:stop] for start, stop in pairwise([*starts, len(tokens)])]


def _markdown(tokens: list[Token]) -> Markdown:
    for each in tokens:
        for child in each.children or ():
            if child.type == "softbreak":
                child.type = "hardbreak"  # the model's line breaks stay
    markdown = Markdown("", hyperlinks=False)  # an address that is not seen may be any
    markdown.parsed = tokens
    return markdown


@contextlib.contextmanager
def _without_echo() -> Iterator[None]:
    """What is typed meanwhile stays for the next prompt, also behind Ctrl-C, and out of the
    picture."""
    if sys.platform == "win32":
        yield
        return
    import termios

    descriptor = sys.stdin.fileno()
    before = termios.tcgetattr(descriptor)
    quiet = [*before[:3], before[3] & ~termios.ECHO | termios.NOFLSH, *before[4:]]
    termios.tcsetattr(descriptor, termios.TCSADRAIN, quiet)
    try:
        yield
    finally:
        termios.tcsetattr(descriptor, termios.TCSADRAIN, before)
