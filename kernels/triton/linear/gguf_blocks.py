"""GGUF's block types in the packed layout of a GPU: the same numbers as `gguf.quants.dequantize`,
to the bit; in memory little more than in the file.

Layouts: https://github.com/ggml-org/ggml/blob/master/src/ggml-common.h. Suffixes: B blocks."""

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any, NamedTuple

import torch

from kernels.triton.linear.quantised_weights import QuantisedWeight, build_weight


class _Values(NamedTuple):
    """What blocks hold, in the meaning of `QuantisedWeight`; its groups are of equal size.

    Attributes:
        q: numbers of any shape, a block's in the order of inputs.
        scales_BG, offsets_BG: floating, or whole numbers if there are supers.
        supers_BC: float32, of one or both.
    """

    num_bits: int
    q: torch.Tensor
    scales_BG: torch.Tensor
    offsets_BG: torch.Tensor | None = None
    supers_BC: torch.Tensor | None = None
    levels: tuple[float, ...] = ()
    is_e2m1: bool = False


def _halves(data: torch.Tensor, start: int) -> torch.Tensor:
    """float32 [B, 1] of the float16 at byte `start` of each block."""
    return data[:, start : start + 2].contiguous().view(torch.float16).float()


def _words(data: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """int32 of bytes that are int16 or int32; of int16 the high bits are zeros."""
    words = data.contiguous().view(dtype).int()
    return words & 0xFFFF if dtype == torch.int16 else words


def _fields(data: torch.Tensor, step: int, mask: int, number: int) -> torch.Tensor:
    """[B, W] -> [B, W, number]: fields of each word from the low bits up, `step` bits apart."""
    shifts = torch.arange(0, step * number, step, dtype=data.dtype, device=data.device)
    return (data[..., None] >> shifts) & mask


def _planes(data: torch.Tensor, step: int, mask: int, width: int = 32) -> torch.Tensor:
    """uint8 [B, W] -> [B, W / width, 8 / step, width]: runs of bytes, their low bits first."""
    return _fields(data.reshape(len(data), -1, width), step, mask, 8 // step).transpose(2, 3)


def _q8_0(data: torch.Tensor) -> _Values:
    return _Values(8, data[:, 2:].contiguous().view(torch.int8), _halves(data, 0))


def _q4_0(data: torch.Tensor) -> _Values:
    return _Values(4, _planes(data[:, 2:], 4, 15, 16), _halves(data, 0))


def _q4_1(data: torch.Tensor) -> _Values:
    return _Values(4, _planes(data[:, 4:], 4, 15, 16), _halves(data, 0), _halves(data, 2))


def _five_bits(data: torch.Tensor, start: int) -> torch.Tensor:
    """Of 32 numbers: 4 bytes of fifth bits, then nibbles -> int8 [B, 32]."""
    fifth = _fields(data[:, start : start + 4], 1, 1, 8).reshape(len(data), 32) << 4
    return (_planes(data[:, start + 4 :], 4, 15, 16).reshape(len(data), 32) | fifth).to(torch.int8)


def _q5_0(data: torch.Tensor) -> _Values:
    return _Values(8, _five_bits(data, 2) - 16, _halves(data, 0))


def _q5_1(data: torch.Tensor) -> _Values:
    return _Values(8, _five_bits(data, 4), _halves(data, 0), _halves(data, 2))


def _mxfp4(data: torch.Tensor) -> _Values:
    powers = data[:, :1].int() - 127
    scales = torch.ldexp(torch.ones_like(powers, dtype=torch.float32), powers)
    return _Values(4, _planes(data[:, 1:], 4, 15, 16), scales, is_e2m1=True)


def _q2_k(data: torch.Tensor) -> _Values:
    supers = torch.cat([_halves(data, 80), -_halves(data, 82)], dim=1)
    scales, minima = data[:, :16] & 15, data[:, :16] >> 4
    return _Values(4, _planes(data[:, 16:80], 2, 3), scales, minima, supers)


def _q3_k(data: torch.Tensor) -> _Values:
    low, high = data[:, 96:104], data[:, 104:108]
    scales = _planes(low, 4, 15, 8).flatten(1) | (_planes(high, 2, 3, 4).flatten(1) << 4)
    third = _planes(data[:, :32], 1, 1).flatten(1) << 2
    q = (_planes(data[:, 32:96], 2, 3).flatten(1) | third) + 4  # of -4 ... 3, and 8 more
    return _Values(4, q, scales.to(torch.int8) - 32, supers_BC=_halves(data, 108))


def _k_scales(data: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Q4_K, Q5_K: scales and minima of 8 groups, supers of both. 12 bytes hold 6 bits each: the
    first four of both plainly, of the others 4 bits in the last 4 bytes and the 2 high bits above
    the plain ones."""
    supers = torch.cat([_halves(data, 0), -_halves(data, 2)], dim=1)
    scale, least, low = data[:, 4:8], data[:, 8:12], data[:, 12:16]
    scales = torch.cat([scale & 63, (low & 15) | ((scale >> 2) & 48)], dim=1)
    return scales, torch.cat([least & 63, (low >> 4) | ((least >> 2) & 48)], dim=1), supers


def _q4_k(data: torch.Tensor) -> _Values:
    return _Values(4, _planes(data[:, 16:], 4, 15), *_k_scales(data))


def _q5_k(data: torch.Tensor) -> _Values:
    fifth = _planes(data[:, 16:48], 1, 1).flatten(1) << 4
    return _Values(8, _planes(data[:, 48:], 4, 15).flatten(1) | fifth, *_k_scales(data))


def _q6_k(data: torch.Tensor) -> _Values:
    high = _planes(data[:, 128:192], 2, 3).flatten(1) << 4
    q = (_planes(data[:, :128], 4, 15, 64).flatten(1) | high).to(torch.int8) - 32
    return _Values(8, q, data[:, 192:208].view(torch.int8), supers_BC=_halves(data, 208))


def _tq1_0(data: torch.Tensor) -> _Values:
    """Base 3, in fractions of 256: multiplied by 3 ** i, a byte's top third is its digit i."""
    powers = torch.tensor([1, 3, 9, 27, 81], dtype=torch.uint8, device=data.device)
    runs = ((data[:, :32], 5), (data[:, 32:48], 5), (data[:, 48:52], 4))
    places = [(run[:, None] * powers[:number, None]).flatten(1) for run, number in runs]
    q = ((torch.cat(places, dim=1).int() * 3) >> 8) + 7
    return _Values(4, q, _halves(data, 52))


def _tq2_0(data: torch.Tensor) -> _Values:
    return _Values(4, _planes(data[:, :64], 2, 3) + 7, _halves(data, 64))


def _iq4_nl(data: torch.Tensor) -> _Values:
    return _Values(4, _planes(data[:, 2:], 4, 15, 16), _halves(data, 0), levels=IQ4_LEVELS)


def _iq4_xs(data: torch.Tensor) -> _Values:
    high = _fields(_words(data[:, 2:4], torch.int16), 2, 3, 8).flatten(1)
    scales = (_fields(data[:, 4:8], 4, 15, 2).flatten(1) | (high << 4)) - 32
    q = _planes(data[:, 8:], 4, 15, 16)
    return _Values(4, q, scales, supers_BC=_halves(data, 0), levels=IQ4_LEVELS)


def _iq3_xxs(data: torch.Tensor) -> _Values:
    words = _words(data[:, 66:98], torch.int32)
    q = _signed("IQ3_XXS", data[:, 2:66], _even_signs(_fields(words, 7, 127, 4)))
    return _Values(4, q, *_odd(data, words >> 28, 4), levels=IQ3_XXS_LEVELS)


def _iq3_s(data: torch.Tensor) -> _Values:
    ninth = _fields(data[:, 66:74], 1, 1, 8).flatten(1).int() << 8
    q = _signed("IQ3_S", data[:, 2:66] | ninth, _fields(data[:, 74:106], 1, 1, 8))
    scales = _fields(data[:, 106:110], 4, 15, 2).flatten(1)
    return _Values(4, q, *_odd(data, scales, 1), levels=_IQ3_S_LEVELS)


def _iq2_xxs(data: torch.Tensor) -> _Values:
    places = data[:, 2:66].reshape(-1, 8, 2, 4)[:, :, 0].flatten(1)
    words = _words(data[:, 2:66], torch.int32)[:, 1::2]
    q = _signed("IQ2_XXS", places, _even_signs(_fields(words, 7, 127, 4)))
    return _Values(4, q, *_odd(data, words >> 28, 8), levels=IQ2_LEVELS)


def _iq2_xs(data: torch.Tensor) -> _Values:
    words = _words(data[:, 2:66], torch.int16)
    q = _signed("IQ2_XS", words & 511, _even_signs(words >> 9))
    scales = _fields(data[:, 66:74], 4, 15, 2).flatten(1)
    return _Values(4, q, *_odd(data, scales, 8), levels=IQ2_LEVELS)


def _iq2_s(data: torch.Tensor) -> _Values:
    high = _fields(data[:, 66:74], 2, 3, 4).flatten(1).int() << 8
    q = _signed("IQ2_S", data[:, 2:34] | high, _fields(data[:, 34:66], 1, 1, 8))
    scales = _fields(data[:, 74:82], 4, 15, 2).flatten(1)
    return _Values(4, q, *_odd(data, scales, 8), levels=IQ2_LEVELS)


def _iq1_s(data: torch.Tensor) -> _Values:
    words = _words(data[:, 34:50], torch.int16)
    high = _fields(words, 3, 7, 4).flatten(1) << 8
    q = _ternary("IQ1_S", data[:, 2:34] | high, words >> 15)
    return _Values(4, q, *_odd(data, (words >> 12) & 7, 8), levels=_IQ1_LEVELS)


def _iq1_m(data: torch.Tensor) -> _Values:
    words = _words(data[:, 48:56], torch.int16)  # their top nibbles are a float16
    first, second, third, fourth = (words & 0xF000).unbind(1)
    bits = (first >> 12) | (second >> 8) | (third >> 4) | fourth
    supers = bits.to(torch.int16).view(torch.float16).float()[:, None] / 8
    high = _fields(data[:, 32:48], 4, 15, 2).flatten(1).int()
    q = _ternary("IQ1_M", data[:, :32] | ((high & 7) << 8), high >> 3)
    scales = 2 * _fields(words, 3, 7, 4).flatten(1) + 1
    return _Values(4, q, scales, supers_BC=supers, levels=_IQ1_LEVELS)


def _odd(
    data: torch.Tensor, scales_BG: torch.Tensor, divisor: int
) -> tuple[torch.Tensor, None, torch.Tensor]:
    """Scales (2 s + 1) d / divisor, s of 4 bits: the first factor, no offsets, the supers."""
    return 2 * (scales_BG & 15) + 1, None, _halves(data, 0) / divisor


# of the types' levels, which stand in the place of q - 8: `QuantisedWeight.levels`
IQ4_LEVELS = (1.433, 11.44, -0.01681, 0.08184, 0.001586)  # within 0.44 of IQ4_NL's 16 numbers
IQ3_XXS_LEVELS = (4.09, 8.17, -0.0252, -0.0163, 0.000801, 0.000321)  # 0.23: 4, 12, ... 52, 62
_IQ3_S_LEVELS = (1.0, 2.0)  # odd numbers
IQ2_LEVELS = (8.125, 16.33, 0.25, 0.1667)  # 0.14 of 8, 25 and 43 and their negatives
_IQ1_LEVELS = (7.0, 2.0)  # q = 4 g + 4 or 5, g of -1, 0, 1, gives 8 g - 1 or 8 g + 1


@cache
def _grid(type_name: str) -> torch.Tensor:
    """uint8 [entries, 4 or 8]: places of an entry's numbers among the sizes that there are."""
    import gguf  # slow to import, and only for rare types: tables of some thousand numbers

    kind: Any = getattr(gguf.quants, type_name)
    kind.init_grid()
    numbers = torch.from_numpy(kind.grid).view(kind.grid_shape)
    sizes = torch.tensor(kind.grid_map, dtype=torch.float32, device="cpu")
    return torch.bucketize(numbers, sizes).to(torch.uint8)


def _signed(type_name: str, entries: torch.Tensor, signs: torch.Tensor) -> torch.Tensor:
    """[B, 256] of 4 or 8 numbers an entry: 8, 9, ... of sizes, and 7, 6, ... where a sign is 1."""
    places = _grid(type_name).to(entries.device)[entries.int()].flatten(1)
    return (places + 8) ^ (signs.reshape(places.shape) * 15)


def _ternary(type_name: str, entries: torch.Tensor, is_less: torch.Tensor) -> torch.Tensor:
    """[B, 256] of 8 numbers -1, 0, 1 an entry, each an eighth more or, where it is 1, less."""
    places = _grid(type_name).to(entries.device)[entries.int()].flatten(1)
    more = 1 - is_less.to(torch.uint8)
    return 4 * places + more.repeat_interleave(256 // more.shape[1], dim=1)


def _even_signs(seven: torch.Tensor) -> torch.Tensor:
    """8 signs of 7 bits [..., W] -> [..., W, 8]: the last makes their number even."""
    signs = _fields(seven.to(torch.uint8), 1, 1, 8)
    signs[..., 7] = signs.sum(dim=-1) & 1
    return signs


_READERS: dict[str, tuple[int, int, Callable[[torch.Tensor], _Values]]] = {
    "Q8_0": (32, 34, _q8_0),
    "Q4_0": (32, 18, _q4_0),
    "Q4_1": (32, 20, _q4_1),
    "Q5_0": (32, 22, _q5_0),
    "Q5_1": (32, 24, _q5_1),
    "MXFP4": (32, 17, _mxfp4),
    "Q2_K": (256, 84, _q2_k),
    "Q3_K": (256, 110, _q3_k),
    "Q4_K": (256, 144, _q4_k),
    "Q5_K": (256, 176, _q5_k),
    "Q6_K": (256, 210, _q6_k),
    "TQ1_0": (256, 54, _tq1_0),
    "TQ2_0": (256, 66, _tq2_0),
    "IQ4_NL": (32, 18, _iq4_nl),
    "IQ4_XS": (256, 136, _iq4_xs),
    "IQ3_XXS": (256, 98, _iq3_xxs),
    "IQ3_S": (256, 110, _iq3_s),
    "IQ2_XXS": (256, 66, _iq2_xxs),
    "IQ2_XS": (256, 74, _iq2_xs),
    "IQ2_S": (256, 82, _iq2_s),
    "IQ1_S": (256, 50, _iq1_s),
    "IQ1_M": (256, 56, _iq1_m),
}
"""Elements and bytes of a block, and what it holds."""

GGUF_TYPES = tuple(_READERS)
"""GGUF's block types that `from_gguf` takes."""


def from_gguf(
    blocks: torch.Tensor, num_outputs: int, num_inputs: int, format_name: str
) -> QuantisedWeight:
    """Blocks of a GGUF tensor, without passing through floats: those of `GGUF_TYPES`.
    `blocks`: uint8, N * E / elements of a block, times the bytes of a block. Raises ValueError:
    another format, or a number of bytes that does not fit the shape."""
    if format_name not in _READERS:
        raise ValueError(f"GGUF format {format_name}; supported are {', '.join(_READERS)}")
    elements, num_bytes, read = _READERS[format_name]
    num_blocks = num_outputs * num_inputs // elements
    if num_inputs % elements or blocks.numel() != num_blocks * num_bytes:
        raise ValueError(
            f"{blocks.numel()} bytes of {format_name} for [{num_outputs}, {num_inputs}]; "
            f"rows are blocks of {elements} elements in {num_bytes} bytes"
        )
    values = read(blocks.reshape(num_blocks, num_bytes))
    rows = (num_outputs, -1)
    scales, offsets, supers = values.scales_BG, values.offsets_BG, values.supers_BC
    weight = build_weight(
        values.q.reshape(num_outputs, num_inputs),
        values.num_bits,
        elements // scales.shape[1],
        scales.reshape(rows),
        None if offsets is None else offsets.reshape(rows),
        supers_NSC=None if supers is None else supers.view(num_outputs, -1, supers.shape[1]),
    )
    if values.is_e2m1:
        return replace(weight, packed_NJ=weight.packed_NJ.view(torch.int8))
    return replace(weight, levels=values.levels)
