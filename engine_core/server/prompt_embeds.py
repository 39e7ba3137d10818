"""Hidden states that a request gives (prompt_embeds): its binary frames are checked here, before
the scheduler sees them."""

import struct
from collections.abc import Iterator, Sequence
from typing import Any
from weakref import WeakSet

import numpy as np

from engine_core.errors import RequestRefused
from engine_core.kv_cache import ContentSpan
from engine_core.scheduler.records.prompt_content import EmbeddedRows
from protocol.codec import binary_frame
from protocol.errors import ErrorCode, InvalidParameter, MalformedMessage
from protocol.prompt_embeds import PromptEmbedsInfo
from protocol.requests import EngineRequest

_REQUESTS_AT_ONCE = 16
"""How many requests of the largest size may be unfinished."""
_PIECE = 2**17
"""Elements that are looked at together: they stay in a core's cache."""


class PromptEmbedsReader:
    """
    Args:
        info: what clients are told.
        block_size: of the KV cache.
        largest_number: that the model's dtype holds.
    """

    def __init__(self, info: PromptEmbedsInfo, *, block_size: int, largest_number: float) -> None:
        self.info = info
        self._block_size = block_size
        self._unfinished: WeakSet[EmbeddedRows] = WeakSet()
        (bits,) = struct.unpack("<I", struct.pack("<f", min(largest_number, 3.4028234e38)))
        self._formats: dict[str, tuple[np.dtype[Any], int, int]] = {
            "float32": (np.dtype("<u4"), 2**31 - 1, bits),
            "bfloat16": (np.dtype("<u2"), 2**15 - 1, bits >> 16),
            "float16": (np.dtype("<u2"), 2**15 - 1, 0x7BFF),
        }
        """Words of an element, all its bits but the sign, and those of the largest number."""

    def read(
        self, request: EngineRequest, frames: Sequence[bytes | memoryview]
    ) -> tuple[tuple[EmbeddedRows, ...], list[ContentSpan]]:
        """The request's rows, and their contents for the names of the blocks that they fill.

        Raises:
            InvalidParameter: a place, shape, dtype, size or number that cannot be.
            RequestRefused: unfinished requests have taken the memory there is for them.
        """
        spans, num_tokens = request.prompt_embeds, len(request.prompt_token_ids)
        self.info.check(spans, num_tokens, request.sampling_params)
        num_bytes = sum(span.num_bytes for span in spans)
        num_kept = sum(rows.data.nbytes for rows in self._unfinished)
        limit = _REQUESTS_AT_ONCE * self.info.max_bytes
        if num_kept + num_bytes > limit and not request.is_resumed:
            raise RequestRefused(
                ErrorCode.QUEUE_FULL,
                f"prompt_embeds of unfinished requests have {num_kept} bytes, with this one's "
                f"{num_bytes} they pass the limit of {limit}; retry later, or raise "
                "--max-prompt-embeds",
            )
        rows = tuple(self._read(request, frames))
        self._unfinished.update(rows)
        return rows, [span for each in rows for span in each.content_spans(self._block_size)]

    def _read(
        self, request: EngineRequest, frames: Sequence[bytes | memoryview]
    ) -> Iterator[EmbeddedRows]:
        for span in request.prompt_embeds:
            try:
                data = binary_frame(span.data, frames)
            except MalformedMessage as error:
                raise InvalidParameter(f"prompt_embeds: {error}") from None
            word, mask, largest = self._formats[span.data.dtype]
            elements = np.frombuffer(data, word)
            for start in range(0, len(elements), _PIECE):
                is_wrong = (elements[start : start + _PIECE] & mask) > largest
                if is_wrong.any():
                    row, column = divmod(start + int(is_wrong.argmax()), self.info.hidden_size)
                    raise InvalidParameter(
                        f"prompt_embeds is not finite, or larger than the model's dtype holds, at "
                        f"position {span.start + row}, column {column}; send finite numbers"
                    )
            yield EmbeddedRows(span.start, span.stop, span.data.dtype, data)


def read_prompt_embeds(
    reader: PromptEmbedsReader | None,
    request: EngineRequest,
    frames: Sequence[bytes | memoryview],
) -> tuple[tuple[EmbeddedRows, ...], list[ContentSpan]]:
    """What a request gives in place of tokens, and its contents. `reader`: None where they are off.
    Raises RequestRefused: the request cannot be served by this engine."""
    if not request.prompt_embeds:
        return (), []
    if reader is None:
        raise RequestRefused(
            ErrorCode.NOT_SUPPORTED,
            "prompt_embeds are off; send tokens, or start the engine with --enable-prompt-embeds",
        )
    if request.multimodal_inputs:
        raise RequestRefused(
            ErrorCode.INVALID_REQUEST,
            "prompt_embeds and multimodal_inputs cannot be combined; send one of them",
        )
    try:
        return reader.read(request, frames)
    except InvalidParameter as error:
        raise RequestRefused(ErrorCode.INVALID_REQUEST, str(error)) from None


def spelled_out(token_ids: Sequence[int], spans: Sequence[ContentSpan]) -> list[int]:
    """Token ids, and in place of what spans cover numbers that are equal where the contents of a
    span are: for traces, and to know a prompt again."""
    spelled = list(token_ids)
    for span in spans:
        first = int.from_bytes(span.content_hash[:4], "little")
        for position in range(span.start, span.stop):
            spelled[position] = (first + position - span.start) & 0x7FFFFFFF
    return spelled
