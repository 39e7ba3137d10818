"""Causal masks of any context length as views of one tensor.

Owns the templates. A mask depends only on the distance from query to key, so that moving a window
over the columns of one template gives the mask of every tile:

                  columns: key position - position of the tile's first query
                   -W ......... -3 -2 -1   0  1  2  3
      query 0       0 ......... 0  0  0    0  x  x  x      x is -inf, W the widest context so far
      query 1       0 ......... 0  0  0    0  0  x  x
      query 2       0 ......... 0  0  0    0  0  0  x

Each row is repeated for the query heads that share a key/value head. Must not know requests.
"""

from __future__ import annotations

import torch

_SMALLEST_CONTEXT = 1024


class MaskTemplates:
    """Templates by (heads, window, dtype); each doubles when a longer context comes."""

    def __init__(self) -> None:
        self._templates: dict[tuple[int, int | None, torch.dtype], torch.Tensor] = {}
        self._num_before: dict[tuple[int, int | None, torch.dtype], int] = {}

    def get(
        self,
        *,
        num_before: int,
        num_queries: int,
        heads_per_kv: int,
        sliding_window: int | None,
        dtype: torch.dtype,
    ) -> torch.Tensor:
        """Mask of a tile whose keys begin `num_before` before its first query and end with its
        last: a view [1, 1, num_queries * heads_per_kv, num_before + num_queries].
        """
        key = (heads_per_kv, sliding_window, dtype)
        template = self._templates.get(key)
        rows = num_queries * heads_per_kv
        width = self._num_before.get(key, 0)
        if template is None or template.shape[0] < rows or width < num_before:
            most_queries = num_queries
            if template is not None:
                most_queries = max(num_queries, template.shape[0] // heads_per_kv)
            width = max(width, _SMALLEST_CONTEXT)
            while width < num_before:
                width *= 2
            template = _build(width, most_queries, heads_per_kv, sliding_window, dtype)
            self._templates[key], self._num_before[key] = template, width
        return template[:rows, width - num_before : width + num_queries][None, None]


def _build(
    num_before: int,
    num_queries: int,
    heads_per_kv: int,
    sliding_window: int | None,
    dtype: torch.dtype,
) -> torch.Tensor:
    query_Q1 = torch.arange(num_queries).unsqueeze(1)
    key_L = torch.arange(-num_before, num_queries)
    hidden_QL = key_L > query_Q1
    if sliding_window is not None:
        hidden_QL |= key_L <= query_Q1 - sliding_window
    mask_QL = torch.zeros(hidden_QL.shape, dtype=dtype).masked_fill_(hidden_QL, float("-inf"))
    return mask_QL.repeat_interleave(heads_per_kv, dim=0)
