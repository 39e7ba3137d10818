"""Linear layers of a Hugging Face folder that GPTQ, AWQ or auto-round have quantised (Frantar et
al., 2022; Lin et al., 2023; arXiv:2309.05516; layouts of AutoGPTQ and AutoAWQ). Shape suffix G:
groups a row.

    q_proj.qweight, q_proj.qzeros, q_proj.scales[, q_proj.g_idx]   ->   q_proj.weight

    W[n, k] = scales[k // group, n] * (q[k, n] - zero[k // group, n])

    GPTQ   qweight int32 [E * bits / 32, N]: neighbouring inputs in a word, the first in its low
           bits; qzeros int32 [G, N * bits / 32], neighbouring outputs. "gptq" stores zeros less
           one, "gptq_v2" as they are
    AWQ    ("gemm") qweight int32 [E, N / 8], qzeros int32 [G, N / 8]: eight outputs in a word, in
           the order 0 2 4 6 1 3 5 7
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

from engine_core.model_files.errors import BrokenModelFile, UnsupportedModelFile
from engine_core.model_files.quantised_layers import (
    GROUP_INPUTS,
    INSTEAD,
    Fields,
    LayerTensors,
    NotRead,
    unpacked,
)

if TYPE_CHECKING:
    import torch

    from kernels.interface.weights import GroupedCodes, QuantisedTensor

Layout = Literal["gptq", "gptq_v2", "awq"]

_GROUP_SIZES = (GROUP_INPUTS, 64, 128, -1)
_AWQ_PLACES = (0, 4, 1, 5, 2, 6, 3, 7)  # in a word, of outputs 0 to 7
_NEEDED = frozenset({"qweight", "qzeros", "scales"})
_AUTO_ROUND = {
    "auto_round:auto_gptq": ("gptq", "gptq"),
    "auto_round": ("gptq", "gptq_v2"),
    "auto_round:gptqmodel": ("gptq", "gptq_v2"),
    "auto_round:auto_awq": ("awq", "gemm"),
}
"""Method and layout that a packing of auto-round is equal to."""


@dataclasses.dataclass(frozen=True, slots=True)
class GroupedIntegers:
    """How a folder's linear layers are quantised."""

    layout: Layout
    bits: int
    group_size: int
    """Inputs that share a scale and a zero; -1: all of a row."""

    @property
    def type_name(self) -> str:
        """Of `QuantisedTensor`: "gptq-int4", "gptq_v2-int8", "awq-int4" and so on."""
        return f"{self.layout}-int{self.bits}"


def read_grouped_integers(fields: Fields) -> LayerTensors:
    """What config.json says of gptq, awq or auto-round.
    Raises NotRead: a variant that is not read."""
    method = fields["quant_method"]
    if method == "auto-round":
        fields, method = _of_auto_round(fields)
    how = _read_awq(fields) if method == "awq" else _read_gptq(fields)
    return LayerTensors(
        type_name=how.type_name,
        needed=_NEEDED,
        as_one=partial(_as_one, how=how),
        allowed=frozenset({"g_idx"}),
    )


def _of_auto_round(fields: Fields) -> tuple[Fields, str]:
    """The fields as GPTQ or AWQ has them."""
    packing = str(fields.get("packing_format", "auto_round:auto_gptq"))
    if packing not in _AUTO_ROUND:
        raise NotRead(f"in the packing {packing!r}, not {' or '.join(map(repr, _AUTO_ROUND))}")
    if (kind := fields.get("data_type", "int")) != "int":
        raise NotRead(f"in the type {kind!r}, not 'int'")
    bits = fields.get("bits")
    for name, own in (fields.get("extra_config") or {}).items():
        if own.get("bits", bits) in (16, 32):  # it is not quantised
            continue
        for field in ("bits", "group_size"):
            if own.get(field, fields.get(field)) != fields.get(field):
                raise NotRead(f"with {field} {own[field]} for {name}, not {fields.get(field)}")
    method, layout = _AUTO_ROUND[packing]
    return {**fields, "checkpoint_format": layout}, method


def _check_numbers(fields: Fields, allowed_bits: tuple[int, ...]) -> GroupedIntegers:
    bits: Any = fields.get("bits")
    group_size: Any = fields.get("group_size")
    if bits not in allowed_bits:
        raise NotRead(f"in {bits} bits, not in {' or '.join(map(str, allowed_bits))}")
    if group_size not in _GROUP_SIZES:
        raise NotRead(f"in groups of {group_size} inputs, not of 32, 64, 128 or all (-1)")
    return GroupedIntegers("awq", bits, group_size)


def _read_awq(fields: Fields) -> GroupedIntegers:
    how = _check_numbers(fields, (4,))
    version = str(fields.get("version", "gemm")).lower()
    if version != "gemm":
        raise NotRead(f'in the layout "{version}", not "gemm"', f"convert it, or {INSTEAD}")
    if fields.get("zero_point") is False:
        raise NotRead("without zero points")
    return how


def _read_gptq(fields: Fields) -> GroupedIntegers:
    how = _check_numbers(fields, (4, 8))
    if fields.get("desc_act"):
        raise NotRead(
            "in the order of its activations (desc_act)",
            f"use a version with desc_act false, or {INSTEAD.removeprefix('use ')}",
        )
    layout: Any = fields.get("checkpoint_format") or fields.get("format") or "gptq"
    if fields.get("is_marlin_format"):
        layout = "marlin"
    if layout not in ("gptq", "gptq_v2"):
        raise NotRead(
            f'in the layout "{layout}", not "gptq" or "gptq_v2"', f"convert it, or {INSTEAD}"
        )
    if fields.get("pack_dtype", "int32") != "int32":
        raise NotRead(f"in words of {fields['pack_dtype']}, not int32")
    if fields.get("dynamic"):
        raise NotRead("in a way of its own for each layer (dynamic)")
    return dataclasses.replace(how, layout=layout)


def _as_one(
    prefix: str, arrays: Mapping[str, torch.Tensor], how: GroupedIntegers
) -> QuantisedTensor:
    import torch

    from kernels.interface.weights import QuantisedTensor

    a_word = 32 // how.bits
    qweight, qzeros, scales = arrays["qweight"], arrays["qzeros"], arrays["scales"]
    if any(each.dtype != torch.int32 for each in (qweight, qzeros)) or qweight.ndim != 2:
        raise BrokenModelFile(
            f"{prefix}: qweight is {qweight.dtype} {list(qweight.shape)}, qzeros {qzeros.dtype}; "
            f"{how.type_name} has matrices of int32: download the weights again"
        )
    rows, columns = qweight.shape
    num_inputs, num_outputs = (
        (rows, columns * a_word) if how.layout == "awq" else (rows * a_word, columns)
    )
    group_size = num_inputs if how.group_size == -1 else how.group_size
    num_groups = -(-num_inputs // group_size)
    shapes = (list(qzeros.shape), list(scales.shape))
    wanted = ([num_groups, num_outputs // a_word], [num_groups, num_outputs])
    if shapes != wanted or num_inputs % group_size:
        raise BrokenModelFile(
            f"{prefix}: {num_inputs} inputs in groups of {group_size} and {num_outputs} outputs "
            f"need qzeros {wanted[0]} and scales {wanted[1]} and whole groups; they are "
            f"{shapes[0]} and {shapes[1]}: config.json belongs to other weights"
        )
    order = arrays.get("g_idx")
    if order is not None and not torch.equal(order.long(), torch.arange(num_inputs) // group_size):
        raise UnsupportedModelFile(
            f"{prefix} is quantised with its inputs in an order of their own (g_idx), which is not "
            f"read; use a version with desc_act false"
        )
    symmetric = 2 ** (how.bits - 1) - (how.layout == "gptq")
    a_half = _words_of(symmetric, how.bits)
    zeros = "Q4_0" if bool((qzeros == a_half).all()) else "Q4_1"
    return QuantisedTensor(
        type_name=how.type_name,
        shape=(num_outputs, num_inputs),
        arrays={"qweight": qweight, "qzeros": qzeros, "scales": scales},
        decode=lambda given: decode(given, how),
        block_inputs=max(how.group_size, GROUP_INPUTS),
        inputs_first=True,
        blocks="" if num_inputs % GROUP_INPUTS else "Q8_0" if how.bits == 8 else zeros,
    )


def _words_of(value: int, bits: int) -> int:
    """The int32 that is made of one value over and over."""
    word = sum(value << shift for shift in range(0, 32, bits))
    return word - (1 << 32) if word >> 31 else word


def decode(arrays: Mapping[str, torch.Tensor], how: GroupedIntegers) -> GroupedCodes:
    """A layer's qweight, qzeros and scales by the formula above."""
    from kernels.interface.weights import GroupedCodes

    scales_NG = arrays["scales"].float().T.contiguous()
    if how.layout == "awq":
        codes_NE, zeros_NG = (_awq_outputs(arrays[name]) for name in ("qweight", "qzeros"))
        return GroupedCodes(codes_NE, scales_NG, zeros_NG)
    codes_NE = unpacked(arrays["qweight"].T, how.bits)
    zeros_NG = unpacked(arrays["qzeros"], how.bits).T.short()
    return GroupedCodes(codes_NE, scales_NG, zeros_NG + (how.layout == "gptq"))


def _awq_outputs(words: torch.Tensor) -> torch.Tensor:
    """int32 [A, N / 8] of AWQ -> uint8 [N, A]."""
    import torch

    shifts = 4 * torch.tensor(_AWQ_PLACES, dtype=torch.int32)[:, None]
    values = (words.T.contiguous()[:, None] >> shifts).bitwise_and_(15)
    return values.to(torch.uint8).flatten(0, 1)
