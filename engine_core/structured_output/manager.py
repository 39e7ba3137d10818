"""Grammars of requests: compiled once by content on threads beside the loop, kept in an LRU cache.
A request waits for its grammar; the step never does."""

import dataclasses
import hashlib
import logging
import os
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable
from collections.abc import Sequence as AnySequence
from typing import TYPE_CHECKING, Protocol

import msgspec

from engine_core.errors import RequestRefused
from engine_core.observers.base import EnginePart, FinishedStep
from engine_core.process.suspects import Suspects
from engine_core.scheduler import Request, SchedulerOutput
from engine_core.scheduler.constraints import ConstrainedSequence, ForcedTokens, KnownTokens
from engine_core.structured_output.masks import MaskFiller, StepMasks
from engine_core.structured_output.wide_stack import start_thread
from protocol.errors import ErrorCode
from protocol.requests import EngineRequest
from protocol.structured_output import StructuredOutput

if TYPE_CHECKING:
    from llguidance import LLMatcher

logger = logging.getLogger(__name__)

_MAX_CACHED = 256
_MAX_CACHED_CHARS = 8 << 20
_MAX_COMPILING = 2
_MAX_COMPILE_S = 30.0
_MAX_ABANDONED = 4
_MAX_QUEUED_BY_CLIENT = 1 << 15
_IDLE_WAIT_S = 0.02
_NICENESS = 10
"""Threads that compile leave the processor to the step."""


class Compiler(Protocol):
    def compile(self, asked: StructuredOutput, is_begun: Callable[[], None]) -> "LLMatcher":
        """Raises GrammarError: it cannot be used. `is_begun` is called before what may end this
        process."""

    def start(self) -> None:
        """Start now what `compile` would start otherwise."""

    def close(self) -> None:
        """End what has been started."""


@dataclasses.dataclass(eq=False, slots=True)
class CachedGrammar:
    """One content. `matcher` or `failure` is there when it has been compiled."""

    asked: StructuredOutput
    matcher: "LLMatcher | None" = None
    failure: str | None = None
    requests: list[Request] = dataclasses.field(default_factory=list)
    """Those that wait for it."""
    started_s: float | None = None
    is_lasting: bool = True
    """Whether `failure` would be met again."""
    fingerprint: int = 0

    @property
    def is_ready(self) -> bool:
        return self.matcher is not None

    @property
    def is_done(self) -> bool:
        return self.matcher is not None or self.failure is not None


class StructuredOutputs(EnginePart):
    """See `Constraints`. All but `_compile` and `_start` is called on the loop's thread.

    Args:
        make_compiler: called once, on a thread, for the first request or by `prepare`: it may take
            a second.
        vocab_size: length of a row of logits.
        suspects: contents that may have killed the engine before are compiled alone, and what is
            being compiled is noted.
        clock: seconds.
    """

    def __init__(
        self,
        make_compiler: Callable[[], Compiler],
        *,
        vocab_size: int,
        suspects: Suspects | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._clock = clock
        self._masks = MaskFiller(vocab_size)
        self._grammars: OrderedDict[StructuredOutput, CachedGrammar] = OrderedDict()
        self._queues: OrderedDict[tuple[int, str | None], deque[CachedGrammar]] = OrderedDict()
        """Grammars to be compiled, by client and tenant: each in turn."""
        self._at_hand: list[CachedGrammar] = []
        self._num_abandoned = 0
        self._compiled: list[tuple[Request, str | None]] = []
        self._done: deque[tuple[CachedGrammar, LLMatcher | str]] = deque()
        self._has_news = threading.Event()
        self._compiler: Compiler | str | None = None
        """The compiler, or why there is none."""
        self._has_compiler = threading.Event()
        self._make_compiler: Callable[[], Compiler] | None = make_compiler
        self._suspects = suspects

    def prepare(self) -> None:
        """Make the compiler, unless it is there or being made. It holds the interpreter for tenths
        of a second: not at start, but while nothing else is to do."""
        make_compiler, self._make_compiler = self._make_compiler, None
        if make_compiler is not None:
            threading.Thread(target=self._start, args=(make_compiler,), daemon=True).start()

    # ------------------------------------------------------------------ requests

    def admit(self, message: EngineRequest, request: Request) -> None:
        """Give the request its grammar, if it asks for one.
        Raises RequestRefused: it is known to be unusable, or too many wait to be compiled."""
        asked = request.sampling_params.structured_output
        if asked is None:
            return
        self._take_news()
        grammar = self._grammars.get(asked)
        if grammar is None:
            grammar = self._enqueue(asked, (request.client_index, request.message.tenant))
        self._grammars.move_to_end(asked)
        if grammar.failure is not None:
            raise RequestRefused(ErrorCode.INVALID_REQUEST, grammar.failure)
        request.grammar = grammar
        if not grammar.is_ready:
            grammar.requests.append(request)

    def take_compiled(self) -> AnySequence[tuple[Request, str | None]]:
        self._take_news()
        compiled, self._compiled = self._compiled, []
        return compiled

    def forced_tokens(self, sequences: Iterable[KnownTokens]) -> Iterable[ForcedTokens]:
        return self._masks.forced_tokens(sequences)

    def begin_masks(self, constrained: AnySequence[ConstrainedSequence]) -> StepMasks:
        found = []
        for each in constrained:
            grammar = each.sequence.request.grammar
            assert isinstance(grammar, CachedGrammar)
            assert grammar.matcher is not None, "it was to wait"
            found.append((each, grammar.matcher))
        return self._masks.begin(found)

    # ------------------------------------------------------------------ between steps

    def on_plan(self, plan: SchedulerOutput, now_s: float) -> None:
        self._masks.drop(plan.finished_req_ids)

    def on_step(self, step: FinishedStep) -> None:
        """A step without tokens may wait for a grammar."""
        if self._at_hand and not step.plan.total_num_scheduled_tokens:
            self._has_news.wait(_IDLE_WAIT_S)
        self._take_news()

    def close(self) -> None:
        if isinstance(self._compiler, str | None):
            return
        self._compiler.close()

    def _enqueue(self, asked: StructuredOutput, sender: tuple[int, str | None]) -> CachedGrammar:
        waiting = self._queues.setdefault(sender, deque())
        if len(waiting) >= _MAX_QUEUED_BY_CLIENT or self._num_abandoned >= _MAX_ABANDONED:
            raise RequestRefused(
                ErrorCode.QUEUE_FULL,
                f"{len(waiting)} structured outputs of this client wait to be compiled and "
                f"{self._num_abandoned} take longer than {_MAX_COMPILE_S:g} s; try again later",
            )
        grammar = CachedGrammar(asked)
        if self._suspects is not None:
            grammar.fingerprint = fingerprint_of(asked)
            if grammar.fingerprint in self._suspects.refused:
                raise RequestRefused(
                    ErrorCode.KILLED_ENGINE,
                    f"the engine died each time it compiled {asked.name}, at last alone; change "
                    "it, and report it with the engine's log",
                )
        self._grammars[asked] = grammar
        waiting.append(grammar)
        self.prepare()
        self._start_next()
        return grammar

    def _start_next(self) -> None:
        while self._queues and len(self._at_hand) < _MAX_COMPILING:
            sender, waiting = self._queues.popitem(last=False)
            if not waiting:
                continue
            if self._at_hand and any(map(self._is_suspect, (waiting[0], *self._at_hand))):
                self._queues[sender] = waiting
                self._queues.move_to_end(sender, last=False)
                return  # it is compiled alone
            grammar = waiting.popleft()
            self._queues[sender] = waiting
            self._at_hand.append(grammar)
            start_thread(self._compile, grammar, name="grammar")

    def _is_suspect(self, grammar: CachedGrammar) -> bool:
        return self._suspects is not None and self._suspects.is_suspect(grammar.fingerprint)

    def _take_news(self) -> None:
        """Take in what the threads have done, and what takes them too long."""
        if not self._at_hand and not self._done:
            return
        self._has_news.clear()
        while self._done:
            grammar, result = self._done.popleft()
            if grammar in self._at_hand:
                self._at_hand.remove(grammar)
                self._end(grammar, result)
            else:
                self._num_abandoned -= 1
        for grammar in [*self._at_hand]:
            started_s = grammar.started_s
            if started_s is not None and self._clock() - started_s > _MAX_COMPILE_S:
                self._at_hand.remove(grammar)
                self._num_abandoned += 1
                self._end(
                    grammar,
                    f"{grammar.asked.name} cannot be used: to compile it "
                    f"takes longer than {_MAX_COMPILE_S:g} s; simplify it",
                )
        self._start_next()

    def _end(self, grammar: CachedGrammar, result: "LLMatcher | str") -> None:
        if isinstance(result, str):
            grammar.failure = result
        else:
            grammar.matcher = result
        if not grammar.is_lasting:
            self._grammars.pop(grammar.asked, None)
        self._compiled += [(request, grammar.failure) for request in grammar.requests]
        grammar.requests.clear()
        self._evict()

    def _evict(self) -> None:
        """Requests keep the grammars that they have."""
        num_chars = sum(len(asked.text) for asked in self._grammars)
        for asked in [*self._grammars]:
            if len(self._grammars) <= _MAX_CACHED and num_chars <= _MAX_CACHED_CHARS:
                return
            if self._grammars[asked].is_done:
                del self._grammars[asked]
                num_chars -= len(asked.text)

    # ------------------------------------------------------------------ on other threads

    def _start(self, make_compiler: Callable[[], Compiler]) -> None:
        try:
            self._compiler = make_compiler()
            self._compiler.start()
        except BaseException as error:  # also the library's panics
            self._compiler = str(error)
            logger.warning("structured outputs will be refused: %s", error)
        finally:
            self._has_compiler.set()

    def _compile(self, grammar: CachedGrammar) -> None:
        result: LLMatcher | str = "it failed"
        try:
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICENESS)
            self._has_compiler.wait()
            compiler = self._compiler
            assert compiler is not None
            grammar.started_s = self._clock()
            if isinstance(compiler, str):
                result = compiler
            else:
                result = compiler.compile(grammar.asked, lambda: self._note(grammar))
        except BaseException as error:
            result = str(error)
            grammar.is_lasting = getattr(error, "is_lasting", True)
        finally:
            if self._suspects is not None:
                self._suspects.end_compile(grammar.fingerprint)
            self._done.append((grammar, result))
            self._has_news.set()

    def _note(self, grammar: CachedGrammar) -> None:
        if self._suspects is not None:
            self._suspects.begin_compile(grammar.fingerprint)


def fingerprint_of(asked: StructuredOutput) -> int:
    digest = hashlib.blake2b(msgspec.msgpack.encode(asked), digest_size=8)
    return int.from_bytes(digest.digest(), "little")
