"""`engine-client chat`: a conversation at the terminal, or line by line from a pipe.

The main thread reads lines; the client lives on an event loop in a thread of its own, so that it
goes on answering the daemon while nobody types, and Ctrl-C reaches the reader at once.
"""

from __future__ import annotations

import contextlib
import re
import sys
from dataclasses import dataclass, field

from frontend.async_llm import AsyncLLM
from frontend.chat_template import ChatTemplateError
from frontend.cli.app import EXIT_FAULT, TurnOptions, UsageError, print_fault
from frontend.cli.sampling_options import SamplingOptions
from frontend.errors import EngineClientError, InvalidInput
from frontend.event_loop import LoopThread
from frontend.outputs import CompletionOutput
from frontend.sampling_params import SamplingParams

_COMMANDS = "/reset starts over, /exit or Ctrl-D leaves, Ctrl-C stops an answer"
_COMMAND = re.compile(r"/\w+")


@dataclass
class Conversation:
    """What was said so far."""

    system: str | None
    turns: list[dict[str, str]] = field(default_factory=list)

    def messages(self) -> list[dict[str, str]]:
        head = [] if self.system is None else [{"role": "system", "content": self.system}]
        return [*head, *self.turns]

    def reset(self) -> None:
        self.turns.clear()


@dataclass
class Answer:
    """An answer as far as it has come."""

    text: str = ""
    last: CompletionOutput | None = None


def run_chat(
    address: str | None, *, system: str | None, sampling: SamplingOptions, turn: TurnOptions
) -> int:
    """Returns the exit code.

    Raises:
        UsageError: sampling options that cannot be.
        EngineClientError: no engine answers.
    """
    is_terminal = sys.stdin.isatty() and sys.stdout.isatty()
    loop = LoopThread("engine-client chat")
    try:
        llm = loop.run(AsyncLLM.connect(address, client_name="engine-client chat"))
        try:
            return _Chat(loop, llm, Conversation(system), sampling, turn, is_terminal).run()
        finally:
            loop.run(llm.close())
    finally:
        loop.close()


class _Chat:
    def __init__(
        self,
        loop: LoopThread,
        llm: AsyncLLM,
        conversation: Conversation,
        sampling: SamplingOptions,
        turn: TurnOptions,
        is_terminal: bool,
    ) -> None:
        self._loop = loop
        self._llm = llm
        self._conversation = conversation
        self._turn = turn
        self._is_terminal = is_terminal
        try:
            self._params = sampling.to_params(llm.model.default_sampling)
        except InvalidInput as error:
            raise UsageError(str(error)) from None

    def run(self) -> int:
        self._say(f"{self._llm.model.name} at {self._llm.address}. {_COMMANDS}.")
        if self._is_terminal:
            with contextlib.suppress(ImportError):
                import readline  # noqa: F401  gives input() editing and history
        while True:
            try:
                line = self._read_line()
            except KeyboardInterrupt:
                if not self._is_terminal:
                    raise
                self._say(f"\n{_COMMANDS}")
                continue
            if line is None or line.strip() == "/exit":
                return 0
            if not self._handle(line.strip()) and not self._is_terminal:
                return EXIT_FAULT

    def _read_line(self) -> str | None:
        """The next line, None at the end of input."""
        if not self._is_terminal:
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
            self._conversation.reset()
            self._say("the conversation starts over")
            return True
        if _COMMAND.fullmatch(line):
            print_fault(f"there is no command {line}; {_COMMANDS}")
            return False
        return self._answer(line)

    def _answer(self, line: str) -> bool:
        turns = self._conversation.turns
        turns.append({"role": "user", "content": line})
        answer = Answer()
        try:
            prompt_token_ids = self._prompt()
            self._loop.run(_stream(self._llm, prompt_token_ids, self._params, self._turn, answer))
        except KeyboardInterrupt:
            if not self._is_terminal:
                raise
            sys.stdout.write(" [stopped]")
        except (EngineClientError, ChatTemplateError) as error:
            # the question is taken back: it may be asked again, shorter or later
            turns.pop()
            if answer.text:
                sys.stdout.write("\n")
            print_fault(error)
            return False
        sys.stdout.write("\n")
        sys.stdout.flush()
        turns.append({"role": "assistant", "content": answer.text})
        return self._report_end(answer.last)

    def _prompt(self) -> list[int]:
        tokenizer = self._llm.get_tokenizer()
        text = tokenizer.apply_chat_template(self._conversation.messages())
        token_ids = tokenizer.encode(text, add_special_tokens=False)
        limit = self._llm.model.max_model_len
        if len(token_ids) >= limit:
            raise InvalidInput(
                f"the conversation has {len(token_ids)} tokens, the limit is max_model_len - 1 = "
                f"{limit - 1}; /reset to start over, or ask something shorter"
            )
        return token_ids

    def _report_end(self, last: CompletionOutput | None) -> bool:
        if last is None or last.finish_reason in (None, "stop"):
            return True
        if last.finish_reason == "length":
            self._say("[the answer was cut: max_tokens or the model's length is reached]")
            return True
        print_fault(f"the engine ended the answer ({last.finish_reason}): {last.detail}")
        return False

    def _say(self, text: str) -> None:
        """What is not the model's goes to stderr, and only where somebody reads along."""
        if self._is_terminal:
            sys.stderr.write(text + "\n")
            sys.stderr.flush()


async def _stream(
    llm: AsyncLLM,
    prompt_token_ids: list[int],
    params: SamplingParams,
    turn: TurnOptions,
    answer: Answer,
) -> None:
    stream = llm.generate(
        {"prompt_token_ids": prompt_token_ids}, params, priority=turn.priority, tenant=turn.tenant
    )
    async with contextlib.aclosing(stream) as outputs:
        async for output in outputs:
            for part in output.outputs:
                answer.text += part.text
                answer.last = part
                sys.stdout.write(part.text)
                sys.stdout.flush()
