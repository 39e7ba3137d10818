"""How llama.cpp's files spell Gemma 3n and Gemma 4 (source: its conversion/gemma.py)."""

from statistics import NormalDist

from engine_core.models.families.gguf import GATED, PROJECTIONS, QK_NORMS, Fields, Metadata
from engine_core.models.gemma_config import FULL, SLIDING

_LOCAL_THETA = 10_000.0
_TABLE = "per_layer_token_embd.weight"
BY_LAYER = frozenset({"attention.head_count_kv", "feed_forward_length"})
IN_PLACE = frozenset({_TABLE})
GEMMA_LAYER = {
    **(PROJECTIONS | GATED | QK_NORMS),
    "attn_norm": "input_layernorm",
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
    "inp_gate": "per_layer_input_gate",
    "proj": "per_layer_projection",
    "post_norm": "post_per_layer_input_norm",
}
PER_LAYER_TOP = {
    _TABLE: "model.embed_tokens_per_layer.weight",
    "per_layer_model_proj.weight": "model.per_layer_model_projection.weight",
    "per_layer_proj_norm.weight": "model.per_layer_projection_norm.weight",
}

GEMMA_EXPERT_LAYER = {
    "ffn_gate_inp": "moe.gate",
    "ffn_gate_inp.scale": "router.scale",
    "ffn_gate_up_exps": "moe.experts.{}.gate_up_proj",
    "ffn_gate_exps": "moe.experts.{}.gate_proj",
    "ffn_up_exps": "moe.experts.{}.up_proj",
    "ffn_down_exps": "moe.experts.{}.down_proj",
    "ffn_down_exps.scale": "router.per_expert_scale",
    "pre_ffw_norm_2": "pre_feedforward_layernorm_2",
    "post_ffw_norm_1": "post_feedforward_layernorm_1",
    "post_ffw_norm_2": "post_feedforward_layernorm_2",
}
ALTUP_LAYER = {
    "laurel_l": "laurel.linear_left",
    "laurel_r": "laurel.linear_right",
    "laurel_post_norm": "laurel.post_laurel_norm",
    "altup_correct_coef": "altup.correction_coefs",
    "altup_correct_scale.weight": "altup.correct_output_scale",
    "altup_predict_coef": "altup.prediction_coefs",
    "altup_router": "altup.modality_router",
    "altup_router_norm": "altup.router_norm",
}
ALTUP_TOP = {
    "altup_proj.weight": "model.altup_projections.{}.weight",
    "altup_unembd_proj.weight": "model.altup_unembed_projections.{}.weight",
}


def gguf_per_layer(meta: Metadata) -> Fields:
    """Sizes of the embeddings per layer."""
    size = int(meta.number("embedding_length_per_layer_input", 0))
    fields: Fields = {"hidden_size_per_layer_input": size}
    if size:
        fields["vocab_size_per_layer_input"] = meta.num_rows(_TABLE)
    return fields


def sliding_kinds(meta: Metadata, num_layers: int) -> list[str]:
    """The type of each layer."""
    is_sliding = meta.values("attention.sliding_window_pattern", [])
    if not isinstance(is_sliding, list) or len(is_sliding) != num_layers:
        meta.broken(f"sliding_window_pattern is {is_sliding!r:.40}, not of {num_layers} layers")
    return [SLIDING if each else FULL for each in is_sliding]


def gemma4_fields(meta: Metadata, config: Fields) -> Fields:
    """Fields of a Gemma4TextConfig."""
    num_layers = config["num_hidden_layers"]
    kinds = sliding_kinds(meta, num_layers)
    heads, widths = (meta.values(key, None) for key in sorted(BY_LAYER))
    heads = heads if isinstance(heads, list) else [config["num_key_value_heads"]] * num_layers
    if len(heads) != num_layers:
        meta.broken(f"head_count_kv is {heads!r:.40}, not of {num_layers} layers")
    size, own_size = config["head_dim"], int(meta.number("attention.key_length_swa"))
    sizes = {FULL: size, SLIDING: own_size}
    factors = meta.numbers("rope_freqs.weight")
    turns = 2 * sum(factor == 1.0 for factor in factors) / size
    local_theta = float(meta.number("rope.freq_base_swa", _LOCAL_THETA))
    full = config["rope_parameters"] | {"rope_type": "proportional", "partial_rotary_factor": turns}
    is_alone = [f"blk.{layer}.attn_v.weight" not in meta.tensors for layer in range(num_layers)]
    num_shared = int(meta.number("attention.shared_kv_layers", 0))
    experts: Fields = {}
    if number := int(meta.number("expert_count", 0)):
        experts = {
            "enable_moe_block": True,
            "num_experts": number,
            "top_k_experts": int(meta.number("expert_used_count")),
            "moe_intermediate_size": int(meta.number("expert_feed_forward_length")),
        }
    return {
        **experts,
        "hidden_activation": "gelu_pytorch_tanh",
        "attention_bias": False,
        "layer_types": kinds,
        "sliding_window": int(meta.number("attention.sliding_window")),
        "head_dim": own_size,
        "per_layer_config": {
            str(layer): {"head_dim": sizes[kind], "num_key_value_heads": int(heads[layer])}
            for layer, kind in enumerate(kinds)
        },
        "attention_k_eq_v": any(is_alone[: num_layers - num_shared]),
        "num_kv_shared_layers": num_shared,
        "use_double_wide_mlp": isinstance(widths, list) and len({*widths}) > 1,
        "final_logit_softcapping": meta.number("final_logit_softcapping", None),
        "rope_parameters": {
            FULL: full,
            SLIDING: {"rope_type": "default", "rope_theta": local_theta},
        },
        **gguf_per_layer(meta),
    }


def gemma3n_fields(meta: Metadata, config: Fields) -> Fields:
    """Fields of a Gemma3nTextConfig."""
    num_layers = config["num_hidden_layers"]
    deviations = meta.values("activation_sparsity_scale", [])
    if not isinstance(deviations, list) or len(deviations) != num_layers:
        meta.broken(f"activation_sparsity_scale is {deviations!r:.40}, not of {num_layers} layers")
    widths = meta.values("feed_forward_length", None)
    local_theta = float(meta.number("rope.freq_base_swa", _LOCAL_THETA))
    return {
        "hidden_activation": "gelu_pytorch_tanh",
        "attention_bias": False,
        "intermediate_size": widths,
        "layer_types": sliding_kinds(meta, num_layers),
        "sliding_window": int(meta.number("attention.sliding_window")),
        "num_kv_shared_layers": int(meta.number("attention.shared_kv_layers")),
        "altup_num_inputs": int(meta.number("altup.num_inputs")),
        "altup_active_idx": int(meta.number("altup.active_idx")),
        "laurel_rank": meta.num_rows("blk.0.laurel_l.weight"),
        # written as float32, from shares of two digits or so
        "activation_sparsity_pattern": [round(NormalDist().cdf(each), 5) for each in deviations],
        "final_logit_softcapping": meta.number("final_logit_softcapping", 30.0),
        "rope_parameters": {
            FULL: config["rope_parameters"],
            SLIDING: {"rope_type": "default", "rope_theta": local_theta},
        },
        **gguf_per_layer(meta),
    }
