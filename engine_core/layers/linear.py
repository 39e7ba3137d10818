"""Linear layers: several projections of one input are fused into one product."""

from collections.abc import Sequence
from functools import partial
from operator import itemgetter

import torch

from engine_core.layers.parameters import CopyWeight, PackedPlacement, Placement, Placements
from kernels.interface.lora import LoRAStack
from kernels.interface.operations import (
    Activations,
    AllReduce,
    InputRounding,
    Operations,
    RoundedRows,
)
from kernels.interface.weights import LinearWeight, WeightPart

LEAST_BITS = 4
"""The fewest bits that files keep of a weight."""


class FusedLinear:
    """`x -> [x @ w0.T + b0, x @ w1.T + b1, ...]`, the outputs side by side.

    Args:
        parts: (checkpoint prefix such as "model.layers.0.self_attn.q_proj", number of outputs).
        bias: whether every part has a bias.
        least_bits: see `WeightPacking.pack`; of more than `LEAST_BITS` files are floating.
        all_reduce: sums the outputs over the ranks that have the other inputs; None: all inputs
            are here.
    """

    def __init__(
        self,
        parts: Sequence[tuple[str, int]],
        num_inputs: int,
        *,
        bias: bool,
        dtype: torch.dtype,
        ops: Operations,
        least_bits: int = LEAST_BITS,
        all_reduce: AllReduce | None = None,
    ) -> None:
        self.parts = tuple(parts)
        self.num_inputs = num_inputs
        self._has_bias = bias
        self._dtype = dtype
        self._ops = ops
        self._num_missing = len(self.parts) * (2 if bias else 1)
        self._packing = ops.weight_packing(dtype)
        self._least_bits = least_bits
        self._all_reduce = all_reduce
        self._kept: dict[int, WeightPart] = {}  # by the first output, until all parts are there
        self._weight_NE: torch.Tensor | None = None
        self._bias_N: torch.Tensor | None = None
        self._prepared: LinearWeight | None = None
        self._rounding: InputRounding | None = None
        self.lora: LoRAStack | None = None
        """The adapters' part that is added to it."""
        self.input_order_E: torch.Tensor | None = None
        """Which columns of the checkpoint its inputs are; None: in the checkpoint's order."""

    def placements(self) -> Placements:
        """Weight, and bias if there is one, of every part."""
        placements: Placements = {}
        start = 0
        for prefix, size in self.parts:
            rows = slice(start, start + size)
            shape = (size, self.num_inputs)
            placements[f"{prefix}.weight"] = (
                Placement(shape, partial(self._store_weight, rows))
                if self._packing is None
                else PackedPlacement(
                    shape, partial(self._keep_part, start), self._least_bits <= LEAST_BITS
                )
            )
            if self._has_bias:
                placements[f"{prefix}.bias"] = Placement((size,), partial(self._store_bias, rows))
            start += size
        return placements

    @property
    def rounding(self) -> InputRounding | None:
        """What may make its inputs. None: it rounds none, or adapters read them as they are."""
        return self._rounding if self.lora is None else None

    def __call__(self, x_TE: Activations) -> torch.Tensor:
        """[T, num_inputs] -> [T, all outputs]."""
        assert self._prepared is not None, f"{self.parts[0][0]} was not loaded"
        if isinstance(x_TE, RoundedRows):
            assert self._rounding is not None, "rounded for another product"
            out_TN = self._rounding.linear(x_TE)
        else:
            out_TN = self._ops.linear(x_TE, self._prepared)
            if self.lora is not None:
                out_TN = self._ops.add_lora(out_TN, x_TE, self.lora)
        return out_TN if self._all_reduce is None else self._ops.reduce(out_TN, self._all_reduce)

    def _keep_part(self, start: int, part: WeightPart) -> None:
        self._kept[start] = part
        self._prepare_when_complete()

    def _store_weight(self, rows: slice, tensor: torch.Tensor, copy: CopyWeight) -> None:
        if self._weight_NE is None:  # allocated on first use: only the layers being read exist
            num_outputs = sum(size for _, size in self.parts)
            self._weight_NE = self._new(num_outputs, self.num_inputs)
        copy(self._weight_NE[rows], tensor)
        self._prepare_when_complete()

    def _store_bias(self, rows: slice, tensor: torch.Tensor, copy: CopyWeight) -> None:
        if self._bias_N is None:
            self._bias_N = self._new(sum(size for _, size in self.parts))
        copy(self._bias_N[rows], tensor)
        self._prepare_when_complete()

    def _new(self, *shape: int) -> torch.Tensor:
        return torch.empty(shape, dtype=self._dtype, device=self._ops.device)

    def _prepare_when_complete(self) -> None:
        self._num_missing -= 1
        if self._num_missing:
            return
        if self._packing is not None:
            name = self.parts[0][0]
            parts = [part for _, part in sorted(self._kept.items(), key=itemgetter(0))]
            self._prepared = self._packing.pack(
                name, parts, self._bias_N, least_bits=self._least_bits
            )
            self._kept.clear()
        else:
            assert self._weight_NE is not None
            self._prepared = self._ops.prepare_linear(self._weight_NE, self._bias_N)
        self._rounding = self._ops.input_rounding(self._prepared)
        self._weight_NE = self._bias_N = None
