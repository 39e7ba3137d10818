"""GGUF blocks (ggml's `ggml-common.h`) in the native library's layouts, same codes and scales."""

from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import torch

from kernels.cpu.library import NativeLibrary
from kernels.cpu.weights import Bytes, Fields, LinearKind, PackedLinear, pack_fields

_GROUP = 32
_SUPERBLOCK = 256


def pack_gguf(
    library: NativeLibrary,
    blocks: Bytes,
    type_name: str,
    num_outputs: int,
    num_inputs: int,
    bias_N: torch.Tensor | None = None,
) -> PackedLinear:
    """
    Args:
        blocks: the tensor's bytes, row after row, of any shape.
        type_name: a key of `GGUF_KINDS`.

    Raises:
        ValueError: a type that the library does not run, inputs that are not whole blocks, or a
            number of bytes that does not fit.
    """
    if type_name not in _FORMATS:
        raise ValueError(
            f'GGUF type "{type_name}" has no integer product; it has for '
            f"{', '.join(GGUF_KINDS)}: dequantise it and use pack_float"
        )
    kind, block_inputs, block_bytes, unpack = _FORMATS[type_name]
    if num_inputs < 1 or num_inputs % block_inputs or num_outputs < 1:
        raise ValueError(
            f"a {type_name} weight of {num_outputs} x {num_inputs}: inputs must be a multiple of "
            f"{block_inputs}, and there must be an output"
        )
    expected = num_outputs * (num_inputs // block_inputs) * block_bytes
    if blocks.dtype != np.uint8 or blocks.size != expected:
        raise ValueError(
            f"{blocks.size} values of {blocks.dtype}: a {type_name} weight of {num_outputs} x "
            f"{num_inputs} has {expected} bytes"
        )
    records = blocks.reshape(num_outputs, num_inputs // block_inputs, block_bytes)
    return pack_fields(
        library, kind, lambda rows: unpack(records[rows]), num_outputs, num_inputs, bias_N
    )


def _fields_q8_0(blocks: Bytes) -> Fields:
    return _halves(blocks[..., :2]), _dwords(np.bitwise_xor(blocks[..., 2:], np.uint8(0x80)))


def _fields_q4_0(blocks: Bytes) -> Fields:
    return _halves(blocks[..., :2]), _dwords(blocks[..., 2:])


def _fields_q4_1(blocks: Bytes) -> Fields:
    return _halves(blocks[..., :4]), _dwords(blocks[..., 4:])


def _fields_q4_k(blocks: Bytes) -> Fields:
    nibbles = _nibbles_of_pairs(blocks[..., 16:])
    return *_scales_and_minima(blocks), _dwords(nibbles.reshape(*blocks.shape[:2], -1))


def _fields_q5_k(blocks: Bytes) -> Fields:
    # bit g of byte i is the fifth of input i of group g
    fifths = blocks[..., None, 16:48] >> np.arange(8, dtype=np.uint8)[:, None] & 1
    planes = fifths.reshape(*blocks.shape[:2], 8, 2, 4, 4)
    planes = planes << (2 * np.arange(4) + np.arange(2)[:, None])[..., None].astype(np.uint8)
    nibbles = _nibbles_of_pairs(blocks[..., 48:])
    codes = np.concatenate((nibbles, planes.sum((3, 4), dtype=np.uint8)), axis=-1)
    return *_scales_and_minima(blocks), _dwords(codes.reshape(*blocks.shape[:2], -1))


def _scales_and_minima(blocks: Bytes) -> Fields:
    packed = blocks[..., 4:16]
    first, second, third = packed[..., :4], packed[..., 4:8], packed[..., 8:]
    scales = np.concatenate((first & 63, (third & 15) | (first >> 6 << 4)), axis=-1)
    minima = np.concatenate((second & 63, (third >> 4) | (second >> 6 << 4)), axis=-1)
    return _halves(blocks[..., :4]), scales, minima


def _nibbles_of_pairs(codes: Bytes) -> Bytes:
    """[N, B, 128] -> [N, B, 8, 16]: 32 bytes hold group 2i in their low halves and group 2i + 1 in
    their high ones."""
    pairs = codes.reshape(*codes.shape[:2], 4, 32)
    groups = np.stack((pairs & 15, pairs >> 4), axis=3).reshape(*codes.shape[:2], 8, 32)
    nibbles: Bytes = groups[..., :16] | (groups[..., 16:] << 4)
    return nibbles


def _fields_q6_k(blocks: Bytes) -> Fields:
    shape = blocks.shape[:2]
    # of each 128 inputs: 64 bytes of low nibbles, 32 of pairs of high bits
    low = blocks[..., :128].reshape(*shape, 2, 64)
    high = blocks[..., 128:192].reshape(*shape, 2, 32)
    quarters = [
        (low[..., 32 * (i % 2) : 32 * (i % 2) + 32] >> (4 * (i // 2)) & 15)
        | ((high >> (2 * i) & 3) << 4)
        for i in range(4)
    ]
    codes = np.concatenate(quarters, axis=-1).reshape(*shape, _SUPERBLOCK)
    return _halves(blocks[..., 208:]), blocks[..., 192:208], _dwords(codes)


def _fields_mxfp4(blocks: Bytes) -> Fields:
    return blocks[..., :1], _dwords(blocks[..., 1:])


def _halves(fields: Bytes) -> npt.NDArray[np.uint16]:
    return np.ascontiguousarray(fields).view(np.uint16)


def _dwords(codes: Bytes) -> npt.NDArray[np.uint32]:
    return np.ascontiguousarray(codes).view(np.uint32)


# layout here, inputs of a block, its bytes, its fields
_FORMATS: dict[str, tuple[LinearKind, int, int, Callable[[Bytes], Fields]]] = {
    "Q8_0": (LinearKind.Q8_GROUP, _GROUP, 34, _fields_q8_0),
    "Q4_0": (LinearKind.Q4_GROUP, _GROUP, 18, _fields_q4_0),
    "Q4_1": (LinearKind.Q4_MINIMUM, _GROUP, 20, _fields_q4_1),
    "Q4_K": (LinearKind.Q4_K, _SUPERBLOCK, 144, _fields_q4_k),
    "Q5_K": (LinearKind.Q5_K, _SUPERBLOCK, 176, _fields_q5_k),
    "Q6_K": (LinearKind.Q6_K, _SUPERBLOCK, 210, _fields_q6_k),
    "MXFP4": (LinearKind.MXFP4, _GROUP, 17, _fields_mxfp4),
}

GGUF_KINDS = {type_name: form[0] for type_name, form in _FORMATS.items()}
"""The GGUF types that run from their own blocks, by name."""


_Q5_0_BYTES = 22


def q5_0_as_q8_0(blocks: Bytes) -> Bytes:
    """uint8 [N, G * 22] -> [N, G * 34]: the same numbers, bit for bit.

    Q5_0   22 bytes: scale f16, 32 high bits, 16 bytes of nibbles    scale * (code - 16)
    Q8_0   34 bytes: scale f16, 32 signed bytes                      scale * code
    """
    num_rows = len(blocks)
    groups = np.ascontiguousarray(blocks).reshape(-1, _Q5_0_BYTES)
    nibbles = groups[:, 6:]
    codes = np.concatenate((nibbles & 15, nibbles >> 4), axis=1)
    # bit i of the four bytes is the fifth bit of input i
    codes |= np.unpackbits(groups[:, 2:6], axis=1, bitorder="little") << 4
    converted = np.empty((len(groups), 2 + _GROUP), np.uint8)
    converted[:, :2] = groups[:, :2]
    converted[:, 2:] = codes - np.uint8(16)  # wraps: two's complement
    return converted.reshape(num_rows, -1)
