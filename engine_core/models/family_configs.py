"""How each family of models spells its options, with the defaults of transformers 5. An option
that changes the arithmetic and is not computed here raises UnsupportedArchitecture."""

from engine_core.layers.feed_forward import Activation, ExpertConfig
from engine_core.layers.rotary import RotaryConfig
from engine_core.models.config import ModelConfig
from engine_core.models.config_fields import ConfigFields
from engine_core.models.errors import ModelConfigError, UnsupportedArchitecture
from engine_core.models.expert_tensors import MIXTRAL_EXPERTS, QWEN_EXPERTS, ExpertNaming
from engine_core.models.rotary_config import read_rotary, read_rotary_by_layer_type

_ACTIVATIONS: dict[str, Activation] = {
    "silu": "silu",
    "swish": "silu",
    "gelu_pytorch_tanh": "gelu_tanh",
}
_Windows = tuple[int | None, ...]
_Experts = tuple[ExpertConfig | None, ...]


def read_llama(fields: ConfigFields) -> ModelConfig:
    """Llama and what shares its code: biases by option, no window."""
    biased = fields.flag("attention_bias", False)
    return _read_decoder(
        fields,
        default_max_position=2048,
        default_num_kv_heads=None,
        qkv_bias=biased,
        output_bias=biased,
        mlp_bias=fields.flag("mlp_bias", False),
    )


_VICUNA = {
    "hidden_size": 4096,
    "intermediate_size": 11_008,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
}


def read_llava(fields: ConfigFields) -> ModelConfig:
    """LLaVA's text model: Llama, Mistral or Qwen 2, by its `model_type`; of Llama the published
    models leave out the sizes."""
    kind = fields.text("model_type", "llama")
    if kind == "llama":
        return read_llama(fields.with_defaults(_VICUNA))
    readers = {"mistral": read_mistral, "qwen2": read_qwen2}
    if kind not in readers:
        raise UnsupportedArchitecture(f'LLaVA over a text model of type "{kind}" is not supported')
    return readers[kind](fields)


def read_mistral(fields: ConfigFields) -> ModelConfig:
    """Mistral: one window for all layers; null is none, absent is the 4096 of its first model."""
    return _read_decoder(
        fields,
        default_max_position=131_072,
        default_num_kv_heads=8,
        sliding_windows=(_window(fields, 4096),) * fields.positive_int("num_hidden_layers"),
    )


def read_qwen2(fields: ConfigFields) -> ModelConfig:
    """Qwen 2 and 2.5: biases on q, k and v only."""
    return _read_decoder(
        fields,
        default_max_position=32_768,
        default_num_kv_heads=32,
        qkv_bias=True,
        sliding_windows=_qwen_windows(fields),
    )


def read_qwen3(fields: ConfigFields) -> ModelConfig:
    """Qwen 3: norms within heads, a head size of its own."""
    biased = fields.flag("attention_bias", False)
    return _read_decoder(
        fields,
        default_max_position=32_768,
        default_num_kv_heads=32,
        default_head_size=128,
        qkv_bias=biased,
        output_bias=biased,
        head_norms=True,
        sliding_windows=_qwen_windows(fields),
    )


def read_mixtral(fields: ConfigFields) -> ModelConfig:
    """Mixtral: Mistral with experts; its window, if any, is for all layers."""
    head_size = _head_size(fields)
    rotary = read_rotary(fields, head_size=head_size, default_theta=1_000_000.0)
    num_layers = fields.positive_int("num_hidden_layers")
    return _read_decoder(
        fields,
        default_max_position=131_072,
        default_num_kv_heads=8,
        default_norm_eps=1e-5,
        sliding_windows=(_window(fields),) * num_layers,
        rotary=(rotary,) * num_layers,
        experts=_read_mixtral_experts(fields),
    )


def read_qwen3_moe(fields: ConfigFields) -> ModelConfig:
    """Qwen 3 with experts: unlike Qwen 3 its head size follows from its width, and a window is for
    all layers."""
    biased = fields.flag("attention_bias", False)
    window = _window(fields, 4096) if fields.flag("use_sliding_window", False) else None
    return _read_decoder(
        fields,
        default_max_position=32_768,
        default_num_kv_heads=4,
        qkv_bias=biased,
        output_bias=biased,
        head_norms=True,
        sliding_windows=(window,) * fields.positive_int("num_hidden_layers"),
        experts=_read_qwen3_experts(fields),
    )


_GEMMA3 = {
    "vocab_size": 262_208,
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 26,
    "num_attention_heads": 8,
}
"""What the published models with images leave out, each another part."""


def read_gemma3(fields: ConfigFields) -> ModelConfig:
    """Gemma 3's text model: windows and angles by layer type, more norms, scaled embeddings."""
    fields = fields.with_defaults(_GEMMA3)
    if fields.flag("use_bidirectional_attention", False):
        raise UnsupportedArchitecture("use_bidirectional_attention is not supported")
    if fields.get("attn_logit_softcapping") is not None:
        raise UnsupportedArchitecture("attn_logit_softcapping of Gemma 3 is not supported")
    num_layers = fields.positive_int("num_hidden_layers")
    layer_types = _layer_types(fields, num_layers)
    if layer_types is None:
        pattern = fields.positive_int("sliding_window_pattern", 6)
        layer_types = [
            "sliding_attention" if (layer + 1) % pattern else "full_attention"
            for layer in range(num_layers)
        ]
    head_size = fields.positive_int("head_dim", 256)
    rotary = read_rotary_by_layer_type(
        fields,
        head_size=head_size,
        full_theta=fields.positive_float("rope_theta", 1_000_000.0),
        sliding_theta=fields.positive_float("rope_local_base_freq", 10_000.0),
    )
    softcap = fields.get("final_logit_softcapping")
    biased = fields.flag("attention_bias", False)
    return _read_decoder(
        fields,
        default_max_position=131_072,
        default_num_kv_heads=4,
        default_head_size=256,
        default_tied=True,
        activation_field="hidden_activation",
        default_activation="gelu_pytorch_tanh",
        attention_scale=fields.positive_float("query_pre_attn_scalar", 256) ** -0.5,
        qkv_bias=biased,
        output_bias=biased,
        head_norms=True,
        is_gemma=True,
        sliding_windows=_windows_of(layer_types, _window(fields, 4096)),
        rotary=tuple(rotary[layer_type] for layer_type in layer_types),
        final_softcap=(
            None if softcap is None else fields.positive_float("final_logit_softcapping")
        ),
    )


def _read_decoder(
    fields: ConfigFields,
    *,
    default_max_position: int,
    default_num_kv_heads: int | None,
    default_head_size: int | None = None,
    default_tied: bool = False,
    default_norm_eps: float = 1e-6,
    activation_field: str = "hidden_act",
    default_activation: str = "silu",
    attention_scale: float | None = None,
    qkv_bias: bool = False,
    output_bias: bool = False,
    mlp_bias: bool = False,
    head_norms: bool = False,
    is_gemma: bool = False,
    sliding_windows: _Windows | None = None,
    rotary: tuple[RotaryConfig, ...] | None = None,
    final_softcap: float | None = None,
    experts: _Experts | None = None,
) -> ModelConfig:
    if fields.get("quantization_config") is not None:
        raise UnsupportedArchitecture("weights with a quantization_config are not supported")
    hidden_size = fields.positive_int("hidden_size")
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
    head_size = _head_size(fields, default_head_size)
    return ModelConfig(
        vocab_size=fields.positive_int("vocab_size"),
        hidden_size=hidden_size,
        intermediate_size=fields.positive_int("intermediate_size"),
        num_layers=num_layers,
        num_query_heads=num_query_heads,
        num_kv_heads=num_kv_heads,
        head_size=head_size,
        norm_eps=fields.positive_float("rms_norm_eps", default_norm_eps),
        norms_plus_one=is_gemma,
        output_norms=is_gemma,
        activation=_activation(fields, activation_field, default_activation),
        experts=experts or (None,) * num_layers,
        qkv_bias=qkv_bias,
        output_bias=output_bias,
        mlp_bias=mlp_bias,
        head_norms=head_norms,
        attention_scale=attention_scale or head_size**-0.5,
        sliding_windows=sliding_windows or (None,) * num_layers,
        rotary=rotary or (read_rotary(fields, head_size=head_size),) * num_layers,
        max_model_len=fields.positive_int("max_position_embeddings", default_max_position),
        embedding_scale=hidden_size**0.5 if is_gemma else None,
        tied_head=fields.flag("tie_word_embeddings", default_tied),
        final_softcap=final_softcap,
    )


def _head_size(fields: ConfigFields, default: int | None = None) -> int:
    width = fields.positive_int("hidden_size") // fields.positive_int("num_attention_heads")
    return fields.positive_int("head_dim", default or width)


def _activation(fields: ConfigFields, name: str, default: str) -> Activation:
    wanted = fields.text(name, default)
    if wanted not in _ACTIVATIONS:
        raise UnsupportedArchitecture(
            f'activation "{wanted}" is not supported; supported: {", ".join(_ACTIVATIONS)}'
        )
    return _ACTIVATIONS[wanted]


def _qwen_windows(fields: ConfigFields) -> _Windows:
    num_layers = fields.positive_int("num_hidden_layers")
    window = _window(fields, 4096) if fields.flag("use_sliding_window", False) else None
    layer_types = _layer_types(fields, num_layers)
    if layer_types is None:
        first = fields.get("max_window_layers")
        first = 28 if first is None else first
        layer_types = [
            "sliding_attention" if window is not None and layer >= first else "full_attention"
            for layer in range(num_layers)
        ]
    return _windows_of(layer_types, window)


def _window(fields: ConfigFields, absent: int | None = None) -> int | None:
    """The window; a null is none."""
    if not fields.has("sliding_window"):
        return absent
    return None if fields.get("sliding_window") is None else fields.positive_int("sliding_window")


def _layer_types(fields: ConfigFields, num_layers: int) -> list[str] | None:
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


def _windows_of(layer_types: list[str], window: int | None) -> _Windows:
    if window is None and "sliding_attention" in layer_types:
        raise UnsupportedArchitecture("layer_types has sliding_attention, but there is no window")
    return tuple(window if kind == "sliding_attention" else None for kind in layer_types)


# ---------------------------------------------------------------------- experts


def _read_mixtral_experts(fields: ConfigFields) -> _Experts:
    """Mixtral: experts in every layer."""
    experts = _read_experts(
        fields,
        intermediate_size=fields.positive_int("intermediate_size"),
        default_num_experts=8,
        default_top_k=2,
        renormalise=True,
        round_weights=False,
        naming=MIXTRAL_EXPERTS,
    )
    return (experts,) * fields.positive_int("num_hidden_layers")


def _read_qwen3_experts(fields: ConfigFields) -> _Experts:
    """Qwen3-MoE: experts in each `decoder_sparse_step`-th layer that `mlp_only_layers` spares."""
    experts = _read_experts(
        fields,
        intermediate_size=fields.positive_int("moe_intermediate_size", 768),
        default_num_experts=128,
        default_top_k=8,
        renormalise=fields.flag("norm_topk_prob", False),
        round_weights=True,
        naming=QWEN_EXPERTS,
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


def _read_experts(
    fields: ConfigFields,
    *,
    intermediate_size: int,
    default_num_experts: int,
    default_top_k: int,
    renormalise: bool,
    round_weights: bool,
    naming: ExpertNaming,
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
    )
