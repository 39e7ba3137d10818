"""Tiny Qwens with gated delta nets, as llama.cpp's converter writes them (its conversion/qwen.py),
give the logits of transformers."""

import gguf
import numpy as np
import pytest
import torch

from engine_core.adapters.errors import AdapterError
from engine_core.adapters.gguf_file import read_gguf_adapter
from engine_core.model_files import open_model_files
from engine_core.models.loading import load_model
from engine_core.models.registry import read_model_config
from tests.engine_core.model_files.converted import gguf_keys, gguf_tensors
from tests.engine_core.models.decoder_cases import (
    assert_close,
    full_logits,
    random_model,
    sequences,
)
from tests.engine_core.models.qwen_hybrid_cases import A, M, qwen3_5, reference_model

NAMES = (
    "qwen3.5",
    "qwen3.5 with experts, attention first and last, tied",
    "qwen3-next, attention last, not renormalised",
)


def keys_of(config):
    keys = gguf_keys(config)
    arch = keys["general.architecture"]
    values = config.linear_num_value_heads * config.linear_value_head_dim
    own = {
        "ssm.conv_kernel": config.linear_conv_kernel_dim,
        "ssm.state_size": config.linear_key_head_dim,
        "ssm.group_count": config.linear_num_key_heads,
        "ssm.time_step_rank": config.linear_num_value_heads,
        "ssm.inner_size": values,
        "full_attention_interval": 4,
        "rope.dimension_count": config.head_dim // 4,
        "block_count": config.num_hidden_layers + 1,
        "nextn_predict_layers": 1,
    }
    if hasattr(config, "norm_topk_prob"):
        own["expert_weights_norm"] = config.norm_topk_prob
    return keys | {f"{arch}.{key}": value for key, value in own.items()}


def tiled(values, config, size, dim=0):
    """`_reorder_v_heads`: heads of values by key head -> the first one of each key head, then the
    second."""
    heads, key_heads = config.linear_num_value_heads, config.linear_num_key_heads
    shape = [*values.shape[:dim], key_heads, heads // key_heads, size, *values.shape[dim + 1 :]]
    return np.swapaxes(values.reshape(shape), dim, dim + 1).reshape(values.shape)


def tensors_of(config, state):
    """`modify_tensors` of layers of linear attention; the rest as elsewhere."""
    size = config.linear_value_head_dim
    keys = 2 * config.linear_num_key_heads * config.linear_key_head_dim
    is_tiled = config.model_type != "qwen3_next"
    converted = {}
    for name, tensor in state.items():
        values, part = tensor.numpy(), name.partition(".linear_attn.")[2]
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        if part == "A_log":
            values = -np.exp(values)
        if part == "conv1d.weight":
            values = values[:, 0]
        if is_tiled and part in ("in_proj_qkv.weight", "conv1d.weight"):
            values = np.concatenate([values[:keys], tiled(values[keys:], config, size)])
        elif is_tiled and part == "in_proj_z.weight":
            values = tiled(values, config, size)
        elif is_tiled and part in ("in_proj_a.weight", "in_proj_b.weight", "A_log", "dt_bias"):
            values = tiled(values, config, 1)
        elif is_tiled and part == "out_proj.weight":
            values = tiled(values, config, size, dim=1)
        if part == "in_proj_qkvz.weight":
            shared = config.linear_num_value_heads // config.linear_num_key_heads * size
            ends = np.cumsum([config.linear_key_head_dim] * 2 + [shared])
            groups = values.reshape(config.linear_num_key_heads, -1, config.hidden_size)
            q, k, v, z = (
                each.reshape(-1, config.hidden_size) for each in np.split(groups, ends, axis=1)
            )
            prefix = name.removesuffix("qkvz.weight")
            converted[f"{prefix}qkv.weight"] = torch.from_numpy(np.concatenate([q, k, v]))
            converted[f"{prefix}z.weight"] = torch.from_numpy(z)
            continue
        name = name.replace(".dt_bias", ".dt_proj.bias")
        converted[name] = torch.from_numpy(np.ascontiguousarray(values))
    tensors = gguf_tensors(config, converted)
    return tensors | {f"blk.{config.num_hidden_layers}.nextn.eh_proj.weight": np.ones((2, 2))}


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("ops", ["torch"], indirect=True)
def test_a_file_gives_the_logits_of_transformers(name, paged_logits, ops, write_gguf):
    """Beside a head for drafts, which is left out."""
    reference = reference_model(name)
    tensors = tensors_of(reference.config, reference.state_dict())
    files = open_model_files(str(write_gguf(keys_of(reference.config), tensors)), report=print)
    model = load_model(files.config, files.tensors(), dtype=torch.float32, ops=ops)
    token_lists = sequences((19, 5))
    assert_close(paged_logits(model, token_lists), full_logits(reference, token_lists))


@pytest.mark.parametrize("size", [64, 16])
def test_blocks_are_those_of_the_checkpoints_order(size, write_gguf):
    """Heads of whole blocks move with them; where a block has columns of two, floats do."""
    config = qwen3_5([M, A], hidden_size=32, linear_value_head_dim=size, linear_key_head_dim=16)
    tensors = tensors_of(config, random_model(config).state_dict())
    kind = gguf.GGMLQuantizationType.Q8_0
    blocks = {
        name: (gguf.quants.quantize(values, kind), kind)
        for name, values in tensors.items()
        if values.ndim == 2 and values.shape[1] % 32 == 0
    }
    files = open_model_files(str(write_gguf(keys_of(config), tensors | blocks)), report=print)
    plain, kept = dict(files.tensors()), dict(files.tensors(keeps_blocks=True))
    assert plain.keys() == kept.keys()
    assert isinstance(kept["model.layers.0.linear_attn.out_proj.weight"], torch.Tensor) == (
        size == 16
    )
    for name, tensor in kept.items():
        values = tensor if isinstance(tensor, torch.Tensor) else tensor.dequantise()
        assert torch.equal(values, plain[name]), name


def test_an_adapter_of_heads_in_another_order_is_refused(write_gguf):
    config = qwen3_5([M, A]).to_dict() | {"architectures": ["Qwen3_5ForCausalLM"]}
    keys = {
        "general.architecture": "qwen35",
        "general.type": "adapter",
        "adapter.type": "lora",
        "adapter.lora.alpha": 4.0,
    }
    tensors = {f"blk.0.ssm_out.weight.lora_{half}": np.ones((4, 4), np.float32) for half in "ab"}
    with pytest.raises(AdapterError, match="use the adapter's PEFT folder"):
        read_gguf_adapter(
            write_gguf(keys, tensors), read_model_config(config).spec, has_experts=False
        )
