"""MiniMax-01 and M1: lightning attention, now and then attention, Mixtral's experts, and a residual
stream that goes through the norms."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from engine_core.layers.config import InterleavedRows
from engine_core.models.blocks.hybrids import read_kinds, with_kept
from engine_core.models.config import ModelConfig
from engine_core.models.config_fields import ConfigFields
from engine_core.models.decoder_config import head_size_of
from engine_core.models.errors import UnsupportedArchitecture
from engine_core.models.expert_tensors import MIXTRAL_EXPERTS
from engine_core.models.families.experts import mixtral
from engine_core.models.families.family import Family
from engine_core.models.families.gguf import (
    PROJECTIONS,
    TWO_NORMS,
    Fields,
    Gguf,
    Metadata,
    layer_kinds,
)
from engine_core.models.layer_cache import PagedKeys, recurrent_state
from engine_core.models.rotary_config import read_rotary

if TYPE_CHECKING:
    from engine_core.models.blocks.block import Block, BlockBuilder

_PARTS = {
    "full_attn": "layernorm_full_attention",
    "linear_attn": "layernorm_linear_attention",
    "mlp": "layernorm_mlp",
}
"""Parts of a layer in names of factors: in transformers, and in MiniMax's own files."""


def read(fields: ConfigFields) -> ModelConfig:
    from engine_core.layers.lightning import lightning_shape  # torch: not for `--help`

    for name, allowed in (("postnorm", (True,)), ("shared_intermediate_size", (0, [0], None))):
        if fields.has(name) and fields.get(name) not in allowed:
            raise UnsupportedArchitecture(
                f"{name} {fields.get(name)!r} of MiniMax is not supported, only {allowed[0]}"
            )
    num_layers, head_size = fields.positive_int("num_hidden_layers"), head_size_of(fields)
    if fields.get("rotary_dim") is not None:
        part = fields.positive_int("rotary_dim") / head_size
        fields = fields.with_values({"partial_rotary_factor": part})
    rotary = read_rotary(fields, head_size=head_size, default_theta=1_000_000.0, turns_a_part=True)
    config = mixtral.read(fields, rotary)
    if fields.get("layer_types") is None:
        kinds = fields.get("attn_type_list")
        if kinds is None:
            kinds = [layer % 2 == 0 for layer in range(num_layers)]
        if isinstance(kinds, list):
            kinds = ["full_attention" if each else "linear_attention" for each in kinds]
        fields = fields.with_values({"layer_types": kinds})
    kinds = read_kinds(fields, "layer_types", ("linear_attention", "full_attention"))
    num_heads = config.spec.num_query_heads
    state = recurrent_state(lightning_shape(num_heads, head_size))
    parts = tuple([(f"self_attn.{part}_proj", (head_size,)) for part in "qkv"])
    factors = {
        f"{ours}_{factor}": fields.positive_float(
            f"{ours}_{factor}_factor", fields.positive_float(f"{theirs}_{factor}", 1.0)
        )
        for ours, theirs in _PARTS.items()
        for factor in ("alpha", "beta")
    }
    return replace(
        with_kept(config, [state if kind == "linear_attention" else None for kind in kinds]),
        interleaved=(InterleavedRows("self_attn.qkv_proj", num_heads, parts),),
        block=_Block(head_size, tuple(factors.items())),
    )


@dataclass(frozen=True, slots=True)
class _Block:
    """`factors`: by part and "alpha", of the residual stream, or "beta", of what is added to it."""

    head_size: int
    factors: tuple[tuple[str, float], ...]

    def __call__(self, build: BlockBuilder, layer: int) -> Block:
        from engine_core.layers.lightning import LightningAttention, lightning_shape, slopes
        from engine_core.models.blocks.post_norm import PostNormBlock

        spec, factors = build.config.spec, dict(self.factors)
        attends = isinstance(spec.layers[layer], PagedKeys)
        own = _of(factors, "full_attn" if attends else "linear_attn") + _of(factors, "mlp")
        if attends:
            return PostNormBlock(build, layer, build.attention(layer), own)
        mixer = LightningAttention(
            f"model.layers.{layer}.self_attn",
            build.place(layer),
            lightning_shape(spec.num_query_heads, self.head_size),
            spec.hidden_size,
            slopes(spec.num_query_heads, layer / (spec.num_layers - 1 + 1e-5)),
            dtype=build.dtype,
            ops=build.ops,
        )
        return PostNormBlock(build, layer, mixer, own)


def _of(factors: Mapping[str, float], part: str) -> tuple[float, float]:
    return factors[f"{part}_alpha"], factors[f"{part}_beta"]


def _gguf_fields(meta: Metadata, config: Fields) -> Fields:
    kinds = {"attn_qkv": "linear_attention", "attn_q": "full_attention"}
    alpha = meta.number("residual_scale", 1.0)
    return {
        **mixtral.gguf_fields(meta, config),
        "layer_types": layer_kinds(meta, config["num_hidden_layers"], kinds),
        **{f"{part}_alpha_factor": alpha for part in _PARTS},
    }


FAMILIES = (
    Family(
        names=(
            *("MiniMaxForCausalLM", "MiniMaxModel"),
            *("MiniMaxText01ForCausalLM", "MiniMaxM1ForCausalLM"),
        ),
        model_type="minimax",
        read=read,
        tensor_suffixes=(("self_attn.out_proj.weight", "self_attn.o_proj.weight"),),
        experts=MIXTRAL_EXPERTS,
        gguf=Gguf(
            architecture="minimax-01",
            layer={
                **(PROJECTIONS | TWO_NORMS | mixtral.GGUF_EXPERTS),
                "attn_qkv": "self_attn.qkv_proj",
                "attn_gate": "self_attn.output_gate",
                "attn_norm_2": "self_attn.norm",
            },
            fields=_gguf_fields,
            turns_a_part=True,
            scales=frozenset({"residual_scale"}),
        ),
    ),
)
