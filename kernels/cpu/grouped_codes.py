"""Codes of GPTQ, AWQ, float8 and others as GGUF blocks, whose layouts the native library runs."""

from collections.abc import Callable

import torch

from kernels.interface.weights import GroupedCodes, QuantisedTensor

_GROUP = 32
_ROWS_AT_ONCE = 256
_LARGEST = 127
_NAN = 0x7F << 7
"""The bits of e4m3's NaN where a float16 has them."""
_NOT_FINITE = "a weight holds values that are not finite: it cannot be quantised"


def as_blocks(part: QuantisedTensor) -> torch.Tensor:
    """uint8 [N, bytes a row] of the type `part.blocks`, made of some rows at a time.

    Q4_0   scale * (code - 8)        exact, but for the scale's rounding to float16
    Q4_1   scale * code + minimum    the same; minimum = -scale * zero is rounded to float16, by
                                     1/128 of a step at most
    Q8_0   scale * code              see `_in_bytes`

    Raises ValueError: a scale or a minimum beyond float16, or a value that is not finite."""
    num_rows, num_inputs = part.shape
    fill, num_bytes = _FORMS[part.blocks]
    blocks = torch.empty(num_rows, num_inputs // _GROUP, num_bytes, dtype=torch.uint8)
    for start in range(0, num_rows, _ROWS_AT_ONCE):
        stop = min(start + _ROWS_AT_ONCE, num_rows)
        piece = part if stop - start == num_rows else part.narrow(0, start, stop)
        if piece is None:
            raise AssertionError(f"{part.type_name} cannot be cut between outputs")
        codes = piece.decode(piece.ordered())
        assert isinstance(codes, GroupedCodes), part.type_name
        fill(codes, blocks[start:stop])
    return blocks.flatten(1)


def _q4_0(codes: GroupedCodes, blocks: torch.Tensor) -> None:
    blocks[..., :2] = _halves(_for_32(codes.scales_NG, blocks))
    blocks[..., 2:] = _nibbles(codes)


def _q4_1(codes: GroupedCodes, blocks: torch.Tensor) -> None:
    assert codes.zeros_NG is not None
    minima_NG = -codes.scales_NG * codes.zeros_NG
    blocks[..., :2] = _halves(_for_32(codes.scales_NG, blocks))
    blocks[..., 2:4] = _halves(_for_32(minima_NG, blocks))
    blocks[..., 4:] = _nibbles(codes)


def _q8_0(codes: GroupedCodes, blocks: torch.Tensor) -> None:
    scales_NB, bytes_NBI = _in_bytes(codes, blocks)
    blocks[..., :2] = _halves(scales_NB)
    blocks[..., 2:] = bytes_NBI.view(torch.uint8)


_FORMS: dict[str, tuple[Callable[[GroupedCodes, torch.Tensor], None], int]] = {
    "Q4_0": (_q4_0, 18),
    "Q4_1": (_q4_1, 20),
    "Q8_0": (_q8_0, 34),
}


def _in_bytes(codes: GroupedCodes, blocks: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(scales [N, B], signed bytes [N, B, 32]) of blocks of 32 inputs.

    Signed bytes, and unsigned ones with a zero of 128, are exact. A table's values are rounded to
    1/127 of its largest. Of float8 a step is the power of
    two by which a block's largest value is 64 to 120 steps: values from an eighth of it on are
    exact, smaller ones off by half a step at most. Others are rounded to 1/127 of the largest."""
    codes_NE, scales_NG, zeros_NG = codes.codes_NE, codes.scales_NG, codes.zeros_NG
    shape = (*blocks.shape[:2], _GROUP)
    if codes_NE.shape[1] // scales_NG.shape[1] % _GROUP:  # several scales a block
        pass
    elif codes.table is not None:
        step = float(codes.table.abs().max()) / _LARGEST
        bytes_of_places = (codes.table / step).round().to(torch.int8)
        return _for_32(scales_NG * step, blocks), bytes_of_places[codes_NE.int()].view(shape)
    elif zeros_NG is None and codes_NE.dtype is torch.int8:
        return _for_32(scales_NG, blocks), codes_NE.reshape(shape)
    elif zeros_NG is None and codes_NE.dtype is torch.float8_e4m3fn:
        values_NBI = _times_2_to_minus_8(codes_NE).view(shape)
        exponents_NB = torch.frexp(_largest(values_NBI)).exponent - 7
        steps_NB = torch.exp2(exponents_NB.float())
        scales_NB = _for_32(scales_NG * 2**8, blocks) * steps_NB
        return scales_NB, _rounded(values_NBI, steps_NB)
    elif codes_NE.dtype is torch.uint8 and zeros_NG is not None and bool((zeros_NG == 128).all()):
        return _for_32(scales_NG, blocks), (codes_NE ^ 128).view(torch.int8).view(shape)
    values_NBI = codes.dequantise().view(shape)
    steps_NB = _largest(values_NBI) / _LARGEST
    return steps_NB, _rounded(values_NBI, steps_NB)


def _times_2_to_minus_8(codes_NE: torch.Tensor) -> torch.Tensor:
    """e4m3 as float32; torch's own conversion takes ten times as long.

    A code's seven low bits are those of a float16 whose exponent has a bias of 15, not 7."""
    halves = codes_NE.view(torch.int8).short().bitwise_left_shift_(7).bitwise_and_(~(1 << 14))
    if bool((halves.bitwise_and(_NAN) == _NAN).any()):
        raise ValueError(_NOT_FINITE)
    return halves.view(torch.float16).float()


def _largest(values_NBI: torch.Tensor) -> torch.Tensor:
    largest = values_NBI.abs().amax(dim=-1)
    if not bool(torch.isfinite(largest).all()):
        raise ValueError(_NOT_FINITE)
    return largest


def _rounded(values_NBI: torch.Tensor, steps_NB: torch.Tensor) -> torch.Tensor:
    return values_NBI.mul_(1 / steps_NB.clamp(min=1e-30)[..., None]).round_().to(torch.int8)


def _for_32(values_NG: torch.Tensor, blocks: torch.Tensor) -> torch.Tensor:
    """One for each 32 inputs, of one for some multiple of them."""
    num_blocks = blocks.shape[1]
    return values_NG.repeat_interleave(num_blocks // values_NG.shape[1], dim=1)


def _halves(values_NB: torch.Tensor) -> torch.Tensor:
    """The bytes of these as float16: uint8 [N, B, 2]."""
    halves = values_NB.half()
    if not bool(torch.isfinite(halves).all()):
        raise ValueError(
            f"a scale as large as {float(values_NB.abs().max()):g} does not fit float16; use "
            "--quantization none"
        )
    return halves.view(torch.uint8).view(*halves.shape, 2)


def _nibbles(codes: GroupedCodes) -> torch.Tensor:
    """[N, B, 16]: inputs i and 16 + i of a block in a byte."""
    halves = codes.codes_NE.view(len(codes.codes_NE), -1, 2, _GROUP // 2)
    return halves[:, :, 0] | (halves[:, :, 1] << 4)
