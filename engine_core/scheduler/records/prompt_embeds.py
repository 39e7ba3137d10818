"""prompt_embeds of a request as the engine keeps them: bytes that the runner makes tensors of, and
hashes of what they hold for the names of blocks."""

import dataclasses
from collections.abc import Iterable, Sequence
from hashlib import blake2b

from engine_core.kv_cache import CONTENT_HASH_BYTES, ContentSpan


@dataclasses.dataclass(frozen=True, slots=True, weakref_slot=True, eq=False)
class EmbeddedRows:
    """Hidden states of prompt positions [start, stop).

    Attributes:
        dtype: float32, float16 or bfloat16.
        data: the rows one behind the other, little-endian; a client's frame, not copied.
    """

    start: int
    stop: int
    dtype: str
    data: memoryview

    def content_spans(self, block_size: int) -> Iterable[ContentSpan]:
        """A span a block, so that prompts with equal leading rows share blocks."""
        row_bytes, start = self.data.nbytes // (self.stop - self.start), self.start
        while start < self.stop:
            stop = min(self.stop, (start // block_size + 1) * block_size)
            part = self.data[(start - self.start) * row_bytes : (stop - self.start) * row_bytes]
            contents = blake2b(
                f"{self.dtype} {row_bytes} ".encode(), digest_size=CONTENT_HASH_BYTES
            )
            contents.update(part)
            yield ContentSpan(start, stop, contents.digest())
            start = stop


def token_ranges(embeds: Sequence[EmbeddedRows], num_prompt_tokens: int) -> list[slice]:
    """Ranges of a prompt that have tokens: what stands at other positions is counted nowhere."""
    starts = [0, *(rows.stop for rows in embeds)]
    stops = [*(rows.start for rows in embeds), num_prompt_tokens]
    return [slice(*ends) for ends in zip(starts, stops, strict=True)]
