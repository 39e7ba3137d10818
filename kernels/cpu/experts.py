"""Mixtures of experts through the native library (`src/experts.h`): one call a layer."""

import ctypes
from collections.abc import Sequence

import torch

from kernels.cpu.library import FLOAT, INT64, POINTER, NativeLibrary, check, members
from kernels.cpu.tensor_checks import check_tensor
from kernels.cpu.weights import LinearArguments, PackedLinear
from kernels.interface.weights import ExpertActivation, ExpertRouting, check_experts


class ExpertLayer(ctypes.Structure):
    """Mirrors `ExpertLayer` of src/experts.h."""

    _fields_ = [
        *members(POINTER, "gate_up", "down", "logits"),
        *members(INT64, "num_experts", "num_here", "first_expert", "top_k", "renormalise"),
        *members(POINTER, "bias", "scales"),
        *members(INT64, "by_sigmoid", "num_groups", "top_groups", "best_of_group", "activation"),
        *members(FLOAT, "epsilon", "scale"),
    ]


_ACTIVATIONS: tuple[ExpertActivation, ...] = ("silu", "relu2", "swiglu_oai", "gelu_tanh")
"""Activations by their numbers in `ExpertLayer`."""


class NativeExpertWeights:
    """The experts of one layer: of each a weight [2F, E] (without a gate [F, E]) and one [E, F].
    Raises ValueError: shapes that do not fit each other."""

    def __init__(
        self,
        library: NativeLibrary,
        gate_up: Sequence[PackedLinear],
        down: Sequence[PackedLinear],
        activation: ExpertActivation = "silu",
    ) -> None:
        shapes = [(len(side), side[0].num_outputs, side[0].num_inputs) for side in (gate_up, down)]
        check_experts(shapes[0], shapes[1], activation)
        num_experts, width, _ = shapes[1]
        self._activation = _ACTIVATIONS.index(activation)
        self._run = library.function("ec_experts", *[POINTER] * 2, *[INT64] * 2, POINTER)
        self._weights = gate_up, down
        self._arrays = [
            (LinearArguments * num_experts)(*(weight.arguments for weight in side))
            for side in self._weights
        ]
        self.num_experts = num_experts
        self.num_inputs = width

    def layer(self, num_experts: int, routing: ExpertRouting) -> ExpertLayer:
        """What the library is given; the logits' address is still to be set. Points into this
        object. `num_experts`: those that are routed to, here or elsewhere.
        Raises ValueError: weights that are rounded to anything but float32, or a routing that does
        not suit so many experts."""
        routing.check(num_experts)
        bias, scales = routing.bias_X, routing.scale_X
        for name, each in (("bias", bias), ("scales", scales)):
            if each is not None:
                check_tensor(name, each, (num_experts,))
        if routing.weights_dtype is not torch.float32:
            raise ValueError(
                f"experts' weights are rounded to {routing.weights_dtype}, float32 experts take "
                "float32"
            )
        gate_up, down = map(ctypes.addressof, self._arrays)
        return ExpertLayer(
            gate_up=gate_up,
            down=down,
            num_experts=num_experts,
            num_here=self.num_experts,
            first_expert=routing.first_expert,
            top_k=routing.top_k,
            renormalise=routing.renormalise,
            bias=None if bias is None else bias.data_ptr(),
            scales=None if scales is None else scales.data_ptr(),
            by_sigmoid=routing.scores == "sigmoid",
            num_groups=routing.num_groups,
            top_groups=routing.top_groups,
            best_of_group=routing.best_of_group,
            activation=self._activation,
            epsilon=routing.epsilon,
            scale=routing.scale,
        )

    def __call__(
        self, x_TE: torch.Tensor, router_logits_TX: torch.Tensor, routing: ExpertRouting
    ) -> torch.Tensor:
        """See `Operations.mixture_of_experts`. A row's bits do not depend on the other rows.
        Raises ValueError: tensors of another shape, dtype or layout."""
        num_rows, num_experts = router_logits_TX.shape
        check_tensor("x", x_TE, (num_rows, self.num_inputs))
        check_tensor("router_logits", router_logits_TX, router_logits_TX.shape)
        layer = self.layer(num_experts, routing)
        layer.logits = router_logits_TX.data_ptr()
        out_TE = torch.empty_like(x_TE)
        call = x_TE.data_ptr(), num_rows, self.num_inputs, out_TE.data_ptr()
        check(self._run(ctypes.addressof(layer), *call))
        return out_TE
