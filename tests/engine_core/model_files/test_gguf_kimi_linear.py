"""A tiny Kimi Linear, written as llama.cpp's converter would, gives the logits of transformers."""

import collections

import gguf
import numpy as np
import pytest
import torch

from engine_core.model_files import open_model_files
from engine_core.models.loading import load_model
from tests.engine_core.models.decoder_cases import assert_close, full_logits, sequences
from tests.engine_core.models.hybrid_cases import published, reference_model

STACKS = {"w1": "gate", "w2": "down", "w3": "up"}


def keys_of(config):
    """What the converter's `set_gguf_parameters` writes."""
    keys = {
        "block_count": config.num_hidden_layers,
        "context_length": 128,
        "embedding_length": config.hidden_size,
        "feed_forward_length": config.intermediate_size,
        "attention.head_count": 6,
        "attention.head_count_kv": [int(kind == "full_attention") for kind in config.layer_types],
        "attention.layer_norm_rms_epsilon": config.rms_norm_eps,
        "attention.kv_lora_rank": config.kv_lora_rank,
        "attention.key_length": config.kv_lora_rank + config.qk_rope_head_dim,
        "attention.key_length_mla": config.qk_nope_head_dim + config.qk_rope_head_dim,
        "attention.value_length_mla": config.v_head_dim,
        "rope.dimension_count": config.qk_rope_head_dim,
        "ssm.conv_kernel": config.linear_conv_kernel_dim,
        "kda.head_dim": config.linear_head_dim,
        "expert_count": config.num_local_experts,
        "expert_used_count": config.num_experts_per_tok,
        "expert_shared_count": config.n_shared_experts,
        "expert_feed_forward_length": config.moe_intermediate_size,
        "expert_gating_func": 2,
        "expert_weights_scale": config.routed_scaling_factor,
        "leading_dense_block_count": 1,
    }
    return {f"kimi-linear.{key}": value for key, value in keys.items()}


def tensors_of(config, checkpoint):
    """What the converter's `modify_tensors` writes, by the names of the `gguf` package."""
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.KIMI_LINEAR, config.num_hidden_layers)
    tensors, stacks = {}, collections.defaultdict(list)
    for name in sorted(checkpoint):
        values = checkpoint[name].numpy()
        layer = f"blk.{name.removeprefix('model.layers.').partition('.')[0]}"
        if ".experts." in name:
            stacks[f"{layer}.ffn_{STACKS[name.split('.')[-2]]}_exps.weight"].append(values)
            continue
        if name.endswith("kv_b_proj.weight"):
            heads = values.reshape(6, config.qk_nope_head_dim + config.v_head_dim, -1)
            k_b, v_b = np.split(heads, [config.qk_nope_head_dim], axis=1)
            tensors[f"{layer}.attn_k_b.weight"] = np.ascontiguousarray(k_b.transpose(0, 2, 1))
            tensors[f"{layer}.attn_v_b.weight"] = np.ascontiguousarray(v_b)
            continue
        if name.endswith("conv1d.weight"):
            values = values.reshape(1, len(values), 1, -1)
        if name.endswith("A_log"):
            values = -np.exp(values)
        name = name.replace(".dt_bias", ".dt_proj.bias")
        name = name.replace("e_score_correction_bias", "e_score_correction.bias")
        if "block_sparse_moe.gate." not in name and "shared_experts" not in name:
            name = name.replace("block_sparse_moe", "mlp")  # as transformers has dense layers
        target = names.get_name(name, try_suffixes=(".weight", ".bias"))
        assert target is not None, name
        tensors[target] = values
    return tensors | {name: np.stack(parts) for name, parts in stacks.items()}


@pytest.mark.parametrize("ops", ["torch"], indirect=True)
def test_a_file_gives_the_logits_of_transformers(paged_logits, ops, write_gguf):
    reference = reference_model("kimi-linear")
    keys = {"general.architecture": "kimi-linear", **keys_of(reference.config)}
    file = write_gguf(keys, tensors_of(reference.config, published(reference)))
    files = open_model_files(str(file), report=print)
    model = load_model(files.config, files.tensors(), dtype=torch.float32, ops=ops)
    token_lists = sequences((19, 5))
    assert_close(paged_logits(model, token_lists), full_logits(reference, token_lists))
