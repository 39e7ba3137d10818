"""Random layers as compressed-tensors, ModelOpt, bitsandbytes and auto-round write them, with the
weights that they mean. The layouts are written down here once more, from their publication."""

import json

import numpy as np
import torch
from quantised_folders import METHODS as GROUPED
from quantised_folders import random_layer, words, write_quantised

E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)
E2M1 = np.concatenate([E2M1, -E2M1])
NF4 = np.sort(np.random.default_rng(3).uniform(-1, 1, 16)).astype(np.float32)
NF4[0], NF4[-1] = -1, 1


def _compressed(format_name, **weights):
    weights = {"type": "int", "num_bits": 4, "symmetric": True, "strategy": "group", **weights}
    group = {"targets": ["Linear"], "weights": weights, "input_activations": None}
    return {
        "quant_method": "compressed-tensors",
        "format": format_name,
        "config_groups": {"group_0": group},
        "ignore": ["lm_head"],
    }


CONFIGS = {
    "w4a16": _compressed("pack-quantized", group_size=64),
    "w4a16 with zeros": _compressed("pack-quantized", group_size=32, symmetric=False),
    "w4a16 by channel": _compressed("pack-quantized", strategy="channel"),
    "w8a16": _compressed("pack-quantized", num_bits=8, group_size=128),
    "w8a8": _compressed("int-quantized", num_bits=8, strategy="channel"),
    "nvfp4": _compressed("nvfp4-pack-quantized", type="float", strategy="tensor_group"),
    "mxfp4": _compressed("mxfp4-pack-quantized", type="float", group_size=32),
    "modelopt nvfp4": {"quant_method": "modelopt", "quant_algo": "NVFP4", "group_size": 16},
    "bitsandbytes nf4": {
        "quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4",
    },
    "bitsandbytes fp4, nested": {
        "quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "fp4",
    },
    "bitsandbytes int8": {"quant_method": "bitsandbytes", "load_in_8bit": True},
    "auto-round": {
        "quant_method": "auto-round", "bits": 4, "group_size": 128, "sym": True,
        "packing_format": "auto_round:auto_gptq", "extra_config": {"lm_head": {"bits": 16}},
    },
    "auto-round as awq": {
        "quant_method": "auto-round", "bits": 4, "group_size": 64,
        "packing_format": "auto_round:auto_awq",
    },
}  # fmt: skip

TYPES = {
    "w4a16 with zeros": "w4a16",
    "w4a16 by channel": "w4a16",
    "modelopt nvfp4": "nvfp4",
    "bitsandbytes nf4": "bnb-nf4",
    "bitsandbytes fp4, nested": "bnb-fp4",
    "bitsandbytes int8": "bnb-int8",
    "auto-round": "gptq-int4",
    "auto-round as awq": "awq-int4",
}
"""Where the type is not called as the case is."""


def layer_of(name, num_outputs, num_inputs, generator):
    """(its tensors by suffix, the weight [N, E] that they mean)."""
    if name.startswith("auto-round"):
        how = GROUPED["awq" if "awq" in name else "gptq 4 bits, symmetric"]
        return random_layer(num_outputs, num_inputs, how, generator)
    if name.startswith("bitsandbytes"):
        arrays, weight = _bitsandbytes(name, num_outputs, num_inputs, generator)
    elif "fp4" in name:
        arrays, weight = _fp4(name, num_outputs, num_inputs, generator)
    else:
        arrays, weight = _integers(name, num_outputs, num_inputs, generator)
    tensors = {
        suffix: each if isinstance(each, torch.Tensor) else torch.from_numpy(each)
        for suffix, each in arrays.items()
    }
    return tensors, np.ascontiguousarray(weight, np.float32)


def _integers(name, num_outputs, num_inputs, generator):
    weights = CONFIGS[name]["config_groups"]["group_0"]["weights"]
    bits, size = weights["num_bits"], weights.get("group_size", num_inputs)
    half = 2 ** (bits - 1)
    codes = generator.integers(-half, half, (num_outputs, num_inputs))
    shape = (num_outputs, num_inputs // size)
    scales = (generator.uniform(0.2, 1, shape) * 0.4 / half).astype(np.float16)
    zeros = generator.integers(-half, half, shape) * (not weights["symmetric"])
    away = (codes - zeros.repeat(size, 1)).astype(np.float32)
    weight = away * scales.astype(np.float32).repeat(size, 1)
    if name == "w8a8":
        return {"weight": codes.astype(np.int8), "weight_scale": scales}, weight
    arrays = {
        "weight_packed": words(codes + half, bits),
        "weight_scale": scales,
        "weight_shape": np.array([num_outputs, num_inputs]),
    }
    if not weights["symmetric"]:
        packed = words(np.ascontiguousarray(zeros.T) + half, bits).T
        arrays["weight_zero_point"] = np.ascontiguousarray(packed)
    return arrays, weight


def _fp4(name, num_outputs, num_inputs, generator):
    codes = generator.integers(0, 16, (num_outputs, num_inputs), np.uint8)
    octets = codes[:, ::2] | (codes[:, 1::2] << 4)
    if name == "mxfp4":
        exponents = generator.integers(118, 122, (num_outputs, num_inputs // 32), np.uint8)
        scales = np.exp2(exponents.astype(np.float32) - 127).repeat(32, 1)
        return {"weight_packed": octets, "weight_scale": exponents}, E2M1[codes] * scales
    small = torch.from_numpy(generator.uniform(20, 448, (num_outputs, num_inputs // 16)))
    small = small.to(torch.float8_e4m3fn)
    weight = E2M1[codes] * (small.float().numpy() * np.float32(2**-13)).repeat(16, 1)
    if name == "nvfp4":
        whole = np.array([2.0**13], np.float32)
        names = ("weight_packed", "weight_scale", "weight_global_scale")
        return dict(zip(names, (octets, small, whole), strict=True)), weight
    names = ("weight", "weight_scale", "weight_scale_2", "input_scale")
    whole = np.array(2.0**-13, np.float32)
    return dict(zip(names, (octets, small, whole, whole.copy()), strict=True)), weight


def _bitsandbytes(name, num_outputs, num_inputs, generator):
    shape = (num_outputs, num_inputs)
    if "int8" in name:
        codes = generator.integers(-127, 128, shape).astype(np.int8)
        largest = generator.uniform(0.1, 0.4, num_outputs).astype(np.float32)
        weight = codes * (largest / np.float32(127))[:, None]
        return {"weight": codes, "SCB": largest, "weight_format": np.array(0, np.uint8)}, weight
    kind = "nf4" if "nf4" in name else "fp4"
    codes = generator.integers(0, 16, num_outputs * num_inputs, np.uint8)
    scales = generator.uniform(0.05, 0.4, len(codes) // 64).astype(np.float32)
    state = {"quant_type": kind, "blocksize": 64, "dtype": "float16", "shape": list(shape)}
    arrays = {"weight": (codes[::2] << 4 | codes[1::2])[:, None], "weight.quant_map": NF4.copy()}
    if "nested" in name:
        state |= {"nested_blocksize": 16, "nested_offset": 0.1, "nested_dtype": "float32"}
        places = generator.integers(0, 256, len(scales), np.uint8)
        values = np.linspace(0, 0.5, 256, dtype=np.float32)
        largest = generator.uniform(0.2, 0.8, -(-len(scales) // 16)).astype(np.float32)
        scales = values[places] * largest.repeat(16)[: len(scales)] + np.float32(0.1)
        arrays |= {"weight.nested_quant_map": values, "weight.nested_absmax": largest}
        arrays["weight.absmax"] = places
    else:
        arrays["weight.absmax"] = scales
    octets = np.frombuffer(json.dumps(state).encode(), np.uint8).copy()
    arrays[f"weight.quant_state.bitsandbytes__{kind}"] = octets
    return arrays, (NF4[codes] * scales.repeat(64)).reshape(shape)


def write_other(folder, model, name, **options):
    """As `write_quantised`, in the way of a case of CONFIGS."""

    def layer(num_outputs, num_inputs, how, generator):
        return layer_of(name, num_outputs, num_inputs, generator)

    return write_quantised(folder, model, CONFIGS[name], layer_of=layer, **options)
