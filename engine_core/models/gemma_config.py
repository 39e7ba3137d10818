"""What Gemma 3n and Gemma 4 read of a config.json: last layers that read the keys of earlier ones,
embeddings per layer, sizes by layer."""

from collections.abc import Sequence
from dataclasses import replace
from statistics import NormalDist
from typing import Any

from engine_core.layers.config import AltUpConfig, ExpertConfig, InterleavedRows, PerLayerConfig
from engine_core.models.config_fields import ConfigFields
from engine_core.models.decoder_config import (
    layer_types_of,
    read_experts,
    read_window,
)
from engine_core.models.errors import ModelConfigError, UnsupportedArchitecture
from engine_core.models.expert_tensors import GEMMA_EXPERTS
from engine_core.models.layer_cache import PagedKeys

SLIDING, FULL = "sliding_attention", "full_attention"
_PATTERN = 6  # one layer of Gemma 4 in six sees everything
_NUM_SPARSE, _SPARSITY = 10, 0.95  # the first layers of Gemma 3n, if there are more


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
    padding = fields.get("pad_token_id")
    return PerLayerConfig(
        fields.positive_int("hidden_size_per_layer_input", 256),
        fields.positive_int("vocab_size_per_layer_input", 262_144),
        given_token=padding if isinstance(padding, int) else 0,
    )


def layer_kinds(fields: ConfigFields, num_layers: int) -> list[str]:
    """The type of each layer; the last one sees everything, whatever the config says."""
    kinds = layer_types_of(fields, num_layers, _PATTERN)
    return [*kinds[:-1], FULL]


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
    if window is None and SLIDING in kinds:
        raise UnsupportedArchitecture("layer_types has sliding_attention, but there is no window")
    keys = []
    for layer, kind in enumerate(kinds):
        own = of_full if kind == FULL else {}
        if by_layer is not None:
            own = by_layer.get(str(layer)) or {}
        of_layer = ConfigFields({**sizes, **own})
        size = of_layer.positive_int("head_dim")
        heads = of_layer.positive_int("num_key_value_heads")
        keys.append(PagedKeys(heads, size, size, window if kind == SLIDING else None))
    return tuple(keys)


def read_gemma_experts(fields: ConfigFields, num_layers: int) -> tuple[ExpertConfig | None, ...]:
    """Experts beside the dense feed-forward of every layer, if the model has any."""
    if not fields.flag("enable_moe_block", False):
        return (None,) * num_layers
    experts = read_experts(
        fields.with_values(
            {"hidden_act": "silu", "num_experts_per_tok": fields.get("top_k_experts")}
        ),
        intermediate_size=fields.positive_int("moe_intermediate_size"),
        renormalise=True,
        round_weights=False,
        naming=GEMMA_EXPERTS,
    )
    return (replace(experts, gated="gelu_tanh"),) * num_layers


def halves_of(experts: ExpertConfig | None) -> tuple[InterleavedRows, ...]:
    """Gate and up of each expert, which llama.cpp's files hold in one tensor."""
    if experts is None:
        return ()
    names = [f"moe.experts.{expert}" for expert in range(experts.num_experts)]
    size = (experts.intermediate_size,)
    return tuple(
        InterleavedRows(
            f"{name}.gate_up_proj", 1, ((f"{name}.gate_proj", size), (f"{name}.up_proj", size))
        )
        for name in names
    )


# ---------------------------------------------------------------------- Gemma 3n


def read_by_layer(fields: ConfigFields, name: str, default: list[int]) -> list[int]:
    """Numbers above zero of each layer; one is for all."""
    value = fields.get(name)
    if value is None or not isinstance(value, list):
        return default if value is None else [fields.positive_int(name)] * len(default)
    if len(value) != len(default):
        raise ModelConfigError(f"config: {name} must list {len(default)} layers, it is {value!r}")
    return [ConfigFields({name: each}).positive_int(name) for each in value]


def read_altup(fields: ConfigFields) -> AltUpConfig:
    number, active = fields.positive_int("altup_num_inputs", 4), fields.get("altup_active_idx")
    if active is not None and active not in range(number):
        raise ModelConfigError(f"config: altup_active_idx is {active!r} of {number} streams")
    return AltUpConfig(
        num_streams=number,
        active=active or 0,
        scales_corrected=fields.flag("altup_correct_scale", True),
        laurel_rank=fields.positive_int("laurel_rank", 64),
    )


def read_deviations(fields: ConfigFields, num_layers: int) -> tuple[float | None, ...]:
    """How far above their mean gates are kept, by layer; None: all are."""
    shares = fields.get("activation_sparsity_pattern")
    if shares is None:
        sparse = _NUM_SPARSE if num_layers > _NUM_SPARSE else 0
        shares = [_SPARSITY] * sparse + [0.0] * (num_layers - sparse)
    if not isinstance(shares, list) or len(shares) != num_layers:
        raise ModelConfigError(
            f"config: activation_sparsity_pattern must list {num_layers} layers, it is {shares!r}"
        )
    if not all(isinstance(each, int | float) and 0 <= each < 1 for each in shares):
        raise ModelConfigError(
            f"config: activation_sparsity_pattern is {shares!r}, it must have shares from 0 to 1"
        )
    return tuple(NormalDist().inv_cdf(each) if each else None for each in shares)
