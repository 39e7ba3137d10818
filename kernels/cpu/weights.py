"""Weights in the native library's layouts: float32, bfloat16, int8 a row, 4-bit groups.

`src/linear.h` draws the layouts; GGUF blocks (ggml-common.h of ggml) keep their codes and scales.

    P panels of 32 outputs (the last one padded with zeros), G groups of 32 inputs
"""

import ctypes
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from enum import IntEnum

import torch

from kernels.cpu.library import INT64, POINTER, NativeLibrary, check, members
from kernels.cpu.table_blocks import TABLE_TYPES, table_rows
from kernels.interface.weights import QuantisedTensor, WeightPart

PANEL_OUTPUTS = 32
_GROUP = 32
_ROWS_AT_ONCE = 64 * PANEL_OUTPUTS
_FLOAT_ROWS = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2}
_BLOCK_ROWS = {"Q4_0": 3, "Q4_1": 4, "Q5_0": 5, "Q8_0": 6, "Q4_K": 7, "Q5_K": 8, "Q6_K": 9}
_BLOCK_ROWS["MXFP4"] = 10
_CODES = 11
_PACKED_ROWS = {"Q5_1": 12, "IQ4_NL": 13, "IQ4_XS": 14, "Q3_K": 15, "Q2_K": 16}
_TABLE_ROWS = 17
"""Types of rows by the numbers of `row_types` in src/pack_rows.h."""


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
    Q5_MINIMUM = 10
    IQ4_GROUP = 11
    IQ4_K = 12
    Q3_K = 13
    Q2_K = 14
    TABLE_K = 15


GGUF_KINDS = {
    "Q8_0": LinearKind.Q8_GROUP,
    "Q4_0": LinearKind.Q4_GROUP,
    "Q4_1": LinearKind.Q4_MINIMUM,
    "Q4_K": LinearKind.Q4_K,
    "Q5_K": LinearKind.Q5_K,
    "Q6_K": LinearKind.Q6_K,
    "MXFP4": LinearKind.MXFP4,
    "Q5_1": LinearKind.Q5_MINIMUM,
    "IQ4_NL": LinearKind.IQ4_GROUP,
    "IQ4_XS": LinearKind.IQ4_K,
    "Q3_K": LinearKind.Q3_K,
    "Q2_K": LinearKind.Q2_K,
    **dict.fromkeys(TABLE_TYPES, LinearKind.TABLE_K),
}
"""The GGUF types that have a layout of their own, by name."""


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
    return pack_parts(library, LinearKind.F32, [weight_NE], bias_N, reserve=reserve)


def pack_parts(
    library: NativeLibrary,
    kind: LinearKind,
    parts: Sequence[WeightPart],
    bias_N: torch.Tensor | None = None,
    *,
    reserve: Callable[[int], torch.Tensor] | None = None,
) -> PackedLinear:
    """A weight of parts [n, E] side by side: in F32 or BF16 of any, else of blocks of its kind, in
    TABLE_K all of one type.
    Raises ValueError: blocks of another kind, or inputs that are not whole blocks."""
    num_outputs, num_inputs = sum(part.shape[0] for part in parts), parts[0].shape[1]
    weight = _empty_weight(library, kind, num_outputs, num_inputs, bias_N, reserve=reserve)
    first = 0
    for part in parts:
        if kind is LinearKind.TABLE_K and isinstance(part, QuantisedTensor):
            for rows in table_rows(part):
                _fill(library, weight, first, rows, _TABLE_ROWS)
                first += len(rows)
            continue
        rows, row_type, order = _rows_of(part, kind)
        _fill(library, weight, first, rows, row_type, order)
        first += part.shape[0]
    return weight


def _empty_weight(
    library: NativeLibrary,
    kind: LinearKind,
    num_outputs: int,
    num_inputs: int,
    bias_N: torch.Tensor | None,
    scales_N: torch.Tensor | None = None,
    reserve: Callable[[int], torch.Tensor] | None = None,
) -> PackedLinear:
    """Memory of any content, but for zeros behind the last output."""
    num_bytes = ctypes.c_int64()
    size_of = library.function("ec_linear_bytes", *[INT64] * 3, POINTER)
    check(size_of(kind, num_outputs, num_inputs, ctypes.addressof(num_bytes)))
    blob = (reserve or library.memory.reserve)(num_bytes.value)
    if num_outputs % PANEL_OUTPUTS:
        blob[num_outputs // PANEL_OUTPUTS * len(blob) // -(-num_outputs // PANEL_OUTPUTS) :].zero_()
    bias = _pad_bias(bias_N, num_outputs)
    scales = None if scales_N is None else _pad_vector(scales_N)
    return packed_linear(library, kind, num_outputs, num_inputs, blob, bias, scales)


def _fill(
    library: NativeLibrary,
    weight: PackedLinear,
    first: int,
    rows: torch.Tensor,
    row_type: int,
    order: torch.Tensor | None = None,
) -> None:
    """Make `rows` [n, ...], in `order`, the outputs from `first` on."""
    pack = library.function("ec_pack_rows", POINTER, *[INT64] * 3, POINTER, *[INT64] * 2, POINTER)
    row_bytes = rows.shape[1] * rows.itemsize
    num_rows = len(rows if order is None else order)
    where = None if order is None else order.data_ptr()
    source = rows.data_ptr(), row_type, len(rows), row_bytes, where, num_rows
    check(pack(*source, first, weight.address))


def _rows_of(part: WeightPart, kind: LinearKind) -> tuple[torch.Tensor, int, torch.Tensor | None]:
    """Contiguous rows, their type by the number in src/pack_rows.h, and their order."""
    if isinstance(part, QuantisedTensor):
        types = _BLOCK_ROWS
        if kind not in (LinearKind.F32, LinearKind.BF16):
            types = types | _PACKED_ROWS
        if part.type_name in types:
            order = part.row_order_N
            rows = part.arrays["blocks"].contiguous()
            return rows, types[part.type_name], None if order is None else order.contiguous()
        part = part.dequantise()
    if part.dtype not in _FLOAT_ROWS:
        part = part.to(torch.float32)
    return part.contiguous(), _FLOAT_ROWS[part.dtype], None


def pack_bfloat16(
    library: NativeLibrary, weight_NE: torch.Tensor, bias_N: torch.Tensor | None = None
) -> PackedLinear:
    """A floating weight in bfloat16, rounded to even. Raises ValueError: as `pack_float`."""
    _check_weight(weight_NE)
    return pack_parts(library, LinearKind.BF16, [weight_NE], bias_N)


def quantise_int8(
    library: NativeLibrary,
    weight_NE: torch.Tensor,
    bias_N: torch.Tensor | None = None,
    *,
    reserve: Callable[[int], torch.Tensor] | None = None,
) -> PackedLinear:
    """A floating weight in signed bytes with one scale a row: `scale = max|w| / 127`.

    Inputs are padded to whole groups with zeros.
    Raises ValueError: as `pack_float`, or a weight that is not finite."""
    num_outputs, num_inputs = _check_weight(weight_NE)
    scales_N = torch.zeros(num_outputs)
    shape = num_outputs, num_inputs
    weight = _empty_weight(library, LinearKind.I8_ROW, *shape, bias_N, scales_N, reserve)
    assert weight.row_scales is not None
    for first, values in _rows_at_a_time(weight_NE):
        scales = values.abs().amax(dim=1) / 127
        codes = torch.round(values / scales.clamp(min=1e-30)[:, None]) + 128
        padded = torch.nn.functional.pad(codes, (0, -num_inputs % _GROUP), value=128)
        _fill(library, weight, first, padded.to(torch.uint8), _CODES)
        weight.row_scales[first : first + len(values)] = scales
    return weight


def quantise_int4(
    library: NativeLibrary,
    weight_NE: torch.Tensor,
    bias_N: torch.Tensor | None = None,
    *,
    reserve: Callable[[int], torch.Tensor] | None = None,
) -> PackedLinear:
    """A floating weight in 4 bits, with a scale and a minimum for every 32 inputs of a row.

    `scale = (max - min) / 15`; both are rounded to float16 before codes are chosen. Inputs are
    padded to whole groups with zeros.
    Raises ValueError: as `quantise_int8`, or a group's scale or minimum beyond float16."""
    num_outputs, num_inputs = _check_weight(weight_NE)
    shape = num_outputs, num_inputs
    packed = _empty_weight(library, LinearKind.Q4_MINIMUM, *shape, bias_N, reserve=reserve)
    for first, values in _rows_at_a_time(weight_NE):
        padded = torch.nn.functional.pad(values, (0, -num_inputs % _GROUP))
        groups = padded.view(len(values), -1, _GROUP)
        minima = groups.amin(dim=2).to(torch.float16)
        scales = ((groups.amax(dim=2) - minima.float()) / 15).clamp(min=0).to(torch.float16)
        if not bool(torch.isfinite(minima).all() and torch.isfinite(scales).all()):
            raise ValueError(
                f"a weight as large as {float(values.abs().max()):g} does not fit float16 "
                "scales; use --quantization int8"
            )
        steps = (groups - minima.float()[..., None]) / scales.float().clamp(min=1e-30)[..., None]
        codes = torch.round(steps).clamp(0, 15).to(torch.uint8)
        factors = torch.stack((scales, minima), dim=2).view(torch.uint8)
        blocks = torch.cat((factors, codes[..., :16] | (codes[..., 16:] << 4)), dim=2)
        _fill(library, packed, first, blocks.flatten(1), _BLOCK_ROWS["Q4_1"])
    return packed


def _rows_at_a_time(weight_NE: torch.Tensor) -> Iterator[tuple[int, torch.Tensor]]:
    """Rows in float32 and where they begin, so that a vocabulary's weight is not held several
    times over on its way. Raises ValueError: one that is not finite."""
    for first in range(0, len(weight_NE), _ROWS_AT_ONCE):
        values = weight_NE[first : first + _ROWS_AT_ONCE].to(torch.float32)
        if not bool(torch.isfinite(values).all()):
            raise ValueError("a weight holds values that are not finite: it cannot be quantised")
        yield first, values


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


def _pad_vector(values_N: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.pad(values_N, (0, -len(values_N) % PANEL_OUTPUTS)).contiguous()


def _pad_bias(bias_N: torch.Tensor | None, num_outputs: int) -> torch.Tensor | None:
    if bias_N is None:
        return None
    if bias_N.shape != (num_outputs,):
        raise ValueError(f"a bias of shape {tuple(bias_N.shape)} for {num_outputs} outputs")
    return _pad_vector(bias_N.to(torch.float32))
