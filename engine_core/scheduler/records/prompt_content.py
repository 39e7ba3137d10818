"""What stands in a prompt beside its tokens: hidden states, images and sounds."""

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from hashlib import blake2b
from typing import Any

from engine_core.kv_cache import CONTENT_HASH_BYTES, ContentSpan


@dataclasses.dataclass(frozen=True, slots=True, eq=False, weakref_slot=True)
class MultiModalFeature:
    """The scheduler reads all but `runs` and `tensors`, which are the model runner's."""

    modality: str
    start: int
    stop: int
    """Positions [start, stop) of the prompt depend on it."""
    num_rows: int
    """Rows of its encoder's output, each in the place of one of these positions."""
    identifier: bytes
    """Names its content and those that may share its encoder's output."""
    runs: tuple[tuple[int, int], ...] = ()
    """Positions [start, stop) that take one row each, in order."""
    tensors: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    """Arrays by transformers' names; not to be changed."""


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


class PromptContent:
    """
    Args:
        embeds: hidden states in place of embeddings, by rising positions.
        features: images and sounds, in order, without overlap.
        spans: what of the prompt is more than its tokens, beside `features`.

    Attributes:
        spans: those of the features among them, by rising positions.
        encoder_stop: behind the last position that depends on an encoder's output; 0 without any.
        num_encoder_tokens: rows that encoders make of the features.
    """

    def __init__(
        self,
        *,
        embeds: tuple[EmbeddedRows, ...] = (),
        features: Iterable[MultiModalFeature] = (),
        spans: Iterable[ContentSpan] = (),
    ) -> None:
        self.embeds = embeds
        self.features = tuple(features)
        inputs = (ContentSpan(each.start, each.stop, each.identifier) for each in self.features)
        self.spans = tuple(sorted((*spans, *inputs)))
        self.encoder_stop = self.features[-1].stop if self.features else 0
        self.num_encoder_tokens = sum(each.num_rows for each in self.features)

    @property
    def embeds_stop(self) -> int:
        """The end of the last range with hidden states in place of tokens; 0 without any."""
        return self.embeds[-1].stop if self.embeds else 0


TOKENS_ONLY = PromptContent()
