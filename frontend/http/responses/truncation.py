"""`truncation: auto`: of a conversation that is too long the oldest items are left out, whole."""

import contextlib
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence

import msgspec

from frontend.errors import PromptTooLong
from frontend.http.generation.requests import ChatCompletionRequest, ChatMessage
from frontend.outputs import RequestOutput

logger = logging.getLogger(__name__)

_ROOM = 4
"""A quarter of the model's length is left for the answer."""
Outputs = AsyncGenerator[RequestOutput, None]


async def fitted(
    outputs: Outputs,
    chat: ChatCompletionRequest,
    generate: Callable[[ChatCompletionRequest], Awaitable[Outputs]],
) -> Outputs:
    """`outputs`; where their prompt is too long, those of the same chat without its oldest turns.
    Raises PromptTooLong: the last turn alone is."""
    num_dropped = 0
    while True:
        try:
            async with contextlib.aclosing(outputs):
                async for output in outputs:
                    yield output
            return
        except PromptTooLong as error:
            kept = _shortened(chat.messages, error)
            num_dropped += len(chat.messages) - len(kept)
            logger.warning("truncation: the oldest %d messages are left out", num_dropped)
            chat = msgspec.structs.replace(chat, messages=kept)
            outputs = await generate(chat)


def _shortened(messages: Sequence[ChatMessage], error: PromptTooLong) -> list[ChatMessage]:
    """Without as many of the oldest messages as the error says, at least one; instructions and
    the last turn stay, and so do calls with their results."""
    first = next(
        (at for at, each in enumerate(messages) if each.role not in ("system", "developer")),
        len(messages),
    )
    sizes = [len(msgspec.json.encode(each)) for each in messages]
    share = 0.5
    if error.num_tokens and error.most:
        share = error.most * (1 - 1 / _ROOM) / error.num_tokens
    too_many = sum(sizes) * (1 - share)
    last = max((at for at, each in enumerate(messages) if each.role == "user"), default=first)
    for at in range(first + 1, last + 1):
        too_many -= sizes[at - 1]
        if messages[at].role != "tool" and too_many <= 0:
            return [*messages[:first], *messages[at:]]
    if last > first:
        return [*messages[:first], *messages[last:]]
    raise error
