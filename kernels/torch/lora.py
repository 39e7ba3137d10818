"""Adapters beside products through torch: the specification of `add_lora`."""

from collections.abc import Mapping, Sequence
from typing import cast

import torch

from kernels.interface.lora import Int32Array, LoRAPart, segments_of

Parts = Mapping[int, LoRAPart]


class TorchLoRARows:
    """See `kernels.interface.lora.LoRARows`."""

    def __init__(self) -> None:
        self.segments: list[tuple[int, int, int]] = []

    def begin_step(self, slots_T: Int32Array | None) -> None:
        self.segments = segments_of(slots_T)

    def make_stack(self, num_inputs: int, part_sizes: Sequence[int]) -> "TorchLoRAStack":
        return TorchLoRAStack(self, part_sizes)


class TorchLoRAStack:
    """See `kernels.interface.lora.LoRAStack`."""

    def __init__(self, rows: TorchLoRARows, part_sizes: Sequence[int]) -> None:
        self.rows = rows
        self.parts: dict[int, Parts] = {}
        self.columns: list[slice] = []
        for size in part_sizes:
            start = self.columns[-1].stop if self.columns else 0
            self.columns.append(slice(start, start + size))

    def prepare(self, parts: Parts) -> object:
        return parts

    def place(self, slot: int, prepared: object | None) -> None:
        self.parts.pop(slot, None)
        if prepared is not None:
            self.parts[slot] = cast("Parts", prepared)


def add_lora(out_TN: torch.Tensor, x_TE: torch.Tensor, stack: TorchLoRAStack) -> torch.Tensor:
    """See `Operations.add_lora`."""
    for slot, start, stop in stack.rows.segments:
        for number, part in stack.parts.get(slot, {}).items():
            hidden = x_TE[start:stop].float() @ part.a_RE.T
            out_TN[start:stop, stack.columns[number]] += (hidden @ part.b_NR.T).to(out_TN.dtype)
    return out_TN
