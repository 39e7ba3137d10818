"""Experts of a Hugging Face folder in MXFP4 (OCP Microscaling Formats 1.0), as OpenAI publishes
gpt-oss (quant_method "mxfp4"). Shape suffixes: X experts, N outputs, G groups of 32 inputs.

    experts.down_proj_blocks [X, N, G, 16]   ->   experts.0.down_proj.weight, ...
    experts.down_proj_scales [X, N, G]

    W[n, 32 g + i] = 2^(scale[n, g] - 127) * e2m1(nibble i of block[n, g]), low nibbles first
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from engine_core.model_files.errors import BrokenModelFile
from engine_core.model_files.quantised_layers import Parts, Tensors

if TYPE_CHECKING:
    import torch

    from kernels.interface.weights import QuantisedTensor

MXFP4 = "mxfp4"
_BLOCK_INPUTS, _BLOCK_BYTES = 32, 16


class Mxfp4Experts:
    """Implements `QuantisedLayers`."""

    type_name = MXFP4

    def joining(self, names: Collection[str], folder: Path) -> Callable[[Tensors], Parts]:
        return partial(join_mxfp4, stacks=find_mxfp4_stacks(names, folder))


def find_mxfp4_stacks(names: Collection[str], folder: Path) -> frozenset[str]:
    """Stacks of experts, such as "model.layers.0.mlp.experts.down_proj"; none where all is
    unquantised. Raises BrokenModelFile: one lacks its blocks or its scales."""
    blocks, scales = (
        {name.removesuffix(end) for name in names if name.endswith(end)}
        for end in ("_blocks", "_scales")
    )
    if alone := sorted(blocks ^ scales):
        what = "scales" if alone[0] in blocks else "blocks"
        raise BrokenModelFile(f"{folder} lacks {alone[0]}_{what}; download its weight files again")
    return frozenset(blocks)


def join_mxfp4(tensors: Tensors, stacks: Collection[str]) -> Parts:
    """The tensors, those of a stack as the weights [N, E] of its experts when both have come.
    Raises BrokenModelFile: shapes or types that contradict each other."""
    waiting: dict[str, torch.Tensor] = {}
    for name, tensor in tensors:
        stem = name.removesuffix("_blocks").removesuffix("_scales")
        if stem == name or stem not in stacks:
            yield name, tensor
            continue
        if stem not in waiting:
            waiting[stem] = tensor
            continue
        blocks, scales = sorted((waiting.pop(stem), tensor), key=lambda each: -each.ndim)
        _check(stem, blocks, scales)
        layer, _, projection = stem.rpartition(".")
        for expert, pair in enumerate(zip(blocks, scales, strict=True)):
            yield f"{layer}.{expert}.{projection}.weight", mxfp4_tensor(*pair)


def _check(stem: str, blocks: torch.Tensor, scales: torch.Tensor) -> None:
    import torch

    if (
        not blocks.dtype == scales.dtype == torch.uint8
        or scales.ndim != 3
        or blocks.shape != (*scales.shape, _BLOCK_BYTES)
    ):
        raise BrokenModelFile(
            f"{stem}: blocks are {blocks.dtype} {list(blocks.shape)} and scales {scales.dtype} "
            f"{list(scales.shape)}; MXFP4 has bytes [X, N, G, {_BLOCK_BYTES}] and [X, N, G]: "
            "download the weights again"
        )


def mxfp4_tensor(blocks_NGB: torch.Tensor, scales_NG: torch.Tensor) -> QuantisedTensor:
    """[N, 32 * G] of bytes [N, G, 16] and exponents [N, G]."""
    from kernels.interface.weights import QuantisedTensor

    num_outputs, num_groups = scales_NG.shape
    return QuantisedTensor(
        type_name=MXFP4,
        shape=(num_outputs, num_groups * _BLOCK_INPUTS),
        arrays={"blocks": blocks_NGB.flatten(1), "scales": scales_NG},
        decode=_decode,
        block_inputs=_BLOCK_INPUTS,
        blocks="MXFP4",
    )


def _decode(arrays: Mapping[str, torch.Tensor]) -> torch.Tensor:
    from engine_core.model_files.gguf.dequantize import dequantize
    from engine_core.model_files.gguf.header import GgmlType
    from kernels.interface.weights import mxfp4_as_gguf

    num_outputs, num_groups = arrays["scales"].shape
    blocks = mxfp4_as_gguf(arrays).reshape(-1)
    return dequantize(blocks, GgmlType.MXFP4, (num_outputs, num_groups * _BLOCK_INPUTS))
