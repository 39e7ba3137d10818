"""Falcon-H1: attention and Mamba-2 side by side in each layer, and factors around most products."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, cast

from engine_core.layers.config import Mamba2Config, WeightFactors
from engine_core.models.blocks.hybrids import SideBySide, mamba2, mamba2_state, read_mamba2
from engine_core.models.config import ModelConfig
from engine_core.models.config_fields import ConfigFields
from engine_core.models.decoder_config import read_decoder
from engine_core.models.errors import ModelConfigError
from engine_core.models.families.family import Family
from engine_core.models.families.gguf import (
    GATED,
    MAMBA2,
    PROJECTIONS,
    TWO_NORMS,
    Fields,
    Gguf,
    Metadata,
    mamba2_sizes,
)
from engine_core.models.layer_cache import KeysAndState, State

if TYPE_CHECKING:
    from engine_core.models.blocks.block import Block, BlockBuilder


def read(fields: ConfigFields) -> ModelConfig:
    config = read_decoder(
        fields,
        default_max_position=8192,
        default_num_kv_heads=8,
        default_norm_eps=1e-5,
    )
    by_width = fields.has("mamba_d_ssm") and fields.get("mamba_d_ssm") is None
    mamba = read_mamba2(fields, None if by_width else fields.positive_int("mamba_d_ssm", 1024))
    mamba = replace(
        mamba,
        output_bias=fields.flag("projectors_bias", False),
        normed=fields.flag("mamba_rms_norm", False),
        gate_first=not fields.flag("mamba_norm_before_gate", True),
    )
    state, biased = cast(State, mamba2_state(mamba)), fields.flag("attention_bias", False)
    keys = config.spec.keys_of(0)
    both = KeysAndState(keys.num_kv_heads, keys.key_size, keys.value_size, state=state)
    in_weights = fields.flag("factors_in_weights", False)  # of a GGUF file
    return replace(
        config,
        spec=replace(config.spec, layers=(both,) * config.spec.num_layers),
        recurrent=mamba,
        qkv_bias=biased,
        output_bias=biased,
        mlp_bias=fields.flag("mlp_bias", False),
        embedding_scale=fields.positive_float("embedding_multiplier", 1.0),
        logits_divisor=1 / fields.positive_float("lm_head_multiplier", 1.0),
        factors=None if in_weights else _factors(fields, mamba),
        block=_block,
    )


def _factors(fields: ConfigFields, mamba: Mamba2Config) -> tuple[WeightFactors, ...]:
    def one(name: str) -> float:
        return fields.positive_float(name, 1.0)

    gate, down = _numbers(fields, "mlp_multipliers", 2)
    of_columns = _numbers(fields, "ssm_multipliers", 5)
    shared = mamba.num_groups * mamba.state_size
    columns = (mamba.inner_size, mamba.inner_size, shared, shared, mamba.num_heads)
    inputs = one("attention_in_multiplier")
    return (
        WeightFactors("self_attn.q_proj", inputs=inputs),
        WeightFactors("self_attn.k_proj", one("key_multiplier"), inputs),
        WeightFactors("self_attn.v_proj", inputs=inputs),
        WeightFactors("self_attn.o_proj", one("attention_out_multiplier")),
        WeightFactors(
            "mamba.in_proj", tuple(zip(columns, of_columns, strict=True)), one("ssm_in_multiplier")
        ),
        WeightFactors("mamba.out_proj", one("ssm_out_multiplier")),
        WeightFactors("feed_forward.gate_proj", gate),
        WeightFactors("feed_forward.down_proj", down),
    )


def _numbers(fields: ConfigFields, name: str, number: int) -> list[float]:
    values = fields.get(name)
    values = [1.0] * number if values is None else values
    are_numbers = isinstance(values, list) and all(isinstance(each, int | float) for each in values)
    if not are_numbers or len(values) != number:
        raise ModelConfigError(f"config: {name} is {values!r}, it must be {number} numbers")
    return [float(each) for each in values]


def _block(build: BlockBuilder, layer: int) -> Block:
    recurs = mamba2(build, layer, "mamba", place=build.place(layer) - 1)
    return build.block(layer, SideBySide(build.attention(layer), recurs, build.no_norm()))


def _gguf_fields(meta: Metadata, config: Fields) -> Fields:
    sizes = mamba2_sizes(meta, config, ["linear_attention"])
    names = {"mlp_bias": "ffn_gate", "attention_bias": "attn_q", "projectors_bias": "ssm_out"}
    return {
        **sizes,
        "mamba_d_ssm": sizes["mamba_n_heads"] * sizes["mamba_d_head"],
        "mamba_rms_norm": "blk.0.ssm_norm.weight" in meta.tensors,
        "mamba_norm_before_gate": False,  # llama.cpp knows no other
        "factors_in_weights": True,
        **{field: f"blk.0.{part}.bias" in meta.tensors for field, part in names.items()},
    }


_FEED_FORWARD = ("gate_proj", "up_proj", "down_proj")

FAMILIES = (
    Family(
        names=("FalconH1ForCausalLM", "FalconH1Model"),
        model_type="falcon_h1",
        read=read,
        tensor_prefixes=(("model.final_layernorm.", "model.norm."),),
        tensor_suffixes=(
            ("pre_ff_layernorm.weight", "post_attention_layernorm.weight"),
            *(
                (f"feed_forward.{part}.{kind}", f"mlp.{part}.{kind}")
                for part in _FEED_FORWARD
                for kind in ("weight", "bias")
            ),
        ),
        gguf=Gguf(
            architecture="falcon-h1",
            # llama.cpp writes this one name without its kind
            layer={
                **(PROJECTIONS | GATED | TWO_NORMS | MAMBA2),
                "ffn_norm": "post_attention_layernorm.weight",
            },
            fields=_gguf_fields,
        ),
    ),
)
