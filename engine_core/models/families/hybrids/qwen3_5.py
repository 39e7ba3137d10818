"""Qwen 3.5 and 3.6: three layers of gated delta nets, then one of attention with gates; norms
within heads, and a quarter of a head turns."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from engine_core.layers.config import DeltaNetConfig, ExpertConfig, InterleavedRows
from engine_core.models.config import ModelConfig
from engine_core.models.config_fields import ConfigFields
from engine_core.models.decoder_config import head_size_of, read_decoder
from engine_core.models.errors import ModelConfigError, UnsupportedArchitecture
from engine_core.models.families.family import Family
from engine_core.models.hybrids import read_kinds, with_kept
from engine_core.models.layer_cache import PagedKeys, recurrent_state
from engine_core.models.rotary_config import read_rotary

if TYPE_CHECKING:
    from engine_core.models.blocks import Block, BlockBuilder

_INTERVAL = 4  # one layer in four attends


def read(fields: ConfigFields) -> ModelConfig:
    return read_hybrid(fields, {"num_key_value_heads": 4})


def read_hybrid(
    fields: ConfigFields,
    defaults: Mapping[str, Any],
    experts: tuple[ExpertConfig | None, ...] | None = None,
) -> ModelConfig:
    """A model with such layers. `defaults`: of what its config.json may leave out."""
    from engine_core.layers.delta_net import delta_net_shape  # torch: not for `--help`

    fields = fields.with_defaults({"partial_rotary_factor": 0.25, "head_dim": 256, **defaults})
    if (activation := fields.text("hidden_act", "silu")) != "silu":
        raise UnsupportedArchitecture(f'hidden_act "{activation}" of a gated delta net, only silu')
    num_layers, sizes = fields.positive_int("num_hidden_layers"), _delta_net(fields)
    rotary = read_rotary(_of_text(fields), head_size=head_size_of(fields), turns_a_part=True)
    config = read_decoder(
        fields,
        default_max_position=32_768,
        rotary=(rotary,) * num_layers,
        experts=experts,
    )
    state = recurrent_state(delta_net_shape(sizes))
    linear = [kind == "linear_attention" for kind in _kinds(fields, num_layers)]
    config = with_kept(config, [state if each else None for each in linear])
    num_heads, biased = config.spec.num_query_heads, fields.flag("attention_bias", False)
    size = fields.positive_int("head_dim")
    gates = (("self_attn.q_proj", (size,)), ("self_attn.gate", (size,)))
    return replace(
        config,
        norms_plus_one=True,
        qkv_bias=biased,
        output_bias=biased,
        interleaved=(InterleavedRows("self_attn.q_proj", num_heads, gates),),
        block=HybridBlock(sizes),
    )


def _kinds(fields: ConfigFields, num_layers: int) -> list[str]:
    if fields.get("layer_types") is not None:
        return read_kinds(fields, "layer_types", ("linear_attention", "full_attention"))
    interval = fields.positive_int("full_attention_interval", _INTERVAL)
    return [
        "linear_attention" if (layer + 1) % interval else "full_attention"
        for layer in range(num_layers)
    ]


def _delta_net(fields: ConfigFields) -> DeltaNetConfig:
    config = DeltaNetConfig(
        num_key_heads=fields.positive_int("linear_num_key_heads", 16),
        num_heads=fields.positive_int("linear_num_value_heads", 32),
        key_size=fields.positive_int("linear_key_head_dim", 128),
        value_size=fields.positive_int("linear_value_head_dim", 128),
        width=fields.positive_int("linear_conv_kernel_dim", 4),
    )
    if config.num_heads % config.num_key_heads:
        raise ModelConfigError(
            f"config: {config.num_heads} heads of values cannot share {config.num_key_heads} key "
            "heads of linear attention"
        )
    return config


def _of_text(fields: ConfigFields) -> ConfigFields:
    """Without sections of M-RoPE: positions of text agree on all axes."""
    for name in ("rope_scaling", "rope_parameters"):
        kept = dict(fields.mapping(name) or {})
        if kept.pop("mrope_section", None) is not None or kept.get("rope_type") == "mrope":
            kept["rope_type"] = "default"
        fields = fields.with_values({name: kept or None})
    return fields


@dataclass(frozen=True, slots=True)
class HybridBlock:
    """A gated delta net or attention with gates, and a feed-forward."""

    delta_net: DeltaNetConfig

    def __call__(self, build: BlockBuilder, layer: int) -> Block:
        from engine_core.layers.delta_net import GatedDeltaNet

        if isinstance(build.config.spec.layers[layer], PagedKeys):
            return build.block(layer, build.gated_attention(layer))
        mixer = GatedDeltaNet(
            f"model.layers.{layer}.linear_attn",
            layer - build.stage.layers.start,
            self.delta_net,
            build.config.spec.hidden_size,
            norm_eps=build.config.norm_eps,
            dtype=build.dtype,
            ops=build.ops,
        )
        return build.block(layer, mixer)


UNUSED = ("mtp.",)
"""Tensors of the head for drafts."""

FAMILIES = (
    Family(
        names=("Qwen3_5ForCausalLM", "Qwen3_5TextModel"),
        model_type="qwen3_5_text",
        read=read,
        ignored_prefixes=UNUSED,
    ),
)
