"""Hunyuan: Llama with norms within heads that act after rotation, and maybe a factor on the base of
its angles."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from engine_core.models.config import ModelConfig
from engine_core.models.config_fields import ConfigFields
from engine_core.models.decoder_config import head_size_of
from engine_core.models.errors import UnsupportedArchitecture
from engine_core.models.families.dense import llama
from engine_core.models.families.family import Family
from engine_core.models.families.gguf import LLAMA, Fields, Gguf, Metadata

if TYPE_CHECKING:
    from engine_core.models.blocks.block import Block, BlockBuilder


def read(fields: ConfigFields) -> ModelConfig:
    fields = _with_whole_theta(fields).with_defaults({"rms_norm_eps": 1e-5})
    config = llama.read(fields)
    if config.rotary[0].factor != 1.0:
        raise UnsupportedArchitecture("angles of Hunyuan with a factor on cosines and sines")
    return replace(config, block=block)


def _with_whole_theta(fields: ConfigFields) -> ConfigFields:
    """What its files call dynamic does not depend on a length: the base has a factor."""
    spelled = fields.mapping("rope_scaling") or fields.mapping("rope_parameters") or {}
    kind = spelled.get("rope_type", spelled.get("type"))
    if kind != "dynamic" or spelled.get("alpha") is None:
        return fields
    options, size = ConfigFields(spelled), head_size_of(fields)
    theta = options.positive_float("rope_theta", fields.positive_float("rope_theta", 10_000.0))
    theta *= options.positive_float("alpha") ** (size / (size - 2))
    return fields.with_values({"rope_scaling": {"rope_type": "default", "rope_theta": theta}})


def block(build: BlockBuilder, layer: int) -> Block:
    return build.block(layer, build.attention(layer, head_norms=True).norm_after_rotation())


def gguf_fields(meta: Metadata, _config: Fields) -> Fields:
    return {"hidden_act": "silu", "attention_bias": "blk.0.attn_q.bias" in meta.tensors}


SUFFIXES = (
    ("query_layernorm.weight", "q_norm.weight"),
    ("key_layernorm.weight", "k_norm.weight"),
)
GGUF_NORMS = {
    "attn_q_norm": "self_attn.query_layernorm",
    "attn_k_norm": "self_attn.key_layernorm",
}
FAMILIES = (
    Family(
        names=("HunYuanDenseV1ForCausalLM", "HunYuanDenseV1Model"),
        model_type="hunyuan_v1_dense",
        read=read,
        tensor_suffixes=SUFFIXES,
        gguf=Gguf(architecture="hunyuan-dense", layer=LLAMA | GGUF_NORMS, fields=gguf_fields),
    ),
)
