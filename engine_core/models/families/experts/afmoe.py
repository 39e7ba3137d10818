"""Trinity (AFMoE): gated attention, of which only windows turn, norms around both parts of a layer,
and DeepSeek's experts."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from engine_core.layers.config import RotaryConfig
from engine_core.models.config import ModelConfig
from engine_core.models.config_fields import ConfigFields
from engine_core.models.decoder_config import (
    head_size_of,
    layer_types_of,
    read_decoder,
    read_window,
    windows_of,
)
from engine_core.models.expert_config import read_deepseek_experts
from engine_core.models.expert_tensors import QWEN_EXPERTS
from engine_core.models.families import gguf
from engine_core.models.families.family import Family
from engine_core.models.families.gguf import Fields, Gguf, Metadata
from engine_core.models.rotary_config import read_rotary

if TYPE_CHECKING:
    from engine_core.models.blocks.block import Block, BlockBuilder

_DEFAULTS = {
    "intermediate_size": 6144,
    "moe_intermediate_size": 1408,
    "num_experts": 64,
    "num_experts_per_tok": 6,
    "num_shared_experts": 2,
    "num_dense_layers": 1,
    "head_dim": 128,
}
_SPELLED = {
    "n_shared_experts": "num_shared_experts",
    "first_k_dense_replace": "num_dense_layers",
    "routed_scaling_factor": "route_scale",
}


def read(fields: ConfigFields) -> ModelConfig:
    fields = fields.with_defaults(_DEFAULTS)
    fields = fields.with_values({ours: fields.get(name) for ours, name in _SPELLED.items()})
    experts = read_deepseek_experts(fields)
    every = fields.positive_int("global_attn_every_n_layers", 4)
    kinds = layer_types_of(fields, len(experts), every)
    rotary = read_rotary(fields, head_size=head_size_of(fields))
    still = RotaryConfig((0.0,) * len(rotary.inverse_frequencies))
    config = read_decoder(
        fields,
        default_max_position=16_384,
        default_norm_eps=1e-5,
        sliding_windows=windows_of(kinds, read_window(fields, 1024)),
        rotary=tuple(rotary if kind == "sliding_attention" else still for kind in kinds),
        experts=experts,
    )
    scale = config.spec.hidden_size**0.5 if fields.flag("mup_enabled", False) else None
    biased = fields.flag("attention_bias", False)
    return replace(config, qkv_bias=biased, output_bias=biased, embedding_scale=scale, block=_block)


def _block(build: BlockBuilder, layer: int) -> Block:
    from engine_core.layers.attention import GatedAttention
    from engine_core.layers.linear import FusedLinear

    spec = build.config.spec
    size = spec.num_query_heads * spec.keys_of(layer).value_size
    named = [(f"model.layers.{layer}.self_attn.gate", size)]
    gate = FusedLinear(named, spec.hidden_size, bias=False, dtype=build.dtype, ops=build.ops)
    attention = GatedAttention(build.attention(layer, head_norms=True), gate)
    return build.block(layer, attention, norms="around")


_GGUF_LAYER = {
    **(gguf.PROJECTIONS | gguf.GATED | gguf.QK_NORMS | gguf.QWEN_EXPERTS | gguf.SHARED_EXPERTS),
    "attn_gate": "self_attn.gate",
    "attn_norm": "input_layernorm",
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}


def _gguf_fields(meta: Metadata, _config: Fields) -> Fields:
    fields = gguf.deepseek_experts(meta)
    return {
        "hidden_act": "silu",
        "num_experts": fields["n_routed_experts"],
        "num_experts_per_tok": fields["num_experts_per_tok"],
        "moe_intermediate_size": fields["moe_intermediate_size"],
        "norm_topk_prob": fields["norm_topk_prob"],
        **{name: fields[ours] for ours, name in _SPELLED.items()},
        "sliding_window": int(meta.number("attention.sliding_window")),
        "mup_enabled": True,  # llama.cpp scales them always
        "attention_bias": "blk.0.attn_q.bias" in meta.tensors,
    }


FAMILIES = (
    Family(
        names=("AfmoeForCausalLM", "AfmoeModel"),
        model_type="afmoe",
        read=read,
        tensor_suffixes=(
            ("self_attn.gate_proj.weight", "self_attn.gate.weight"),
            ("pre_mlp_layernorm.weight", "pre_feedforward_layernorm.weight"),
            ("post_mlp_layernorm.weight", "post_feedforward_layernorm.weight"),
            ("mlp.router.gate.weight", "mlp.gate.weight"),
            ("mlp.expert_bias", "mlp.gate.e_score_correction_bias"),
        ),
        experts=QWEN_EXPERTS,
        gguf=Gguf(architecture="afmoe", layer=_GGUF_LAYER, fields=_gguf_fields),
    ),
)
