"""What a layer keeps of a sequence, as the cache's planning asks: a kind of layer is a class."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

    from kernels.interface.kv_cache import KVShape, StateShape


class LayerCache(ABC):
    """Something of each token that all later ones read, unless a kind says otherwise."""

    __slots__ = ()

    @property
    def reach(self) -> int | None:
        """Tokens back from the next one, itself included, that are read; None: all."""
        return None

    @property
    def can_go_back(self) -> bool:
        """Whether tokens can be taken back: what lies behind is written again."""
        return True

    def span(self, block_size: int) -> int:
        """Blocks of so many tokens that one of the layer's stands for.
        Raises ValueError: the layer's do not end where such blocks do."""
        return 1

    @abstractmethod
    def block_bytes(self, block_size: int, dtype: torch.dtype) -> int:
        """What it keeps in a block of so many tokens of a cache of `dtype`."""


@dataclass(frozen=True, slots=True)
class PagedKeys(LayerCache):
    """Keys and values of each token.

    Attributes:
        window: tokens that a query sees, itself included; None for all.
        shares: the layer whose keys and values it reads; it keeps none of its own.
    """

    num_kv_heads: int
    key_size: int
    value_size: int
    window: int | None = None
    shares: int | None = None

    @property
    def reach(self) -> int | None:
        return self.window

    def kv_shape(self, block_size: int, dtype: torch.dtype) -> KVShape:
        """Shape of what the layer reads in a block of so many tokens of a cache of `dtype`."""
        from kernels.interface.kv_cache import KVShape

        return KVShape(block_size, self.num_kv_heads, self.key_size, self.value_size, dtype)

    def block_bytes(self, block_size: int, dtype: torch.dtype) -> int:
        return 0 if self.shares is not None else self.kv_shape(block_size, dtype).block_bytes


@dataclass(frozen=True, slots=True)
class Latent(LayerCache):
    """One vector of each token, which all heads make their keys and values of (MLA)."""

    size: int

    def block_bytes(self, block_size: int, dtype: torch.dtype) -> int:
        from kernels.interface.kv_cache import cached_head_bytes

        return block_size * cached_head_bytes(self.size, dtype)


@dataclass(frozen=True, slots=True)
class State(LayerCache):
    """One state of a sequence, which each token changes.

    Attributes:
        shapes, dtypes: of the tensors that it consists of.
        every: a state is kept every so many tokens.
    """

    shapes: tuple[tuple[int, ...], ...]
    dtypes: tuple[torch.dtype, ...]
    every: int

    @property
    def reach(self) -> int | None:
        return 2  # the state of the token before, and its own

    @property
    def can_go_back(self) -> bool:
        return False  # only to where one is kept

    @property
    def state_shape(self) -> StateShape:
        """Shape of what the layer keeps in a block."""
        from kernels.interface.kv_cache import StateShape

        return StateShape(self.shapes, self.dtypes)

    def span(self, block_size: int) -> int:
        if self.every % block_size:
            raise ValueError(
                f"a state every {self.every} tokens, and blocks of {block_size}; choose a "
                "--block-size that divides it"
            )
        return self.every // block_size

    def block_bytes(self, block_size: int, dtype: torch.dtype) -> int:
        """Bytes of a state, however many tokens a block stands for; it has dtypes of its own."""
        return self.state_shape.block_bytes


def paged_keys(
    num_kv_heads: int, head_size: int, windows: Sequence[int | None]
) -> tuple[LayerCache, ...]:
    """Layers of equal heads, one for each window."""
    return tuple(PagedKeys(num_kv_heads, head_size, head_size, window) for window in windows)
