"""GGUF quantised blocks to float32: the bits of `gguf.quants.dequantize`, five times as fast, by
all of torch's threads on pieces that stay in the CPU's caches. Rare types go through gguf's own.

Block layouts: https://github.com/ggml-org/ggml/blob/master/src/ggml-common.h"""

from collections.abc import Callable, Iterator

import torch

from engine_core.model_files.errors import BrokenModelFile
from engine_core.model_files.gguf.header import GgmlType, GgufTensor

# elements a piece: 1 MiB of float32, so that a piece and its temporaries stay in the L2 caches
PIECE_ELEMENTS = 1 << 18

_T = GgmlType


def _half(blocks_NB: torch.Tensor, start: int) -> torch.Tensor:
    """float16 at byte `start` of each block -> float32 [N, 1]."""
    return blocks_NB[:, start : start + 2].contiguous().view(torch.float16).float()


def _signed(bytes_: torch.Tensor) -> torch.Tensor:
    return bytes_.contiguous().view(torch.int8)


def _nibbles(packed: torch.Tensor) -> torch.Tensor:
    """uint8 [N, W] -> [N, 2W]: all low halves, then all high halves."""
    return torch.cat((packed & 15, packed >> 4), dim=1)


def _fifth_bits(blocks_NB: torch.Tensor, start: int) -> torch.Tensor:
    """32 bits at byte `start` -> uint8 [N, 32], each 0 or 16."""
    bytes_N41 = blocks_NB[:, start : start + 4, None]
    shifts = torch.arange(8, dtype=torch.uint8)
    return ((bytes_N41 >> shifts) & 1).reshape(-1, 32) << 4


def _q4_0(blocks_NB: torch.Tensor, out_NE: torch.Tensor) -> None:
    quants = _nibbles(blocks_NB[:, 2:]).view(torch.int8) - 8
    torch.mul(_half(blocks_NB, 0), quants, out=out_NE)


def _q4_1(blocks_NB: torch.Tensor, out_NE: torch.Tensor) -> None:
    torch.mul(_half(blocks_NB, 0), _nibbles(blocks_NB[:, 4:]), out=out_NE)
    out_NE += _half(blocks_NB, 2)


def _q5_0(blocks_NB: torch.Tensor, out_NE: torch.Tensor) -> None:
    quants = _nibbles(blocks_NB[:, 6:]) | _fifth_bits(blocks_NB, 2)
    torch.mul(_half(blocks_NB, 0), quants.view(torch.int8) - 16, out=out_NE)


def _q8_0(blocks_NB: torch.Tensor, out_NE: torch.Tensor) -> None:
    torch.mul(_half(blocks_NB, 0), _signed(blocks_NB[:, 2:]), out=out_NE)


def _k_scales(blocks_NB: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Q4_K, Q5_K: scale and minimum of each of the 8 groups of 32, float32 [N, 8, 1] each."""
    low, mid, high = (blocks_NB[:, s : s + 4] for s in (4, 8, 12))
    scales = torch.cat((low & 63, (high & 15) | ((low >> 2) & 48)), dim=1)
    minima = torch.cat((mid & 63, (high >> 4) | ((mid >> 2) & 48)), dim=1)
    return (
        (_half(blocks_NB, 0) * scales).unsqueeze(-1),
        (_half(blocks_NB, 2) * minima).unsqueeze(-1),
    )


def _k_nibbles(packed_N128: torch.Tensor) -> torch.Tensor:
    """Each 32 bytes hold 64 values: uint8 [N, 128] -> [N, 8, 32]."""
    packed = packed_N128.reshape(-1, 4, 1, 32)
    return torch.cat((packed & 15, packed >> 4), dim=2).reshape(-1, 8, 32)


def _q4_k(blocks_NB: torch.Tensor, out_NE: torch.Tensor) -> None:
    scales, minima = _k_scales(blocks_NB)
    out = out_NE.view(-1, 8, 32)
    torch.mul(scales, _k_nibbles(blocks_NB[:, 16:]), out=out)
    out -= minima


def _q5_k(blocks_NB: torch.Tensor, out_NE: torch.Tensor) -> None:
    scales, minima = _k_scales(blocks_NB)
    # bit g of byte i of the high plane is the fifth bit of value i of group g
    shifts = torch.arange(8, dtype=torch.uint8)[:, None]
    fifth = ((blocks_NB[:, 16:48].unsqueeze(1) >> shifts) & 1) << 4
    out = out_NE.view(-1, 8, 32)
    torch.mul(scales, _k_nibbles(blocks_NB[:, 48:]) | fifth, out=out)
    out -= minima


def _q6_k(blocks_NB: torch.Tensor, out_NE: torch.Tensor) -> None:
    # two halves of 128 values; each: 64 bytes of low nibbles, 32 bytes of high bit pairs
    low = blocks_NB[:, :128].reshape(-1, 2, 64)
    low = torch.cat((low & 15, low >> 4), dim=2).view(-1, 2, 4, 32)
    shifts = torch.tensor((0, 2, 4, 6), dtype=torch.uint8)[:, None]
    high = (blocks_NB[:, 128:192].reshape(-1, 2, 1, 32) >> shifts) & 3
    quants = (low | (high << 4)).view(torch.int8) - 32
    scales = _half(blocks_NB, 208) * _signed(blocks_NB[:, 192:208])
    torch.mul(scales.unsqueeze(-1), quants.view(-1, 16, 16), out=out_NE.view(-1, 16, 16))


_E2M1_TWICE = (0.0, 1.0, 2.0, 3.0, 4.0, 6.0, 8.0, 12.0)


def _mxfp4(blocks_NB: torch.Tensor, out_NE: torch.Tensor) -> None:
    twice = torch.tensor((*_E2M1_TWICE, *(-value for value in _E2M1_TWICE)))
    torch.index_select(twice, 0, _nibbles(blocks_NB[:, 1:]).flatten().int(), out=out_NE.view(-1))
    out_NE *= torch.ldexp(torch.ones(len(blocks_NB), 1), blocks_NB[:, :1].int() - 128)


BY_TORCH: dict[GgmlType, Callable[[torch.Tensor, torch.Tensor], None]] = {
    _T.Q4_0: _q4_0,
    _T.Q4_1: _q4_1,
    _T.Q5_0: _q5_0,
    _T.Q8_0: _q8_0,
    _T.Q4_K: _q4_k,
    _T.Q5_K: _q5_k,
    _T.Q6_K: _q6_k,
    _T.MXFP4: _mxfp4,
}
PLAIN = {
    _T.F64: torch.float64,
    _T.F32: torch.float32,
    _T.F16: torch.float16,
    _T.BF16: torch.bfloat16,
}


def dequantize(data: torch.Tensor, quant_type: GgmlType, shape: tuple[int, ...]) -> torch.Tensor:
    """Blocks to numbers.
    Returns float32 of `shape`; for F16, BF16 and F64 that type, sharing memory with `data`.

    Args:
        data: uint8, flat, the tensor's bytes as in the file.
        quant_type: one of `SUPPORTED_TYPES`.
        shape: of the result; the last dimension is a whole number of blocks.
    """
    if quant_type in PLAIN:
        return data.view(PLAIN[quant_type]).view(shape)
    blocks = data.view(-1, quant_type.block_bytes)
    out = torch.empty(blocks.shape[0], quant_type.block_elements)
    step = max(1, PIECE_ELEMENTS // quant_type.block_elements)
    for start in range(0, blocks.shape[0], step):
        piece, target = blocks[start : start + step], out[start : start + step]
        if quant_type in BY_TORCH:
            BY_TORCH[quant_type](piece, target)
        else:
            target.copy_(_by_gguf(piece, quant_type).view_as(target))
    return out.view(shape)


def _by_gguf(blocks_NB: torch.Tensor, quant_type: GgmlType) -> torch.Tensor:
    import gguf  # slow to import, and only for rare types

    kind = gguf.GGMLQuantizationType(quant_type.value)
    return torch.from_numpy(gguf.quants.dequantize(blocks_NB.numpy(), kind))


def unstack(
    name: str, tensor: GgufTensor, data: torch.Tensor
) -> Iterator[tuple[str, torch.Tensor]]:
    """Each expert of a stack, dequantised when its turn comes: a layer's stack may be gigabytes.
    Raises BrokenModelFile: not three dimensions, of biases two.

    Args:
        name: with {} where the expert's number belongs.
        tensor: [X, rows, columns]; of biases [X, rows].
        data: uint8, its bytes; those of an expert lie together.
    """
    num_dimensions = 2 if name.endswith(".bias") else 3
    if len(tensor.shape) != num_dimensions:
        raise BrokenModelFile(
            f"tensor {tensor.name!r} has shape {list(tensor.shape)}; experts are stacked in "
            f"{num_dimensions} dimensions: convert the model again"
        )
    num_experts, *shape = tensor.shape
    for expert, part in enumerate(data.view(num_experts, -1)):
        yield name.format(expert), dequantize(part, tensor.quant_type, tuple(shape))
