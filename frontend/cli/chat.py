"""`engine-client chat`: a conversation at the terminal, or line by line from a pipe. The main
thread reads lines; the client runs on an event loop in another thread, so that it serves its
connection while the user types, and Ctrl-C reaches the reader at once."""

import base64
import contextlib
import dataclasses
import json
import mimetypes
import re
import sys
import typing
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Annotated, Any

import msgspec
from cyclopts import Parameter

from frontend.cli.chat_model import ChatModel, daemons_lines
from frontend.cli.options import (
    DAEMON,
    EXIT_FAULT,
    SAMPLING,
    SCHEDULING,
    DaemonOptions,
    SamplingOptions,
    SchedulingOptions,
    UsageError,
    print_fault,
)
from frontend.errors import EngineClientError, InvalidInput
from frontend.event_loop import LoopThread
from frontend.multimodal.media import MAX_MEDIA_BYTES
from frontend.outputs import MAX_MODEL_LEN, CompletionOutput, RequestOutput
from frontend.text.chat_template import own_renderers
from protocol.presets import SAMPLING_NAMES

_HINT = "/help lists the commands, Ctrl-C stops an answer, Ctrl-D leaves"
_HELP = """\
/system TEXT      sets the system message; /system alone shows it, /system - removes it
/set NAME VALUE   sets a sampling parameter; VALUE default resets it, /set alone shows all
/show             shows the model, its context and what this conversation has set
/model            lists the models that your daemons serve; /load NAME goes on with another
/image FILE       sends a picture with the next message
/save FILE        writes the conversation: messages as JSON (FILE.json), else Markdown
/clear            forgets the conversation, not the system message
/bye              leaves, as /exit and Ctrl-D do
Enter sends, Alt-Enter begins a new line, a paste is one message, and so is what
stands between triple quotes. Ctrl-C stops an answer.
A message that begins with a slash: type a space before it."""
_LEAVE = ("/bye", "/exit", "/quit")
_COMMAND = re.compile(r"(/[a-z]+|/\?)(?:\s+(.*\S))?\s*")
_CONTROL = dict.fromkeys({*range(32), *range(127, 160)} - {ord("\n"), ord("\t")})
"""A model's answer commands no terminal."""


def chat(
    *,
    system: str | None = None,
    preset: str | None = None,
    chat_template: Path | None = None,
    image: Annotated[list[Path] | None, Parameter(negative="")] = None,
    markdown: bool = True,
    sampling: SamplingOptions = SAMPLING,
    scheduling: SchedulingOptions = SCHEDULING,
    daemon: DaemonOptions = DAEMON,
) -> int:
    """
    Args:
        system: The system message.
        preset: Apply what this name of your own stands for (engine-core create) to the daemon's
            model.
        chat_template: A file with a Jinja2 template to use in place of the model's.
        image: A picture to send with the first message; may be repeated.
        markdown: Render answers as Markdown, at a terminal.

    Raises:
        UsageError: sampling options outside their limits, no chat template, or a picture that
            cannot be read.
        EngineClientError: no engine answers.
    """
    own_renderers.start()
    try:
        images = [_image_part(each) for each in image or ()]
    except (InvalidInput, OSError) as error:
        raise UsageError(f"--image: {error}") from None
    is_terminal = sys.stdin.isatty() and sys.stdout.isatty()
    loop = LoopThread("engine-client chat")
    try:
        model = ChatModel.open(loop, daemon, preset, sampling, chat_template)
        if system is not None:
            model.system = system
        conversation = _Chat(loop, model, sampling, scheduling, is_terminal, images)
        try:
            if is_terminal:
                from frontend.cli.chat_terminal import markdown_answer, open_prompt

                conversation.prompt = open_prompt()
                if markdown:
                    conversation.show_answer = markdown_answer
            return conversation.read_and_answer()
        finally:
            conversation.model.close()
    finally:
        loop.close()


@contextlib.contextmanager
def _plain_answer() -> Iterator[Callable[[str], None]]:
    """The text as it comes, and the end of its line."""
    is_open = False

    def write(text: str) -> None:
        nonlocal is_open
        is_open = True
        sys.stdout.write(text)
        sys.stdout.flush()

    try:
        yield write
        is_open = True
    finally:
        if is_open:
            write("\n")


@dataclasses.dataclass
class _Chat:
    loop: LoopThread
    model: ChatModel
    sampling: SamplingOptions
    scheduling: SchedulingOptions
    is_terminal: bool
    images: list[dict[str, Any]]
    """Parts of the next message."""
    prompt: Callable[[], str] | None = None
    """None: lines of standard input."""
    show_answer: Callable[[], AbstractContextManager[Callable[[str], None]]] = _plain_answer
    turns: list[dict[str, Any]] = dataclasses.field(default_factory=list)

    def __post_init__(self) -> None:
        self.system, self.params = self.model.system, self.model.params

    def read_and_answer(self) -> int:
        self._say(f"{self.model.llm.model.name} at {self.model.llm.address}\n{_HINT}")
        while True:
            try:
                line = self._read_line()
            except KeyboardInterrupt:
                if not self.is_terminal:
                    raise
                self._say(_HINT)
                continue
            if line is None or line.strip() in _LEAVE:
                return 0
            if not self._handle(line) and not self.is_terminal:
                return EXIT_FAULT

    def _read_line(self) -> str | None:
        """The next line, None at the end of input."""
        if self.prompt is None:
            return sys.stdin.readline() or None
        try:
            return self.prompt()
        except EOFError:
            return None

    def _handle(self, line: str) -> bool:
        """False if the line could not be answered."""
        if not line.strip():
            return True
        command = _COMMAND.fullmatch(line)
        if command is None:
            return self._answer(line.rstrip())
        commands = {
            "/help": lambda _: self._tell(_HELP),
            "/?": lambda _: self._tell(_HELP),
            "/clear": self._clear,
            "/system": self._set_system,
            "/set": self._set,
            "/image": self._attach,
            "/show": self._show,
            "/model": self._load,
            "/load": self._load,
            "/save": self._save,
        }
        name, argument = command[1], command[2] or ""
        try:
            if name not in commands:
                raise InvalidInput(f"there is no command {name}; {_HINT}")
            commands[name](argument)
        except (EngineClientError, ValueError, OSError, RuntimeError) as error:
            # the last: ~ of no user
            print_fault(error)
            return False
        return True

    # commands

    def _clear(self, _argument: str) -> None:
        self.turns.clear()
        self.images.clear()
        self._say("the conversation starts over")

    def _set_system(self, text: str) -> None:
        if text:
            self.system = None if text == "-" else text
        self._tell(f"system message: {self.system or 'none'}")

    def _set(self, argument: str) -> None:
        """Raises InvalidInput: no such parameter, or not a value of it."""
        kinds = typing.get_type_hints(SamplingOptions)
        name, _, value = argument.partition(" ")
        if name == "system":  # as Ollama has it
            self._set_system(value.strip())
            return
        if name == "parameter":
            name, _, value = value.strip().partition(" ")
        name, value = name.replace("-", "_"), value.strip()
        name = SAMPLING_NAMES.get(name, name)
        if name and name not in kinds:
            raise InvalidInput(f"there is no parameter {name}; /set takes {', '.join(kinds)}")
        if value == "default":
            self.params = dataclasses.replace(
                self.params, **{name: getattr(self.model.params, name)}
            )
        elif value:
            try:
                given = [value] if name == "stop" else value
                given = msgspec.convert(given, kinds[name], strict=False)
            except msgspec.ValidationError as error:
                raise InvalidInput(f"{name} is {value!r}: {error}") from None
            self.params = dataclasses.replace(self.params, **{name: given})
        for each in [name] if name else kinds:
            self._tell(f"{each} {getattr(self.params, each)}")

    def _show(self, _argument: str) -> None:
        self._tell(self.model.described(self.params, self.system, len(self.turns)))

    def _load(self, name: str) -> None:
        """Raises InvalidInput, UsageError, EngineClientError: the model stays the one it was."""
        if name:
            model, before = ChatModel.load(self.loop, name, self.sampling), self.model
            before.close()
            self.model = model
            names = typing.get_type_hints(SamplingOptions)
            now = {each: getattr(self.params, each) for each in names}
            set_here = {k: v for k, v in now.items() if v != getattr(before.params, k)}
            self.params = dataclasses.replace(model.params, **set_here)
            if self.system == before.system or model.system is not None:
                self.system = model.system
            self._tell(f"{model.llm.model.name} at {model.llm.address} goes on; /clear starts over")
        else:
            self._tell(f"{self.model.llm.model.name} at {self.model.llm.address} answers")
            if lines := daemons_lines(self.model.llm.address):
                self._tell(f"{lines}\n/load NAME goes on with another")

    def _attach(self, file: str) -> None:
        """Raises OSError: it cannot be read. InvalidInput: there is none, or it is too large."""
        if not file:
            raise InvalidInput("/image needs the name of a FILE")
        self.images.append(_image_part(Path(file).expanduser()))
        self._tell(f"{len(self.images)} pictures go with the next message")

    def _save(self, file: str) -> None:
        """Raises OSError: it cannot be written. InvalidInput: it is there already."""
        path = Path(file).expanduser()
        if not file:
            raise InvalidInput("/save needs the name of a FILE")
        messages = self._messages()
        if path.suffix == ".json":
            text = json.dumps(messages, ensure_ascii=False, indent=1) + "\n"
        else:
            text = "\n".join(f"## {each['role']}\n\n{_shown(each)}\n" for each in messages)
        try:
            with path.open("x", encoding="utf-8") as opened:
                opened.write(text)
        except FileExistsError:
            raise InvalidInput(f"{path} is there already; give another name") from None
        self._tell(f"{len(messages)} messages are in {path}")

    # answers

    def _messages(self) -> list[dict[str, Any]]:
        first: list[dict[str, Any]] = []
        if self.system is not None:
            first.append({"role": "system", "content": self.system})
        return [*first, *self.turns]

    def _answer(self, line: str) -> bool:
        turns, images = self.turns, self.images
        content = [*images, {"type": "text", "text": line}] if images else line
        turns.append({"role": "user", "content": content})
        self.images = []
        outputs: list[RequestOutput] = []
        try:
            self.loop.run_and_wait(self._stream(outputs))
        except KeyboardInterrupt:
            if not self.is_terminal:
                raise
            self._say("[stopped]")
        except EngineClientError as error:
            # the question is dropped: it may be asked again, shorter or later
            turns.pop()
            self.images = images
            hint = "; /clear starts over" if isinstance(error, InvalidInput) else ""
            print_fault(f"{error}{hint}")
            return False
        parts = [part for output in outputs for part in output.outputs]
        turns.append({"role": "assistant", "content": "".join(part.text for part in parts)})
        if outputs and outputs[-1].metrics.first_token_s is not None:
            self._say(_speed(outputs))
        return not parts or self._report_end(parts[-1])

    async def _stream(self, shown: list[RequestOutput]) -> None:
        """Prints the answer's parts and appends them to `shown`."""
        policy = dataclasses.asdict(self.scheduling)
        stream = self.model.llm.chat(
            self._messages(), self.params, chat_template=self.model.chat_template, **policy
        )
        with self.show_answer() as write:
            async with contextlib.aclosing(stream) as outputs:
                async for output in outputs:
                    shown.append(output)
                    text = "".join(part.text for part in output.outputs)
                    write(text.translate(_CONTROL) if self.is_terminal else text)

    def _report_end(self, last: CompletionOutput) -> bool:
        if last.finish_reason in (None, "stop"):
            return True
        if last.finish_reason == "length":
            full = last.stop_reason == MAX_MODEL_LEN
            why = "the context is full; /clear starts over" if full else "max_tokens is reached"
            self._say(f"[the answer was cut: {why}]")
            return True
        print_fault(f"the engine ended the answer ({last.finish_reason}): {last.detail}")
        return False

    def _say(self, text: str) -> None:
        """A message of the program, on stderr; at a terminal only."""
        if self.is_terminal:
            self._tell(text)

    def _tell(self, text: str) -> None:
        """Say something that the user asked for."""
        sys.stderr.write(text + "\n")
        sys.stderr.flush()


def _image_part(path: Path) -> dict[str, Any]:
    """Raises OSError: it cannot be read. InvalidInput: it is too large."""
    with path.open("rb") as opened:
        data = opened.read(MAX_MEDIA_BYTES + 1)
    if len(data) > MAX_MEDIA_BYTES:
        raise InvalidInput(f"{path} has more than {MAX_MEDIA_BYTES} bytes; give a smaller file")
    kind = mimetypes.guess_type(path.name)[0] or "image"
    url = f"data:{kind};base64,{base64.b64encode(data).decode()}"
    return {"type": "image_url", "image_url": {"url": url}}


def _shown(message: dict[str, Any]) -> str:
    """Its text, with a word for each picture."""
    content = message["content"]
    if isinstance(content, str):
        return content
    return "\n\n".join(part.get("text", "[picture]") for part in content)


def _speed(outputs: list[RequestOutput]) -> str:
    num_tokens = sum(len(part.token_ids) for output in outputs for part in output.outputs)
    metrics = outputs[-1].metrics
    first_s, last_s = metrics.first_token_s or 0.0, metrics.last_token_s or 0.0
    speed = f", {(num_tokens - 1) / (last_s - first_s):.1f} tokens/s" if last_s > first_s else ""
    return f"[{num_tokens} tokens{speed}, first token after {first_s:.2f} s]"
