"""Tiny models of which some layers keep a state, written as llama.cpp's converter would, give the
logits of transformers."""

import json

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from engine_core.adapters.adapter import AdapterTargets, read_adapter
from engine_core.adapters.errors import AdapterError
from engine_core.model_files import BrokenModelFile, open_model_files
from engine_core.models.loading import load_model
from kernels.torch.operations import TorchOperations
from tests.engine_core.model_files.converted import permute
from tests.engine_core.models.decoder_cases import assert_close, full_logits, sequences
from tests.engine_core.models.hybrid_cases import reference_model

ARCHITECTURES = {
    "granite, dense": "granitehybrid",
    "granite, experts, tied": "granitehybrid",
    "bamba": "granitehybrid",
    "falcon-h1": "falcon-h1",
    "falcon-h1, biases, no norm, tied": "falcon-h1",
    "minimax": "minimax-01",
    "lfm2, tied": "lfm2",
    "lfm2, biases, width of 4": "lfm2",
    "lfm2-moe": "lfm2moe",
    "nemotron-h, Mamba first and last": "nemotron_h",
    "nemotron-h, a feed-forward first and last, biases, one group": "nemotron_h",
    "nemotron-h, experts": "nemotron_h_moe",
    "nemotron-h, experts in a latent space": "nemotron_h_moe",
}


LIGHTNING = {
    "self_attn.qkv_proj": "attn_qkv",
    "self_attn.norm": "attn_norm_2",
    "self_attn.output_gate": "attn_gate",
    "self_attn.out_proj": "attn_output",
}


def kinds_of(config):
    kinds = {
        "hybrid": "*",
        "linear_attention": "M",
        "conv": "M",
        "full_attention": "*",
        "mlp": "-",
        "moe": "E",
    }
    return [kinds[kind] for kind in getattr(config, "layers_block_type", config.layer_types)]


def first_of(config, *names):
    """The value of the field that has one of these names."""
    return next(getattr(config, name) for name in names if hasattr(config, name))


def keys_of(config, arch):
    """What the converter's `set_gguf_parameters` writes."""
    kinds = kinds_of(config)
    eps = first_of(config, "rms_norm_eps", "norm_eps", "layer_norm_epsilon")
    head_dim = getattr(config, "head_dim", config.hidden_size // config.num_attention_heads)
    keys = {
        "block_count": len(kinds),
        "context_length": 128,
        "embedding_length": config.hidden_size,
        "feed_forward_length": config.intermediate_size,
        "attention.head_count": config.num_attention_heads,
        "attention.head_count_kv": [3 if kind == "*" else 0 for kind in kinds],
        "attention.layer_norm_rms_epsilon": eps,
        "rope.dimension_count": head_dim,
    }
    if arch == "lfm2moe":
        keys |= {
            "expert_count": config.num_experts,
            "expert_used_count": config.num_experts_per_tok,
            "expert_feed_forward_length": config.moe_intermediate_size,
            "expert_gating_func": 2,
            "leading_dense_block_count": config.num_dense_layers,
        }
    if arch in ("lfm2", "lfm2moe"):
        keys["shortconv.l_cache"] = config.conv_L_cache
        keys["rope.freq_base"] = config.rope_parameters["rope_theta"]
        if getattr(config, "block_auto_adjust_ff_dim", False):
            keys["feed_forward_length"] = 36  # 2/3 of 50, to a multiple of 6
    elif arch == "minimax-01":
        keys |= {"expert_count": 4, "expert_used_count": config.num_experts_per_tok}
        keys |= {"attention.key_length": 10, "attention.value_length": 10}
        keys |= {"residual_scale": 1.7, "attention.head_count_kv": 3}
        keys["rope.freq_base"] = config.rope_parameters["rope_theta"]
    else:
        heads = first_of(config, "mamba_n_heads", "mamba_num_heads")
        keys |= {
            "ssm.conv_kernel": first_of(config, "mamba_d_conv", "conv_kernel"),
            "ssm.state_size": first_of(config, "mamba_d_state", "ssm_state_size"),
            "ssm.group_count": first_of(config, "mamba_n_groups", "n_groups"),
            "ssm.inner_size": heads * first_of(config, "mamba_d_head", "mamba_head_dim"),
            "ssm.time_step_rank": heads,
        }
    if arch == "nemotron_h":
        keys |= {"attention.key_length": head_dim, "attention.value_length": head_dim}
        keys["feed_forward_length"] = [50 if kind == "-" else 0 for kind in kinds]
    if arch == "falcon-h1":
        keys |= {"attention.key_length": head_dim, "attention.value_length": head_dim}
    if arch == "nemotron_h_moe":
        keys |= {"attention.key_length": head_dim, "attention.value_length": head_dim}
        keys |= {
            "feed_forward_length": [{"-": 50, "E": 22}.get(kind, 0) for kind in kinds],
            "expert_used_count": 2,
            "expert_feed_forward_length": 22,
            "expert_shared_feed_forward_length": 30,
            "expert_count": 6,
            "expert_shared_count": 1,
            "expert_weights_norm": True,
            "expert_weights_scale": 2.5,
            "expert_group_count": 1,
        }
        if config.moe_latent_size is not None:
            keys["moe_latent_size"] = config.moe_latent_size
    if config.model_type == "bamba":
        keys |= {"attention.key_length": head_dim, "attention.value_length": head_dim}
        keys |= {"rope.dimension_count": head_dim // 2, "rope.scaling.finetuned": True}
    if config.model_type == "granitemoehybrid":
        keys |= {
            "embedding_scale": float(config.embedding_multiplier),
            "residual_scale": float(config.residual_multiplier),
            "logit_scale": float(config.logits_scaling),
            "attention.scale": float(config.attention_multiplier),
            "expert_shared_feed_forward_length": config.shared_intermediate_size,
            "rope.scaling.finetuned": False,
        }
        if config.num_local_experts:
            keys |= {"expert_count": 4, "expert_used_count": config.num_experts_per_tok}
    return {"general.architecture": arch} | {f"{arch}.{key}": v for key, v in keys.items()}


def with_factors(config, name, values):
    """As the converter of Falcon-H1 multiplies weights."""
    shared = config.mamba_n_groups * config.mamba_d_state
    sizes = [config.mamba_d_ssm, config.mamba_d_ssm, shared, shared, config.mamba_n_heads]
    factors = {
        "down_proj": config.mlp_multipliers[1],
        "gate_proj": config.mlp_multipliers[0],
        "k_proj": config.key_multiplier * config.attention_in_multiplier,
        "q_proj": config.attention_in_multiplier,
        "v_proj": config.attention_in_multiplier,
        "o_proj": config.attention_out_multiplier,
        "out_proj": config.ssm_out_multiplier,
        "in_proj": config.ssm_in_multiplier * np.repeat(config.ssm_multipliers, sizes),
        "lm_head": config.lm_head_multiplier,
        "embed_tokens": config.embedding_multiplier,
    }
    factor = factors.get(name.split(".")[-2], 1.0)
    return (values.T * factor).T.astype(np.float32)


def tensors_of(config, state, arch):
    """What the converter's `modify_tensors` writes, by the names of the `gguf` package."""
    known = "llama" if arch == "minimax-01" else arch  # the package is older than that
    number = next(key for key, name in gguf.MODEL_ARCH_NAMES.items() if name == known)
    names = gguf.get_tensor_name_map(number, len(kinds_of(config)))
    tensors = {}
    for name, tensor in state.items():
        values = tensor.numpy()
        layer = f"blk.{name.removeprefix('model.layers.').partition('.')[0]}"
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        if name.endswith(("experts.gate_up_proj", "shared_mlp.input_linear.weight")):
            parts = np.split(values, 2, axis=-2)
            end = "_exps" if "experts" in name else "_shexp" if config.num_local_experts else ""
            for part, half in zip(("gate", "up"), parts, strict=True):
                tensors[f"{layer}.ffn_{part}{end}.weight"] = half
            continue
        if name.endswith(("experts.down_proj", "mixer.experts.up_proj")):
            part = "down" if "down" in name else "up"
            tensors[f"{layer}.ffn_{part}_exps.weight"] = values
            continue
        if name.endswith("router.weight"):
            tensors[f"{layer}.ffn_gate_inp.weight"] = values
            continue
        if name.endswith("shared_mlp.output_linear.weight"):
            end = "_shexp" if config.num_local_experts else ""
            tensors[f"{layer}.ffn_down{end}.weight"] = values
            continue
        if arch == "falcon-h1":
            values = with_factors(config, name, values)
        if arch == "granitehybrid" and name.endswith(("q_proj.weight", "k_proj.weight")):
            values = permute(values, 6 if "q_proj" in name else 3)
        if name.endswith((".A_log", ".D")):
            values = (-np.exp(values) if "A_log" in name else values)[:, None]
        if name.endswith((".conv1d.weight", ".conv.conv.weight")):
            values = values[:, 0]
        if name.endswith((".mamba.norm.weight", ".mixer.norm.weight")):
            values = values.reshape(first_of(config, "mamba_n_groups", "n_groups"), -1)
        if arch.startswith("nemotron_h"):
            name = name.replace("model.", "backbone.", 1)
        name = name.replace(".e_score_correction_bias", ".e_score_correction.bias")
        name = name.replace(".expert_bias", ".expert_bias.bias")
        name = name.replace(".dt_bias", ".dt_proj.bias")
        part = name.removesuffix(".weight").partition(f"{layer[4:]}.")[2]
        if arch == "minimax-01" and (part in LIGHTNING or part.endswith(("slope_rate", "decay"))):
            if part in LIGHTNING:
                tensors[f"{layer}.{LIGHTNING[part]}.weight"] = values
            continue
        target = names.get_name(name, try_suffixes=(".weight", ".bias"))
        assert target is not None, name
        tensors[target] = values
    return tensors


@pytest.mark.parametrize("name", ARCHITECTURES)
@pytest.mark.parametrize("ops", ["torch"], indirect=True)
def test_a_file_gives_the_logits_of_transformers(name, paged_logits, ops, write_gguf):
    reference, arch = reference_model(name), ARCHITECTURES[name]
    keys = keys_of(reference.config, arch)
    tensors = tensors_of(reference.config, reference.state_dict(), arch)
    files = open_model_files(str(write_gguf(keys, tensors)), report=print)
    model = load_model(files.config, files.tensors(), dtype=torch.float32, ops=ops)
    token_lists = sequences((19, 5))
    assert_close(paged_logits(model, token_lists), full_logits(reference, token_lists))


def test_factors_that_a_file_does_not_name_are_not_taken_for_one(write_gguf, tmp_path):
    """PEFT trains beside the weights without them."""
    reference = reference_model("falcon-h1")
    tensors = tensors_of(reference.config, reference.state_dict(), "falcon-h1")
    file = write_gguf(keys_of(reference.config, "falcon-h1"), tensors)
    files = open_model_files(str(file), report=print)
    model = load_model(files.config, files.tensors(), dtype=torch.float32, ops=TorchOperations())
    name = "base_model.model.model.layers.0.self_attn.q_proj.lora_"
    parts = {f"{name}A.weight": torch.ones(1, 36), f"{name}B.weight": torch.ones(72, 1)}
    save_file(parts, tmp_path / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": 1, "lora_alpha": 1}
    (tmp_path / "adapter_config.json").write_text(json.dumps(config))
    with pytest.raises(AdapterError, match="factors that the model's GGUF file does not name"):
        read_adapter(tmp_path, AdapterTargets.of_model(model), max_rank=None)


def test_a_layer_without_the_matrix_of_any_kind_is_named(write_gguf):
    reference = reference_model("lfm2, tied")
    tensors = tensors_of(reference.config, reference.state_dict(), "lfm2")
    del tensors["blk.1.attn_q.weight"]
    with pytest.raises(BrokenModelFile, match="2 of 3 layers have a matrix of shortconv"):
        open_model_files(str(write_gguf(keys_of(reference.config, "lfm2"), tensors)), report=print)
