"""SmolLM3: Llama, of which every fourth layer rotates nothing."""

from dataclasses import replace

from engine_core.layers.config import RotaryConfig
from engine_core.models.config import ModelConfig
from engine_core.models.config_fields import ConfigFields
from engine_core.models.decoder_config import read_layer_types, read_window, windows_of
from engine_core.models.errors import ModelConfigError
from engine_core.models.families.dense import llama
from engine_core.models.families.family import Family
from engine_core.models.families.gguf import LLAMA, Fields, Gguf, Metadata
from engine_core.models.layer_cache import paged_keys
from engine_core.models.rotary_config import read_rotary

_EVERY = 4


def read(fields: ConfigFields) -> ModelConfig:
    fields = fields.with_defaults({"tie_word_embeddings": True, "num_key_value_heads": 4})
    config = llama.read(fields)
    spec, keys = config.spec, config.spec.keys_of(0)
    rotary = read_rotary(fields, head_size=keys.key_size, default_theta=2_000_000.0)
    still = RotaryConfig((0.0,) * len(rotary.inverse_frequencies))
    every = fields.positive_int("no_rope_layer_interval", _EVERY)
    turns = fields.get("no_rope_layers")
    if turns is None:
        turns = [(layer + 1) % every != 0 for layer in range(spec.num_layers)]
    if not isinstance(turns, list) or len(turns) < spec.num_layers:
        raise ModelConfigError(
            f"config: no_rope_layers is {turns!r}, it must say of all {spec.num_layers} layers "
            "whether they rotate"
        )
    window = read_window(fields) if fields.flag("use_sliding_window", False) else None
    types = read_layer_types(fields, spec.num_layers)
    if types is None:
        types = ["full_attention" if turn or not window else "sliding_attention" for turn in turns]
    windows = windows_of(types[: spec.num_layers], window)
    return replace(
        config,
        spec=replace(
            spec,
            layers=paged_keys(keys.num_kv_heads, keys.key_size, windows),
            max_model_len=fields.positive_int("max_position_embeddings", 32_768),
        ),
        rotary=tuple(rotary if turn else still for turn in turns[: spec.num_layers]),
    )


def _gguf_fields(meta: Metadata, config: Fields) -> Fields:
    return llama.gguf_fields(meta, config) | {"no_rope_layer_interval": _EVERY}


FAMILIES = (
    Family(
        names=("SmolLM3ForCausalLM", "SmolLM3Model", "SmolLM3ForSequenceClassification"),
        model_type="smollm3",
        read=read,
        gguf=Gguf(architecture="smollm3", layer=LLAMA, fields=_gguf_fields, pairs_rows=True),
    ),
)
