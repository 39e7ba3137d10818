"""Weights of a random model in GGUF blocks, and the model itself with what the blocks mean.

In torch alone, without the gguf package.

    Q8_0   float16 scale, 32 signed bytes                          w = scale * q
    Q4_0   float16 scale, 16 bytes: inputs 0-15 low, 16-31 high    w = scale * (q - 8)
"""

from collections.abc import Mapping
from typing import Any

import torch

from kernels.interface.weights import QuantisedTensor

TYPES = frozenset({"Q8_0", "Q4_0"})
_INPUTS = 32


def quantise_reference(reference: Any) -> dict[str, QuantisedTensor]:
    """Every matrix by its name in blocks, on the host: feed-forwards in Q4_0, all else in Q8_0.
    The reference, transformers' model, then has the blocks' numbers, rounded to its dtype."""
    parts = {}
    for name, parameter in reference.named_parameters():
        if parameter.ndim == 2:
            part = as_blocks(parameter.data.float().cpu(), "Q4_0" if ".mlp." in name else "Q8_0")
            parameter.data.copy_(part.dequantise())
            parts[name] = part
    return parts


def as_blocks(weight_NE: torch.Tensor, type_name: str) -> QuantisedTensor:
    """float32 [N, E], E a multiple of 32, rounded to the nearest."""
    num_outputs, num_inputs = weight_NE.shape
    w_NBI = weight_NE.view(num_outputs, -1, _INPUTS)
    most = 127 if type_name == "Q8_0" else 7
    scale_NB1 = (w_NBI.abs().amax(2, keepdim=True) / most).half()
    steps = w_NBI / torch.where(scale_NB1 == 0, 1.0, scale_NB1.float())
    q_NBI = steps.round().clamp(-most, most).to(torch.int8)
    if type_name == "Q8_0":
        values = q_NBI.view(torch.uint8)
    else:
        nibbles = (q_NBI + 8).view(torch.uint8)
        values = nibbles[..., :16] | (nibbles[..., 16:] << 4)
    blocks = torch.cat([scale_NB1.view(torch.uint8), values], dim=2).view(num_outputs, -1)

    def decode(arrays: Mapping[str, torch.Tensor]) -> torch.Tensor:
        assert arrays["blocks"] is blocks, "no row moves here"
        return (scale_NB1.float() * q_NBI.float()).view(num_outputs, num_inputs)

    return QuantisedTensor(type_name, (num_outputs, num_inputs), {"blocks": blocks}, decode)
