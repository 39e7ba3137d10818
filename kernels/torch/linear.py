"""Dense products on a CPU: float32 weights repacked once for oneDNN.

Owns the layout of weights. Must not know which layer a weight belongs to.

Measured on 2 cores with 576 x 3072 weights: repacked is 2.3 times as fast as `F.linear` at 1 and
16 rows, 1.6 times at 64, 1.25 times at 512. Other dtypes stay as they are.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F

# oneDNN chooses a layout for a number of rows; this one was the best, or equal to it, from 1 to 512
_ROWS_PACKED_FOR = 64


@dataclass(frozen=True, slots=True)
class TorchLinearWeight:
    """`weight` is [N, E], or that repacked (opaque) when `packed`."""

    num_inputs: int
    num_outputs: int
    weight: torch.Tensor
    bias_N: torch.Tensor | None
    packed: bool


def prepare_linear(weight_NE: torch.Tensor, bias_N: torch.Tensor | None) -> TorchLinearWeight:
    """See `Operations.prepare_linear`."""
    num_outputs, num_inputs = weight_NE.shape
    packed = weight_NE.dtype == torch.float32 and torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
    weight = (
        torch.ops.mkldnn._reorder_linear_weight(weight_NE.contiguous(), _ROWS_PACKED_FOR)
        if packed
        else weight_NE
    )
    return TorchLinearWeight(num_inputs, num_outputs, weight, bias_N, packed)


def linear(x_TE: torch.Tensor, weight: TorchLinearWeight) -> torch.Tensor:
    """See `Operations.linear`."""
    if weight.packed:
        if not x_TE.shape[0]:  # oneDNN refuses empty products
            return x_TE.new_empty(0, weight.num_outputs)
        out_TN: torch.Tensor = torch.ops.mkldnn._linear_pointwise(
            x_TE, weight.weight, weight.bias_N, "none", [], ""
        )
        return out_TN
    return F.linear(x_TE, weight.weight, weight.bias_N)
