"""Linear layers of a Hugging Face folder that GPTQ or AWQ have quantised (Frantar et al., 2022;
Lin et al., 2023; layouts of AutoGPTQ and AutoAWQ). Shape suffix G: groups a row.

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
from collections.abc import Collection, Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NoReturn

from engine_core.model_files.errors import BrokenModelFile, UnsupportedModelFile

if TYPE_CHECKING:
    import torch

    from kernels.interface.weights import GroupedCodes, QuantisedTensor, WeightPart

Layout = Literal["gptq", "gptq_v2", "awq"]

_LEAST_GROUP = 32
_GROUP_SIZES = (_LEAST_GROUP, 64, 128, -1)
_AWQ_PLACES = (0, 4, 1, 5, 2, 6, 3, 7)  # in a word, of outputs 0 to 7
_NEEDED = frozenset({"qweight", "qzeros", "scales"})
_SUFFIXES = _NEEDED | {"g_idx"}
_INSTEAD = "use the unquantised model, or a .gguf of it"


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


def read_quantisation(config: Mapping[str, Any], folder: Path) -> GroupedIntegers | None:
    """What config.json says; None: nothing is quantised.
    Raises UnsupportedModelFile: a method, or a variant of one, that is not read."""
    fields = config.get("quantization_config")
    if not fields:
        return None
    fields = fields if isinstance(fields, dict) else {}
    method = fields.get("quant_method")

    def refuse(what: str, instead: str = _INSTEAD) -> NoReturn:
        raise UnsupportedModelFile(
            f"{folder} is quantised with {method or 'an unnamed method'}{what}, which is not "
            f"read; {instead}"
        )

    if method not in ("gptq", "awq"):
        refuse("")
    allowed_bits = (4, 8) if method == "gptq" else (4,)
    bits: Any = fields.get("bits")
    group_size: Any = fields.get("group_size")
    if bits not in allowed_bits:
        refuse(f" in {bits} bits, not in {' or '.join(map(str, allowed_bits))}")
    if group_size not in _GROUP_SIZES:
        refuse(f" in groups of {group_size} inputs, not of 32, 64, 128 or all (-1)")
    if method == "awq":
        version = str(fields.get("version", "gemm")).lower()
        if version != "gemm":
            refuse(f' in the layout "{version}", not "gemm"', f"convert it, or {_INSTEAD}")
        if fields.get("zero_point") is False:
            refuse(" without zero points")
        return GroupedIntegers("awq", 4, group_size)
    if fields.get("desc_act"):
        refuse(
            " in the order of its activations (desc_act)",
            f"use a version with desc_act false, or {_INSTEAD.removeprefix('use ')}",
        )
    layout: Any = fields.get("checkpoint_format") or fields.get("format") or "gptq"
    if fields.get("is_marlin_format"):
        layout = "marlin"
    if layout not in ("gptq", "gptq_v2"):
        refuse(f' in the layout "{layout}", not "gptq" or "gptq_v2"', f"convert it, or {_INSTEAD}")
    if fields.get("pack_dtype", "int32") != "int32":
        refuse(f" in words of {fields['pack_dtype']}, not int32")
    if fields.get("dynamic"):
        refuse(" in a way of its own for each layer (dynamic)")
    return GroupedIntegers(layout, bits, group_size)


def find_layers(names: Collection[str], folder: Path) -> dict[str, frozenset[str]]:
    """Prefixes of quantised layers, such as "model.layers.0.mlp.up_proj", with the suffixes of the
    tensors that each has.

    Raises:
        UnsupportedModelFile: no layer has the tensors of these layouts.
        BrokenModelFile: a layer has some of them only.
    """
    found: dict[str, set[str]] = {}
    for name in names:
        prefix, _, suffix = name.rpartition(".")
        if suffix in _SUFFIXES:
            found.setdefault(prefix, set()).add(suffix)
    if not found:
        raise UnsupportedModelFile(
            f"{folder} is quantised by its config.json, but no tensor is called qweight; it is of "
            f"another layout: {_INSTEAD}"
        )
    for prefix, suffixes in found.items():
        if missing := _NEEDED - suffixes:
            raise BrokenModelFile(
                f"{folder} lacks {', '.join(sorted(missing))} of the quantised layer {prefix}; "
                f"download its weight files again"
            )
    return {prefix: frozenset(suffixes) for prefix, suffixes in found.items()}


def join_layers(
    tensors: Iterable[tuple[str, torch.Tensor]],
    layers: Mapping[str, frozenset[str]],
    quantisation: GroupedIntegers,
) -> Iterator[tuple[str, WeightPart]]:
    """The tensors, those of a quantised layer as its one weight [N, E] when the last has come.

    Raises:
        BrokenModelFile: shapes or types that contradict each other or the configuration.
        UnsupportedModelFile: inputs in an order of their own.
    """
    waiting: dict[str, dict[str, torch.Tensor]] = {}
    for name, tensor in tensors:
        prefix, _, suffix = name.rpartition(".")
        if prefix not in layers or suffix not in _SUFFIXES:
            yield name, tensor
            continue
        arrays = waiting.setdefault(prefix, {})
        arrays[suffix] = tensor
        if arrays.keys() == layers[prefix]:
            yield f"{prefix}.weight", _as_one(prefix, waiting.pop(prefix), quantisation)


def dequantised(part: WeightPart) -> torch.Tensor:
    """A tensor as it is, a quantised one in float32."""
    from kernels.interface.weights import QuantisedTensor

    return part.dequantise() if isinstance(part, QuantisedTensor) else part


def _as_one(prefix: str, arrays: dict[str, torch.Tensor], how: GroupedIntegers) -> QuantisedTensor:
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
    order = arrays.pop("g_idx", None)
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
        arrays=arrays,
        decode=lambda given: decode(given, how),
        block_inputs=max(how.group_size, _LEAST_GROUP),
        inputs_first=True,
        blocks="" if num_inputs % _LEAST_GROUP else "Q8_0" if how.bits == 8 else zeros,
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
    codes_NE = unpacked(arrays["qweight"].T.contiguous(), how.bits)
    zeros_NG = unpacked(arrays["qzeros"].contiguous(), how.bits).T.short()
    return GroupedCodes(codes_NE, scales_NG, zeros_NG + (how.layout == "gptq"))


def unpacked(words: torch.Tensor, bits: int) -> torch.Tensor:
    """int32 [A, C], of several values each, the first in the low bits -> uint8 [A, C * 32 / bits].
    4 or 8 bits."""
    import torch

    octets = words.view(torch.uint8)
    return octets if bits == 8 else torch.stack((octets & 15, octets >> 4), -1).flatten(1)


def _awq_outputs(words: torch.Tensor) -> torch.Tensor:
    """int32 [A, N / 8] of AWQ -> uint8 [N, A]."""
    import torch

    shifts = 4 * torch.tensor(_AWQ_PLACES, dtype=torch.int32)[:, None]
    values = (words.T.contiguous()[:, None] >> shifts).bitwise_and_(15)
    return values.to(torch.uint8).flatten(0, 1)
