"""Qwen 3.5 and 3.6: three layers of gated delta nets, then one of attention with gates; norms
within heads, and a quarter of a head turns."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from engine_core.layers.config import DeltaNetConfig, ExpertConfig, InterleavedRows
from engine_core.models.blocks.hybrids import read_kinds, with_kept
from engine_core.models.config import ModelConfig
from engine_core.models.config_fields import ConfigFields
from engine_core.models.decoder_config import head_size_of, read_decoder
from engine_core.models.errors import ModelConfigError, UnsupportedArchitecture
from engine_core.models.families.family import Family
from engine_core.models.families.gguf import (
    GATED,
    NEXTN,
    PROJECTIONS,
    QK_NORMS,
    Fields,
    Gguf,
    Metadata,
    layer_kinds,
)
from engine_core.models.layer_cache import PagedKeys, recurrent_state
from engine_core.models.rotary_config import read_rotary

if TYPE_CHECKING:
    from engine_core.layers.attention import GatedAttention
    from engine_core.models.blocks.block import Block, BlockBuilder

_INTERVAL = 4  # one layer in four attends
TILED = "linear_output_tiled"
"""A GGUF file's, see `by_key_head`."""


def read(fields: ConfigFields) -> ModelConfig:
    return read_hybrid(fields, {"num_key_value_heads": 4})


def read_hybrid(
    fields: ConfigFields,
    defaults: Mapping[str, Any],
    experts: tuple[ExpertConfig | None, ...] | None = None,
) -> ModelConfig:
    """A model with such layers. `defaults`: of what its config.json may leave out."""
    fields = fields.with_defaults({"partial_rotary_factor": 0.25, "head_dim": 256, **defaults})
    if (activation := fields.text("hidden_act", "silu")) != "silu":
        raise UnsupportedArchitecture(f'hidden_act "{activation}" of a gated delta net, only silu')
    num_layers, sizes = fields.positive_int("num_hidden_layers"), _delta_net(fields)
    rotary = read_rotary(fields, head_size=head_size_of(fields), turns_a_part=True)
    config = read_decoder(
        fields,
        default_max_position=32_768,
        rotary=(rotary,) * num_layers,
        experts=experts,
    )
    state = recurrent_state(sizes.shape)
    linear = [kind == "linear_attention" for kind in _kinds(fields, num_layers)]
    config = with_kept(config, [state if each else None for each in linear], sizes)
    num_heads, biased = config.spec.num_query_heads, fields.flag("attention_bias", False)
    size = fields.positive_int("head_dim")
    gates = (("self_attn.q_proj", (size,)), ("self_attn.gate", (size,)))
    return replace(
        config,
        norms_plus_one=True,
        qkv_bias=biased,
        output_bias=biased,
        interleaved=(InterleavedRows("self_attn.q_proj", num_heads, gates),),
        block=hybrid_block,
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
        is_output_tiled=fields.flag(TILED, False),
    )
    if config.num_heads % config.num_key_heads:
        raise ModelConfigError(
            f"config: {config.num_heads} heads of values cannot share {config.num_key_heads} key "
            "heads of linear attention"
        )
    return config


def gated_attention(build: BlockBuilder, layer: int) -> GatedAttention:
    """Attention with norms of q and k, and gates beside `q_proj`."""
    from engine_core.layers.attention import GatedAttention
    from engine_core.layers.linear import FusedLinear

    spec = build.config.spec
    size = spec.num_query_heads * spec.keys_of(layer).value_size
    gate = FusedLinear(
        [(f"model.layers.{layer}.self_attn.gate", size)],
        spec.hidden_size,
        bias=build.config.qkv_bias,
        dtype=build.dtype,
        ops=build.ops,
    )
    return GatedAttention(build.attention(layer, head_norms=True), gate)


def hybrid_block(build: BlockBuilder, layer: int) -> Block:
    """A gated delta net or attention with gates, and a feed-forward."""
    from engine_core.layers.delta_net import GatedDeltaNet

    if isinstance(build.config.spec.layers[layer], PagedKeys):
        return build.block(layer, gated_attention(build, layer))
    sizes = build.config.recurrent
    assert isinstance(sizes, DeltaNetConfig)
    mixer = GatedDeltaNet(
        f"model.layers.{layer}.linear_attn",
        layer - build.stage.layers.start,
        sizes,
        build.config.spec.hidden_size,
        norm_eps=build.config.norm_eps,
        dtype=build.dtype,
        ops=build.ops,
        all_reduce=build.all_reduce("recurrent"),
    )
    return build.block(layer, mixer)


GGUF_LAYER = (
    PROJECTIONS
    | QK_NORMS
    | NEXTN
    | {
        "attn_norm": "input_layernorm",
        "post_attention_norm": "post_attention_layernorm",
        "attn_qkv": "linear_attn.in_proj_qkv",
        "attn_gate": "linear_attn.in_proj_z",
        "ssm_beta": "linear_attn.in_proj_b",
        "ssm_alpha": "linear_attn.in_proj_a",
        "ssm_conv1d": "linear_attn.conv1d",
        "ssm_dt.bias": "linear_attn.dt_bias",
        "ssm_a": "linear_attn.A_log",
        "ssm_norm": "linear_attn.norm",
        "ssm_out": "linear_attn.out_proj",
    }
)
"""Tensors of a layer, but for those of its feed-forward."""


def gguf_fields(meta: Metadata, config: Fields) -> Fields:
    kinds = {"attn_qkv": "linear_attention", "attn_q": "full_attention"}
    num_heads = int(meta.number("ssm.time_step_rank"))
    return {
        "hidden_act": "silu",
        "layer_types": layer_kinds(meta, config["num_hidden_layers"], kinds),
        "linear_num_key_heads": int(meta.number("ssm.group_count")),
        "linear_num_value_heads": num_heads,
        "linear_key_head_dim": int(meta.number("ssm.state_size")),
        "linear_value_head_dim": int(meta.number("ssm.inner_size")) // num_heads,
        "linear_conv_kernel_dim": int(meta.number("ssm.conv_kernel")),
        TILED: True,
    }


_OF_HEADS = {
    "in_proj_qkv.weight": True,
    "conv1d.weight": True,
    "in_proj_z.weight": False,
    "in_proj_b.weight": False,
    "in_proj_a.weight": False,
    "dt_bias": False,
    "A_log": False,
}
"""Tensors whose rows are of heads of values: whether behind those of q and k."""


def by_key_head(name: str, tensor: Any, config: Fields) -> Any:
    """A tensor of llama.cpp's file, which has the first head of values of every key head, then the
    second one, in the order of the checkpoint; but for `out_proj`, whose blocks of columns may have
    two heads."""
    part = name.partition(".linear_attn.")[2]
    key_heads, heads = config["linear_num_key_heads"], config["linear_num_value_heads"]
    if key_heads == heads or part not in _OF_HEADS:
        return tensor
    import torch

    from kernels.interface.weights import QuantisedTensor

    places_H = torch.arange(heads).view(-1, key_heads).T.flatten()
    before = 2 * key_heads * config["linear_key_head_dim"] if _OF_HEADS[part] else 0
    rows_HP = torch.arange(before, tensor.shape[0]).view(heads, -1)[places_H]
    order_N = torch.cat([torch.arange(before), rows_HP.flatten()])
    return tensor.rows(order_N) if isinstance(tensor, QuantisedTensor) else tensor[order_N]


UNUSED = ("mtp.",)
"""Tensors of the head for drafts."""

FAMILIES = (
    Family(
        names=("Qwen3_5ForCausalLM", "Qwen3_5TextModel"),
        model_type="qwen3_5_text",
        read=read,
        ignored_prefixes=UNUSED,
        gguf=Gguf(
            architecture="qwen35",
            layer=GGUF_LAYER | GATED,
            fields=gguf_fields,
            norms_plus_one=True,
            turns_a_part=True,
            reordered=by_key_head,
        ),
    ),
)
