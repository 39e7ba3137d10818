"""Where each tensor of a checkpoint goes. A layer names the tensors that it takes, with their
shapes; the loader hands them over one at a time, so that no second copy of the model exists."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch

from kernels.interface.weights import QuantisedTensor, WeightPart

CopyWeight = Callable[[torch.Tensor, torch.Tensor], None]
"""`copy(destination, source)` fills a tensor on the model's device from one of equal shape, which
may be in host memory and of another dtype. Later work of the current stream sees the result."""


@dataclass(frozen=True, slots=True)
class Placement:
    """What one checkpoint tensor must look like, and who takes it: `store(tensor, copy)`."""

    shape: tuple[int, ...]
    store: Callable[[torch.Tensor, CopyWeight], None]

    @property
    def may_be_quantised(self) -> bool:
        return False


@dataclass(frozen=True, slots=True)
class PackedPlacement:
    """As `Placement`, for a tensor that is packed where the model runs: `store(part)` takes blocks
    as they are, and may keep what it is given until its layer is complete.
    `may_be_quantised`: whether quantised folders have it so, as a rule: routers and vocabularies
    are left floating."""

    shape: tuple[int, ...]
    store: Callable[[WeightPart], None]
    may_be_quantised: bool = True


AnyPlacement = Placement | PackedPlacement
Placements = dict[str, AnyPlacement]


def place(placement: AnyPlacement, part: WeightPart, copy: CopyWeight) -> None:
    """Hand a checkpoint's tensor to its place; blocks are dequantised where they have none."""
    if isinstance(placement, PackedPlacement):
        placement.store(part)
    else:
        tensor = part.dequantise() if isinstance(part, QuantisedTensor) else part
        placement.store(tensor, copy)


class Parameter:
    """A tensor kept as it comes, in one dtype on one device.
    `offset`: added to every element (Gemma's norms are stored less one)."""

    def __init__(
        self,
        name: str,
        shape: tuple[int, ...],
        dtype: torch.dtype,
        *,
        device: torch.device,
        offset: float = 0.0,
    ) -> None:
        self._name = name
        self._offset = offset
        # filled with NaN: a parameter that no tensor reached must not look like a number
        self.tensor = torch.full(shape, float("nan"), dtype=dtype, device=device)

    def placements(self) -> Placements:
        """The one tensor that this takes."""
        return {self._name: Placement(tuple(self.tensor.shape), self._store)}

    def _store(self, tensor: torch.Tensor, copy: CopyWeight) -> None:
        copy(self.tensor, tensor)
        if self._offset:
            self.tensor.add_(self._offset)


def merge(parts: Iterable[Placements]) -> Placements:
    """All placements of several layers; a name belongs to one of them."""
    merged: Placements = {}
    for part in parts:
        overlap = merged.keys() & part.keys()
        assert not overlap, f"two layers take {overlap}"
        merged.update(part)
    return merged
