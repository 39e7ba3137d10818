"""What some steps have beside tokens: rows in place of embeddings, scores of positions."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class GivenRows:
    """Hidden states that take the place of the embeddings of some of a step's tokens: given by a
    request, or made by an encoder.

    Attributes:
        places_N: int64 [N], which of the T tokens, each once.
        rows_NE: [N, E] in the model's dtype, contiguous; an embedding's scale is not applied.
    """

    places_N: torch.Tensor
    rows_NE: torch.Tensor

    def part(self, start: int, stop: int) -> "GivenRows | None":
        """Those of tokens [start, stop), counted from `start` on."""
        is_in_N = (self.places_N >= start) & (self.places_N < stop)
        if not is_in_N.any():
            return None
        return GivenRows(self.places_N[is_in_N] - start, self.rows_NE[is_in_N])


def replace_rows(x_TE: torch.Tensor, given: GivenRows | None) -> torch.Tensor:
    """See `Operations.replace_rows`."""
    return x_TE if given is None else x_TE.index_copy_(0, given.places_N, given.rows_NE)


@dataclass(frozen=True, slots=True, kw_only=True)
class PositionScores:
    """What distances add to the scores of a step's attention (disentangled: arXiv:2006.03654):
    `queries[h][i, b] + keys[h][j, b]` to that of head h's query i and key j, both tokens of the
    step, b the bucket of their distance.

    Attributes:
        queries, keys: by query head, [T, num_buckets]: content to position, position to content.
        buckets_N: int32, N = 2 * reach + 1, each below num_buckets: of keys `reach` or more before
            the query, ..., at it, ..., `reach` or more behind it.
    """

    queries: Sequence[torch.Tensor]
    keys: Sequence[torch.Tensor]
    buckets_N: torch.Tensor
    num_buckets: int

    @property
    def reach(self) -> int:
        """The largest distance that has a bucket of its own."""
        return self.buckets_N.shape[0] // 2

    def of_heads(self, num_heads: int) -> tuple[Sequence[torch.Tensor], Sequence[torch.Tensor]]:
        """Those of queries and of keys. Raises ValueError: of another number of heads."""
        if len(self.queries) != num_heads or len(self.keys) != num_heads:
            raise ValueError(
                f"scores of positions of {len(self.queries)} and {len(self.keys)} heads; there are "
                f"{num_heads}"
            )
        return self.queries, self.keys
