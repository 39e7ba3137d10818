"""Folders as GPTQ's and AWQ's libraries write them, of given random integers.

The layouts are written down here once more, in numpy, from their publication: an error in the
reading code cannot cancel with one here.
"""

import json

import numpy as np
import torch
from safetensors.torch import save_file
from transformers import LlamaConfig, LlamaForCausalLM

from engine_core.model_files import open_model_files

METHODS = {
    "gptq 4 bits": {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": False},
    "gptq 4 bits, symmetric": {
        "quant_method": "gptq",
        "bits": 4,
        "group_size": 128,
        "desc_act": False,
        "sym": True,
        "checkpoint_format": "gptq",
    },
    "gptq 8 bits": {"quant_method": "gptq", "bits": 8, "group_size": 64, "desc_act": False},
    "gptq_v2 4 bits, a group a row": {
        "quant_method": "gptq",
        "bits": 4,
        "group_size": -1,
        "desc_act": False,
        "checkpoint_format": "gptq_v2",
    },
    "awq": {
        "quant_method": "awq",
        "bits": 4,
        "group_size": 64,
        "version": "gemm",
        "zero_point": True,
    },
}


def words(values, bits):
    """[A, C] below 2**bits -> int32 [A, C * bits / 32], the first value in the low bits."""
    eights = values.astype(np.uint64).reshape(len(values), -1, 32 // bits)
    shifts = np.arange(0, 32, bits, dtype=np.uint64)
    return (eights << shifts).sum(axis=2).astype(np.uint32).view(np.int32)


def awq_words(values):
    """[A, C] below 16 -> int32 [A, C / 8]; eight columns lie in the order 0 2 4 6 1 3 5 7."""
    eights = values.reshape(len(values), -1, 8)[:, :, [0, 2, 4, 6, 1, 3, 5, 7]]
    return words(eights.reshape(values.shape), 4)


def random_layer(num_outputs, num_inputs, how, generator):
    """(its tensors by suffix, the weight [N, E] that they mean)."""
    bits = how["bits"]
    group_size = num_inputs if how["group_size"] == -1 else how["group_size"]
    num_groups = num_inputs // group_size
    q_EN = generator.integers(0, 2**bits, (num_inputs, num_outputs))
    zeros_GN = generator.integers(1, 2**bits, (num_groups, num_outputs))
    if how.get("sym"):
        zeros_GN[:] = 2 ** (bits - 1)
    largest = 0.4 / 2 ** (bits - 1)
    scales_GN = generator.uniform(0.2, 1, (num_groups, num_outputs)) * largest
    scales_GN = scales_GN.astype(np.float16)
    groups_E = np.arange(num_inputs) // group_size
    difference_EN = (q_EN - zeros_GN[groups_E]).astype(np.float32)
    weight_NE = np.ascontiguousarray((difference_EN * scales_GN[groups_E].astype(np.float32)).T)
    if how["quant_method"] == "awq":
        arrays = {"qweight": awq_words(q_EN), "qzeros": awq_words(zeros_GN)}
    else:
        less = int(how.get("checkpoint_format") != "gptq_v2")
        arrays = {
            "qweight": np.ascontiguousarray(words(np.ascontiguousarray(q_EN.T), bits).T),
            "qzeros": words(zeros_GN - less, bits),
            "g_idx": groups_E.astype(np.int32),
        }
    arrays["scales"] = scales_GN
    return {name: torch.from_numpy(array) for name, array in arrays.items()}, weight_NE


def write_quantised(folder, model, how, *, num_shards=1, zero_biases=False, layer_of=random_layer):
    """Write `model` (transformers') with random integers for its linear layers but the head, which
    the model is given, too. `zero_biases`: as old libraries, one for every layer. `layer_of`: makes
    a layer, as `random_layer` does.

    Returns:
        The tensors of the folder.
    """
    generator = np.random.default_rng(5)
    tensors = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    for name, parameter in list(model.named_parameters()):
        if parameter.ndim == 3:  # experts, which every tool writes one by one
            del tensors[name]
            for part, weight in experts_one_by_one(name, parameter):
                layer, weight_NE = layer_of(*weight.shape, how, generator)
                weight.data.copy_(torch.from_numpy(weight_NE))
                tensors |= {f"{part}.{suffix}": tensor for suffix, tensor in layer.items()}
    for name, module in model.named_modules():
        if not isinstance(module, torch.nn.Linear) or name == "lm_head":
            continue
        num_outputs, num_inputs = module.weight.shape
        layer, weight_NE = layer_of(num_outputs, num_inputs, how, generator)
        module.weight.data = torch.from_numpy(weight_NE)
        del tensors[f"{name}.weight"]
        tensors |= {f"{name}.{suffix}": tensor for suffix, tensor in layer.items()}
        if zero_biases and module.bias is None:
            tensors[f"{name}.bias"] = torch.zeros(num_outputs, dtype=torch.float16)
    save(folder, tensors, num_shards=num_shards)
    config = model.config.to_dict() | {"architectures": [type(model).__name__]}
    config["quantization_config"] = how
    (folder / "config.json").write_text(json.dumps(config))
    return tensors


def experts_one_by_one(name, stack):
    """(name, [N, E]) of each projection of each expert, of a parameter of transformers 5."""
    block, _, projection = name.rpartition(".")
    for expert, weight in enumerate(stack):
        if projection == "down_proj":
            yield f"{block}.{expert}.down_proj", weight
        else:
            gate, up = weight.chunk(2)
            yield f"{block}.{expert}.gate_proj", gate
            yield f"{block}.{expert}.up_proj", up


def save(folder, tensors, *, num_shards=1):
    """The tensors dealt out to the shards in turn, so that layers are spread over them."""
    folder.mkdir(exist_ok=True)
    names = sorted(tensors)
    for shard in range(num_shards):
        part = {name: tensors[name].contiguous() for name in names[shard::num_shards]}
        name = f"model-{shard + 1:05d}-of-{num_shards:05d}.safetensors"
        save_file(part, folder / (name if num_shards > 1 else "model.safetensors"))


def make_model():
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=40,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=1,
    )
    return LlamaForCausalLM(config)


def opened(folder):
    return open_model_files(str(folder), report=print)
