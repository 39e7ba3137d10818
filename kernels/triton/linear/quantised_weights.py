"""Weight-only float8, int8 and int4: one packed layout (`QuantisedWeight`), and the way into it
from files.

Shape suffixes here: G groups a row, J bytes a row."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

INPUTS_A_SPAN = 32
"""Inputs whose int4 values share a run of bytes."""

_AWQ_PLACE = (0, 4, 1, 5, 2, 6, 3, 7)
"""Nibble of an int32 that holds column c of 8."""


@dataclass(frozen=True, slots=True, kw_only=True)
class QuantisedWeight:
    """W[n, k] = scales[n, k // G] * q[n, k] + offsets[n, k // G]; a `LinearWeight`.

    int8: q as it is. float8: q is e4m3. int4: q in [0, 16), or e2m1, two in a byte, so that the
    bytes of a group of 32 have no other:

        inputs   32 j ... 32 j + 15 | 32 j + 16 ... 32 j + 31
        bytes       low nibbles of  |    high nibbles of          bytes 16 j ... 16 j + 15

    A matrix unit's thread multiplies bytes 2 w, 2 w + 1, 2 w + 8 and 2 w + 9 of each run of 16.
    They are word w: it reads 4 bytes at a time, and memory is copied by 16. In a word they stand as
    2 w, 2 w + 8, 2 w + 1, 2 w + 9: neighbours are 16 bits apart, as two 16-bit numbers are.

    Without offsets W = scales * q for 8 bits and e2m1, and scales * (q - 8) for int4, or one of 16
    levels in place of q - 8. Offsets are in scaled units, because some formats have no zero points;
    of those that have them, W = scales * (q - offsets).

    With supers, scales and offsets are whole numbers, and those of 256 inputs are multiplied by
    supers[n, k // 256, 0] and [.., 1].

    Attributes:
        num_bits: 4 or 8.
        group_size: inputs that share a scale: a power of two of at least 16, or all.
        packed_NJ: uint8 [N, E / 2] for int4, int8 [N, E / 2] for e2m1, int8 [N, E] for int8, uint8
            [N, E] for float8.
        scales_NG, offsets_NG: floating [N, G], of one dtype; with supers int8; offsets None if
            symmetric.
        has_zero_points: offsets are whole numbers that q lies around, at most 16 from any of int4.
        supers_NSC: float32 [N, E / 256, 1], or 2 with offsets; None: without.
        levels: of int4 without offsets: coefficients, from that of power 0 on, of a polynomial in
            q - 8. The number is the whole one nearest to its value; empty: q - 8 itself.
        input_order_E: int64; if given, column k of the packed weight belongs to input
            `input_order_E[k]` (GPTQ's act-order).
    """

    num_bits: int
    group_size: int
    num_inputs: int
    num_outputs: int
    packed_NJ: torch.Tensor
    scales_NG: torch.Tensor
    offsets_NG: torch.Tensor | None = None
    has_zero_points: bool = False
    input_order_E: torch.Tensor | None = None
    supers_NSC: torch.Tensor | None = None
    levels: tuple[float, ...] = ()

    @property
    def is_float8(self) -> bool:
        return self.num_bits == 8 and self.packed_NJ.dtype == torch.uint8

    @property
    def is_e2m1(self) -> bool:
        return self.num_bits == 4 and self.packed_NJ.dtype == torch.int8

    def rows(self, rows_T: torch.Tensor) -> "QuantisedWeight":
        """Outputs `rows_T`, int64, alone."""

        def of(array: torch.Tensor | None) -> torch.Tensor | None:
            return None if array is None else array.index_select(0, rows_T)

        return replace(
            self,
            num_outputs=len(rows_T),
            packed_NJ=self.packed_NJ.index_select(0, rows_T),
            scales_NG=self.scales_NG.index_select(0, rows_T),
            offsets_NG=of(self.offsets_NG),
            supers_NSC=of(self.supers_NSC),
        )


E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)


def dequantise(weight: QuantisedWeight) -> torch.Tensor:
    """The reference: float32 [N, E], inputs in the model's order."""
    runs = weight.packed_NJ.view(weight.num_outputs, -1, 4, 2, 2)
    packed_NJ = runs.permute(0, 1, 4, 2, 3).reshape(weight.packed_NJ.shape)
    q_NE = unpack_nibbles(packed_NJ.view(torch.uint8)) if weight.num_bits == 4 else packed_NJ
    if weight.is_float8:
        q_NE = q_NE.view(torch.float8_e4m3fn)
    if weight.is_e2m1:
        q_NE = torch.tensor(E2M1, device=q_NE.device)[q_NE.int()]
    elif weight.num_bits == 4 and weight.offsets_NG is None:
        q_NE = q_NE.to(torch.int8) - 8
        if weight.levels:
            values_NE = torch.zeros(q_NE.shape, device=q_NE.device)
            for coefficient in reversed(weight.levels):
                values_NE = values_NE * q_NE + coefficient
            q_NE = values_NE.round()
    q_NGI = q_NE.float().view(weight.num_outputs, -1, weight.group_size)
    if weight.offsets_NG is not None and weight.has_zero_points:
        q_NGI = q_NGI - weight.offsets_NG.float()[..., None]
    w_NGI = q_NGI * _factors(weight, weight.scales_NG, 0)
    if weight.offsets_NG is not None and not weight.has_zero_points:
        w_NGI = w_NGI + _factors(weight, weight.offsets_NG, 1)
    w_NE = w_NGI.reshape(weight.num_outputs, weight.num_inputs)
    if weight.input_order_E is None:
        return w_NE
    in_order_NE = torch.empty_like(w_NE)
    in_order_NE[:, weight.input_order_E] = w_NE
    return in_order_NE


def _factors(weight: QuantisedWeight, factors_NG: torch.Tensor, column: int) -> torch.Tensor:
    """Scales (column 0) or offsets (1): float32 [N, G, 1]."""
    if weight.supers_NSC is None:
        return factors_NG.float()[..., None]
    supers_NS = weight.supers_NSC[:, :, column]
    factors_NSG = factors_NG.view(*supers_NS.shape, -1) * supers_NS[..., None]
    return factors_NSG.flatten(1)[..., None]


def join_outputs(weights: Sequence[QuantisedWeight]) -> QuantisedWeight:
    """Weights of equal inputs, bits and groups, the outputs of one after those of another; with
    supers or levels, all of one type.
    Raises ValueError: unequal ones, or inputs in another order than they stand."""
    first = weights[0]
    if len(weights) == 1:
        return first
    if len({(each.num_inputs, each.num_bits, each.group_size) for each in weights}) != 1:
        raise ValueError("weights of unequal inputs, bits or groups cannot be joined")
    if any(each.input_order_E is not None for each in weights):
        raise ValueError("weights whose inputs are in an order of their own cannot be joined")
    offsets_NG = None
    with_offsets = [each for each in weights if each.offsets_NG is not None]
    has_zero_points = bool(with_offsets) and all(each.has_zero_points for each in with_offsets)
    if with_offsets:
        offsets_NG = torch.cat([_offsets(each, has_zero_points) for each in weights])
    supers = [each.supers_NSC for each in weights if each.supers_NSC is not None]
    return replace(
        first,
        num_outputs=sum(each.num_outputs for each in weights),
        packed_NJ=torch.cat([each.packed_NJ for each in weights]),
        scales_NG=torch.cat([each.scales_NG for each in weights]),
        offsets_NG=offsets_NG,
        has_zero_points=has_zero_points,
        supers_NSC=torch.cat(supers) if supers else None,
    )


def narrowed(weight: QuantisedWeight) -> QuantisedWeight:
    """The same numbers, with scales and offsets in float16 if that holds all of them exactly."""
    floats = [each for each in (weight.scales_NG, weight.offsets_NG) if each is not None]
    if weight.supers_NSC is not None:
        return weight
    if not all(torch.equal(each.half().float(), each.float()) for each in floats):
        return weight
    offsets_NG = weight.offsets_NG
    return replace(
        weight,
        scales_NG=weight.scales_NG.half(),
        offsets_NG=None if offsets_NG is None else offsets_NG.half(),
    )


def _offsets(weight: QuantisedWeight, as_zero_points: bool) -> torch.Tensor:
    """Those of a weight that has none are what the layout says."""
    zeros_NG = weight.offsets_NG
    if zeros_NG is None:
        zeros_NG = torch.full_like(weight.scales_NG, 8.0 if weight.num_bits == 4 else 0.0)
    elif not weight.has_zero_points:
        return zeros_NG
    return zeros_NG if as_zero_points else -weight.scales_NG * zeros_NG


def pack_nibbles(q_NE: torch.Tensor) -> torch.Tensor:
    """uint8 [N, E] of numbers below 16 -> uint8 [N, E / 2]."""
    num_outputs, num_inputs = q_NE.shape
    halves = q_NE.view(num_outputs, num_inputs // INPUTS_A_SPAN, 2, INPUTS_A_SPAN // 2)
    return (halves[:, :, 0] | (halves[:, :, 1] << 4)).reshape(num_outputs, -1)


def unpack_nibbles(packed_NJ: torch.Tensor) -> torch.Tensor:
    """The inverse of `pack_nibbles`."""
    spans = packed_NJ.view(packed_NJ.shape[0], -1, INPUTS_A_SPAN // 2)
    return torch.stack((spans & 15, spans >> 4), dim=2).reshape(packed_NJ.shape[0], -1)


def quantise(
    weight_NE: torch.Tensor, *, num_bits: int, group_size: int, symmetric: bool = True
) -> QuantisedWeight:
    """Round to nearest: symmetric to +-127 or +-7 steps, else from a group's least to its largest.
    Raises ValueError: number of bits, or a group size that does not fit."""
    num_outputs, num_inputs = weight_NE.shape
    _check_groups(num_bits, num_inputs, group_size)
    w_NGI = weight_NE.float().view(num_outputs, -1, group_size)
    if symmetric:
        largest = 7 if num_bits == 4 else 127
        scales_NG = w_NGI.abs().amax(dim=2) / largest
        low, offsets_NG = -largest, None
    else:
        offsets_NG = w_NGI.amin(dim=2)
        scales_NG = (w_NGI.amax(dim=2) - offsets_NG) / (2**num_bits - 1)
        w_NGI = w_NGI - offsets_NG[..., None]
        low, largest = 0, 2**num_bits - 1
    steps_NGI = w_NGI / torch.where(scales_NG == 0, 1.0, scales_NG)[..., None]
    q_NE = steps_NGI.round().clamp(low, largest).reshape(num_outputs, num_inputs)
    if num_bits == 4:
        q_NE = q_NE + 8 if symmetric else q_NE
    elif offsets_NG is not None:
        q_NE, offsets_NG = q_NE - 128, offsets_NG + 128 * scales_NG
    return build_weight(q_NE, num_bits, group_size, scales_NG, offsets_NG)


def from_gptq(
    qweight: torch.Tensor,
    qzeros: torch.Tensor,
    scales_GN: torch.Tensor,
    g_idx_E: torch.Tensor | None = None,
    *,
    num_bits: int,
    zeros_are_less_one: bool = True,
) -> QuantisedWeight:
    """GPTQ (Frantar et al., 2022), as its libraries store it: W[n, k] = s * (q - z).
    Raises ValueError: number of bits, or groups that are unequal or do not fit.

    Args:
        qweight: int32 [E * bits / 32, N], consecutive inputs from the low bits up.
        qzeros: int32 [G, N * bits / 32], consecutive outputs from the low bits up.
        g_idx_E: group of each input; groups of equal size, in any order.
        zeros_are_less_one: True for checkpoint format "gptq", False for "gptq_v2".
    """
    if num_bits not in (4, 8):
        raise ValueError(f"GPTQ with {num_bits} bits; 4 and 8 are supported")
    q_NE = _unpack_int32(qweight.T, num_bits)
    zeros_GN = _unpack_int32(qzeros, num_bits) + int(zeros_are_less_one)
    num_inputs, num_groups = q_NE.shape[1], scales_GN.shape[0]
    if num_inputs % num_groups:
        raise ValueError(f"{num_inputs} inputs in {num_groups} groups; groups must be equal")
    order_E = None
    group_size = num_inputs // num_groups
    if g_idx_E is not None and not torch.equal(
        g_idx_E.long(), torch.arange(num_inputs, device=g_idx_E.device) // group_size
    ):
        counts = torch.bincount(g_idx_E.long(), minlength=num_groups)
        if not bool((counts == group_size).all()):
            raise ValueError(f"g_idx has groups of {counts.tolist()} inputs; they must be equal")
        order_E = torch.sort(g_idx_E.long(), stable=True).indices
        q_NE = q_NE[:, order_E]
    return from_zero_points(q_NE, zeros_GN.T, scales_GN.T, num_bits, group_size, order_E)


def from_awq(
    qweight: torch.Tensor, qzeros: torch.Tensor, scales_GN: torch.Tensor
) -> QuantisedWeight:
    """AWQ (Lin et al., 2023) "gemm" checkpoints, 4 bits: W[n, k] = s * (q - z).

    Args:
        qweight: int32 [E, N / 8]; column c of 8 lies in nibble (0, 4, 1, 5, 2, 6, 3, 7)[c].
        qzeros: int32 [G, N / 8], likewise.
    """
    place = torch.tensor(_AWQ_PLACE, device=qweight.device)

    def in_order(packed: torch.Tensor) -> torch.Tensor:
        nibbles = _unpack_int32(packed, 4).view(packed.shape[0], -1, 8)
        return nibbles[:, :, place].reshape(packed.shape[0], -1)

    num_inputs, num_groups = qweight.shape[0], scales_GN.shape[0]
    if num_inputs % num_groups:
        raise ValueError(f"{num_inputs} inputs in {num_groups} groups; groups must be equal")
    zeros_NG, group_size = in_order(qzeros).T, num_inputs // num_groups
    return from_zero_points(in_order(qweight).T, zeros_NG, scales_GN.T, 4, group_size)


def from_float8(weight_NE: torch.Tensor, scales_NG: torch.Tensor) -> QuantisedWeight:
    """float8_e4m3fn with its scales, which are as many a row as it has groups."""
    num_outputs, num_inputs = weight_NE.shape
    group_size = num_inputs // scales_NG.shape[1]
    _check_groups(8, num_inputs, group_size)
    return QuantisedWeight(
        num_bits=8,
        group_size=group_size,
        num_inputs=num_inputs,
        num_outputs=num_outputs,
        packed_NJ=_in_words(weight_NE.view(torch.uint8)),
        scales_NG=scales_NG,
    )


def _in_words(packed_NJ: torch.Tensor) -> torch.Tensor:
    """Each run of 16 bytes in the order that `QuantisedWeight` says."""
    runs = packed_NJ.reshape(len(packed_NJ), -1, 2, 4, 2)
    return runs.permute(0, 1, 3, 4, 2).reshape(packed_NJ.shape)


def _unpack_int32(packed: torch.Tensor, num_bits: int) -> torch.Tensor:
    """int32 [A, C] -> int32 [A, C * 32 / bits], from the low bits up."""
    shifts = torch.arange(0, 32, num_bits, dtype=torch.int32, device=packed.device)
    values: torch.Tensor = (packed.contiguous()[:, :, None] >> shifts) & (2**num_bits - 1)
    return values.reshape(packed.shape[0], -1)


def from_zero_points(
    q_NE: torch.Tensor,
    zeros_NG: torch.Tensor,
    scales_NG: torch.Tensor,
    num_bits: int,
    group_size: int,
    order_E: torch.Tensor | None = None,
) -> QuantisedWeight:
    """W = scales * (q - zeros), q and zeros counted from 0."""
    middle = 2 ** (num_bits - 1)
    scales_NG = scales_NG.float()
    stored_zero = 0 if num_bits == 4 else middle  # int8 is stored less 128
    q_NE = q_NE - stored_zero
    if bool((zeros_NG == middle).all()):
        return build_weight(q_NE, num_bits, group_size, scales_NG, None, order_E)
    is_whole = (zeros_NG == zeros_NG.round()) & (zeros_NG >= 0) & (zeros_NG <= 2 * middle)
    has_zero_points, offsets_NG = bool(is_whole.all()), zeros_NG - stored_zero
    if not has_zero_points:
        offsets_NG = -scales_NG * offsets_NG
    weight = build_weight(q_NE, num_bits, group_size, scales_NG, offsets_NG, order_E)
    return replace(weight, has_zero_points=has_zero_points)


def build_weight(
    q_NE: torch.Tensor,
    num_bits: int,
    group_size: int,
    scales_NG: torch.Tensor,
    offsets_NG: torch.Tensor | None,
    order_E: torch.Tensor | None = None,
    *,
    supers_NSC: torch.Tensor | None = None,
) -> QuantisedWeight:
    """Of numbers as `QuantisedWeight` says, in the order of inputs.
    Raises ValueError: number of bits, or a group size that does not fit."""
    num_outputs, num_inputs = q_NE.shape
    _check_groups(num_bits, num_inputs, group_size)
    if num_bits == 4:
        packed_NJ = pack_nibbles(q_NE.to(torch.uint8).contiguous())
    else:
        packed_NJ = q_NE.to(torch.int8)
    factor_dtype = torch.float32 if supers_NSC is None else torch.int8
    return QuantisedWeight(
        num_bits=num_bits,
        group_size=group_size,
        num_inputs=num_inputs,
        num_outputs=num_outputs,
        packed_NJ=_in_words(packed_NJ),
        scales_NG=scales_NG.to(factor_dtype).contiguous(),
        offsets_NG=None if offsets_NG is None else offsets_NG.to(factor_dtype).contiguous(),
        input_order_E=order_E,
        supers_NSC=supers_NSC,
    )


def _check_groups(num_bits: int, num_inputs: int, group_size: int) -> None:
    if num_bits not in (4, 8):
        raise ValueError(f"{num_bits} bits; 4 and 8 are supported")
    least = INPUTS_A_SPAN // 2
    power_of_two = group_size > 0 and group_size & (group_size - 1) == 0
    if num_inputs % INPUTS_A_SPAN or num_inputs % group_size:
        raise ValueError(
            f"{num_inputs} inputs in groups of {group_size}; inputs must be a multiple of the "
            f"group and of {INPUTS_A_SPAN}"
        )
    if group_size != num_inputs and not (power_of_two and group_size >= least):
        raise ValueError(
            f"groups of {group_size} inputs; give a power of two of at least {least}, or one group"
        )
