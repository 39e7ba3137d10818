"""Gemma 3n's text model: several residual streams, low-rank maps beside attention, gates of which
few are kept, embeddings per layer, layers that read another's keys."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from engine_core.layers.config import AltUpConfig
from engine_core.models.config import ModelConfig
from engine_core.models.config_fields import ConfigFields
from engine_core.models.decoder_config import (
    layer_types_of,
    read_decoder,
    read_window,
    windows_of,
)
from engine_core.models.errors import UnsupportedArchitecture
from engine_core.models.families.family import Family
from engine_core.models.families.gemma_gguf import (
    ALTUP_LAYER,
    ALTUP_TOP,
    BY_LAYER,
    GEMMA_LAYER,
    IN_PLACE,
    PER_LAYER_TOP,
    gemma3n_fields,
)
from engine_core.models.families.gguf import Gguf
from engine_core.models.gemma_config import (
    read_altup,
    read_by_layer,
    read_deviations,
    read_per_layer,
    sharing,
    unused,
)
from engine_core.models.rotary_config import read_rotary_by_layer_type

if TYPE_CHECKING:
    from engine_core.models.blocks.block import Block, BlockBuilder

_LEFT_OUT = {
    "vocab_size": 262_400,
    "hidden_size": 2048,
    "num_hidden_layers": 35,
    "num_attention_heads": 8,
    "head_dim": 256,
    "final_logit_softcapping": 30.0,
}
_PATTERN = 5  # one layer in five sees everything
_THETA, _LOCAL_THETA = 1_000_000.0, 10_000.0


def read(fields: ConfigFields) -> ModelConfig:
    fields = fields.with_defaults(_LEFT_OUT)
    num_layers = fields.positive_int("num_hidden_layers")
    kinds = layer_types_of(fields, num_layers, _PATTERN)
    rotary = read_rotary_by_layer_type(
        fields,
        head_size=fields.positive_int("head_dim"),
        full_theta=fields.positive_float("rope_theta", _THETA),
        sliding_theta=fields.positive_float("rope_local_base_freq", _LOCAL_THETA),
    )
    widths = read_by_layer(fields, "intermediate_size", [16_384] * num_layers)
    config = read_decoder(
        fields.with_values({"intermediate_size": widths[0]}),
        default_max_position=32_768,
        default_num_kv_heads=2,
        default_tied=True,
        activation_field="hidden_activation",
        default_activation="gelu_pytorch_tanh",
        sliding_windows=windows_of(kinds, read_window(fields, 512)),
        rotary=tuple(rotary[kind] for kind in kinds),
    )
    if config.activation != "gelu_tanh":
        raise UnsupportedArchitecture(f"Gemma 3n with {config.activation}, only gelu_pytorch_tanh")
    per_layer = read_per_layer(fields)
    if per_layer is None:
        raise UnsupportedArchitecture("Gemma 3n without embeddings per layer is not supported")
    num_shared = fields.get("num_kv_shared_layers")
    every = [config.spec.keys_of(layer) for layer in range(num_layers)]
    keys = sharing(every, kinds, 15 if num_shared is None else num_shared)
    biased = fields.flag("attention_bias", False)
    return replace(
        config,
        spec=replace(config.spec, layers=keys),
        attention_scale=1.0,
        qkv_bias=biased,
        output_bias=biased,
        norms_in_float32=True,
        embedding_scale=config.spec.hidden_size**0.5,
        final_softcap=fields.positive_float("final_logit_softcapping"),
        can_be_shared=False,
        per_layer=per_layer,
        lacks=frozenset({"drafts", "prompt_embeds"}),
        unused=unused([kept.shares is None for kept in keys]),
        block=_Block(read_altup(fields), tuple(widths), read_deviations(fields, num_layers)),
    )


@dataclass(frozen=True, slots=True)
class _Block:
    """See `gemma3n_blocks`. Of each layer: features, deviations."""

    altup: AltUpConfig
    widths: tuple[int, ...]
    deviations: tuple[float | None, ...]

    def __call__(self, build: BlockBuilder, layer: int) -> Block:
        from engine_core.models.blocks.gemma3n import altup_block

        width, deviations = self.widths[layer], self.deviations[layer]
        return altup_block(build, layer, self.altup, width=width, deviations=deviations)


FAMILIES = (
    Family(
        names=("Gemma3nForCausalLM", "Gemma3nTextModel"),
        model_type="gemma3n_text",
        read=read,
        gguf=Gguf(
            architecture="gemma3n",
            layer=GEMMA_LAYER | ALTUP_LAYER,
            fields=gemma3n_fields,
            theta=_THETA,
            by_layer=BY_LAYER,
            top=PER_LAYER_TOP | ALTUP_TOP,
            in_place=IN_PLACE,
        ),
    ),
)
