"""Adapters beside products through the native library (`src/lora.h`)."""

import ctypes
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import cast

import torch

from kernels.cpu.library import INT64, POINTER, NativeLibrary, check, members
from kernels.cpu.weights import LinearArguments, PackedLinear, pack_float
from kernels.interface.lora import Int32Array, LoRAPart, segments_of

_FLOAT32 = torch.float32


class LoraSlot(ctypes.Structure):
    """Mirrors `LoraSlot` of src/lora.h."""

    _fields_ = [*members(POINTER, "a", "b", "columns"), ("num_parts", INT64)]


class LoraStep(ctypes.Structure):
    """Mirrors `LoraStep` there."""

    _fields_ = [("segments", POINTER), ("num_segments", INT64)]


class LoraStack(ctypes.Structure):
    """Mirrors `LoraStack` there."""

    _fields_ = [("slots", POINTER), ("num_slots", INT64), ("step", POINTER)]


@dataclass(frozen=True, slots=True)
class _Prepared:
    """An adapter's weights for one product; `keeps` is what `slot` points to."""

    slot: LoraSlot
    keeps: tuple[object, ...]


class NativeLoRARows:
    """See `kernels.interface.lora.LoRARows`."""

    def __init__(self, library: NativeLibrary, num_slots: int) -> None:
        self.library = library
        self.num_slots = num_slots
        self.step = LoraStep()
        self._segments: ctypes.Array[ctypes.c_int64] | None = None

    def begin_step(self, slots_T: Int32Array | None) -> None:
        flat = [number for segment in segments_of(slots_T) for number in segment]
        self._segments = (INT64 * len(flat))(*flat)
        self.step.segments = ctypes.addressof(self._segments)
        self.step.num_segments = len(flat) // 3

    def make_stack(self, num_inputs: int, part_sizes: Sequence[int]) -> "NativeLoRAStack":
        return NativeLoRAStack(self, num_inputs, part_sizes)


class NativeLoRAStack:
    """See `kernels.interface.lora.LoRAStack`. `address`: of what the library is given."""

    def __init__(self, rows: NativeLoRARows, num_inputs: int, part_sizes: Sequence[int]) -> None:
        self.num_inputs, self.num_outputs = num_inputs, sum(part_sizes)
        self._sizes = tuple(part_sizes)
        self._library = rows.library
        self._run = rows.library.function("ec_lora", *[POINTER] * 2, *[INT64] * 2, POINTER, INT64)
        self._slots = (LoraSlot * rows.num_slots)()
        self._placed: dict[int, _Prepared] = {}
        self._rows = rows
        self._stack = LoraStack(
            slots=ctypes.addressof(self._slots),
            num_slots=rows.num_slots,
            step=ctypes.addressof(rows.step),
        )
        self.address = ctypes.addressof(self._stack)

    def prepare(self, parts: Mapping[int, LoRAPart]) -> object:
        numbers = sorted(parts)
        joined_RE = torch.cat([parts[number].a_RE for number in numbers])
        a = self._pack(joined_RE)
        each_b = [self._pack(parts[number].b_NR) for number in numbers]
        b = (LinearArguments * len(each_b))(*(each.arguments for each in each_b))
        columns = (INT64 * len(numbers))(*(sum(self._sizes[:number]) for number in numbers))
        slot = LoraSlot(
            a=a.address,
            b=ctypes.addressof(b),
            columns=ctypes.addressof(columns),
            num_parts=len(numbers),
        )
        return _Prepared(slot, (a, each_b, b, columns))

    def place(self, slot: int, prepared: object | None) -> None:
        self._slots[slot] = LoraSlot() if prepared is None else cast("_Prepared", prepared).slot
        self._placed.pop(slot, None)
        if prepared is not None:
            self._placed[slot] = cast("_Prepared", prepared)

    def add(self, out_TN: torch.Tensor, x_TE: torch.Tensor) -> torch.Tensor:
        """See `Operations.add_lora`. Raises ValueError: tensors of another shape or layout."""
        for name, tensor, size in (("out", out_TN, self.num_outputs), ("x", x_TE, self.num_inputs)):
            if (
                tensor.dtype is not _FLOAT32
                or tensor.shape != (len(x_TE), size)
                or tensor.stride(1) != 1
            ):
                raise ValueError(
                    f"{name} is {tensor.dtype} {tuple(tensor.shape)} with strides "
                    f"{tensor.stride()}; it must be float32 rows of {size}"
                )
        x, out = x_TE.data_ptr(), out_TN.data_ptr()
        strides = x_TE.stride(0), out_TN.stride(0)
        check(self._run(self.address, x, strides[0], len(x_TE), out, strides[1]))
        return out_TN

    def _pack(self, weight_NE: torch.Tensor) -> PackedLinear:
        return pack_float(self._library, weight_NE, reserve=_reserve)


def _reserve(num_bytes: int) -> torch.Tensor:
    """Memory of its own, which goes with the adapter; torch aligns it to 64 bytes."""
    return torch.empty(num_bytes, dtype=torch.uint8)
