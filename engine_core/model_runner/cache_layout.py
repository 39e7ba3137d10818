"""How the layers of a model share the KV blocks, after Jenga (arXiv:2503.18292). Layers that
attend alike form groups of one size, each with a block table of its own: one pool of blocks serves
all.

    tensor 0   | layer 5  (full)    | layer 0  (window)  | layer 3 (window) |
    tensor 1   | layer 11 (full)    | layer 1  (window)  | layer 4 (window) |
               |       group 0      |      group 1       |     group 2      |  a column a group

A block id addresses the same block in every tensor of the row that its group's layer uses.
"""

import dataclasses
from collections.abc import Sequence


@dataclasses.dataclass(frozen=True, slots=True)
class LayerGroup:
    """Layers with one block table. `sliding_window` in tokens, None for full attention."""

    layers: tuple[int, ...]
    sliding_window: int | None


@dataclasses.dataclass(frozen=True, slots=True)
class CacheLayout:
    """Groups of layers, and the number of cache tensors: the size of the largest group."""

    groups: tuple[LayerGroup, ...]
    num_tensors: int

    def place_of(self, layer: int) -> tuple[int, int]:
        """(group index, tensor index) of a layer."""
        for index, group in enumerate(self.groups):
            if layer in group.layers:
                return index, group.layers.index(layer)
        raise KeyError(layer)


def plan_cache_layout(sliding_windows: Sequence[int | None]) -> CacheLayout:
    """Group a model's layers.

    Args:
        sliding_windows: for each layer its window in tokens, or None for full attention.
    """
    kinds: dict[int | None, list[int]] = {}
    for layer, window in enumerate(sliding_windows):
        kinds.setdefault(window, []).append(layer)
    # The smallest kind sets the size, so that larger kinds split into groups of that size; unless
    # kinds are nearly equal, when one group a kind wastes less than a second group would.
    smallest = min(len(layers) for layers in kinds.values())
    largest = max(len(layers) for layers in kinds.values())
    size = largest if largest <= smallest * 1.25 else smallest
    ordered = sorted(kinds.items(), key=lambda item: item[0] is not None)
    groups = tuple(
        LayerGroup(tuple(layers[start : start + size]), window)
        for window, layers in ordered
        for start in range(0, len(layers), size)
    )
    return CacheLayout(groups, num_tensors=size)
