"""Qwen 3 with experts: unlike Qwen 3 its head size follows from its width, and a window is for all
layers."""

from dataclasses import replace

from engine_core.models.config import ModelConfig
from engine_core.models.config_fields import ConfigFields
from engine_core.models.decoder_config import read_decoder, read_qwen_experts, read_window
from engine_core.models.expert_tensors import QWEN_EXPERTS
from engine_core.models.families import gguf
from engine_core.models.families.dense import qwen3
from engine_core.models.families.family import Family
from engine_core.models.families.gguf import Fields, Gguf, Metadata


def read(fields: ConfigFields) -> ModelConfig:
    window = read_window(fields, 4096) if fields.flag("use_sliding_window", False) else None
    config = read_decoder(
        fields,
        default_max_position=32_768,
        default_num_kv_heads=4,
        sliding_windows=(window,) * fields.positive_int("num_hidden_layers"),
        experts=read_qwen_experts(
            fields, default_num_experts=128, default_top_k=8, default_intermediate_size=768
        ),
    )
    biased = fields.flag("attention_bias", False)
    return replace(config, qkv_bias=biased, output_bias=biased, block=qwen3.block)


def _gguf_fields(meta: Metadata, _config: Fields) -> Fields:
    meta.refuse_unless("expert_shared_count", 0)
    return {
        "hidden_act": "silu",
        "use_sliding_window": False,
        "attention_bias": "blk.0.attn_q.bias" in meta.tensors,
        **gguf.experts(meta),
        "moe_intermediate_size": int(meta.number("expert_feed_forward_length")),
        "decoder_sparse_step": 1,  # llama.cpp has experts in every layer
        "mlp_only_layers": [],
    }


FAMILIES = (
    Family(
        names=("Qwen3MoeForCausalLM", "Qwen3MoeModel", "Qwen3MoeForSequenceClassification"),
        model_type="qwen3_moe",
        read=read,
        experts=QWEN_EXPERTS,
        gguf=Gguf(
            architecture="qwen3moe",
            also=("qwen3vlmoe",),
            layer=gguf.PROJECTIONS | gguf.TWO_NORMS | gguf.QK_NORMS | gguf.QWEN_EXPERTS,
            fields=_gguf_fields,
        ),
    ),
)
