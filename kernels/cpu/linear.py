"""The native dense product, and rows of its weights: one call for any packed weight."""

from dataclasses import dataclass

import torch

from kernels.cpu.library import INT64, POINTER, NativeLibrary, check
from kernels.cpu.weights import PackedLinear

_FLOAT32 = torch.float32


@dataclass(frozen=True, slots=True, eq=False)
class PackedParts:
    """A `LinearWeight` of several kinds, side by side; parts of one kind are packed as one weight.
    Raises ValueError: no parts, or parts with different numbers of inputs."""

    parts: tuple[PackedLinear, ...]

    def __post_init__(self) -> None:
        if len({part.num_inputs for part in self.parts}) != 1:
            raise ValueError(
                f"parts with {[part.num_inputs for part in self.parts]} inputs; they must be "
                "equal, and there must be a part"
            )

    @property
    def num_inputs(self) -> int:
        return self.parts[0].num_inputs

    @property
    def num_outputs(self) -> int:
        return sum(part.num_outputs for part in self.parts)

    @property
    def num_bytes(self) -> int:
        """Bytes that one product reads of it."""
        return sum(part.num_bytes for part in self.parts)


class NativeLinear:
    """Products and rows of one library. Keeps the functions found: a lookup costs microseconds."""

    def __init__(self, library: NativeLibrary) -> None:
        self._run = library.function("ec_linear", *[POINTER] * 2, *[INT64] * 3, POINTER, INT64)
        self._gather = library.function("ec_embedding_packed", *[POINTER] * 2, INT64, POINTER)

    def __call__(self, x_TE: torch.Tensor, weight: PackedLinear | PackedParts) -> torch.Tensor:
        """See `Operations.linear`.

        Quantised weights take x in signed bytes, by groups of 32 with `scale = max|x| / 127`. A
        row's bits do not depend on the other rows. A row with a value that is not finite gives NaN.

        Args:
            x_TE: float32 on the CPU, its rows contiguous.

        Raises:
            TypeError: x of another dtype.
            ValueError: x of another shape, layout or device.
        """
        num_rows, num_inputs = x_TE.shape if x_TE.dim() == 2 else (0, -1)
        if num_inputs != weight.num_inputs or x_TE.dtype is not _FLOAT32 or not x_TE.is_cpu:
            _refuse(x_TE, weight)
        row_stride = num_inputs
        if not x_TE.is_contiguous():
            row_stride, column_stride = x_TE.stride()
            if (column_stride != 1 and num_inputs > 1) or row_stride < num_inputs:
                raise ValueError(
                    f"x has strides {x_TE.stride()}, its rows must be contiguous; call "
                    ".contiguous()"
                )
        num_outputs = weight.num_outputs
        out_TN = torch.empty(num_rows, num_outputs, dtype=_FLOAT32)
        x, out = x_TE.data_ptr(), out_TN.data_ptr()
        for part in (weight,) if isinstance(weight, PackedLinear) else weight.parts:
            check(self._run(part.address, x, num_rows, row_stride, num_inputs, out, num_outputs))
            out += part.num_outputs * _FLOAT32.itemsize
        return out_TN

    def gather_rows(self, ids_T: torch.Tensor, weight: PackedLinear) -> torch.Tensor:
        """Rows of a packed weight, dequantised without the bias: of GGUF blocks bit for bit what
        the gguf package gives -> float32 [..., E]. `ids_T`: int64 on the CPU, contiguous, in [0,
        N); of any shape. Raises ValueError: ids of another dtype or layout, or out of range."""
        if ids_T.dtype is not torch.int64 or not ids_T.is_contiguous() or not ids_T.is_cpu:
            raise ValueError(
                f"ids are {ids_T.dtype} with strides {ids_T.stride()} on {ids_T.device}; they "
                "must be contiguous int64 on the CPU"
            )
        out_TE = torch.empty((*ids_T.shape, weight.num_inputs), dtype=_FLOAT32)
        check(self._gather(weight.address, ids_T.data_ptr(), ids_T.numel(), out_TE.data_ptr()))
        return out_TE


def _refuse(x_TE: torch.Tensor, weight: PackedLinear | PackedParts) -> None:
    if x_TE.dtype is not _FLOAT32:
        raise TypeError(f"x is {x_TE.dtype}, the native product takes float32; convert it")
    if not x_TE.is_cpu:
        raise ValueError(f"x is on {x_TE.device}, the native product runs on the CPU")
    raise ValueError(
        f"x has shape {tuple(x_TE.shape)}, the weight takes [rows, {weight.num_inputs}]"
    )
