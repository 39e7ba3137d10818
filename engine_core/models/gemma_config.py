"""What Gemma 3n and Gemma 4 read alike of a config.json: last layers that read the keys of earlier
ones, embeddings per layer."""

from collections.abc import Sequence
from dataclasses import replace

from engine_core.layers.config import PerLayerConfig
from engine_core.models.config_fields import ConfigFields
from engine_core.models.errors import ModelConfigError
from engine_core.models.layer_cache import PagedKeys


def sharing(
    keys: Sequence[PagedKeys], kinds: Sequence[str], num_shared: int
) -> tuple[PagedKeys, ...]:
    """The last layers, so many, read the keys of the last one of their type before them."""
    first = len(keys) - num_shared
    last = {kind: layer for layer, kind in enumerate(kinds[:first])}
    if not first >= 0 or not {*kinds[first:]} <= last.keys():
        raise ModelConfigError(
            f"config: num_kv_shared_layers is {num_shared}; of the {len(keys)} layers none before "
            "those has keys for each of their types"
        )
    read = (replace(keys[last[kind]], shares=last[kind]) for kind in kinds[first:])
    return (*keys[:first], *read)


def unused(own: Sequence[bool]) -> tuple[str, ...]:
    """Tensors of layers that read another's keys, which checkpoints hold all the same."""
    parts = ("k_proj", "v_proj", "k_norm")
    layers = [layer for layer, has_keys in enumerate(own) if not has_keys]
    return tuple(f"model.layers.{layer}.self_attn.{part}." for layer in layers for part in parts)


def read_per_layer(fields: ConfigFields) -> PerLayerConfig | None:
    """Embeddings per layer; a size of 0 is none."""
    if fields.get("hidden_size_per_layer_input") == 0:
        return None
    return PerLayerConfig(
        fields.positive_int("hidden_size_per_layer_input", 256),
        fields.positive_int("vocab_size_per_layer_input", 262_144),
    )
