"""What makes rows of a prompt's images and sounds, and what is known of them without weights."""

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch

from engine_core.scheduler.records.prompt_content import MultiModalFeature

Tensors = Mapping[str, npt.NDArray[Any]]


class MultiModalEncoder(Protocol):
    """An encoder with its weights, for inputs that `InputFamily.num_rows` has accepted."""

    family: "InputFamily"

    def encode(self, tensors: Tensors) -> torch.Tensor:
        """Rows [N, (1 + D) * E] of one input, in the model's dtype, the same bits at every call: in
        the place of embeddings, then for each of the family's D layers that rows are added to."""


class InputFamily(Protocol):
    """A family's inputs, as far as they are known without its weights."""

    modalities: tuple[str, ...]
    is_bidirectional: bool
    """Tokens of a run see all of the run, also what stands behind them."""
    is_causal_without_window: bool
    """In layers without a window they see up to themselves all the same."""
    has_axes: bool
    """Each token has a position on each of three axes (M-RoPE)."""
    is_cross_attended: bool
    """The decoder attends to the rows: they take no places in its prompt."""
    num_added_layers: int
    """How many of the decoder's first layers have rows added to their output (DeepStack,
    arXiv:2406.04334)."""
    most_rows: int
    """Most rows of one input, as far as that is bounded by the model."""

    def num_rows(self, modality: str, tensors: Tensors) -> int:
        """Rows that the encoder makes of an input.
        Raises ValueError: tensors that the model does not take; value, limit, next action."""

    def grid(self, tensors: Tensors) -> tuple[int, int]:
        """Rows and columns of an input's run; only with axes."""


def positions_on_axes(
    family: InputFamily, inputs: Sequence[MultiModalFeature]
) -> tuple[npt.NDArray[np.int64], int]:
    """Positions on the axes time, row and column [3, P] of a prompt's tokens up to the last input's
    end, and what is added to the index of each token behind. As `get_rope_index` of transformers'
    Qwen2-VL: a grid of h x w takes max(h, w) positions of the text behind it."""
    parts: list[npt.NDArray[np.int64]] = []
    index = position = 0
    for each in inputs:
        ((start, stop),) = each.runs
        parts.append(np.tile(np.arange(start - index) + position, (3, 1)))
        position += start - index
        rows, columns = family.grid(each.tensors)
        row, column = np.divmod(np.arange(stop - start), columns)
        parts.append(np.stack((np.zeros_like(row), row, column)) + position)
        position += max(rows, columns)
        index = stop
    return np.concatenate(parts, axis=1).astype(np.int64), position - index
