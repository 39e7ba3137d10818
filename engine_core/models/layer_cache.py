"""What a layer keeps of a sequence, as the cache's planning asks: a kind of layer is a class."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

    from kernels.interface.kv_cache import KVShape, StateShape
    from kernels.interface.recurrence import RecurrenceShape


class LayerCache(ABC):
    """Something of each token that all later ones read, unless a kind says otherwise."""

    __slots__ = ()

    @property
    def reach(self) -> int | None:
        """Tokens back from the next one, itself included, that are read; None: all."""
        return None

    @property
    def is_sparse(self) -> bool:
        """Whether of the blocks that a step fills only those need to be written that another
        sequence, or the next step, starts from."""
        return False

    @property
    def parts(self) -> tuple[LayerCache, ...]:
        """What lies in blocks of its own; of several the last one is what `keys_of` gives."""
        return (self,)

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

    @property
    def value_size_in_keys(self) -> int | None:
        """Last elements of a key that are its value; None: values are kept beside keys."""
        return None

    def kv_shape(self, block_size: int, dtype: torch.dtype) -> KVShape:
        """Shape of what the layer reads in a block of so many tokens of a cache of `dtype`."""
        from kernels.interface.kv_cache import KVShape

        sizes = self.num_kv_heads, self.key_size, self.value_size
        in_keys = self.value_size_in_keys is not None
        return KVShape(block_size, *sizes, dtype, values_in_keys=in_keys)

    def block_bytes(self, block_size: int, dtype: torch.dtype) -> int:
        return 0 if self.shares is not None else self.kv_shape(block_size, dtype).block_bytes


@dataclass(frozen=True, slots=True)
class Latent(PagedKeys):
    """One vector of each token, which all heads make their keys and values of (MLA): a key of one
    head, whose last elements are its value. Caches of 8 bits hold none.

    Attributes:
        index_size: see `KVShape`.
    """

    index_size: int = 0

    @property
    def value_size_in_keys(self) -> int | None:
        return self.value_size

    def kv_shape(self, block_size: int, dtype: torch.dtype) -> KVShape:
        shape = PagedKeys.kv_shape(self, block_size, dtype)
        return replace(shape, index_size=self.index_size)


@dataclass(frozen=True, slots=True)
class NoCache(LayerCache):
    """Nothing: each token goes through the layer alone."""

    def block_bytes(self, block_size: int, dtype: torch.dtype) -> int:
        return 0


@dataclass(frozen=True, slots=True)
class State(LayerCache):
    """A state that each token changes: as it is at a block's start, and rows of the block's tokens,
    from which and it the state at any of them follows (`kernels/interface/recurrence.py`). A token
    is taken back by dropping its row.

    Attributes:
        shapes, dtypes: of the tensors that a state consists of.
        row_shapes, row_dtypes: of those of a token.
    """

    shapes: tuple[tuple[int, ...], ...]
    dtypes: tuple[torch.dtype, ...]
    row_shapes: tuple[tuple[int, ...], ...]
    row_dtypes: tuple[torch.dtype, ...]

    @property
    def reach(self) -> int | None:
        return 2  # a block's first token works out its state of the block before

    @property
    def is_sparse(self) -> bool:
        return True

    def state_shape(self, block_size: int) -> StateShape:
        """Shape of what the layer keeps in a block of so many tokens."""
        from kernels.interface.kv_cache import StateShape

        rows = tuple([(block_size, *shape) for shape in self.row_shapes])
        return StateShape((*self.shapes, *rows), (*self.dtypes, *self.row_dtypes))

    def block_bytes(self, block_size: int, dtype: torch.dtype) -> int:
        """Bytes of a block; it has dtypes of its own."""
        return self.state_shape(block_size).block_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class KeysAndState(PagedKeys):
    """Keys and values, and a state beside them, of a layer that attends and recurs (Falcon-H1)."""

    state: State

    @property
    def parts(self) -> tuple[LayerCache, ...]:
        return (self.state, self)


def recurrent_state(shape: RecurrenceShape) -> State:
    """The cache of a recurrent layer."""
    (shapes, dtypes), (row_shapes, row_dtypes) = (
        zip(*parts, strict=True) for parts in (shape.state_parts, shape.row_parts)
    )
    return State(shapes, dtypes, row_shapes, row_dtypes)


def paged_keys(
    num_kv_heads: int, head_size: int, windows: Sequence[int | None]
) -> tuple[LayerCache, ...]:
    """Layers of equal heads, one for each window."""
    return tuple(PagedKeys(num_kv_heads, head_size, head_size, window) for window in windows)
