"""Codes of folders (`kernels.interface.weights.GroupedCodes`) in the packed layout of a GPU."""

from dataclasses import replace

import torch

from kernels.interface.weights import GroupedCodes
from kernels.triton.linear.quantised_weights import (
    E2M1,
    QuantisedWeight,
    build_weight,
    from_zero_points,
)

CODE_BITS = {"w4a16": 4, "w8a16": 8, "w8a8": 8, "bnb-int8": 8, "nvfp4": 4, "bnb-nf4": 4}
"""Bits of a code of each type that is run so."""

_STEPS = 4096
"""Of the largest number of a table: levels are whole numbers of them."""
_MOST_OFF = 0.25


def from_codes(codes: GroupedCodes, num_bits: int) -> QuantisedWeight | None:
    """The same numbers, but those of a table that is not e2m1's (nf4) are rounded to 1/4096 of its
    largest, as float16 rounds numbers near 1. None: groups or a table that do not fit.

    Args:
        codes: of 4 or 8 bits as `num_bits` says; uint8 with zeros or a table, or int8.
    """
    num_inputs = codes.codes_NE.shape[1]
    group_size = num_inputs // codes.scales_NG.shape[1]
    fits = group_size == num_inputs or (group_size >= 16 and group_size & (group_size - 1) == 0)
    if num_inputs % 32 or not fits:
        return None
    q_NE, scales_NG, zeros_NG = codes.codes_NE, codes.scales_NG, codes.zeros_NG
    if codes.table is not None:
        return _of_table(codes, codes.table, group_size)
    if q_NE.dtype == torch.int8:
        offsets_NG = None if zeros_NG is None else -scales_NG * zeros_NG
        return build_weight(q_NE, num_bits, group_size, scales_NG, offsets_NG)
    assert zeros_NG is not None, "codes that count from 0 have zeros"
    return from_zero_points(q_NE, zeros_NG.float(), scales_NG, num_bits, group_size)


def _of_table(codes: GroupedCodes, table: torch.Tensor, group_size: int) -> QuantisedWeight | None:
    if torch.equal(table.cpu(), torch.tensor(E2M1)):
        weight = build_weight(codes.codes_NE, 4, group_size, codes.scales_NG, None)
        return replace(weight, packed_NJ=weight.packed_NJ.view(torch.int8))
    order = table.argsort()
    largest = float(table.abs().max())
    levels = _levels([round(float(each) / largest * _STEPS) for each in table[order]])
    if levels is None:
        return None
    places = order.argsort().to(torch.uint8)
    q_NE, scales_NG = places[codes.codes_NE.int()], codes.scales_NG * (largest / _STEPS)
    return replace(build_weight(q_NE, 4, group_size, scales_NG, None), levels=levels)


def _levels(numbers: list[int]) -> tuple[float, ...] | None:
    """`QuantisedWeight.levels` of 16 numbers: the polynomial through them. None: float32 is too
    coarse for it, as for bitsandbytes' fp4, whose steps are of very unequal width."""
    x = torch.arange(16, dtype=torch.float64) - 8
    powers = (x[:, None] / 8) ** torch.arange(16)
    through = torch.linalg.solve(powers, torch.tensor(numbers, dtype=torch.float64))
    levels = tuple((through / 8.0 ** torch.arange(16)).float().tolist())
    values = torch.zeros(16)
    for coefficient in reversed(levels):
        values = values * x.float() + coefficient
    return levels if (values - torch.tensor(numbers)).abs().max() < _MOST_OFF else None
