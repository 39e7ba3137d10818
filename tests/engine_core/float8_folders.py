"""Folders in float8 as DeepSeek's, Qwen's and llm-compressor's tools write them, and transformers
made to multiply as they ask for: weights rounded once, activations where a product takes them.

The roundings are written down here once more, in plain torch, from their publication: an error in
our kernels cannot cancel with one here.
"""

import contextlib
import dataclasses
import json
from unittest import mock

import torch
import torch.nn.functional as F
from quantised_folders import experts_one_by_one, save

LARGEST = 448.0


@dataclasses.dataclass(frozen=True)
class Recipe:
    """`weights`: tensor, channel or block. `activations`: token, group, static or None."""

    config: dict
    weights: str
    activations: str | None
    scale_name: str = "weight_scale"
    input_scale_name: str = "input_scale"


def _fp8(weights, activations, *names, **fields):
    config = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", **fields}
    return Recipe(config, weights, activations, *names)


def _compressed(weights, activations):
    weight_args = {"num_bits": 8, "type": "float", "strategy": weights, "symmetric": True}
    weight_args |= {"dynamic": False, "group_size": None, "block_structure": None}
    if weights == "block":
        weight_args["block_structure"] = [128, 128]
    strategy = {"static": "tensor"}.get(activations, activations)
    input_args = {"num_bits": 8, "type": "float", "strategy": strategy, "symmetric": True}
    input_args |= {"dynamic": activations != "static"}
    input_args |= {"group_size": 128 if activations == "group" else None}
    group = {"targets": ["Linear"], "weights": weight_args, "output_activations": None}
    group["input_activations"] = input_args if activations else None
    config = {"quant_method": "compressed-tensors", "format": "float-quantized"}
    config |= {"config_groups": {"group_0": group}, "ignore": ["lm_head"]}
    return Recipe(config | {"quantization_status": "compressed"}, weights, activations)


RECIPES = {
    "fp8 in blocks": _fp8("block", "group", "weight_scale_inv", weight_block_size=[128, 128]),
    "fp8 by tensor": _fp8("tensor", "token", "weight_scale_inv", weight_block_size=None),
    "fp8 by tensor, static": _fp8("tensor", "static", activation_scheme="static"),
    "fp8 by tensor, static, as transformers names it": _fp8(
        "tensor", "static", "weight_scale_inv", "activation_scale", activation_scheme="static"
    ),
    "compressed-tensors by channel": _compressed("channel", "token"),
    "compressed-tensors by tensor": _compressed("tensor", "token"),
    "compressed-tensors by tensor, static": _compressed("tensor", "static"),
    "compressed-tensors in blocks": _compressed("block", "group"),
    "compressed-tensors, weights alone": _compressed("channel", None),
}


def round_weight(weight, how):
    """(float8_e4m3fn, its scale as the files hold it, what the two mean)."""
    num_outputs, num_inputs = weight.shape
    sizes = {"tensor": weight.shape, "channel": (1, num_inputs), "block": (128, 128)}[how]
    rows, columns = -(-num_outputs // sizes[0]), -(-num_inputs // sizes[1])
    whole = torch.zeros(rows * sizes[0], columns * sizes[1])
    whole[:num_outputs, :num_inputs] = weight
    blocks = whole.view(rows, sizes[0], columns, sizes[1])
    scale = blocks.abs().amax(dim=(1, 3)) / LARGEST
    codes = (blocks / scale[:, None, :, None]).to(torch.float8_e4m3fn)
    meant = (codes.float() * scale[:, None, :, None]).view(whole.shape)
    codes = codes.view(whole.shape)[:num_outputs, :num_inputs].contiguous()
    return codes, scale[0, 0] if how == "tensor" else scale, meant[:num_outputs, :num_inputs]


def round_rows(x, how, scale):
    """What activations become."""
    if how is None:
        return x
    groups = x.unflatten(-1, (-1, 128 if how == "group" else x.shape[-1]))
    if scale is None:
        scale = groups.abs().amax(dim=-1, keepdim=True).clamp(min=1e-20) / LARGEST
    codes = (groups / scale).clamp(-LARGEST, LARGEST).to(torch.float8_e4m3fn)
    return (codes.float() * scale).flatten(-2)


def write_float8(folder, model, recipe, *, more=None, num_shards=1):
    """Write `model` (transformers') with all linear layers but head and routers in float8, and give
    the model the weights that they mean.

    Returns:
        By a parameter's storage, the scale of its inputs (None: it follows from them).
    """
    rounded = {}
    tensors = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    for name, parameter in list(model.named_parameters()):
        is_expert = parameter.ndim == 3
        layer = name.removesuffix(".weight")
        if layer.endswith(("lm_head", "gate")) or (not is_expert and "proj" not in layer):
            continue
        if name.endswith("bias"):
            continue
        del tensors[name]
        input_scale = None
        if recipe.activations == "static":
            # below what the largest inputs need, so that some are cut; of one input there is one
            kinds = {"o_proj": 0.004, "down_proj": 0.003}
            input_scale = torch.tensor(kinds.get(layer.rpartition(".")[2], 0.006))
        parts = experts_one_by_one(name, parameter) if is_expert else [(layer, parameter)]
        for part, weight in parts:
            codes, scale, meant = round_weight(weight.detach(), recipe.weights)
            weight.data.copy_(meant)
            tensors[f"{part}.weight"] = codes
            tensors[f"{part}.{recipe.scale_name}"] = scale
            if input_scale is not None:
                tensors[f"{part}.{recipe.input_scale_name}"] = input_scale.clone()
        rounded[parameter.untyped_storage().data_ptr()] = input_scale
    save(folder, tensors | (more or {}), num_shards=num_shards)
    config = model.config.to_dict() | {"architectures": [type(model).__name__]}
    config["quantization_config"] = recipe.config
    (folder / "config.json").write_text(json.dumps(config))
    return rounded


@contextlib.contextmanager
def float8_products(rounded, recipe):
    """Inside, transformers' products round the inputs of those parameters."""
    plain = F.linear

    def linear(x, weight, bias=None):
        storage = weight.untyped_storage().data_ptr()
        if storage in rounded:
            x = round_rows(x, recipe.activations, rounded[storage])
        return plain(x, weight, bias)

    with mock.patch.object(F, "linear", linear):
        yield
