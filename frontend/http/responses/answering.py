"""Makes the events of a response of the engine's outputs."""

import contextlib
import itertools
from collections import deque
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator, Mapping, Sequence

import msgspec

from frontend.async_llm import AsyncLLM
from frontend.http.answer_parts import AnswerFormat, AnswerParser
from frontend.http.generation.answers import TokenCounts, finish_reason, token_logprobs
from frontend.http.responses import bodies
from frontend.http.responses.server_tools import ServerTools
from frontend.http.responses.truncation import Outputs
from frontend.http.responses.writer import ResponseWriter
from frontend.logprobs import Logprob
from frontend.outputs import CompletionOutput

Events = AsyncGenerator[bodies.ResponseEvent, None]
Keep = Callable[[], Awaitable[None]]


class Answering:
    """One answer.

    Args:
        streams: arguments of calls are passed on as they come.
        num_top: with log-probabilities, so many of the likeliest tokens; None: without.
        server_tools: those of the request that this server runs.
    """

    def __init__(
        self,
        llm: AsyncLLM,
        parts: AnswerFormat,
        writer: ResponseWriter,
        *,
        streams: bool,
        num_top: int | None,
        server_tools: ServerTools,
    ) -> None:
        self._parts = parts
        self._server_tools = server_tools
        self.writer = writer
        self._streams = streams
        self._logprobs = None if num_top is None else TextLogprobs(llm, num_top)

    async def events(self, outputs: Outputs, keep: Keep | None = None) -> Events:
        """All but the first ones.

        Args:
            keep: called before the last of them.
        """
        counts = TokenCounts()
        num_reasoning_tokens = 0
        for each in self._server_tools.begin(self.writer):
            yield each
        for number in itertools.count():
            parser, reason = None, None
            async with contextlib.aclosing(outputs):
                async for output in outputs:
                    counts.count(number, output)
                    (part,) = output.outputs
                    reason = finish_reason(part)
                    parser = parser or self._parts.parser(
                        output.prompt, streams_arguments=self._streams
                    )
                    for each in self._written(parser, part):
                        yield each
                    num_reasoning_tokens += len(part.token_ids) if parser.is_reasoning else 0
            if reason != "stop":
                break
            async for each in self._server_tools.run(self.writer):
                yield each
            if (following := await self._server_tools.next(self.writer)) is None:
                break
            self._parts, outputs = following
        for each in self.writer.end(reason, _usage(counts, num_reasoning_tokens)):
            if each.response is not msgspec.UNSET and keep is not None:
                await keep()
            yield each

    def _written(
        self, parser: AnswerParser, part: CompletionOutput
    ) -> Iterator[bodies.ResponseEvent]:
        if self._logprobs is not None:
            self._logprobs.add(part.token_ids, part.logprobs or ())
        for piece in parser.feed(part.text, at_end=part.finished()):
            found = None
            if self._logprobs is not None:
                found = self._logprobs.take(piece if isinstance(piece, str) else None)
            yield from self.writer.add(piece, found)

    async def begun_events(self, outputs: Outputs, keep: Keep | None = None) -> Events:
        """All of them."""
        for each in self.writer.begin():
            yield each
        async for each in self.events(outputs, keep):
            yield each


class TextLogprobs:
    """Which tokens a text is made of: a parser holds texts back, and leaves marks out."""

    def __init__(self, llm: AsyncLLM, num_top: int) -> None:
        self._tokenizer = llm.get_tokenizer()
        self._num_top = num_top
        self._held: deque[tuple[bodies.Part, int]] = deque()
        """Entries of tokens, each with its number of bytes."""
        self._is_text = True

    def add(self, token_ids: Sequence[int], logprobs: Sequence[Mapping[int, Logprob]]) -> None:
        """Tokens of an output."""
        entries = msgspec.json.decode(
            token_logprobs(token_ids, logprobs, self._num_top, self._tokenizer)
        )
        self._held.extend((entry, len(entry["bytes"] or ())) for entry in entries)

    def take(self, text: str | None) -> list[bodies.Part]:
        """Those of the next text; None: something else comes, such as a call.

        Behind something else a text is what the last tokens are made of."""
        if text is None:
            self._is_text = False
            return []
        size = len(text.encode())
        if not self._is_text:
            num_held = sum(each for _, each in self._held)
            while self._held and num_held - self._held[0][1] >= size:
                num_held -= self._held.popleft()[1]
        self._is_text = True
        found = []
        while self._held and size > 0:
            entry, num_bytes = self._held.popleft()
            size -= num_bytes
            found.append(entry)
        return found


def _usage(counts: TokenCounts, num_reasoning_tokens: int) -> bodies.ResponseUsage:
    usage = counts.usage()
    return bodies.ResponseUsage(
        input_tokens=usage.prompt_tokens,
        input_tokens_details=bodies.InputTokensDetails(usage.prompt_tokens_details.cached_tokens),
        output_tokens=usage.completion_tokens,
        output_tokens_details=bodies.OutputTokensDetails(num_reasoning_tokens),
        total_tokens=usage.total_tokens,
    )
