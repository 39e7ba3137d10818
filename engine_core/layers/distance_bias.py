"""What heads add to scores by the distance of key and query, learned in buckets."""

import math

import torch

from engine_core.layers.parameters import Parameter, Placements

_REACH = 128
"""Keys that far away, and further, share the last bucket of their side."""


class DistanceBias:
    """A number for each head and bucket (arXiv:1910.10683). On each side of the query, half of the
    buckets: one a distance, from their middle on ever wider ones.
    `bias_HN`: that of `AttentionParams`, right after `finish_loading`."""

    def __init__(
        self, name: str, *, num_buckets: int, num_heads: int, device: torch.device
    ) -> None:
        self._num_buckets = num_buckets
        shape = num_buckets, num_heads
        self._learned = Parameter(name, shape, torch.float32, device=device)
        self.bias_HN = torch.empty(num_heads, 2 * _REACH + 1, device=device)

    def placements(self) -> Placements:
        """The table of buckets."""
        return self._learned.placements()

    def finish_loading(self) -> None:
        """Write the bias of each distance."""
        half = self._num_buckets // 2
        exact = half // 2
        distance_N = torch.arange(-_REACH, _REACH + 1)
        far_N = distance_N.abs()
        wide_N = torch.log(far_N.float() / exact) / math.log(_REACH / exact) * (half - exact)
        wide_N = (exact + wide_N.clamp(min=0).long()).clamp(max=half - 1)
        bucket_N = torch.where(far_N < exact, far_N, wide_N) + half * (distance_N > 0)
        self.bias_HN.copy_(self._learned.tensor[bucket_N].T)
