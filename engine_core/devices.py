"""What the engine may expect of each kind of device: decided here, asked everywhere else."""

import dataclasses
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    import torch


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class DeviceTraits:
    """
    Attributes:
        is_host: tensors lie in the host's memory, whose pages are taken as they are touched;
            else they are copied there, and work is queued.
        runs_ahead: rows and sampling are the device's, graphs are captured, and a step is in
            flight while the next is planned; else one step at a time, with rows on the host.
        packs_weights: weights are packed for the native library, and kept so in files.
        compiles_kernels: kernels are compiled for the shapes that they meet, powers of two.
        computes_in_order: a step computes its requests in their order, but those of one token
            first, so that one may start from a state that another before it leaves; else beside one
            another.
        collectives: what ranks exchange tensors by.
    """

    is_host: bool
    runs_ahead: bool
    packs_weights: bool
    compiles_kernels: bool
    computes_in_order: bool
    collectives: Literal["gloo", "nccl"]


_TRAITS = {
    "cpu": DeviceTraits(
        is_host=True,
        runs_ahead=False,
        packs_weights=True,
        compiles_kernels=False,
        computes_in_order=True,
        collectives="gloo",
    ),
    "cuda": DeviceTraits(
        is_host=False,
        runs_ahead=True,
        packs_weights=False,
        compiles_kernels=True,
        computes_in_order=False,
        collectives="nccl",
    ),
}


def traits_of(device: "torch.device | str") -> DeviceTraits:
    """Of a device that `kernels.backends.select_operations` serves, or is yet to refuse."""
    return _TRAITS.get(str(device).partition(":")[0], _TRAITS["cuda"])
