"""What families of decoders read alike of a config.json, with the defaults of transformers 5. An
option that changes the arithmetic and is not computed here raises UnsupportedArchitecture."""

from engine_core.layers.config import Activation, ExpertConfig, RotaryConfig
from engine_core.models.config import ModelConfig
from engine_core.models.config_fields import ConfigFields
from engine_core.models.errors import ModelConfigError, UnsupportedArchitecture
from engine_core.models.expert_tensors import QWEN_EXPERTS, ExpertNaming
from engine_core.models.interface import ModelSpec
from engine_core.models.layer_cache import paged_keys
from engine_core.models.rotary_config import read_rotary

_ACTIVATIONS: dict[str, Activation] = {
    "silu": "silu",
    "swish": "silu",
    "gelu_pytorch_tanh": "gelu_tanh",
}
_Windows = tuple[int | None, ...]
_Experts = tuple[ExpertConfig | None, ...]


def read_decoder(
    fields: ConfigFields,
    *,
    default_max_position: int,
    default_num_kv_heads: int | None = None,
    default_head_size: int | None = None,
    default_tied: bool = False,
    default_norm_eps: float = 1e-6,
    activation_field: str = "hidden_act",
    default_activation: str = "silu",
    sliding_windows: _Windows | None = None,
    rotary: tuple[RotaryConfig, ...] | None = None,
    experts: _Experts | None = None,
) -> ModelConfig:
    """Sizes and angles; whatever else a family has it sets in the result."""
    if fields.get("quantization_config") is not None:
        raise UnsupportedArchitecture("weights with a quantization_config are not supported")
    num_layers = fields.positive_int("num_hidden_layers")
    num_query_heads = fields.positive_int("num_attention_heads")
    # present but null means one for each query head; only absence means the family's default
    if fields.has("num_key_value_heads") or default_num_kv_heads is None:
        num_kv_heads = fields.positive_int("num_key_value_heads", num_query_heads)
    else:
        num_kv_heads = default_num_kv_heads
    if num_query_heads % num_kv_heads:
        raise ModelConfigError(
            f"config: {num_query_heads} attention heads cannot share {num_kv_heads} key/value heads"
        )
    head_size = head_size_of(fields, default_head_size)
    return ModelConfig(
        spec=ModelSpec(
            layers=paged_keys(num_kv_heads, head_size, sliding_windows or (None,) * num_layers),
            num_query_heads=num_query_heads,
            hidden_size=fields.positive_int("hidden_size"),
            vocab_size=fields.positive_int("vocab_size"),
            max_model_len=fields.positive_int("max_position_embeddings", default_max_position),
        ),
        intermediate_size=fields.positive_int("intermediate_size"),
        norm_eps=fields.positive_float("rms_norm_eps", default_norm_eps),
        activation=_activation(fields, activation_field, default_activation),
        experts=experts or (None,) * num_layers,
        rotary=rotary or (read_rotary(fields, head_size=head_size),) * num_layers,
        tied_head=fields.flag("tie_word_embeddings", default_tied),
    )


def head_size_of(fields: ConfigFields, default: int | None = None) -> int:
    width = fields.positive_int("hidden_size") // fields.positive_int("num_attention_heads")
    return fields.positive_int("head_dim", default or width)


def _activation(fields: ConfigFields, name: str, default: str) -> Activation:
    wanted = fields.text(name, default)
    if wanted not in _ACTIVATIONS:
        raise UnsupportedArchitecture(
            f'activation "{wanted}" is not supported; supported: {", ".join(_ACTIVATIONS)}'
        )
    return _ACTIVATIONS[wanted]


def read_qwen_windows(fields: ConfigFields) -> _Windows:
    num_layers = fields.positive_int("num_hidden_layers")
    window = read_window(fields, 4096) if fields.flag("use_sliding_window", False) else None
    layer_types = read_layer_types(fields, num_layers)
    if layer_types is None:
        first = fields.get("max_window_layers")
        first = 28 if first is None else first
        layer_types = [
            "sliding_attention" if window is not None and layer >= first else "full_attention"
            for layer in range(num_layers)
        ]
    return windows_of(layer_types, window)


def read_window(fields: ConfigFields, absent: int | None = None) -> int | None:
    """The window; a null is none."""
    if not fields.has("sliding_window"):
        return absent
    return None if fields.get("sliding_window") is None else fields.positive_int("sliding_window")


def read_layer_types(fields: ConfigFields, num_layers: int) -> list[str] | None:
    layer_types = fields.get("layer_types")
    if layer_types is None:
        return None
    if not isinstance(layer_types, list) or len(layer_types) != num_layers:
        raise ModelConfigError(
            f"config: layer_types must name all {num_layers} layers, it is {layer_types!r}"
        )
    for layer_type in layer_types:
        if layer_type not in ("full_attention", "sliding_attention"):
            raise UnsupportedArchitecture(f'layers of type "{layer_type}" are not supported')
    return layer_types


def layer_types_by(every: int, num_layers: int) -> list[str]:
    """What a config leaves out: one layer in `every` sees everything, the others have windows."""
    return [
        "sliding_attention" if (layer + 1) % every else "full_attention"
        for layer in range(num_layers)
    ]


def layer_types_of(fields: ConfigFields, num_layers: int, every: int) -> list[str]:
    """Those that a config names, else `layer_types_by`."""
    return read_layer_types(fields, num_layers) or layer_types_by(every, num_layers)


def windows_of(layer_types: list[str], window: int | None) -> _Windows:
    if window is None and "sliding_attention" in layer_types:
        raise UnsupportedArchitecture("layer_types has sliding_attention, but there is no window")
    return tuple(window if kind == "sliding_attention" else None for kind in layer_types)


# ---------------------------------------------------------------------- experts


def read_qwen_experts(
    fields: ConfigFields,
    *,
    default_num_experts: int,
    default_top_k: int,
    default_intermediate_size: int,
    shared_size: int | None = None,
) -> _Experts:
    """Qwen's: experts in each `decoder_sparse_step`-th layer that `mlp_only_layers` spares."""
    experts = read_experts(
        fields,
        intermediate_size=fields.positive_int("moe_intermediate_size", default_intermediate_size),
        default_num_experts=default_num_experts,
        default_top_k=default_top_k,
        renormalise=fields.flag("norm_topk_prob", False),
        round_weights=True,
        naming=QWEN_EXPERTS,
        shared_size=shared_size,
    )
    step = fields.positive_int("decoder_sparse_step", 1)
    dense = fields.get("mlp_only_layers") or []
    num_layers = fields.positive_int("num_hidden_layers")
    if not isinstance(dense, list) or not all(layer in range(num_layers) for layer in dense):
        raise ModelConfigError(
            f"config: mlp_only_layers is {dense!r}, it must list layers from 0 to {num_layers - 1}"
        )
    return tuple(
        None if layer in dense or (layer + 1) % step else experts for layer in range(num_layers)
    )


def read_experts(
    fields: ConfigFields,
    *,
    intermediate_size: int,
    default_num_experts: int | None = None,
    default_top_k: int | None = None,
    renormalise: bool,
    round_weights: bool,
    naming: ExpertNaming,
    shared_size: int | None = None,
) -> ExpertConfig:
    if fields.text("hidden_act", "silu") not in ("silu", "swish"):
        raise UnsupportedArchitecture(
            f'experts with activation "{fields.get("hidden_act")}" are not supported, only silu'
        )
    # transformers takes either name for the other
    old, new = fields.get("num_experts"), fields.get("num_local_experts")
    if None not in (old, new) and old != new:
        raise ModelConfigError(
            f"config: num_experts is {old!r} and num_local_experts {new!r}; they are one number"
        )
    name = "num_experts" if new is None else "num_local_experts"
    num_experts = fields.positive_int(name, default_num_experts)
    top_k = fields.positive_int("num_experts_per_tok", default_top_k)
    if top_k > num_experts:
        raise ModelConfigError(
            f"config: num_experts_per_tok is {top_k}, but there are only {num_experts} experts"
        )
    return ExpertConfig(
        num_experts=num_experts,
        top_k=top_k,
        intermediate_size=intermediate_size,
        renormalise=renormalise,
        round_weights=round_weights,
        block=naming.block,
        projections=naming.projections,
        shared_size=shared_size,
    )
