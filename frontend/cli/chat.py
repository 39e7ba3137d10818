"""`engine-client chat`: a conversation at the terminal, or line by line from a pipe. The main
thread reads lines; the client runs on an event loop in another thread, so that it serves its
connection while the user types, and Ctrl-C reaches the reader at once."""

from __future__ import annotations

import contextlib
import dataclasses
import re
import sys
from pathlib import Path

from frontend.async_llm import AsyncLLM
from frontend.chat_template import template_process
from frontend.cli.connected import connected
from frontend.cli.options import (
    EXIT_FAULT,
    DaemonOptions,
    SamplingOptions,
    SchedulingOptions,
    print_fault,
    read_template,
)
from frontend.errors import EngineClientError, InvalidInput
from frontend.event_loop import LoopThread
from frontend.outputs import CompletionOutput
from frontend.sampling_params import RequestOutputKind, SamplingParams

_COMMANDS = "/reset starts over, /exit or Ctrl-D leaves, Ctrl-C stops an answer"
_COMMAND = re.compile(r"/\w+")


def run_chat(
    daemon: DaemonOptions,
    system: str | None,
    chat_template: Path | None,
    sampling: SamplingOptions,
    scheduling: SchedulingOptions,
) -> int:
    """Returns the exit code.

    Raises:
        UsageError: sampling options outside their limits, or no chat template.
        EngineClientError: no engine answers.
    """
    template_process.start()
    is_terminal = sys.stdin.isatty() and sys.stdout.isatty()
    loop = LoopThread("engine-client chat")
    try:
        connection = connected(daemon, "chat")
        llm = loop.run_and_wait(connection.__aenter__())
        try:
            params = sampling.to_params(llm.model, RequestOutputKind.DELTA)
            template = read_template(chat_template, llm.model)
            first = [] if system is None else [{"role": "system", "content": system}]
            chat = _Chat(loop, llm, first, template, params, scheduling, is_terminal)
            return chat.read_and_answer()
        finally:
            loop.run_and_wait(connection.__aexit__(None, None, None))
    finally:
        loop.close()


@dataclasses.dataclass
class _Chat:
    loop: LoopThread
    llm: AsyncLLM
    system: list[dict[str, str]]
    chat_template: str | None
    params: SamplingParams
    scheduling: SchedulingOptions
    is_terminal: bool
    turns: list[dict[str, str]] = dataclasses.field(default_factory=list)

    def read_and_answer(self) -> int:
        self._say(f"{self.llm.model.name} at {self.llm.address}. {_COMMANDS}.")
        if self.is_terminal:
            with contextlib.suppress(ImportError):
                import readline  # noqa: F401  gives input() editing and history
        while True:
            try:
                line = self._read_line()
            except KeyboardInterrupt:
                if not self.is_terminal:
                    raise
                self._say(f"\n{_COMMANDS}")
                continue
            if line is None or line.strip() == "/exit":
                return 0
            if not self._handle(line.strip()) and not self.is_terminal:
                return EXIT_FAULT

    def _read_line(self) -> str | None:
        """The next line, None at the end of input."""
        if not self.is_terminal:
            return sys.stdin.readline() or None
        try:
            return input("> ")
        except EOFError:
            self._say("")
            return None

    def _handle(self, line: str) -> bool:
        """False if the line could not be answered."""
        if not line:
            return True
        if line == "/reset":
            self.turns.clear()
            self._say("the conversation starts over")
            return True
        if _COMMAND.fullmatch(line):
            print_fault(f"there is no command {line}; {_COMMANDS}")
            return False
        return self._answer(line)

    def _answer(self, line: str) -> bool:
        turns = self.turns
        turns.append({"role": "user", "content": line})
        parts: list[CompletionOutput] = []
        try:
            self.loop.run_and_wait(self._stream(parts))
        except KeyboardInterrupt:
            if not self.is_terminal:
                raise
            sys.stdout.write(" [stopped]")
        except EngineClientError as error:
            # the question is dropped: it may be asked again, shorter or later
            turns.pop()
            if parts:
                sys.stdout.write("\n")
            hint = "; /reset starts over" if isinstance(error, InvalidInput) else ""
            print_fault(f"{error}{hint}")
            return False
        sys.stdout.write("\n")
        sys.stdout.flush()
        turns.append({"role": "assistant", "content": "".join(part.text for part in parts)})
        return not parts or self._report_end(parts[-1])

    async def _stream(self, parts: list[CompletionOutput]) -> None:
        """Prints the answer's parts and appends them to `parts`."""
        policy = dataclasses.asdict(self.scheduling)
        stream = self.llm.chat(
            [*self.system, *self.turns], self.params, chat_template=self.chat_template, **policy
        )
        async with contextlib.aclosing(stream) as outputs:
            async for output in outputs:
                parts += output.outputs
                sys.stdout.write("".join(part.text for part in output.outputs))
                sys.stdout.flush()

    def _report_end(self, last: CompletionOutput) -> bool:
        if last.finish_reason in (None, "stop"):
            return True
        if last.finish_reason == "length":
            self._say("[the answer was cut: max_tokens or the model's length is reached]")
            return True
        print_fault(f"the engine ended the answer ({last.finish_reason}): {last.detail}")
        return False

    def _say(self, text: str) -> None:
        """A message of the program, on stderr; at a terminal only."""
        if self.is_terminal:
            sys.stderr.write(text + "\n")
            sys.stderr.flush()
