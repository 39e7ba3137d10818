"""Nemotron-H: a layer is Mamba-2, attention without angles, or a feed-forward or experts
without gates, alone.

Steps of Mamba-2 have no least size, as in NVIDIA's own code: transformers has one
(`time_step_min`) in prompts, and none in answers."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from engine_core.layers.config import ExpertConfig, Mamba2Config, RotaryConfig
from engine_core.models.blocks.hybrids import (
    mamba2,
    mamba2_state,
    read_kinds,
    read_mamba2_rest,
    with_kept,
)
from engine_core.models.config import ModelConfig
from engine_core.models.config_fields import ConfigFields
from engine_core.models.decoder_config import read_decoder
from engine_core.models.errors import UnsupportedArchitecture
from engine_core.models.expert_config import deepseek_experts
from engine_core.models.expert_tensors import NEMOTRON_EXPERTS
from engine_core.models.families.family import Family
from engine_core.models.families.gguf import (
    MAMBA2,
    PROJECTIONS,
    Fields,
    Gguf,
    Metadata,
    layer_kinds,
    mamba2_sizes,
)
from engine_core.models.layer_cache import LayerCache, NoCache

if TYPE_CHECKING:
    from engine_core.models.blocks.block import Block, BlockBuilder

_PATTERN = {"M": "linear_attention", "E": "moe", "*": "full_attention", "-": "mlp"}
_KINDS = ("linear_attention", "full_attention", "mlp", "moe")


def read(fields: ConfigFields) -> ModelConfig:
    if fields.get("layers_block_type") is None:
        pattern = fields.text("hybrid_override_pattern", "ME*-")
        named = [_PATTERN.get(letter, letter) for letter in pattern]
        fields = fields.with_values({"layers_block_type": fields.get("layer_types") or named})
    kinds = read_kinds(fields, "layers_block_type", _KINDS)
    for name, allowed in (("mlp_hidden_act", "relu2"), ("mamba_hidden_act", "silu")):
        if (activation := fields.text(name, allowed)) != allowed:
            raise UnsupportedArchitecture(f'{name} "{activation}" of Nemotron-H, only {allowed}')
    like_llama = {
        "num_hidden_layers": len(kinds),
        "hidden_act": "silu",
        "rms_norm_eps": fields.positive_float("layer_norm_epsilon", 1e-5),
    }
    still = RotaryConfig((0.0,) * (fields.positive_int("head_dim", 128) // 2))
    config = read_decoder(
        fields.with_values(like_llama),
        default_max_position=4096,
        default_num_kv_heads=8,
        default_head_size=128,
        rotary=(still,) * len(kinds),
    )
    mamba, mlp_bias = _read_mamba2(fields), fields.flag("mlp_bias", False)
    kept: dict[str, LayerCache] = {"linear_attention": mamba2_state(mamba)}
    kept |= dict.fromkeys(("mlp", "moe"), NoCache())
    experts = _read_experts(fields, mlp_bias) if "moe" in kinds else None
    return replace(
        with_kept(config, [kept.get(kind) for kind in kinds], mamba),
        activation="relu2",
        mlp_bias=mlp_bias,
        experts=tuple(experts if kind == "moe" else None for kind in kinds),
        norms_in_float32=True,
        block=_Block(tuple(kinds)),
    )


_EXPERTS = {"n_routed_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 7688}


def _read_experts(fields: ConfigFields, bias: bool) -> ExpertConfig:
    """Of every layer that has some; in a latent space if the config has one."""
    experts = deepseek_experts(fields.with_defaults(_EXPERTS), NEMOTRON_EXPERTS)
    has_latents = fields.get("moe_latent_size") is not None
    return replace(
        experts,
        shared_size=fields.positive_int("moe_shared_expert_intermediate_size", 7688),
        latent_size=fields.positive_int("moe_latent_size") if has_latents else None,
        latent_bias=bias,
    )


def _read_mamba2(fields: ConfigFields) -> Mamba2Config:
    sizes = {"mamba_n_groups": ("n_groups", 8), "mamba_d_conv": ("conv_kernel", 4)}
    spelled = {
        ours: fields.positive_int(ours, fields.positive_int(theirs, default))
        for ours, (theirs, default) in sizes.items()
    }
    named = {
        "mamba_d_state": fields.positive_int("ssm_state_size", 128),
        "mamba_proj_bias": fields.flag("use_bias", False),
        "mamba_conv_bias": fields.flag("mamba_conv_bias", fields.flag("use_conv_bias", True)),
    }
    return read_mamba2_rest(
        fields.with_values(spelled | named),
        fields.positive_int("mamba_num_heads", 128),
        fields.positive_int("mamba_head_dim", 64),
    )


@dataclass(frozen=True, slots=True)
class _Block:
    """A layer of one part."""

    kinds: tuple[str, ...]

    def __call__(self, build: BlockBuilder, layer: int) -> Block:
        match self.kinds[layer]:
            case "linear_attention":
                return build.part_alone(layer, mamba2(build, layer, "mixer"), "norm")
            case "full_attention":
                return build.part_alone(layer, build.attention(layer), "norm")
            case _:
                return build.part_alone(layer, build.feed_forward_alone(layer), "norm")


_ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
_FEED_FORWARD = ("up_proj.weight", "up_proj.bias", "down_proj.weight", "down_proj.bias")

GGUF_LAYER = {
    **(PROJECTIONS | {"attn_norm": "norm", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj"}),
    **{ours: name.replace("mamba.", "mixer.") for ours, name in MAMBA2.items()},
}
_GGUF_KINDS = {
    "ssm_in": "linear_attention",
    "attn_q": "full_attention",
    "ffn_up": "mlp",
    "ffn_up_exps": "moe",
}


def gguf_fields(meta: Metadata, config: Fields) -> Fields:
    kinds = layer_kinds(meta, config["num_hidden_layers"], _GGUF_KINDS)
    sizes = mamba2_sizes(meta, config, kinds)
    dense = kinds.index("mlp") if "mlp" in kinds else 0
    return {
        "layers_block_type": kinds,
        "layer_norm_epsilon": config["rms_norm_eps"],
        "mamba_num_heads": sizes["mamba_n_heads"],
        "mamba_head_dim": sizes["mamba_d_head"],
        "n_groups": sizes["mamba_n_groups"],
        "ssm_state_size": sizes["mamba_d_state"],
        "conv_kernel": sizes["mamba_d_conv"],
        "use_conv_bias": sizes["mamba_conv_bias"],
        "use_bias": sizes["mamba_proj_bias"],
        "mlp_bias": f"blk.{dense}.ffn_up.bias" in meta.tensors,
    }


FAMILY = Family(
    names=("NemotronHForCausalLM", "NemotronHModel"),
    model_type="nemotron_h",
    read=read,
    tensor_prefixes=(
        ("backbone.embeddings.", "model.embed_tokens."),
        ("backbone.norm_f.", "model.norm."),
        ("backbone.", "model."),
        ("model.embeddings.", "model.embed_tokens."),
        ("model.norm_f.", "model.norm."),
    ),
    ignored_prefixes=("mtp.",),
    tensor_suffixes=(
        *((f"mixer.{part}.weight", f"self_attn.{part}.weight") for part in _ATTENTION),
        *((f"mixer.{part}", f"mlp.{part}") for part in _FEED_FORWARD),
    ),
    experts=NEMOTRON_EXPERTS,
    gguf=Gguf(architecture="nemotron_h", layer=GGUF_LAYER, fields=gguf_fields, has_kinds=True),
)
FAMILIES = (FAMILY,)
