"""Norms with learned weights, alone or after the residual addition."""

from functools import partial

import torch

from engine_core.layers.linear import FusedLinear
from engine_core.layers.parameters import CopyWeight, Parameter, Placement, Placements
from kernels.interface.operations import Activations, Operations


class RMSNorm:
    """`x / rms(x) * weight`.

    Args:
        name: checkpoint prefix.
        plus_one: the checkpoint holds the weight less one (Gemma).
        in_float32: the product with the weight is taken in float32; otherwise the weight is of the
            model's dtype.
    """

    def __init__(
        self,
        name: str,
        size: int,
        eps: float,
        *,
        plus_one: bool = False,
        in_float32: bool = False,
        dtype: torch.dtype,
        ops: Operations,
    ) -> None:
        self._eps = eps
        self._ops = ops
        self._weight = Parameter(
            f"{name}.weight",
            (size,),
            torch.float32 if plus_one or in_float32 else dtype,
            device=ops.device,
            offset=1.0 if plus_one else 0.0,
        )

    @property
    def weight(self) -> torch.Tensor:
        """The factor of the normalised value."""
        return self._weight.tensor

    def placements(self) -> Placements:
        return self._weight.placements()

    def __call__(self, x_TE: torch.Tensor) -> torch.Tensor:
        """[T, E] -> [T, E]."""
        return self._ops.rms_norm(x_TE, self.weight, self._eps)

    def add(
        self, x_TE: torch.Tensor, residual_TE: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(norm of `residual + x`, `residual + x`); consumes both arguments."""
        return self._ops.add_rms_norm(x_TE, residual_TE, self.weight, self._eps)

    def add_before(
        self, linear: FusedLinear | None, x_TE: torch.Tensor, residual_TE: torch.Tensor
    ) -> tuple[Activations, torch.Tensor]:
        """As `add`, where the norm goes into this layer alone, if into one."""
        rounding = None if linear is None else linear.rounding
        if rounding is None:
            return self.add(x_TE, residual_TE)
        return rounding.add_rms_norm(x_TE, residual_TE, self.weight, self._eps)


class NoNorm:
    """Stands where a layer has no norm before it: sums alone."""

    def __init__(self, size: int, *, dtype: torch.dtype, ops: Operations) -> None:
        self._ops = ops
        self._weight_E = torch.ones(size, dtype=dtype, device=ops.device)

    def placements(self) -> Placements:
        """Nothing."""
        return {}

    def __call__(self, x_TE: torch.Tensor) -> torch.Tensor:
        """The argument itself."""
        return x_TE

    def add_before(
        self, _linear: FusedLinear | None, x_TE: torch.Tensor, residual_TE: torch.Tensor
    ) -> tuple[Activations, torch.Tensor]:
        """`residual + x`, twice; consumes both arguments."""
        # no backend has a sum alone: the norm of it costs little and is not used
        _, residual_TE = self._ops.add_rms_norm(x_TE, residual_TE, self._weight_E, 1.0)
        return residual_TE, residual_TE


class LayerNorm:
    """`(x - mean(x)) / deviation(x) * weight + bias`.
    `name`: checkpoint prefix. `bias`: whether it has one. `plus_one`: see `RMSNorm`."""

    def __init__(
        self,
        name: str,
        size: int,
        eps: float,
        *,
        bias: bool,
        plus_one: bool = False,
        dtype: torch.dtype,
        ops: Operations,
    ) -> None:
        self._name = name
        self._offset = 1.0 if plus_one else 0.0
        self._eps = eps
        self._ops = ops
        self._rows = ("weight", "bias") if bias else ("weight",)
        self._weight_2E = torch.zeros(2, size, dtype=dtype, device=ops.device)

    def placements(self) -> Placements:
        shape = tuple(self._weight_2E.shape[1:])
        return {
            f"{self._name}.{kind}": Placement(shape, partial(self._store, row))
            for row, kind in enumerate(self._rows)
        }

    def _store(self, row: int, tensor: torch.Tensor, copy: CopyWeight) -> None:
        copy(self._weight_2E[row], tensor)
        if row == 0 and self._offset:
            self._weight_2E[0].add_(self._offset)

    def __call__(self, x_TE: torch.Tensor) -> torch.Tensor:
        """[T, E] -> [T, E]."""
        return self._ops.layer_norm(x_TE, self._weight_2E, self._eps)

    def add(
        self, x_TE: torch.Tensor, residual_TE: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(norm of `residual + x`, `residual + x`); consumes both arguments."""
        return self._ops.add_layer_norm(x_TE, residual_TE, self._weight_2E, self._eps)

    def add_before(
        self, _linear: FusedLinear | None, x_TE: torch.Tensor, residual_TE: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The residual stream with x added, normed, and that stream: rounded for no product."""
        return self.add(x_TE, residual_TE)
