"""Experts in a GGUF file: the keys that describe them, and tensors that stack all of a layer.

    blk.0.ffn_gate_exps.weight [X, F, E]   ->   ...experts.0.w1.weight [F, E], ...experts.1.w1...

Owns both. Must not know the rest of a model. Keys and what they mean: llama.cpp's llama-hparams.h
and `build_moe_ffn`, which for these architectures renormalises unless a file says otherwise.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from engine_core.model_files.errors import BrokenModelFile
from engine_core.model_files.gguf.header import GgufTensor
from engine_core.model_files.gguf.metadata import GgufMetadata

if TYPE_CHECKING:
    import torch

_SOFTMAX = 1


def mixtral_config(meta: GgufMetadata) -> dict[str, Any]:
    """The fields of a MixtralConfig that are about experts."""
    common = _common(meta)
    if not common.pop("norm_topk_prob"):
        meta.refuse("weights of experts that are not renormalised")
    return {"num_local_experts": common.pop("num_experts"), **common}


def qwen3_moe_config(meta: GgufMetadata) -> dict[str, Any]:
    """The fields of a Qwen3MoeConfig that are about experts: llama.cpp has them in every layer."""
    return _common(meta) | {
        "moe_intermediate_size": int(meta.number("expert_feed_forward_length")),
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    }


def _common(meta: GgufMetadata) -> dict[str, Any]:
    for key in ("expert_shared_count", "expert_group_count", "leading_dense_block_count"):
        if meta.number(key, 0):
            meta.refuse(f"{key} {meta.number(key)}")
    if meta.number("expert_gating_func", _SOFTMAX) not in (0, _SOFTMAX):
        meta.refuse(f"expert_gating_func {meta.number('expert_gating_func')}")
    if meta.number("expert_weights_scale", 1.0) not in (0.0, 1.0):
        meta.refuse(f"expert_weights_scale {meta.number('expert_weights_scale')}")
    return {
        "num_experts": int(meta.number("expert_count")),
        "num_experts_per_tok": int(meta.number("expert_used_count")),
        "norm_topk_prob": bool(meta.number("expert_weights_norm", True)),
    }


def unstack(
    name: str, tensor: GgufTensor, data: torch.Tensor
) -> Iterator[tuple[str, torch.Tensor]]:
    """Each expert of a stack, dequantised when its turn comes: a layer's stack may be gigabytes.

    Args:
        name: with {} where the expert's number belongs.
        tensor: [X, rows, columns].
        data: uint8, its bytes; those of an expert lie together.

    Raises:
        BrokenModelFile: not three dimensions.
    """
    from engine_core.model_files.dequantize import dequantize  # torch: not for opening

    if len(tensor.shape) != 3:
        raise BrokenModelFile(
            f"tensor {tensor.name!r} has shape {list(tensor.shape)}; experts are stacked in three "
            f"dimensions: convert the model again"
        )
    num_experts, *shape = tensor.shape
    for expert, part in enumerate(data.view(num_experts, -1)):
        yield name.format(expert), dequantize(part, tensor.quant_type, tuple(shape))
