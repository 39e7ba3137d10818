"""Folders of llm-compressor ("compressed-tensors") and of NVIDIA's ModelOpt ("modelopt").

pack-quantized         weight_packed int32 [N, E * bits / 32]: neighbouring inputs in a word, the
                       first in its low bits, each plus 2^(bits - 1); weight_scale [N, G];
                       weight_zero_point int32 [N * bits / 32, G], neighbouring outputs in a word
int-quantized          weight int8 [N, E], weight_scale [N, G], weight_zero_point int8 [N, G]
nvfp4-pack-quantized   weight_packed uint8 [N, E / 2] of e2m1, low nibbles first; weight_scale
                       e4m3 [N, E / 16]; W = e2m1 * weight_scale / weight_global_scale
NVFP4 of ModelOpt      the same as weight, weight_scale, and W = ... * weight_scale_2
mxfp4-pack-quantized   weight_packed as of nvfp4; weight_scale uint8 [N, E / 32] of e8m0
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING

from engine_core.model_files.errors import BrokenModelFile, UnsupportedModelFile
from engine_core.model_files.float8 import FLOAT8_FORMATS, Float8, read_float8_group
from engine_core.model_files.mxfp4 import MXFP4, mxfp4_tensor
from engine_core.model_files.quantised_layers import (
    GROUP_INPUTS,
    Fields,
    LayerTensors,
    NotRead,
    QuantisedLayers,
    unpacked,
)

if TYPE_CHECKING:
    import torch

    from kernels.interface.weights import GroupedCodes, QuantisedTensor

    Arrays = Mapping[str, torch.Tensor]

NVFP4 = "nvfp4"
_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
_PACKED = frozenset({"weight_packed", "weight_scale"})
_OF_ACTIVATIONS = frozenset({"input_scale", "input_zero_point", "input_global_scale"})


@dataclasses.dataclass(frozen=True, slots=True)
class _Format:
    """What a format of compressed-tensors may have, and what a layer's tensors are."""

    kinds: frozenset[tuple[str, int]]
    """Type and bits of its weights."""
    strategies: frozenset[str]
    needed: frozenset[str]
    allowed: frozenset[str] = frozenset()


_OF_INTEGERS = frozenset({"group", "channel", "tensor"})
_ZEROS = "weight_zero_point"
_FORMATS = {
    "pack-quantized": _Format(
        frozenset({("int", 4), ("int", 8)}),
        _OF_INTEGERS,
        _PACKED | {"weight_shape"},
        frozenset({_ZEROS, "weight_g_idx"}),
    ),
    "int-quantized": _Format(
        frozenset({("int", 8)}),
        _OF_INTEGERS,
        frozenset({"weight", "weight_scale"}),
        frozenset({_ZEROS}),
    ),
    "nvfp4-pack-quantized": _Format(
        frozenset({("float", 4)}),
        frozenset({"tensor_group"}),
        _PACKED | {"weight_global_scale"},
    ),
    "mxfp4-pack-quantized": _Format(frozenset({("float", 4)}), frozenset({"group"}), _PACKED),
}


@dataclasses.dataclass(frozen=True, slots=True)
class _Group:
    """How layers are quantised, whatever the size of a group."""

    format_name: str
    num_bits: int


def read_compressed_tensors(fields: Fields) -> QuantisedLayers:
    """What config.json says of compressed-tensors. Raises NotRead: a variant that is not read."""
    sparsity = fields.get("sparsity_config") or {}
    if sparsity.get("format", "dense") != "dense":
        raise NotRead(f"and sparse ({sparsity['format']})")
    if fields.get("transform_config"):
        raise NotRead("with rotated inputs (transform_config)")
    groups = fields.get("config_groups")
    if not isinstance(groups, dict) or not groups:
        raise NotRead("without config_groups")
    found = {_read_group(group, fields.get("format")) for group in groups.values()}
    if len(found) != 1:
        raise NotRead("in several ways (config_groups)")
    how = found.pop()
    return how if isinstance(how, Float8) else _layers_of(how)


def _read_group(group: Fields, format_name: str | None) -> Float8 | _Group:
    format_name = str(group.get("format") or format_name)
    weights: Fields = group.get("weights") or {}
    kind = (str(weights.get("type")), int(weights.get("num_bits") or 0))
    if format_name == "naive-quantized" and kind == ("int", 8):
        format_name = "int-quantized"
    own = _FORMATS.get(format_name)
    if own is None:
        if format_name not in FLOAT8_FORMATS:
            raise NotRead(f"in the format {format_name!r}", _instead())
        return read_float8_group(group, format_name)
    if kind not in own.kinds:
        raise NotRead(f"in {kind[1]} bits of type {kind[0]} in {format_name!r}", _instead())
    if weights.get("strategy") not in own.strategies:
        raise NotRead(f"by {weights.get('strategy')} in {format_name!r}", _instead())
    if group.get("output_activations"):
        raise NotRead("with output_activations", _instead())
    return _Group(format_name, kind[1])


def _instead() -> str:
    names = ", ".join((*FLOAT8_FORMATS, *_FORMATS))
    return f"use a version in {names} (integers of 4 or 8 bits), or the unquantised model"


def _layers_of(how: _Group) -> LayerTensors:
    names: Mapping[str, tuple[str, Callable[[str, Arrays], QuantisedTensor]]] = {
        "pack-quantized": (f"w{how.num_bits}a16", partial(_packed_integers, how.num_bits)),
        "int-quantized": ("w8a8", _integers),
        "nvfp4-pack-quantized": (NVFP4, _nvfp4_packed),
        "mxfp4-pack-quantized": (MXFP4, _mxfp4),
    }
    (type_name, as_one), own = names[how.format_name], _FORMATS[how.format_name]
    return LayerTensors(type_name, own.needed, as_one, own.allowed, _OF_ACTIVATIONS)


def read_modelopt(fields: Fields) -> QuantisedLayers:
    """What config.json or hf_quant_config.json says. Raises NotRead: a variant that is not read."""
    algorithm = fields.get("quant_algo")
    if algorithm == "FP8":
        return Float8(in_blocks=False, activations="static")
    if algorithm != "NVFP4":
        raise NotRead(f"by {algorithm}, not FP8 or NVFP4")
    needed = frozenset({"weight", "weight_scale", "weight_scale_2"})
    return LayerTensors(NVFP4, needed, _nvfp4_of_modelopt, unused=_OF_ACTIVATIONS)


def integer_blocks(num_bits: int, num_inputs: int, num_groups: int, *, symmetric: bool) -> str:
    """`QuantisedTensor.blocks` of integers of 4 or 8 bits."""
    if num_inputs % GROUP_INPUTS:
        return ""
    if num_bits == 4 and not num_inputs // num_groups % GROUP_INPUTS:
        return "Q4_0" if symmetric else "Q4_1"
    return "Q8_0"


def _packed_integers(num_bits: int, prefix: str, arrays: Arrays) -> QuantisedTensor:
    import torch

    words, zeros = arrays["weight_packed"], arrays.get(_ZEROS)
    num_outputs, num_inputs = arrays["weight_shape"].tolist()
    wanted = [num_outputs, -(-num_inputs * num_bits // 32)]
    if words.dtype != torch.int32 or list(words.shape) != wanted:
        raise _broken(prefix, "weight_packed", words, f"int32 {wanted}")
    scales_NG = _scales(prefix, arrays["weight_scale"], num_outputs, num_inputs)
    num_groups = scales_NG.shape[1]
    order = arrays.get("weight_g_idx")
    if order is not None and bool((order >= 0).all()):
        in_order = torch.arange(num_inputs) // (num_inputs // num_groups)
        if not torch.equal(order.long(), in_order):
            raise UnsupportedModelFile(
                f"{prefix} is quantised with its inputs in an order of their own (weight_g_idx), "
                "which is not read; use a version with actorder null or static"
            )
    if zeros is not None and zeros.dtype == torch.int32:  # some outputs in a word
        zeros = unpacked(zeros.T, num_bits)[:, :num_outputs].T.contiguous()
    elif zeros is not None:
        zeros = (zeros.short() + 2 ** (num_bits - 1)).to(torch.uint8)

    def decode(given: Arrays) -> GroupedCodes:
        codes_NE = unpacked(given["codes"], num_bits)[:, :num_inputs]
        return _codes(codes_NE, given, 2 ** (num_bits - 1))

    return _tensor(
        f"w{num_bits}a16", (num_outputs, num_inputs), words, scales_NG, zeros, decode, num_bits
    )


def _integers(prefix: str, arrays: Arrays) -> QuantisedTensor:
    import torch

    codes_NE = arrays["weight"]
    if codes_NE.dtype != torch.int8 or codes_NE.ndim != 2:
        raise _broken(prefix, "weight", codes_NE, "int8 [N, E]")
    num_outputs, num_inputs = codes_NE.shape
    scales_NG = _scales(prefix, arrays["weight_scale"], num_outputs, num_inputs)

    def decode(given: Arrays) -> GroupedCodes:
        return _codes(given["codes"], given, None)

    zeros, shape = arrays.get(_ZEROS), (num_outputs, num_inputs)
    return _tensor("w8a8", shape, codes_NE, scales_NG, zeros, decode, 8)


def _codes(codes_NE: torch.Tensor, given: Arrays, zero: int | None) -> GroupedCodes:
    """`zero`: where there are no zeros."""
    import torch

    from kernels.interface.weights import GroupedCodes

    scales_NG, zeros_NG = given["scales"].float(), given.get("zeros")
    if zeros_NG is None and zero is not None:
        zeros_NG = torch.full(scales_NG.shape, zero, dtype=torch.uint8)
    return GroupedCodes(codes_NE, scales_NG, zeros_NG)


def _tensor(
    type_name: str,
    shape: tuple[int, int],
    codes: torch.Tensor,
    scales_NG: torch.Tensor,
    zeros: torch.Tensor | None,
    decode: Callable[[Arrays], GroupedCodes],
    num_bits: int,
) -> QuantisedTensor:
    from kernels.interface.weights import QuantisedTensor

    num_inputs, num_groups = shape[1], scales_NG.shape[1]
    of_a_row = 0 if num_inputs % GROUP_INPUTS else GROUP_INPUTS
    return QuantisedTensor(
        type_name=type_name,
        shape=shape,
        arrays={"codes": codes, "scales": scales_NG} | ({} if zeros is None else {"zeros": zeros}),
        decode=decode,
        block_inputs=num_inputs // num_groups if num_groups > 1 else of_a_row,
        blocks=integer_blocks(num_bits, num_inputs, num_groups, symmetric=zeros is None),
    )


def _scales(prefix: str, scale: torch.Tensor, num_outputs: int, num_inputs: int) -> torch.Tensor:
    """[N, G] of those of the tensor, of rows or of groups."""
    if scale.numel() == 1:
        return scale.reshape(1, 1).expand(num_outputs, 1).contiguous()
    num_groups = scale.numel() // num_outputs
    if scale.shape[0] != num_outputs or not num_groups or num_inputs % num_groups:
        wanted = f"[{num_outputs}, groups] of whole groups of {num_inputs} inputs"
        raise _broken(prefix, "weight_scale", scale, wanted)
    return scale.reshape(num_outputs, num_groups)


def _nvfp4_packed(prefix: str, arrays: Arrays) -> QuantisedTensor:
    factor = 1 / arrays["weight_global_scale"].float()
    return _nvfp4(prefix, arrays["weight_packed"], arrays["weight_scale"], factor)


def _nvfp4_of_modelopt(prefix: str, arrays: Arrays) -> QuantisedTensor:
    factor = arrays["weight_scale_2"].float()
    return _nvfp4(prefix, arrays["weight"], arrays["weight_scale"], factor)


def _nvfp4(
    prefix: str, codes: torch.Tensor, scales: torch.Tensor, factor: torch.Tensor
) -> QuantisedTensor:
    import torch

    from kernels.interface.weights import QuantisedTensor

    _check_nibbles(prefix, codes, scales, torch.float8_e4m3fn, 16)
    if factor.numel() != 1:
        raise _broken(prefix, "the scale of all its weights", factor, "[1]")
    shape = (len(codes), 2 * codes.shape[1])
    return QuantisedTensor(
        type_name=NVFP4,
        shape=shape,
        arrays={"codes": codes, "scales": scales, "factor": factor.reshape(1)},
        decode=_decode_nvfp4,
        block_inputs=16,
        blocks="" if shape[1] % GROUP_INPUTS else "Q8_0",
    )


def _decode_nvfp4(given: Arrays) -> GroupedCodes:
    import torch

    from kernels.interface.weights import GroupedCodes

    codes_NE = unpacked(given["codes"], 4)
    scales_NG = given["scales"].float() * given["factor"]
    return GroupedCodes(codes_NE, scales_NG, table=torch.tensor(_E2M1))


def _mxfp4(prefix: str, arrays: Arrays) -> QuantisedTensor:
    import torch

    codes, scales = arrays["weight_packed"], arrays["weight_scale"]
    _check_nibbles(prefix, codes, scales, torch.uint8, 32)
    return mxfp4_tensor(codes.view(*scales.shape, 16), scales)


def _check_nibbles(
    prefix: str, codes: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype, group: int
) -> None:
    import torch

    if codes.dtype != torch.uint8 or codes.ndim != 2:
        raise _broken(prefix, "its codes", codes, "uint8 [N, E / 2]")
    wanted = [len(codes), 2 * codes.shape[1] // group]
    if scales.dtype != dtype or list(scales.shape) != wanted or 2 * codes.shape[1] % group:
        raise _broken(prefix, "weight_scale", scales, f"{dtype} {wanted}")


def _broken(prefix: str, name: str, tensor: torch.Tensor, wanted: str) -> BrokenModelFile:
    return BrokenModelFile(
        f"{prefix}: {name} is {tensor.dtype} {list(tensor.shape)}, not {wanted}: config.json "
        "belongs to other weights, or download these again"
    )
