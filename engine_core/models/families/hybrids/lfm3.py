"""LFM3: LFM2 with windows in half of its attention layers, angles by kind of layer, a gate on each
head's output, and norms behind a layer's parts, too."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from engine_core.layers.config import ShortConvolutionConfig
from engine_core.models.blocks.hybrids import read_kinds, with_kept
from engine_core.models.config import ModelConfig
from engine_core.models.config_fields import ConfigFields
from engine_core.models.decoder_config import head_size_of, read_decoder, read_window, windows_of
from engine_core.models.errors import UnsupportedArchitecture
from engine_core.models.families.family import Family
from engine_core.models.families.hybrids import lfm2
from engine_core.models.layer_cache import PagedKeys, recurrent_state
from engine_core.models.rotary_config import read_rotary_by_layer_type

if TYPE_CHECKING:
    from engine_core.layers.attention import Attention, GatedAttention
    from engine_core.models.blocks.block import Block, BlockBuilder

_ANGLES = {
    "sliding_attention": {"rope_type": "default"},
    "full_attention": {"rope_type": "proportional", "partial_rotary_factor": 0.5},
}


def read(fields: ConfigFields) -> ModelConfig:
    if not fields.flag("use_sandwich_norm", True):
        raise UnsupportedArchitecture("use_sandwich_norm false of LFM3 is not supported, only true")
    num_layers = fields.positive_int("num_hidden_layers", 24)
    eps = fields.positive_float("norm_eps", fields.positive_float("rms_norm_eps", 1e-5))
    fields = fields.with_values({"rms_norm_eps": eps})
    if fields.get("rope_parameters") is None:
        fields = fields.with_values({"rope_parameters": _ANGLES})
    if fields.get("layer_types") is None:
        kinds = [_kind(layer) for layer in range(num_layers)]
        fields = fields.with_values({"layer_types": kinds})
    kinds = read_kinds(fields, "layer_types", ("conv", "full_attention", "sliding_attention"))
    rotary = read_rotary_by_layer_type(
        fields,
        head_size=head_size_of(fields, 128),
        full_theta=1_000_000.0,
        sliding_theta=10_000.0,
    )
    config = read_decoder(
        fields,
        default_max_position=128_000,
        default_num_kv_heads=4,
        default_head_size=128,
        default_tied=True,
        sliding_windows=windows_of(kinds, read_window(fields, 256)),
        rotary=tuple([rotary.get(kind, rotary["full_attention"]) for kind in kinds]),
    )
    convolution = ShortConvolutionConfig(
        num_channels=config.spec.hidden_size,
        width=fields.positive_int("conv_L_cache", 7),
        bias=fields.flag("conv_bias", False),
    )
    state, biased = recurrent_state(convolution.shape), fields.flag("attention_bias", False)
    gated = fields.flag("use_attention_gate", True)
    return replace(
        with_kept(config, [state if kind == "conv" else None for kind in kinds], convolution),
        qkv_bias=biased,
        output_bias=biased,
        block=_Block(gated),
    )


def _kind(layer: int) -> str:
    if layer % 4 == 2:
        return "full_attention"
    return "conv" if layer % 4 or not layer else "sliding_attention"


@dataclass(frozen=True, slots=True)
class _Block:
    """`gated`: whether outputs of heads are."""

    gated: bool

    def __call__(self, build: BlockBuilder, layer: int) -> Block:
        if not isinstance(build.config.spec.layers[layer], PagedKeys):
            mixer = lfm2.short_convolution(build, layer)
            return build.block(layer, mixer, norms="around")
        attention = build.attention(layer, head_norms=True)
        mixer_of_keys = _gated(build, layer, attention) if self.gated else attention
        return build.block(layer, mixer_of_keys, norms="around")


def _gated(build: BlockBuilder, layer: int, attention: Attention) -> GatedAttention:
    from engine_core.layers.attention import GatedAttention
    from engine_core.layers.linear import FusedLinear

    spec = build.config.spec
    gate = FusedLinear(
        [(f"model.layers.{layer}.self_attn.g_proj", spec.num_query_heads)],
        spec.hidden_size,
        bias=False,
        dtype=build.dtype,
        ops=build.ops,
    )
    return GatedAttention(attention, gate)


FAMILIES = (
    Family(
        names=("Lfm3ForCausalLM", "Lfm3Model"),
        model_type="lfm3",
        read=read,
        tensor_prefixes=(("model.embedding_norm.", "model.norm."),),
        tensor_suffixes=(
            ("post_operator_norm.weight", "post_attention_layernorm.weight"),
            ("post_ffn_norm.weight", "post_feedforward_layernorm.weight"),
            ("ffn_norm.weight", "pre_feedforward_layernorm.weight"),
            ("self_attn.gate_proj.weight", "self_attn.g_proj.weight"),
            *lfm2.SUFFIXES,
        ),
    ),
)
