"""Granite 4: Mamba-2 or attention, experts beside a feed-forward or that alone, and the factors of
Granite 3."""

from dataclasses import replace

from engine_core.layers.config import ExpertConfig, RotaryConfig
from engine_core.models.blocks.hybrids import (
    mamba2_block,
    mamba2_state,
    read_kinds,
    read_mamba2,
    with_kept,
)
from engine_core.models.config import ModelConfig
from engine_core.models.config_fields import ConfigFields
from engine_core.models.decoder_config import read_experts
from engine_core.models.expert_tensors import MIXTRAL_EXPERTS
from engine_core.models.families.dense import granite
from engine_core.models.families.family import Family
from engine_core.models.families.gguf import (
    GATED,
    MAMBA2,
    PROJECTIONS,
    TWO_NORMS,
    Fields,
    Gguf,
    Metadata,
    layer_kinds,
    mamba2_sizes,
)
from engine_core.models.families.gguf import experts as gguf_experts

_DEFAULTS = {"intermediate_size": 11_008, "shared_intermediate_size": 1024}


def read(fields: ConfigFields) -> ModelConfig:
    fields = fields.with_defaults(_DEFAULTS)
    num_layers = fields.positive_int("num_hidden_layers")
    name = "layers_block_type" if fields.get("layer_types") is None else "layer_types"
    fields = fields.with_defaults({name: ["linear_attention"] * num_layers})
    kinds = read_kinds(fields, name, ("linear_attention", "full_attention"))
    config, mamba = granite.read(fields), read_mamba2(fields)
    experts = None if fields.get("num_local_experts") == 0 else _experts(fields)
    rotary = config.rotary
    if fields.get("position_embedding_type") != "rope":
        rotary = tuple(RotaryConfig((0.0,) * len(one.inverse_frequencies)) for one in rotary)
    state = mamba2_state(mamba)
    config = replace(
        config,
        intermediate_size=fields.positive_int("shared_intermediate_size"),
        rotary=rotary,
        experts=(experts,) * num_layers,
        block=mamba2_block,
    )
    kept = [state if kind == "linear_attention" else None for kind in kinds]
    return with_kept(config, kept, mamba)


def _experts(fields: ConfigFields) -> ExpertConfig:
    experts = read_experts(
        fields,
        intermediate_size=fields.positive_int("intermediate_size"),
        default_num_experts=8,
        default_top_k=2,
        renormalise=True,
        round_weights=True,
        naming=MIXTRAL_EXPERTS,
        shared_size=fields.positive_int("shared_intermediate_size"),
    )
    return replace(experts, shared_name="mlp", gates_shared=False)


KINDS = {"ssm_in": "linear_attention", "attn_q": "full_attention"}
"""The first matrix of each kind of layer in llama.cpp's files."""
_GGUF_LAYER = {
    **(PROJECTIONS | GATED | TWO_NORMS | MAMBA2),
    "ffn_gate_shexp": "mlp.gate_proj",
    "ffn_up_shexp": "mlp.up_proj",
    "ffn_down_shexp": "mlp.down_proj",
    "ffn_gate_inp": "block_sparse_moe.gate",
    "ffn_gate_exps": "block_sparse_moe.experts.{}.w1",
    "ffn_up_exps": "block_sparse_moe.experts.{}.w3",
    "ffn_down_exps": "block_sparse_moe.experts.{}.w2",
}


def _gguf_fields(meta: Metadata, config: Fields) -> Fields:
    kinds = layer_kinds(meta, config["num_hidden_layers"], KINDS)
    experts: Fields = {"num_local_experts": 0}
    if meta.number("expert_count", 0):
        experts = gguf_experts(meta)
        experts["num_local_experts"] = experts.pop("num_experts")
        if not experts.pop("norm_topk_prob"):
            meta.refuse("weights of experts that are not renormalised")
    return {
        **granite.gguf_fields(meta, config),
        **mamba2_sizes(meta, config, kinds),
        **experts,
        "layer_types": kinds,
        "shared_intermediate_size": int(
            meta.number("expert_shared_feed_forward_length", config["intermediate_size"])
        ),
    }


FAMILIES = (
    Family(
        names=("GraniteMoeHybridForCausalLM", "GraniteMoeHybridModel"),
        model_type="granitemoehybrid",
        read=read,
        tensor_suffixes=(("shared_mlp.output_linear.weight", "mlp.down_proj.weight"),),
        experts=MIXTRAL_EXPERTS,
        gguf=Gguf(
            architecture="granitehybrid",
            layer=_GGUF_LAYER,
            fields=_gguf_fields,
            pairs_rows=True,
            has_kinds=True,
            scales=granite.SCALES,
        ),
    ),
)
