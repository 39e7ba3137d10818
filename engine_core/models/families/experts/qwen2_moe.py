"""Qwen 2 and 1.5 with experts: biases on q, k and v, and an expert that all tokens go through."""

from dataclasses import replace

from engine_core.models.config import ModelConfig
from engine_core.models.config_fields import ConfigFields
from engine_core.models.decoder_config import (
    read_decoder,
    read_layer_types,
    read_qwen_experts,
    read_window,
    windows_of,
)
from engine_core.models.expert_tensors import QWEN_EXPERTS
from engine_core.models.families import gguf
from engine_core.models.families.family import Family
from engine_core.models.families.gguf import Fields, Gguf, Metadata


def read(fields: ConfigFields) -> ModelConfig:
    config = read_decoder(
        fields,
        default_max_position=32_768,
        default_num_kv_heads=16,
        sliding_windows=_windows(fields),
        experts=read_qwen_experts(
            fields,
            default_num_experts=60,
            default_top_k=4,
            default_intermediate_size=1408,
            shared_size=fields.positive_int("shared_expert_intermediate_size", 5632),
        ),
    )
    return replace(config, qkv_bias=fields.flag("qkv_bias", True))


def _windows(fields: ConfigFields) -> tuple[int | None, ...]:
    """Where windows are used, every second one of the first layers has one."""
    num_layers = fields.positive_int("num_hidden_layers")
    if not fields.flag("use_sliding_window", False):
        return (None,) * num_layers
    types = read_layer_types(fields, num_layers)
    if types is None:
        most = fields.positive_int("max_window_layers", 28)
        types = [
            "full_attention" if layer % 2 or layer >= most else "sliding_attention"
            for layer in range(num_layers)
        ]
    return windows_of(types, read_window(fields, 4096))


def _gguf_fields(meta: Metadata, _config: Fields) -> Fields:
    return {
        "hidden_act": "silu",
        "use_sliding_window": False,
        "qkv_bias": "blk.0.attn_q.bias" in meta.tensors,
        **gguf.experts(meta, renormalises=False),
        "moe_intermediate_size": int(meta.number("expert_feed_forward_length")),
        "shared_expert_intermediate_size": int(meta.number("expert_shared_feed_forward_length")),
        "decoder_sparse_step": 1,  # llama.cpp has experts in every layer
        "mlp_only_layers": [],
    }


FAMILIES = (
    Family(
        names=("Qwen2MoeForCausalLM", "Qwen2MoeModel", "Qwen2MoeForSequenceClassification"),
        model_type="qwen2_moe",
        read=read,
        experts=QWEN_EXPERTS,
        gguf=Gguf(
            architecture="qwen2moe",
            layer=gguf.PROJECTIONS | gguf.TWO_NORMS | gguf.QWEN_EXPERTS | gguf.SHARED_EXPERT,
            fields=_gguf_fields,
        ),
    ),
)
