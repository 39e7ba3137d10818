"""Matrices in GGUF blocks, as the gguf package writes and reads them."""

import numpy as np
import torch
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize, quantize

from kernels.cpu.library import NativeLibrary
from kernels.cpu.weights import GGUF_KINDS, PackedLinear, pack_parts
from kernels.interface.weights import QuantisedTensor

SCALES_AT = {"Q4_K": slice(0, 4), "Q5_K": slice(0, 4), "Q6_K": slice(208, 210)}
SCALES_AT |= {"Q3_K": slice(108, 110), "Q2_K": slice(80, 84), "TQ1_0": slice(52, 54)}
SCALES_AT |= {"TQ2_0": slice(64, 66), "IQ1_M": slice(49, 56, 2)}
SCALES_AT |= dict.fromkeys(
    ("IQ4_NL", "IQ4_XS", "IQ1_S", "IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS", "IQ3_S"), slice(0, 2)
)
"""The float16 of a block of types that the package does not write. IQ1_M has one in quarters."""


def random_blocks(type_name: str, num_rows: int, num_inputs: int) -> np.ndarray:
    """uint8 [rows, bytes]: of normal numbers, or of any bytes, but for small scales."""
    kind = GGMLQuantizationType[type_name]
    generator = np.random.default_rng(num_rows * 10_000 + num_inputs)
    if type_name not in (*SCALES_AT, "IQ1_M"):
        return quantize(generator.standard_normal((num_rows, num_inputs)).astype(np.float32), kind)
    elements, num_bytes = GGML_QUANT_SIZES[kind]
    blocks = generator.integers(0, 256, (num_rows, num_inputs // elements, num_bytes), np.uint8)
    scales = blocks[..., SCALES_AT[type_name]]
    if type_name == "IQ1_M":  # the last quarter is sign and exponent: 2^-12 to 2^-9
        scales[..., 3] &= 0x8F
        scales[..., 3] |= 0x10
        return blocks.reshape(num_rows, -1)
    size = (*scales.shape[:2], scales.shape[2] // 2)
    scales[:] = generator.uniform(-1e-3, 1e-3, size).astype(np.float16).view(np.uint8)
    return blocks.reshape(num_rows, -1)


def part_of(
    blocks: np.ndarray, type_name: str, num_inputs: int, order: torch.Tensor | None = None
) -> QuantisedTensor:
    """Rows of blocks as a file has them, `order`: in another order than the matrix."""
    kind = GGMLQuantizationType[type_name]
    return QuantisedTensor(
        type_name=type_name,
        shape=(len(blocks), num_inputs),
        arrays={"blocks": torch.from_numpy(blocks)},
        decode=lambda arrays: torch.from_numpy(dequantize(arrays["blocks"].numpy(), kind)),
        row_order_N=order,
    )


def random_part(
    type_name: str, num_rows: int, num_inputs: int = 256, order: torch.Tensor | None = None
) -> QuantisedTensor:
    return part_of(random_blocks(type_name, num_rows, num_inputs), type_name, num_inputs, order)


def rounded_part(weight_NE: torch.Tensor, type_name: str) -> QuantisedTensor:
    """float32 in blocks of a type that the package writes."""
    blocks = quantize(weight_NE.numpy(), GGMLQuantizationType[type_name])
    return part_of(blocks, type_name, weight_NE.shape[1])


def pack_gguf(
    library: NativeLibrary,
    blocks: np.ndarray,
    type_name: str,
    num_outputs: int,
    num_inputs: int,
    bias_N: torch.Tensor | None = None,
) -> PackedLinear:
    """The native library's weight of a tensor's bytes, row after row, of any shape."""
    part = part_of(blocks.reshape(num_outputs, -1), type_name, num_inputs)
    return pack_parts(library, GGUF_KINDS[type_name], [part], bias_N)
