"""Weights in the native library's layouts: float32, bfloat16, int8 a row, 4-bit groups.

`src/linear.h` draws the layouts; GGUF's blocks come through `gguf_blocks`.

    P panels of 32 outputs (the last one padded with zeros), G groups of 32 inputs
"""

import ctypes
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from kernels.cpu.library import INT64, POINTER, NativeLibrary, check, members
from kernels.interface.weights import QuantisedTensor, WeightPart

Bytes = npt.NDArray[np.uint8]

Fields = tuple[npt.NDArray[Any], ...]

PANEL_OUTPUTS = 32
_GROUP = 32
_ROWS_AT_ONCE = 64 * PANEL_OUTPUTS
_FLOAT_ROWS = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2}
_BLOCK_ROWS = {"Q4_0": 3, "Q4_1": 4, "Q5_0": 5, "Q8_0": 6, "Q4_K": 7, "Q5_K": 8, "Q6_K": 9}
_BLOCK_ROWS["MXFP4"] = 10
"""Kinds of rows by the numbers of `row_types` in src/pack_floats.cpp."""


class LinearKind(IntEnum):
    """The layouts of `src/linear.h`, by its numbers."""

    F32 = 0
    I8_ROW = 1
    Q8_GROUP = 2
    Q4_GROUP = 3
    Q4_MINIMUM = 4
    Q4_K = 5
    Q6_K = 6
    BF16 = 7
    MXFP4 = 8
    Q5_K = 9


class LinearArguments(ctypes.Structure):
    """`LinearWeight` of src/linear.h."""

    _fields_ = [
        *members(ctypes.c_int32, "kind", "reserved"),
        *members(INT64, "num_outputs", "num_inputs"),
        ("blob", POINTER),
        ("blob_bytes", INT64),
        *members(POINTER, "row_scales", "bias"),
    ]


@dataclass(frozen=True, slots=True, eq=False)
class PackedLinear:
    """A `LinearWeight` as the native library reads it.

    Attributes:
        blob: uint8, the packed weight.
        row_scales: float32 [P * 32], for I8_ROW.
        bias: float32 [P * 32], padded with zeros.
        arguments: what the library is given; points into the three above.
        address: of `arguments`.
    """

    kind: LinearKind
    num_inputs: int
    num_outputs: int
    blob: torch.Tensor
    row_scales: torch.Tensor | None
    bias: torch.Tensor | None
    arguments: LinearArguments
    address: int

    @property
    def num_bytes(self) -> int:
        """Bytes that one product reads of it."""
        return int(self.arguments.blob_bytes)


def pack_float(
    library: NativeLibrary,
    weight_NE: torch.Tensor,
    bias_N: torch.Tensor | None = None,
    *,
    reserve: Callable[[int], torch.Tensor] | None = None,
) -> PackedLinear:
    """A floating weight in float32. `reserve`: gives the memory for it; default: the library's.
    Raises ValueError: a weight that is not [N, E], or a bias that is not [N]."""
    _check_weight(weight_NE)
    return pack_float_parts(library, [weight_NE], bias_N, reserve=reserve)


def pack_float_parts(
    library: NativeLibrary,
    parts: Sequence[WeightPart],
    bias_N: torch.Tensor | None = None,
    *,
    kind: LinearKind = LinearKind.F32,
    reserve: Callable[[int], torch.Tensor] | None = None,
) -> PackedLinear:
    """As `pack_float`, or in BF16 by `kind`, of parts [n, E] side by side: floats of any type, or
    quantised ones, which are dequantised on their way into the panels."""
    num_outputs, num_inputs = sum(part.shape[0] for part in parts), parts[0].shape[1]
    in_pairs = kind is LinearKind.BF16
    row_bytes = -(-num_inputs // _GROUP) * _GROUP * 2 if in_pairs else num_inputs * 4
    num_panels = -(-num_outputs // PANEL_OUTPUTS)
    blob = (reserve or library.memory.reserve)(num_panels * PANEL_OUTPUTS * row_bytes)
    if num_outputs % PANEL_OUTPUTS:
        blob[-PANEL_OUTPUTS * row_bytes :].zero_()
    pack = library.function(
        "ec_pack_floats", POINTER, *[INT64] * 3, POINTER, *[INT64] * 2, POINTER, *[INT64] * 3
    )
    first = 0
    for part in parts:
        rows, row_type, order = _rows_of(part)
        check(
            pack(
                rows.data_ptr(),
                row_type,
                len(rows),
                rows.shape[1] * rows.itemsize,
                None if order is None else order.data_ptr(),
                part.shape[0],
                num_inputs,
                blob.data_ptr(),
                num_outputs,
                first,
                in_pairs,
            )
        )
        first += part.shape[0]
    bias = _pad_bias(bias_N, num_outputs)
    return packed_linear(library, kind, num_outputs, num_inputs, blob, bias)


def _rows_of(part: WeightPart) -> tuple[torch.Tensor, int, torch.Tensor | None]:
    """Contiguous rows, their type by the number in src/pack_floats.cpp, and their order."""
    if isinstance(part, QuantisedTensor):
        if part.type_name in _BLOCK_ROWS:
            order = part.row_order_N
            rows = part.arrays["blocks"].contiguous()
            return rows, _BLOCK_ROWS[part.type_name], None if order is None else order.contiguous()
        part = part.dequantise()
    if part.dtype not in _FLOAT_ROWS:
        part = part.to(torch.float32)
    return part.contiguous(), _FLOAT_ROWS[part.dtype], None


def pack_bfloat16(
    library: NativeLibrary, weight_NE: torch.Tensor, bias_N: torch.Tensor | None = None
) -> PackedLinear:
    """A floating weight in bfloat16, rounded to even. Raises ValueError: as `pack_float`."""
    _check_weight(weight_NE)
    return pack_float_parts(library, [weight_NE], bias_N, kind=LinearKind.BF16)


def quantise_int8(
    library: NativeLibrary, weight_NE: torch.Tensor, bias_N: torch.Tensor | None = None
) -> PackedLinear:
    """A floating weight in signed bytes with one scale a row: `scale = max|w| / 127`.

    Inputs are padded to whole groups with zeros.
    Raises ValueError: as `pack_float`, or a weight that is not finite."""
    num_outputs, num_inputs = _check_weight(weight_NE)
    scales_N = torch.empty(num_outputs)

    def panels(rows: slice) -> Bytes:
        weight = _finite(weight_NE[rows].to(torch.float32))
        scales = scales_N[rows] = weight.abs().amax(dim=1) / 127
        codes = torch.round(weight / scales.clamp(min=1e-30)[:, None]) + 128
        padded = _pad_outputs(codes.to(torch.uint8).numpy())
        padded = np.pad(padded, ((0, 0), (0, -num_inputs % _GROUP)), constant_values=128)
        dwords = np.ascontiguousarray(padded).view(np.uint32)
        turned = dwords.reshape(-1, PANEL_OUTPUTS, dwords.shape[1]).transpose(0, 2, 1)
        return np.ascontiguousarray(turned).view(np.uint8)

    blob = _pack_panels(library.memory.reserve, num_outputs, panels)
    bias, scales = _pad_bias(bias_N, num_outputs), _pad_vector(scales_N)
    return packed_linear(library, LinearKind.I8_ROW, num_outputs, num_inputs, blob, bias, scales)


def quantise_int4(
    library: NativeLibrary, weight_NE: torch.Tensor, bias_N: torch.Tensor | None = None
) -> PackedLinear:
    """A floating weight in 4 bits, with a scale and a minimum for every 32 inputs of a row.

    `scale = (max - min) / 15`; both are rounded to float16 before codes are chosen. Inputs are
    padded to whole groups with zeros.
    Raises ValueError: as `quantise_int8`, or a group's scale or minimum beyond float16."""
    num_outputs, num_inputs = _check_weight(weight_NE)

    def fields(rows: slice) -> Fields:
        weight = _finite(weight_NE[rows].to(torch.float32))
        padded = torch.nn.functional.pad(weight, (0, -num_inputs % _GROUP))
        groups = padded.view(len(weight), -1, _GROUP)
        minima = groups.amin(dim=2).to(torch.float16)
        scales = ((groups.amax(dim=2) - minima.float()) / 15).clamp(min=0).to(torch.float16)
        if not bool(torch.isfinite(minima).all() and torch.isfinite(scales).all()):
            raise ValueError(
                f"a weight as large as {float(weight.abs().max()):g} does not fit float16 "
                "scales; use --quantization int8"
            )
        steps = (groups - minima.float()[..., None]) / scales.float().clamp(min=1e-30)[..., None]
        codes = torch.round(steps).clamp(0, 15).to(torch.uint8).numpy()
        nibbles = codes[..., :16] | (codes[..., 16:] << 4)
        factors = torch.stack((scales, minima), dim=2).numpy().view(np.uint16)
        return factors, np.ascontiguousarray(nibbles).view(np.uint32)

    return pack_fields(library, LinearKind.Q4_MINIMUM, fields, num_outputs, num_inputs, bias_N)


def pack_fields(
    library: NativeLibrary,
    kind: LinearKind,
    fields: Callable[[slice], Fields],
    num_outputs: int,
    num_inputs: int,
    bias_N: torch.Tensor | None,
) -> PackedLinear:
    """A grouped weight from the values of its blocks.

    Args:
        fields: of some rows, [rows, blocks, values] each, in the order of the kind's record in
            src/linear.h: float16 as uint16, bytes, and at last codes as dwords of four inputs.
    """

    def panels(rows: slice) -> Bytes:
        return np.concatenate([_interleave(_pad_outputs(f)) for f in fields(rows)], axis=2)

    blob = _pack_panels(library.memory.reserve, num_outputs, panels)
    bias = _pad_bias(bias_N, num_outputs)
    return packed_linear(library, kind, num_outputs, num_inputs, blob, bias)


def _pack_panels(
    reserve: Callable[[int], torch.Tensor], num_outputs: int, panels: Callable[[slice], Bytes]
) -> torch.Tensor:
    """The blob whose panels `panels` makes of some rows at a time, so that a vocabulary's weight
    is not held several times over on its way."""
    num_panels = -(-num_outputs // PANEL_OUTPUTS)
    blob = torch.empty(0, dtype=torch.uint8)
    for start in range(0, num_outputs, _ROWS_AT_ONCE):
        stop = min(start + _ROWS_AT_ONCE, num_outputs)
        made = torch.from_numpy(panels(slice(start, stop)).reshape(-1))
        first, last = start // PANEL_OUTPUTS, -(-stop // PANEL_OUTPUTS)
        panel_bytes = made.numel() // (last - first)
        if not start:
            blob = reserve(num_panels * panel_bytes)
        blob[first * panel_bytes : last * panel_bytes] = made
    return blob


def _interleave(field: npt.NDArray[Any]) -> Bytes:
    """[P * 32, blocks, values] -> [P, blocks, values, 32] as bytes of a record."""
    num_blocks, num_values = field.shape[1:]
    turned = field.reshape(-1, PANEL_OUTPUTS, num_blocks, num_values).transpose(0, 2, 3, 1)
    return np.ascontiguousarray(turned).view(np.uint8).reshape(len(turned), num_blocks, -1)


def packed_linear(
    library: NativeLibrary,
    kind: LinearKind,
    num_outputs: int,
    num_inputs: int,
    blob: torch.Tensor,
    bias: torch.Tensor | None,
    row_scales: torch.Tensor | None = None,
) -> PackedLinear:
    """A weight over memory that is packed already; see `PackedLinear` for what the tensors hold.
    Raises ValueError: memory whose size or alignment does not fit the weight."""
    size = -(-num_outputs // PANEL_OUTPUTS) * PANEL_OUTPUTS
    for name, values in (("row_scales", row_scales), ("bias", bias)):
        if values is not None and (values.dtype is not torch.float32 or values.shape != (size,)):
            raise ValueError(
                f"{name} of {tuple(values.shape)} and {values.dtype}; {num_outputs} outputs need "
                f"float32 [{size}]"
            )
    arguments = LinearArguments(
        kind=kind,
        num_outputs=num_outputs,
        num_inputs=num_inputs,
        blob=blob.data_ptr(),
        blob_bytes=blob.numel(),
        row_scales=None if row_scales is None else row_scales.data_ptr(),
        bias=None if bias is None else bias.data_ptr(),
    )
    address = ctypes.addressof(arguments)
    check(library.function("ec_linear_check", POINTER)(address))
    return PackedLinear(kind, num_inputs, num_outputs, blob, row_scales, bias, arguments, address)


def _check_weight(weight_NE: torch.Tensor) -> tuple[int, int]:
    if weight_NE.dim() != 2 or not weight_NE.numel() or not weight_NE.is_floating_point():
        raise ValueError(
            f"a weight of shape {tuple(weight_NE.shape)} and {weight_NE.dtype}; it must be "
            "floating, [outputs, inputs]"
        )
    return weight_NE.shape[0], weight_NE.shape[1]


def _finite(weight: torch.Tensor) -> torch.Tensor:
    if not bool(torch.isfinite(weight).all()):
        raise ValueError("a weight holds values that are not finite: it cannot be quantised")
    return weight


def _pad_outputs(rows: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Rows of zeros behind, to whole panels."""
    missing = -len(rows) % PANEL_OUTPUTS
    if not missing:
        return rows
    return np.concatenate((rows, np.zeros((missing, *rows.shape[1:]), rows.dtype)))


def _pad_vector(values_N: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.pad(values_N, (0, -len(values_N) % PANEL_OUTPUTS)).contiguous()


def _pad_bias(bias_N: torch.Tensor | None, num_outputs: int) -> torch.Tensor | None:
    if bias_N is None:
        return None
    if bias_N.shape != (num_outputs,):
        raise ValueError(f"a bias of shape {tuple(bias_N.shape)} for {num_outputs} outputs")
    return _pad_vector(bias_N.to(torch.float32))
