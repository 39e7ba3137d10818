"""Tiny Qwens with gated delta nets, as llama.cpp's converter writes them (its conversion/qwen.py),
give the logits of transformers."""

import gguf
import numpy as np
import pytest
import torch

from engine_core.adapters.errors import AdapterError
from engine_core.adapters.gguf_file import read_gguf_adapter
from engine_core.model_files import open_model_files
from engine_core.models.loading import load_model, load_mtp_head
from engine_core.models.registry import read_model_config
from kernels.cpu.operations import CpuOperations
from kernels.torch.operations import TorchOperations
from tests.engine_core.model_files.converted import gguf_keys, gguf_tensors
from tests.engine_core.models.decoder_cases import (
    assert_close,
    full_logits,
    random_model,
    sequences,
)
from tests.engine_core.models.head_context import context_for
from tests.engine_core.models.qwen_hybrid_cases import A, M, qwen3_5, reference_model
from tests.kernels.gguf_parts import random_blocks
from tests.mtp_heads import PublishedMTP
from tests.native_kernels import native_library_or_skip

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
    return gguf_tensors(config, converted)


NEXTN = {
    "fc": "eh_proj",
    "pre_fc_norm_embedding": "enorm",
    "pre_fc_norm_hidden": "hnorm",
    "norm": "shared_head_norm",
}


def tensors_of_head(config, head):
    """`_QwenMtpMixin`: the head for drafts is a layer behind the model's own."""
    number, layer, tensors = config.num_hidden_layers, {}, {}
    for name, tensor in head.items():
        part, _, kind = name.removeprefix("mtp.").rpartition(".")
        if part in NEXTN:
            values = tensor.numpy() + (part != "fc")  # norms have their one
            tensors[f"blk.{number}.nextn.{NEXTN[part]}.{kind}"] = values
        else:
            rest = name.removeprefix("mtp.layers.0.")
            layer[f"model.layers.{number}.{rest}"] = tensor
    return tensors | gguf_tensors(config, layer)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("ops", ["torch"], indirect=True)
def test_a_file_gives_the_logits_of_transformers(name, paged_logits, ops, write_gguf):
    """Beside a head for drafts, whose logits are the checkpoint's."""
    reference = reference_model(name)
    config, published = reference.config, PublishedMTP(reference)
    tensors = tensors_of(config, reference.state_dict())
    tensors |= tensors_of_head(config, published.tensors)
    path = write_gguf(keys_of(config), tensors)
    files, loaded = open_model_files(str(path), report=print), {"dtype": torch.float32, "ops": ops}
    model = load_model(files.config, files.tensors(), **loaded)
    token_lists = sequences((19, 5))
    assert_close(paged_logits(model, token_lists), full_logits(reference, token_lists))
    head = load_mtp_head(files.config, files.tensors(), model, **loaded)
    ids_T, context = torch.tensor(token_lists[0]), context_for(head, 19, ops)
    hidden_TE = torch.randn(19, config.hidden_size, generator=torch.Generator().manual_seed(1))
    with torch.inference_mode():
        rows = head.remember(ids_T, torch.arange(19), hidden_TE, context)
        logits, _ = head.guess(rows, context)
        expected, _ = published(ids_T[None], hidden_TE[None])
    torch.testing.assert_close(logits, expected[0], rtol=1e-4, atol=1e-4)


def quantised_file(config, type_name, write_gguf):
    """Its matrices in blocks of a type, but for the products that decays are made of."""
    tensors = tensors_of(config, random_model(config).state_dict())
    kind = gguf.GGMLQuantizationType[type_name]
    blocks = {
        name: (random_blocks(type_name, *values.shape), kind)
        for name, values in tensors.items()
        if values.ndim == 2 and values.shape[1] % 256 == 0 and len(values) > 16
    }
    return open_model_files(str(write_gguf(keys_of(config), tensors | blocks)), report=print)


class RoundedInputs(TorchOperations):
    """Torch's, with the inputs of products as native ones of blocks see them."""

    def linear(self, x_TE, weight):
        if weight.num_outputs > 32:
            groups = x_TE.unflatten(1, (-1, 32))
            scales = groups.abs().amax(dim=2, keepdim=True).clamp(min=1e-30) / 127
            x_TE = (torch.round(groups / scales) * scales).flatten(1)
        return super().linear(x_TE, weight)


@pytest.mark.parametrize("ops", ["torch"], indirect=True)
@pytest.mark.parametrize(("shared", "type_name"), [(2, "Q4_K"), (4, "Q6_K")])
def test_blocks_with_columns_of_several_heads_run_as_they_are(
    ops, shared, type_name, write_gguf, paged_logits
):
    """Beside a folder of the numbers that they stand for, in the checkpoint's order."""
    heads, size = 4 * shared, 128 // shared
    config = qwen3_5(
        [M, A, M], hidden_size=256, intermediate_size=256, num_attention_heads=4, head_dim=64,
        num_key_value_heads=2, linear_num_key_heads=4, linear_num_value_heads=heads,
        linear_value_head_dim=size,
    )  # fmt: skip
    files = quantised_file(config, type_name, write_gguf)
    published = {
        name: tensor.unflatten(1, (shared, 4, size)).transpose(1, 2).flatten(1)
        if name.endswith("linear_attn.out_proj.weight")
        else tensor
        for name, tensor in files.tensors()
    }
    native, token_lists = CpuOperations(native_library_or_skip()), sequences((40, 5))

    def logits(ops, model_config, tensors):
        model = load_model(model_config, tensors, dtype=torch.float32, ops=ops)
        return torch.cat(paged_logits(model, token_lists, on=ops))

    ours = logits(native, files.config, files.tensors(keeps_blocks=True))
    by_format = native.weight_packing(torch.float32).bytes_by_format()
    assert by_format.keys() == {type_name, "float32"}
    assert by_format["float32"] == 2 * 32 * 256 * 4  # of decays, in panels of 32
    folder = config.to_dict() | {"architectures": ["Qwen3_5ForCausalLM"]}
    exact, rounded = (
        logits(each, folder, published.items()) for each in (TorchOperations(), RoundedInputs())
    )
    by_rounding = (rounded - exact).norm()
    assert by_rounding < 0.1 * exact.norm()
    # where a value lies between two codes, the last bits of what came before decide
    assert (ours - rounded).norm() < 0.2 * by_rounding
    best, second = rounded.topk(2).values.unbind(1)
    is_clear = best - second > 0.05 * rounded.std()
    assert is_clear.sum() > 30
    assert torch.equal(ours.argmax(1)[is_clear], rounded.argmax(1)[is_clear])


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
