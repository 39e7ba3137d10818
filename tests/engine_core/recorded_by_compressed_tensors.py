"""What the package compressed-tensors makes of small weights; recorded in compressed_tensors.json
by version 0.20.1, where it is not installed. Not a test."""

import torch

CASES = {
    "w4a16": ("pack-quantized", {"num_bits": 4, "group_size": 32}),
    "w4a16 with zeros": ("pack-quantized", {"num_bits": 4, "group_size": 32, "symmetric": False}),
    "w8a16 with zeros": ("pack-quantized", {"num_bits": 8, "group_size": 32, "symmetric": False}),
    "w8a8": ("int-quantized", {"num_bits": 8}),
    "nvfp4": ("nvfp4-pack-quantized", {"num_bits": 4, "type": "float", "group_size": 16}),
    "mxfp4": ("mxfp4-pack-quantized", {"num_bits": 4, "type": "float", "group_size": 32}),
}


def config_of(name):
    format_name, given = CASES[name]
    size = given.get("group_size")
    strategy = {None: "channel", 16: "tensor_group"}.get(size, "group")
    weights = {"type": "int", "symmetric": True, "strategy": strategy} | given
    group = {"targets": ["Linear"], "weights": weights, "format": format_name}
    return {"quant_method": "compressed-tensors", "config_groups": {"group_0": group}}


def made():
    """By case: the tensors of a layer by suffix, and as "" the weight that the package reads."""
    from compressed_tensors.compressors.base import BaseCompressor
    from compressed_tensors.quantization import QuantizationScheme
    from compressed_tensors.quantization.utils import calculate_qparams

    torch.manual_seed(0)
    found = {}
    for name in CASES:
        group = config_of(name)["config_groups"]["group_0"]
        scheme = QuantizationScheme(**{**group, "format": None})
        weight = torch.randn(16, 64) * 0.05
        groups = weight.view(16, -1, scheme.weights.group_size or 64)
        whole = torch.tensor([448 * 6 / weight.abs().max()]) if name == "nvfp4" else None
        scale, zeros = calculate_qparams(
            groups.amin(-1), groups.amax(-1), scheme.weights, global_scale=whole
        )
        state = {"weight": weight, "weight_scale": scale}
        if whole is not None:
            state["weight_global_scale"] = whole
        if not scheme.weights.symmetric:
            state["weight_zero_point"] = zeros
        compressor = BaseCompressor.get_value_from_registry(group["format"])
        state = compressor.compress(state, scheme)
        found[name] = state | {"": compressor.decompress(dict(state), scheme)["weight"].float()}
    return found
