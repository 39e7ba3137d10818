"""Requests that ask for a vector, score or classes of a prompt instead of tokens behind it."""

import enum
import struct

from protocol.base import Message
from protocol.errors import InvalidParameter
from protocol.sampling import SamplingParams, check_whole

MAX_POOLED_VALUES = 2**24
"""Most values of one answer: 64 MiB on the wire."""
POOLING_SAMPLING = SamplingParams(max_tokens=1, temperature=0.0)
"""The sampling parameters of every pooling request: it samples nothing."""


class PoolingTask(enum.StrEnum):
    """The thing that is made of a prompt's hidden states, by vLLM's names."""

    EMBED = "embed"
    """One vector, [hidden size] or [dimensions]."""
    TOKEN_EMBED = "token_embed"
    """A vector a token, [tokens, hidden size]."""
    CLASSIFY = "classify"
    """[labels]."""
    TOKEN_CLASSIFY = "token_classify"
    """[tokens, labels]; of a step reward model, [steps, labels]; of BGE-M3, weights of [tokens]."""
    SCORE = "score"
    """A score of a text or a pair, [1]."""

    @property
    def of_tokens(self) -> bool:
        """Whether there is a row for each token."""
        return self in (PoolingTask.TOKEN_EMBED, PoolingTask.TOKEN_CLASSIFY)

    @property
    def has_head(self) -> bool:
        """Whether labels are scored."""
        return self not in (PoolingTask.EMBED, PoolingTask.TOKEN_EMBED)


class PoolingParams(Message, frozen=True):
    """Raises InvalidParameter: a value outside its limits, or two that contradict each other."""

    task: PoolingTask
    dimensions: int | None = None
    """The vector's first numbers (Matryoshka), before it is normalised; None: all."""
    use_activation: bool | None = None
    """Of a vector whether it has length 1, of labels whether they pass softmax or sigmoid. None: as
    the model is configured."""
    second_segment_start: int | None = None
    """Of a pair: tokens from here on are its second text (token type 1)."""

    def __post_init__(self) -> None:
        if self.dimensions is not None:
            check_whole("dimensions", self.dimensions, minimum=1)
            if self.task.has_head:
                raise InvalidParameter(
                    f"dimensions is {self.dimensions} for task {self.task.value}, whose labels are "
                    "what they are; omit it"
                )
        if self.second_segment_start is not None:
            check_whole("second_segment_start", self.second_segment_start, minimum=0)


class Pooled(Message, frozen=True):
    """A tensor on the wire."""

    shape: tuple[int, ...]
    data: bytes
    """float32, little-endian, row-major."""

    def rows(self) -> list[list[float]]:
        """Its one or two dimensions as rows; a vector is one row."""
        width, num_rows = self.shape[-1], self.shape[0] if len(self.shape) > 1 else 1
        return [
            list(struct.unpack_from(f"<{width}f", self.data, 4 * width * row))
            for row in range(num_rows)
        ]
