"""LFM2: short convolutions, and now and then attention with norms of q and k."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from engine_core.layers.config import ShortConvolutionConfig
from engine_core.models.blocks.hybrids import read_kinds, with_kept
from engine_core.models.config import ModelConfig
from engine_core.models.config_fields import ConfigFields
from engine_core.models.decoder_config import head_size_of, read_decoder
from engine_core.models.families.family import Family
from engine_core.models.families.gguf import (
    GATED,
    PROJECTIONS,
    QK_NORMS,
    TWO_NORMS,
    Fields,
    Gguf,
    Metadata,
    layer_kinds,
)
from engine_core.models.layer_cache import PagedKeys, recurrent_state
from engine_core.models.rotary_config import read_rotary

if TYPE_CHECKING:
    from engine_core.layers.short_convolution import ShortConvolution
    from engine_core.models.blocks.block import Block, BlockBuilder


def read(fields: ConfigFields) -> ModelConfig:
    fields = fields.with_values(
        {
            "rms_norm_eps": fields.positive_float("norm_eps", 1e-5),
            "intermediate_size": _intermediate_size(fields),
            "tie_word_embeddings": fields.flag(
                "tie_embedding", fields.flag("tie_word_embeddings", True)
            ),
        }
    )
    num_layers = fields.positive_int("num_hidden_layers", 32)
    rotary = read_rotary(fields, head_size=head_size_of(fields), default_theta=1_000_000.0)
    config = read_decoder(
        fields,
        default_max_position=128_000,
        default_num_kv_heads=8,
        rotary=(rotary,) * num_layers,
    )
    if fields.get("layer_types") is None:
        attends = fields.get("full_attn_idxs")
        attends = range(num_layers) if attends is None else attends
        kinds = ["full_attention" if layer in attends else "conv" for layer in range(num_layers)]
        fields = fields.with_values({"layer_types": kinds})
    kinds = read_kinds(fields, "layer_types", ("conv", "full_attention"))
    convolution = ShortConvolutionConfig(
        num_channels=config.spec.hidden_size,
        width=fields.positive_int("conv_L_cache", 3),
        bias=fields.flag("conv_bias", False),
    )
    state = recurrent_state(convolution.shape)
    config = with_kept(config, [state if kind == "conv" else None for kind in kinds], convolution)
    return replace(config, block=_block)


def _intermediate_size(fields: ConfigFields) -> int:
    size = fields.positive_int("block_ff_dim", fields.positive_int("intermediate_size", 12_288))
    if not fields.flag("block_auto_adjust_ff_dim", True):
        return size
    multiple = fields.positive_int("block_multiple_of", 256)
    size = int(fields.positive_float("block_ffn_dim_multiplier", 1.0) * int(2 * size / 3))
    return multiple * -(-size // multiple)


def _block(build: BlockBuilder, layer: int) -> Block:
    """Attention or a short convolution, and a feed-forward."""
    if isinstance(build.config.spec.layers[layer], PagedKeys):
        return build.block(layer, build.attention(layer, head_norms=True))
    return build.block(layer, short_convolution(build, layer))


def short_convolution(build: BlockBuilder, layer: int) -> ShortConvolution:
    """The mixer of one layer."""
    from engine_core.layers.short_convolution import ShortConvolution

    config = build.config.recurrent
    assert isinstance(config, ShortConvolutionConfig)
    return ShortConvolution(
        f"model.layers.{layer}.conv",
        build.place(layer),
        config,
        build.config.spec.hidden_size,
        dtype=build.dtype,
        ops=build.ops,
        all_reduce=build.all_reduce("recurrent"),
    )


GGUF_LAYER = {
    **(PROJECTIONS | GATED | TWO_NORMS | QK_NORMS),
    "shortconv.in_proj": "conv.in_proj",
    "shortconv.conv": "conv.conv",
    "shortconv.out_proj": "conv.out_proj",
}
_KINDS = {"shortconv.in_proj": "conv", "attn_q": "full_attention"}


def gguf_fields(meta: Metadata, config: Fields) -> Fields:
    kinds = layer_kinds(meta, config["num_hidden_layers"], _KINDS)
    layer = kinds.index("conv") if "conv" in kinds else 0
    return {
        "layer_types": kinds,
        "conv_L_cache": int(meta.number("shortconv.l_cache")),
        "conv_bias": f"blk.{layer}.shortconv.conv.bias" in meta.tensors,
        "block_auto_adjust_ff_dim": False,
        "norm_eps": config["rms_norm_eps"],
    }


SUFFIXES = (
    ("operator_norm.weight", "input_layernorm.weight"),
    ("ffn_norm.weight", "post_attention_layernorm.weight"),
    ("feed_forward.w1.weight", "mlp.gate_proj.weight"),
    ("feed_forward.w3.weight", "mlp.up_proj.weight"),
    ("feed_forward.w2.weight", "mlp.down_proj.weight"),
    ("self_attn.q_layernorm.weight", "self_attn.q_norm.weight"),
    ("self_attn.k_layernorm.weight", "self_attn.k_norm.weight"),
    ("self_attn.out_proj.weight", "self_attn.o_proj.weight"),
)
FAMILY = Family(
    names=("Lfm2ForCausalLM", "Lfm2Model"),
    model_type="lfm2",
    read=read,
    tensor_prefixes=(("model.embedding_norm.", "model.norm."),),
    tensor_suffixes=SUFFIXES,
    gguf=Gguf(
        architecture="lfm2",
        layer=GGUF_LAYER,
        fields=gguf_fields,
        theta=1_000_000.0,
        has_kinds=True,
        last_norm="token_embd_norm.weight",
    ),
)
FAMILIES = (FAMILY,)
