"""Experts of some layers in the host's memory, computed by a CPU's kernels: what travels is their
tokens, not their weights.

device   router | x, logits ->                                     -> out | what follows
host     waits  |               experts of a layer: a CPU's kernel
"""

import re
from dataclasses import replace

import torch

from kernels.interface.operations import Operations
from kernels.interface.weights import ExpertRouting, ExpertWeights

_LAYER = re.compile(r"\.layers\.(\d+)\.")


class HostExperts:
    """Computes experts that `ops` has packed, for tensors of a device. The host waits for the
    device in every call, so nothing of it can be in a CUDA graph.

    Args:
        ops: of a CPU; it packs weights.
        num_layers: the first ones of the model, whose experts these are.
        device: of the tensors; under Triton's interpreter a CPU.
    """

    def __init__(self, ops: Operations, num_layers: int, device: torch.device) -> None:
        packing = ops.weight_packing(torch.float32)
        assert packing is not None, f"{ops.name} packs no weights"
        self.packing = packing
        self._ops, self._num_layers, self._device = ops, num_layers, device
        self._staged: dict[str, torch.Tensor] = {}

    def has(self, name: str) -> bool:
        """Whether these are experts of the first layers: "model.layers.0.mlp"."""
        found = _LAYER.search(name)
        return found is not None and int(found[1]) < self._num_layers

    def compute(
        self,
        x_TE: torch.Tensor,
        router_logits_TX: torch.Tensor,
        experts: ExpertWeights,
        routing: ExpertRouting,
    ) -> torch.Tensor:
        """See `Operations.mixture_of_experts`. Between device and host x and the result travel in
        the dtype of x; the host computes in float32, and rounds no weight of an expert."""
        x, logits, bias_X, scale_X = (
            None if each is None else self._stage(name, each)
            for name, each in (
                ("x", x_TE),
                ("logits", router_logits_TX),
                ("bias", routing.bias_X),
                ("scale", routing.scale_X),
            )
        )
        assert x is not None and logits is not None
        self._ops.wake_threads()
        if self._device.type == "cuda":
            torch.cuda.current_stream(self._device).synchronize()
        routing = replace(routing, bias_X=bias_X, scale_X=scale_X, weights_dtype=torch.float32)
        out_TE = self._ops.mixture_of_experts(x.float(), logits.float(), experts, routing)
        # the last layer's copy is done: this layer's tokens came behind it
        return torch.empty_like(x_TE).copy_(
            self._stage("out", out_TE.to(x_TE.dtype)), non_blocking=True
        )

    def _stage(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        """Queues a copy into page-locked memory of that name, grown to the largest step's."""
        room = self._staged.get(name)
        if room is None or room.nbytes < tensor.nbytes:
            is_cuda = self._device.type == "cuda"
            room = torch.empty(tensor.nbytes, dtype=torch.uint8, device="cpu", pin_memory=is_cuda)
            self._staged[name] = room
        place = room[: tensor.nbytes].view(tensor.dtype).view(tensor.shape)
        return place.copy_(tensor, non_blocking=True)
