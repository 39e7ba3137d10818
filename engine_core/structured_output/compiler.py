"""From what a request asks for to a matcher of llguidance. Each content is proved in a process of
its own first (`sandbox.py`), with less time, memory and stack than here."""

import logging
import queue
import signal
import time
from collections.abc import Callable

import msgspec
from llguidance import LLMatcher

from engine_core.server.limited_log import LimitedLog
from engine_core.structured_output.grammar_error import GrammarError
from engine_core.structured_output.sandbox import LIMITS, PROOF_BYTES
from engine_core.structured_output.tokens import PARSER_LIMITS, Setup, read_tokenizer
from protocol.sandbox import Ending, SandboxEnded, SandboxProcess, SandboxRefused
from protocol.structured_output import StructuredOutput

logger = logging.getLogger(__name__)

_NUM_PROCESSES = 2
"""Contents proved at the same time; a process is started when it is needed."""
_SMALLER = "make it smaller and flatter"
_BY_ITSELF = (f"by signal {signal.SIGSEGV}", f"by signal {signal.SIGABRT}")


class GrammarCompiler:
    """For one model's tokens. Takes tenths of a second, holding the interpreter.
    Raises GrammarError: llguidance cannot read this tokenizer.

    Args:
        tokenizer_json: a `tokenizers` document.
        vocab_size: length of a row of logits.
        eos_token_ids: they end an answer where its grammar may end; at least one.
    """

    def __init__(
        self,
        tokenizer_json: bytes,
        *,
        vocab_size: int,
        eos_token_ids: tuple[int, ...],
    ) -> None:
        setup = Setup(tokenizer_json, vocab_size, eos_token_ids)
        self._tokenizer = read_tokenizer(setup)
        self._processes = [
            SandboxProcess(
                "engine_core.structured_output.sandbox",
                LIMITS,
                setup=lambda: msgspec.msgpack.encode(setup),
            )
            for _ in range(_NUM_PROCESSES)
        ]
        self._is_closed = False
        self._log = LimitedLog(logger, logging.WARNING, time.monotonic)
        self._free: queue.LifoQueue[SandboxProcess] = queue.LifoQueue()
        for process in reversed(self._processes):
            self._free.put(process)

    def compile(
        self, asked: StructuredOutput, is_begun: Callable[[], None] = lambda: None
    ) -> LLMatcher:
        """A matcher at its start; copies of it are used. Its first mask has been made, so that what
        is slow once is not slow in a step. Raises GrammarError.

        Args:
            is_begun: called when it has been proved, before it is compiled in this process.
        """
        proved = self.prove(asked)
        is_begun()
        matcher = LLMatcher(self._tokenizer, proved, limits=PARSER_LIMITS, log_level=0)
        matcher.deep_copy().compute_bitmask()
        if matcher.is_error():  # after the proof: not of this text
            raise GrammarError(f"{asked.name} cannot be used: {matcher.get_error():.400}")
        return matcher

    def prove(self, asked: StructuredOutput) -> str:
        """The grammar that another process has compiled and walked through.
        Raises GrammarError."""
        process = self._free.get()
        try:
            return process.call(msgspec.msgpack.encode(asked)).decode()
        except SandboxRefused as error:
            raise GrammarError(f"{error}") from None
        except SandboxEnded as error:
            if not self._is_closed:
                self._log.log("ended", f"a structured output's process gave no answer: {error}")
            is_lasting = error.ending in (Ending.CPU_TIME, Ending.MEMORY) or (
                error.detail in _BY_ITSELF
            )
            raise GrammarError(
                f"{asked.name} cannot be used: {_why(error)}",
                is_lasting=is_lasting,
            ) from None
        finally:
            self._free.put(process)

    def start(self) -> None:
        """The first process, which `compile` then need not wait for."""
        self._processes[0].start()

    def close(self) -> None:
        """End the processes, also one that is at work."""
        self._is_closed = True
        for process in self._processes:
            process.kill()
            process.close()


def _why(ended: SandboxEnded) -> str:
    match ended.ending:
        case Ending.NOT_STARTED:
            return f"no process can be started to compile it: {ended.detail}; try again later"
        case Ending.WALL_TIME:
            return f"to compile it took longer than {LIMITS.wall_s:g} s; try again later"
        case Ending.CPU_TIME:
            return f"to compile it takes more than {LIMITS.cpu_s:g} s; {_SMALLER}"
        case Ending.MEMORY:
            return f"to compile it takes more than {PROOF_BYTES >> 20} MiB of memory; {_SMALLER}"
        case Ending.CRASH:
            return f"it ended the process that compiled it, {ended.detail}; {_SMALLER}"
