"""Hidden states that take the place of the embeddings of some of a step's tokens: given by a
request, or made by an encoder."""

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class GivenRows:
    """
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
