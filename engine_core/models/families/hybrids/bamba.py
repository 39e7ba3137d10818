"""Bamba: Llama, where most layers have Mamba-2 in the place of attention; half of a head turns."""

from dataclasses import replace

from engine_core.models.blocks.hybrids import mamba2_block, mamba2_state, read_mamba2, with_kept
from engine_core.models.config import ModelConfig
from engine_core.models.config_fields import ConfigFields
from engine_core.models.decoder_config import head_size_of, read_decoder
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
from engine_core.models.families.hybrids.granite import KINDS
from engine_core.models.rotary_config import read_rotary


def read(fields: ConfigFields) -> ModelConfig:
    num_layers = fields.positive_int("num_hidden_layers")
    turning = fields.with_values({"partial_rotary_factor": 0.5})
    rotary = read_rotary(turning, head_size=head_size_of(fields), turns_a_part=True)
    config = read_decoder(
        fields,
        default_max_position=262_144,
        default_num_kv_heads=8,
        default_norm_eps=1e-5,
        rotary=(rotary,) * num_layers,
    )
    attends, mamba = fields.get("attn_layer_indices") or (), read_mamba2(fields)
    state, biased = mamba2_state(mamba), fields.flag("attention_bias", False)
    kept = [None if layer in attends else state for layer in range(num_layers)]
    config = with_kept(config, kept, mamba)
    return replace(
        config,
        qkv_bias=biased,
        output_bias=biased,
        mlp_bias=fields.flag("mlp_bias", False),
        block=mamba2_block,
    )


def _turns(meta: Metadata) -> bool:
    """llama.cpp calls Bamba granitehybrid, too; Granite 4 has no angles."""
    return bool(meta.number("rope.scaling.finetuned", False))


def _gguf_fields(meta: Metadata, config: Fields) -> Fields:
    kinds = layer_kinds(meta, config["num_hidden_layers"], KINDS)
    attends = [layer for layer, kind in enumerate(kinds) if kind == "full_attention"]
    return mamba2_sizes(meta, config, kinds) | {"attn_layer_indices": attends}


_FEED_FORWARD = ("gate_proj.weight", "up_proj.weight", "down_proj.weight")
_BIASES = ("gate_proj.bias", "up_proj.bias", "down_proj.bias")

FAMILIES = (
    Family(
        names=("BambaForCausalLM", "BambaModel"),
        model_type="bamba",
        read=read,
        tensor_prefixes=(("model.final_layernorm.", "model.norm."),),
        tensor_suffixes=(
            ("pre_ff_layernorm.weight", "post_attention_layernorm.weight"),
            *((f"feed_forward.{end}", f"mlp.{end}") for end in _FEED_FORWARD + _BIASES),
        ),
        gguf=Gguf(
            architecture="granitehybrid",
            layer=PROJECTIONS | GATED | TWO_NORMS | MAMBA2,
            fields=_gguf_fields,
            is_of=_turns,
            pairs_rows=True,
            turns_a_part=True,
            has_kinds=True,
        ),
    ),
)
