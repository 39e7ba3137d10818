"""Gemma 4's text model: sizes and number of key heads by layer type, values with a norm, keys that
are values, layers that read another's keys, a number on each layer's output."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from engine_core.models.config import ModelConfig
from engine_core.models.config_fields import ConfigFields
from engine_core.models.decoder_config import read_decoder, read_layer_types, read_window
from engine_core.models.errors import ModelConfigError, UnsupportedArchitecture
from engine_core.models.families.family import Family
from engine_core.models.gemma_config import read_per_layer, sharing, unused
from engine_core.models.layer_cache import PagedKeys
from engine_core.models.rotary_config import read_rotary_by_layer_type

if TYPE_CHECKING:
    from engine_core.models.blocks import Block, BlockBuilder

_SLIDING, _FULL = "sliding_attention", "full_attention"
_PATTERN = 6  # one layer in six sees everything
_THETA, _LOCAL_THETA = 1_000_000.0, 10_000.0
_ROTARY = {
    _FULL: {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": _THETA},
    _SLIDING: {"rope_type": "default", "rope_theta": _LOCAL_THETA},
}
_LEFT_OUT = {
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 30,
    "num_attention_heads": 8,
    "vocab_size": 262_144,
}


def read(fields: ConfigFields) -> ModelConfig:
    fields = fields.with_defaults(_LEFT_OUT)
    if fields.get("use_bidirectional_attention") == "all":
        raise UnsupportedArchitecture('use_bidirectional_attention "all" is not supported')
    if fields.get("rope_parameters") is None:
        fields = fields.with_values({"rope_parameters": _ROTARY})
    num_layers = fields.positive_int("num_hidden_layers")
    if fields.get("enable_moe_block"):
        raise UnsupportedArchitecture("enable_moe_block of Gemma 4 is not supported")
    kinds = layer_kinds(fields, num_layers)
    keys = sharing(read_keys(fields, kinds), kinds, fields.get("num_kv_shared_layers") or 0)
    own = [kept.shares is None for kept in keys]
    sizes = {kind: kept.key_size for kind, kept in zip(kinds, keys, strict=True)}
    rotary = read_rotary_by_layer_type(
        fields,
        head_size=sizes.get(_SLIDING, sizes[_FULL]),
        full_head_size=sizes[_FULL],
        full_theta=_THETA,
        sliding_theta=_LOCAL_THETA,
    )
    config = read_decoder(
        fields,
        default_max_position=131_072,
        default_num_kv_heads=4,
        default_head_size=256,
        default_tied=True,
        activation_field="hidden_activation",
        default_activation="gelu_pytorch_tanh",
        rotary=tuple(rotary[kind] for kind in kinds),
    )
    for kept in keys:
        if config.spec.num_query_heads % kept.num_kv_heads:
            raise ModelConfigError(
                f"config: {config.spec.num_query_heads} attention heads cannot share "
                f"{kept.num_kv_heads} key/value heads"
            )
    softcap, biased = fields.get("final_logit_softcapping"), fields.flag("attention_bias", False)
    are_values = fields.flag("attention_k_eq_v", False)
    wide = fields.flag("use_double_wide_mlp", False)
    widths = tuple(config.intermediate_size * (1 if each or not wide else 2) for each in own)
    per_layer = read_per_layer(fields)
    return replace(
        config,
        spec=replace(config.spec, layers=keys),
        attention_scale=1.0,
        qkv_bias=biased,
        output_bias=biased,
        norms_in_float32=True,
        embedding_scale=config.spec.hidden_size**0.5,
        final_softcap=None if softcap is None else fields.positive_float("final_logit_softcapping"),
        can_be_shared=len({*widths}) == 1 and per_layer is None,
        per_layer=per_layer,
        block=_Block(tuple(are_values and kind == _FULL for kind in kinds), widths),
        unused=unused(own),
    )


def layer_kinds(fields: ConfigFields, num_layers: int) -> list[str]:
    """The type of each layer; the last one sees everything, whatever the config says."""
    kinds = read_layer_types(fields, num_layers) or [
        _SLIDING if (layer + 1) % _PATTERN else _FULL for layer in range(num_layers)
    ]
    return [*kinds[:-1], _FULL]


def read_keys(fields: ConfigFields, kinds: list[str]) -> tuple[PagedKeys, ...]:
    """The keys of each layer, were all its own."""
    num_heads = fields.positive_int("num_key_value_heads", 4)
    sizes: dict[str, Any] = {"head_dim": fields.positive_int("head_dim", 256)}
    sizes["num_key_value_heads"] = num_heads
    of_full = {"head_dim": fields.positive_int("global_head_dim", 512)}
    if fields.flag("attention_k_eq_v", False):
        of_full["num_key_value_heads"] = fields.positive_int(
            "num_global_key_value_heads", num_heads
        )
    by_layer = fields.mapping("per_layer_config")
    window = read_window(fields, 512)
    if window is None and _SLIDING in kinds:
        raise UnsupportedArchitecture("layer_types has sliding_attention, but there is no window")
    keys = []
    for layer, kind in enumerate(kinds):
        own = of_full if kind == _FULL else {}
        if by_layer is not None:
            own = by_layer.get(str(layer)) or {}
        of_layer = ConfigFields({**sizes, **own})
        size = of_layer.positive_int("head_dim")
        heads = of_layer.positive_int("num_key_value_heads")
        keys.append(PagedKeys(heads, size, size, window if kind == _SLIDING else None))
    return tuple(keys)


@dataclass(frozen=True, slots=True)
class _Block:
    """Attention and a feed-forward. Of each layer: whether keys are values, features."""

    keys_are_values: tuple[bool, ...]
    widths: tuple[int, ...]

    def __call__(self, build: BlockBuilder, layer: int) -> Block:
        from engine_core.models.gemma_blocks import scaled_block

        attention = build.attention(
            layer,
            head_norms=True,
            norms_values=True,
            keys_are_values=self.keys_are_values[layer],
        )
        width = build.config.intermediate_size if build.config.can_be_shared else self.widths[layer]
        return scaled_block(build, layer, attention, build.feed_forward(layer, size=width))


FAMILIES = (
    Family(
        names=("Gemma4ForCausalLM", "Gemma4TextModel"),
        model_type="gemma4_text",
        read=read,
    ),
)
