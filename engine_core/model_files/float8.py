"""Linear layers of a Hugging Face folder in float8 (e4m3), as DeepSeek and Qwen publish them
(quant_method "fp8") and as llm-compressor writes them ("compressed-tensors").

    q_proj.weight, q_proj.weight_scale[_inv][, q_proj.input_scale]   ->   q_proj.weight

    W[n, k] = scale * q[n, k], with a scale of the tensor, of output n, or of a block of 128 x 128
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from engine_core.model_files.errors import BrokenModelFile, UnsupportedModelFile
from engine_core.model_files.quantised_layers import (
    CACHE_SCALE,
    GROUP_INPUTS,
    Fields,
    NotRead,
    Parts,
    Tensors,
    note_unused,
)

if TYPE_CHECKING:
    import torch

    from kernels.interface.weights import GroupedCodes, QuantisedTensor

_BLOCK = 128
_WEIGHT_SCALES = ("weight_scale", "weight_scale_inv")
_INPUT_SCALES = ("input_scale", "activation_scale")
FLOAT8_FORMATS = ("float-quantized", "naive-quantized")
"""Names of compressed-tensors for float8."""


@dataclasses.dataclass(frozen=True, slots=True)
class Float8:
    """Implements `QuantisedLayers`: how a folder's linear layers are rounded."""

    in_blocks: bool
    """Whether a scale is that of 128 x 128 weights, and of 128 inputs of a token."""
    activations: Literal["dynamic", "static", "none"]
    """Their scale: from their values, from the files, or they are not rounded."""

    @property
    def type_name(self) -> str:
        """Of `QuantisedTensor`: "fp8", "fp8-block", "fp8-w8a16" or "fp8-block-w8a16"."""
        return "fp8" + "-block" * self.in_blocks + "-w8a16" * (self.activations == "none")

    def joining(self, names: Collection[str], folder: Path) -> Callable[[Tensors], Parts]:
        layers = find_float8_layers(names, folder, self)
        return partial(join_float8_layers, layers=layers, how=self)


def read_float8(fields: Fields) -> Float8:
    """What config.json says of fp8 or fbgemm_fp8. Raises NotRead: a variant that is not read."""
    if fields["quant_method"] == "fbgemm_fp8":
        return Float8(in_blocks=False, activations="dynamic")
    return _read_fp8(fields)


def _not_read(what: str) -> NotRead:
    cure = "float8 (e4m3) by tensor, channel or blocks of 128 x 128, or the unquantised model"
    return NotRead(what, f"use a version in {cure}")


def _read_fp8(fields: Mapping[str, Any]) -> Float8:
    for name, allowed in (
        ("fmt", (None, "e4m3")),
        ("scale_fmt", (None, "float")),
        ("expert_dtype", (None, "fp8")),
        ("weight_block_size", (None, [_BLOCK, _BLOCK])),
        ("activation_scheme", ("dynamic", "static")),
    ):
        if fields.get(name) not in allowed:
            raise _not_read(f"and {name} {fields.get(name)!r}")
    in_blocks = fields.get("weight_block_size") is not None
    if in_blocks and fields["activation_scheme"] == "static":
        raise _not_read("in blocks, with activation_scheme 'static'")
    return Float8(in_blocks, fields["activation_scheme"])


def read_float8_group(group: Fields, format_name: str) -> Float8:
    """How a group of layers of compressed-tensors is rounded. Raises NotRead: not as we read it."""
    weights, inputs = group.get("weights") or {}, group.get("input_activations")
    for each in (weights, inputs or weights):
        if (each.get("type"), each.get("num_bits")) != ("float", 8):
            raise _not_read(f"in {each.get('num_bits')} bits of type {each.get('type')}")
        if each.get("symmetric") is False:
            raise _not_read("with zero points")
    if group.get("output_activations"):
        raise _not_read("with output_activations")
    strategy = weights.get("strategy")
    block: Any = weights.get("block_structure")
    if strategy not in ("tensor", "channel", "block") or (
        strategy == "block" and block not in ([_BLOCK, _BLOCK], f"{_BLOCK}x{_BLOCK}")
    ):
        raise _not_read(f"by {strategy}{f' of {block}' if block else ''}")
    in_blocks = strategy == "block"
    if inputs is None:
        return Float8(in_blocks, "none")
    rounded = (inputs.get("strategy"), inputs.get("dynamic"), inputs.get("group_size"))
    if in_blocks and rounded == ("group", True, _BLOCK):
        return Float8(in_blocks, "dynamic")
    # a scale of all tokens that follows from them would let one's bits depend on the others: each
    # token has its own
    if not in_blocks and rounded[0] in ("tensor", "token") and rounded[1] is True:
        return Float8(in_blocks, "dynamic")
    if not in_blocks and rounded[:2] == ("tensor", False):
        return Float8(in_blocks, "static")
    raise _not_read(
        f"by {strategy}, with activations by {rounded[0]} (dynamic {rounded[1]}, group_size "
        f"{rounded[2]})"
    )


def find_float8_layers(
    names: Collection[str], folder: Path, how: Float8
) -> dict[str, frozenset[str]]:
    """Prefixes of layers in float8, such as "model.layers.0.mlp.up_proj", with the suffixes of the
    tensors that each has. Says which scales are of no use here.

    Raises:
        UnsupportedModelFile: no layer has a scale.
        BrokenModelFile: a layer lacks a tensor.
    """
    found: dict[str, set[str]] = {}
    wanted = {"weight", *_WEIGHT_SCALES, *(_INPUT_SCALES if how.activations == "static" else ())}
    for name in names:
        prefix, _, suffix = name.rpartition(".")
        if suffix in wanted:
            found.setdefault(prefix, set()).add(suffix)
    found = {prefix: suffixes for prefix, suffixes in found.items() if suffixes != {"weight"}}
    if not found:
        raise UnsupportedModelFile(
            f"{folder} is in float8 by its config.json, but no tensor is called weight_scale or "
            "weight_scale_inv; use the unquantised model"
        )
    for prefix, suffixes in found.items():
        for kinds in ({"weight"}, set(_WEIGHT_SCALES), set(_INPUT_SCALES)):
            if not kinds & suffixes and (kinds & wanted):
                raise BrokenModelFile(
                    f"{folder} lacks {' or '.join(sorted(kinds))} of the float8 layer {prefix}; "
                    "download its weight files again"
                )
    note_unused((name for name in names if _is_unused(name, how)), folder)
    return {prefix: frozenset(suffixes) for prefix, suffixes in found.items()}


def _is_unused(name: str, how: Float8) -> bool:
    if name.endswith(".input_scale_ub"):  # of FBGEMM: cuts activations' scales
        return True
    is_input = name.endswith(tuple(f".{suffix}" for suffix in _INPUT_SCALES))
    return CACHE_SCALE.fullmatch(name) is not None or (is_input and how.activations != "static")


def join_float8_layers(
    tensors: Tensors, layers: Mapping[str, frozenset[str]], how: Float8
) -> Parts:
    """The tensors, those of a float8 layer as its one weight [N, E] when the last has come. One
    whose inputs are no whole number of blocks comes in float32.
    Raises BrokenModelFile: shapes or types that contradict each other or the configuration."""
    import torch

    waiting: dict[str, dict[str, torch.Tensor]] = {}
    for name, tensor in tensors:
        prefix, _, suffix = name.rpartition(".")
        if _is_unused(name, how):
            continue
        if suffix not in layers.get(prefix, ()):
            if tensor.dtype in (torch.float8_e4m3fn, torch.float8_e5m2):
                raise BrokenModelFile(
                    f"tensor {name} is {tensor.dtype} without a scale; download the weights again"
                )
            yield name, tensor
            continue
        arrays = waiting.setdefault(prefix, {})
        arrays[suffix] = tensor
        if arrays.keys() == layers[prefix]:
            part = _as_one(prefix, waiting.pop(prefix), how)
            yield f"{prefix}.weight", part if part.blocks else _floats(part)


def _as_one(prefix: str, arrays: Mapping[str, torch.Tensor], how: Float8) -> QuantisedTensor:
    import torch

    from kernels.interface.weights import QuantisedTensor

    def named(names: tuple[str, ...]) -> torch.Tensor | None:
        return next((arrays[name] for name in names if name in arrays), None)

    weight, scale, input_scale = arrays["weight"], named(_WEIGHT_SCALES), named(_INPUT_SCALES)
    assert scale is not None
    if weight.dtype != torch.float8_e4m3fn or weight.ndim != 2:
        raise BrokenModelFile(
            f"{prefix}.weight is {weight.dtype} {list(weight.shape)} and has a scale; float8 layers"
            " are matrices of float8_e4m3fn: download the weights again"
        )
    num_outputs, num_inputs = weight.shape
    scale = scale.float()
    blocks = [-(-num_outputs // _BLOCK), -(-num_inputs // _BLOCK)]
    if how.in_blocks and list(scale.shape) == blocks:
        scales_NG = scale.repeat_interleave(_BLOCK, dim=0)[:num_outputs].contiguous()
    elif not how.in_blocks and scale.numel() in (1, num_outputs):
        scales_NG = scale.reshape(-1, 1).expand(num_outputs, 1).contiguous()
    else:
        wanted = f"{blocks}, its blocks" if how.in_blocks else f"1 or {num_outputs} numbers"
        raise BrokenModelFile(
            f"{prefix}: the scale of {list(weight.shape)} weights has shape {list(scale.shape)}, "
            f"not {wanted}: config.json belongs to other weights"
        )
    given = {} if input_scale is None else {"input_scale": input_scale.float().reshape(-1)}
    if given and given["input_scale"].numel() != 1:
        raise BrokenModelFile(
            f"{prefix}: the scale of its inputs has {given['input_scale'].numel()} numbers, not 1; "
            "download the weights again"
        )
    return QuantisedTensor(
        type_name=how.type_name,
        shape=(num_outputs, num_inputs),
        arrays={"weight": weight, "weight_scale": scales_NG, **given},
        decode=_decode,
        block_inputs=_BLOCK if how.in_blocks else 1,
        blocks="" if num_inputs % (_BLOCK if how.in_blocks else GROUP_INPUTS) else "Q8_0",
    )


def _decode(arrays: Mapping[str, torch.Tensor]) -> GroupedCodes:
    from kernels.interface.weights import GroupedCodes

    return GroupedCodes(arrays["weight"], arrays["weight_scale"])


def _floats(part: QuantisedTensor) -> torch.Tensor:
    """float32 [N, E]; the last block of inputs may be short."""
    num_inputs = part.shape[1]
    scales_NE = part.arrays["weight_scale"]
    if scales_NE.shape[1] > 1:
        scales_NE = scales_NE.repeat_interleave(_BLOCK, dim=1)[:, :num_inputs]
    return part.arrays["weight"].float().mul_(scales_NE)
