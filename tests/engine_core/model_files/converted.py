"""Models of transformers as llama.cpp's convert_hf_to_gguf.py writes them: keys and tensors."""

from typing import Any

import gguf
import numpy as np
import torch
from transformers import PreTrainedConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

_PAIRED_ROWS = ("llama", "mistral3", "smollm3", "granite", "granitemoe", "arcee")
"""Architectures whose q and k the converter permutes."""
_ARCHITECTURES = {
    **dict.fromkeys(("mistral", "mixtral"), "llama"),
    **{name: name for name in ("ernie4_5", "seed_oss")},
    "glm": "chatglm",
    "ernie4_5_moe": "ernie4_5-moe",
    "hunyuan_v1_dense": "hunyuan-dense",
    "hunyuan_v1_moe": "hunyuan-moe",
    "olmo3": "olmo2",
    "gemma3_text": "gemma3",
    "gemma3n_text": "gemma3n",
    "gemma4_text": "gemma4",
    "gpt_oss": "gpt-oss",
    "ministral3": "mistral3",
    "qwen3_5_text": "qwen35",
    **dict.fromkeys(("qwen2_vl_text", "qwen2_5_vl_text"), "qwen2vl"),
    "qwen3_vl_text": "qwen3vl",
    "qwen3_vl_moe_text": "qwen3vlmoe",
    "qwen3_5_moe_text": "qwen35moe",
    "minimax_m2": "minimax-m2",
    "granitemoeshared": "granitemoe",
    "solar_open": "glm4moe",
}
_DEEPSEEK_EXPERTS = ("glm4moe", "dots1", "minimax-m2", "afmoe")
_EXPERT_KEYS = (
    ("expert_feed_forward_length", "moe_intermediate_size"),
    ("expert_shared_feed_forward_length", "shared_expert_intermediate_size"),
    ("expert_shared_feed_forward_length", "shared_intermediate_size"),
    ("expert_shared_count", "n_shared_experts", "num_shared_experts", "moe_num_shared_experts"),
    ("expert_weights_scale", "routed_scaling_factor", "route_scale"),
    ("leading_dense_block_count", "first_k_dense_replace", "num_dense_layers"),
    ("leading_dense_block_count", "moe_layer_start_index"),
    ("interleave_moe_layer_step", "moe_layer_interval"),
    ("expert_group_count", "n_group"),
    ("expert_group_used_count", "topk_group"),
)
"""Keys, and the fields that they come from."""
_PLUS_ONE = ("nemotron", "gemma2", "gemma3", "qwen35", "qwen35moe", "qwen3next")
"""Those whose norms are written with the one that a checkpoint leaves out."""


def architecture_of(config: PreTrainedConfig) -> str:
    return _ARCHITECTURES.get(config.model_type, config.model_type.replace("_", ""))


def converter_names(config: PreTrainedConfig) -> gguf.TensorNameMap:
    arch = next(
        key for key, name in gguf.MODEL_ARCH_NAMES.items() if name == architecture_of(config)
    )
    return gguf.get_tensor_name_map(arch, config.num_hidden_layers + 1)  # and one that drafts


def rope_part(config: PreTrainedConfig) -> float:
    """How much of a head turns."""
    return float((config.rope_parameters or {}).get("partial_rotary_factor", 1.0))


def permute(weights: np.ndarray, num_heads: int) -> np.ndarray:
    """LlamaModel.permute of llama.cpp's convert_hf_to_gguf.py."""
    return (
        weights.reshape(num_heads, 2, weights.shape[0] // num_heads // 2, *weights.shape[1:])
        .swapaxes(1, 2)
        .reshape(weights.shape)
    )


def gguf_keys(config: PreTrainedConfig) -> dict[str, Any]:
    arch = architecture_of(config)
    head_dim = getattr(config, "head_dim", None) or 8
    keys: dict[str, Any] = {
        "block_count": config.num_hidden_layers,
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "attention.head_count": config.num_attention_heads,
        "attention.head_count_kv": config.num_key_value_heads,
    }
    if hasattr(config, "rms_norm_eps"):
        keys["attention.layer_norm_rms_epsilon"] = config.rms_norm_eps
    for name in ("layer_norm_eps", "norm_epsilon", "norm_eps"):
        if hasattr(config, name):
            keys["attention.layer_norm_epsilon"] = getattr(config, name)
    if hasattr(config, "intermediate_size"):
        keys["feed_forward_length"] = config.intermediate_size
    if hasattr(config, "head_dim"):
        keys |= {"attention.key_length": head_dim, "attention.value_length": head_dim}
    if arch in ("llama", "qwen3", "qwen3moe"):
        keys["rope.dimension_count"] = head_dim
    names = ("num_experts", "num_local_experts", "n_routed_experts")
    if number := next((getattr(config, name) for name in names if hasattr(config, name)), None):
        used = getattr(config, "num_experts_per_tok", None) or config.top_k_experts
        keys |= {"expert_count": number, "expert_used_count": used}
    if arch in _DEEPSEEK_EXPERTS:
        keys |= {
            "expert_gating_func": 2,
            "expert_weights_norm": getattr(config, "norm_topk_prob", True),
        }
        part = rope_part(config)
        keys["rope.dimension_count"] = int(head_dim * part)
    for key, *names in _EXPERT_KEYS:
        found = [getattr(config, name) for name in names if hasattr(config, name)]
        if found and found[0]:
            keys[key] = found[0]
    if arch == "phi3":
        part = config.rope_parameters["partial_rotary_factor"]
        keys["rope.dimension_count"] = int(head_dim * part)
        keys["rope.scaling.original_context_length"] = 128
        keys["rope.scaling.attn_factor"] = 1.125
    if arch in ("glm4", "chatglm", "nemotron"):
        keys["rope.dimension_count"] = int(head_dim * rope_part(config))
    if config.model_type in ("exaone4", "olmo3") and config.sliding_window:
        keys["attention.sliding_window"] = config.sliding_window
        keys["attention.sliding_window_pattern"] = [
            kind == "sliding_attention" for kind in config.layer_types
        ]
    if arch == "mistral3":
        keys |= {"rope.scaling.yarn_log_multiplier": 1.0, "attention.temperature_scale": 0.3}
    if arch == "minimax-m2":
        keys["expert_feed_forward_length"] = config.intermediate_size
    if arch == "afmoe":
        keys["attention.sliding_window"] = config.sliding_window
    if arch.startswith("granite"):
        keys |= {
            "embedding_scale": config.embedding_multiplier,
            "residual_scale": config.residual_multiplier,
            "logit_scale": config.logits_scaling,
            "attention.scale": config.attention_multiplier,
        }
    if arch == "gemma4":
        full = [config.per_layer_config[layer] for layer in range(config.num_hidden_layers)]
        head_dim = max(layer.head_dim for layer in full)
        shared = config.num_kv_shared_layers
        is_wide = [mode == "reuse" for mode in config.kv_sharing_modes]
        keys |= {
            "attention.key_length": head_dim,
            "attention.value_length": head_dim,
            "attention.key_length_swa": config.head_dim,
            "attention.value_length_swa": config.head_dim,
            "attention.head_count_kv": [layer.num_key_value_heads for layer in full],
            "attention.shared_kv_layers": shared,
            "attention.sliding_window_pattern": [
                kind == "sliding_attention" for kind in config.layer_types
            ],
            "attention.sliding_window": config.sliding_window,
            "embedding_length_per_layer_input": config.hidden_size_per_layer_input,
            "rope.dimension_count": head_dim,
            "rope.dimension_count_swa": config.head_dim,
        }
        if config.final_logit_softcapping:
            keys["final_logit_softcapping"] = config.final_logit_softcapping
        if config.use_double_wide_mlp:
            keys["feed_forward_length"] = [
                config.intermediate_size * (1 + wide) for wide in is_wide
            ]
    if arch == "gemma3n":
        normal, shares = torch.distributions.Normal(0, 1), config.activation_sparsity_pattern
        keys |= {
            "attention.shared_kv_layers": config.num_kv_shared_layers,
            "attention.sliding_window_pattern": [
                kind == "sliding_attention" for kind in config.layer_types
            ],
            "attention.sliding_window": config.sliding_window,
            "embedding_length_per_layer_input": config.hidden_size_per_layer_input,
            "altup.active_idx": config.altup_active_idx,
            "altup.num_inputs": config.altup_num_inputs,
            "activation_sparsity_scale": [
                normal.icdf(torch.tensor(share)).item() for share in shares
            ],
            "final_logit_softcapping": config.final_logit_softcapping,
        }
    rope = config.rope_parameters
    rope = rope.get("full_attention", rope)
    keys["rope.freq_base"] = float(rope["rope_theta"])
    if "mrope_section" in rope:
        keys["rope.dimension_sections"] = [*rope["mrope_section"], 0]
    if rope["rope_type"] in ("linear", "yarn"):
        keys |= {
            "rope.scaling.type": rope["rope_type"],
            "rope.scaling.factor": rope["factor"],
        }
    if rope["rope_type"] == "yarn":
        original = rope["original_max_position_embeddings"]
        keys["rope.scaling.original_context_length"] = original
    if arch == "gemma2":
        keys |= {
            "attn_logit_softcapping": config.attn_logit_softcapping,
            "final_logit_softcapping": config.final_logit_softcapping,
        }
    if arch == "cohere2":
        keys |= {"logit_scale": config.logit_scale, "rope.scaling.type": "none"}
    if arch in ("gemma2", "gemma3", "cohere2") or (
        config.model_type in ("mistral", "phi3") and config.sliding_window is not None
    ):
        keys["attention.sliding_window"] = config.sliding_window
    return {"general.architecture": arch} | {f"{arch}.{key}": v for key, v in keys.items()}


def gguf_tensors(config: PreTrainedConfig, state: dict[str, torch.Tensor]) -> dict[str, np.ndarray]:
    """By llama.cpp's names. Stacked experts are [X, out, in], gate and up apart."""
    names, arch = converter_names(config), architecture_of(config)
    tensors: dict[str, np.ndarray] = {}
    for name, tensor in state.items():
        values = tensor.numpy()
        layer = f"blk.{name.removeprefix('model.layers.').partition('.')[0]}"
        if arch == "gemma4" and name.endswith(("router.scale", "per_expert_scale")):
            kind = "ffn_gate_inp" if name.endswith("router.scale") else "ffn_down_exps"
            tensors[f"{layer}.{kind}.scale"] = values
            continue
        if arch == "gemma4" and name.endswith("experts.gate_up_proj"):
            tensors[f"{layer}.ffn_gate_up_exps.weight"] = values
            continue
        if name.endswith("experts.gate_up_proj"):
            gate, up = np.split(values, 2, axis=1)
            tensors |= {f"{layer}.ffn_gate_exps.weight": gate, f"{layer}.ffn_up_exps.weight": up}
            continue
        if name.endswith("experts.down_proj"):
            tensors[f"{layer}.ffn_down_exps.weight"] = values
            continue
        if name.endswith("shared_mlp.input_linear.weight"):
            for part, half in zip(("gate", "up"), np.split(values, 2), strict=True):
                tensors[f"{layer}.ffn_{part}_shexp.weight"] = half
            continue
        if name.endswith("shared_expert_gate.weight") and arch == "qwen2moe":
            values = values[0]  # as llama-quantize leaves it
        name = name.replace("e_score_correction_bias", "e_score_correction.bias")
        name = name.replace("mlp.gate.moe_statics", "mlp.moe_statics")
        name = name.replace(".expert_bias", ".expert_bias.bias")
        name = name.replace("block_sparse_moe.router", "block_sparse_moe.gate")
        name = name.replace("shared_mlp.output_linear", "mlp.shared_expert.down_proj")
        if arch == "minimax-m2":
            name = name.replace(".mlp.", ".block_sparse_moe.")
        if arch in _PAIRED_ROWS and "q_proj" in name:
            values = permute(values, config.num_attention_heads)
        if arch in _PAIRED_ROWS and "k_proj" in name:
            values = permute(values, config.num_key_value_heads)
        if name.endswith("norm.weight") and arch in _PLUS_ONE and "linear_attn" not in name:
            values = values + 1
        if name.endswith(("layer_scalar", "correct_output_scale")):
            name = f"{name}.weight"
        if name.startswith("model.altup_"):  # lists of matrices become stacks
            kind, _, rest = name.removeprefix("model.").partition(".")
            if rest == "0.weight":
                number = config.altup_num_inputs - 1
                stack = [state[f"model.{kind}.{n}.weight"] for n in range(number)]
                target = names.get_name(f"model.{kind}")
                assert target is not None, name
                tensors[f"{target}.weight"] = torch.stack(stack).numpy()
            continue
        target = names.get_name(name, try_suffixes=(".weight", ".bias"))
        assert target is not None, name
        tensors[target] = values
    if arch == "gemma4":
        size = max(each.head_dim for each in config.per_layer_config)
        turning = int(size * 0.25 / 2)
        factors = [1.0] * turning + [1e30] * (size // 2 - turning)
        tensors["rope_freqs.weight"] = np.array(factors, np.float32)
    if config.rope_parameters.get("rope_type") == "longrope":
        for kind in ("short", "long"):
            factors = np.array(config.rope_parameters[f"{kind}_factor"], np.float32)
            tensors[f"rope_factors_{kind}.weight"] = factors
    if config.rope_parameters.get("rope_type") == "llama3":
        inverse, _ = ROPE_INIT_FUNCTIONS["llama3"](config, "cpu")
        index = torch.arange(0, config.head_dim, 2).float() / config.head_dim
        plain = 1.0 / config.rope_parameters["rope_theta"] ** index
        tensors["rope_freqs.weight"] = (plain / inverse).numpy()
    return tensors
