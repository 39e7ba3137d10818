"""Checkpoints with low-rank changes of their weights for several tasks (jina-embeddings v3), of
which one task's are added as the tensors are read (arXiv:2106.09685)."""

from collections.abc import Iterable, Iterator

import torch

from engine_core.models.encoders.encoder_configs import TaskAdapters
from kernels.interface.weights import WeightPart

_PART = ".parametrizations.weight."
_CHANGE = ("0.lora_A", "0.lora_B")


def with_task(
    tensors: Iterable[tuple[str, WeightPart]], adapters: TaskAdapters
) -> Iterator[tuple[str, WeightPart]]:
    """Tensors of a checkpoint, each changed weight under its plain name, in float32:

        product               weight + scale * B[task] @ A[task]     [outputs, inputs]
        table of embeddings   weight + scale * A[task] @ B[task]     [rows, size]

    A weight is held until its A and B have come."""
    held: dict[str, dict[str, torch.Tensor]] = {}
    for name, tensor in tensors:
        module, is_part, part = name.partition(_PART)
        if not is_part:
            yield name, tensor
        elif adapters.task is None:
            if part == "original":
                yield f"{module}.weight", tensor
        else:
            assert isinstance(tensor, torch.Tensor), "such checkpoints are not quantised"
            parts = held.setdefault(module, {})
            parts[part] = tensor
            if len(parts) == 1 + len(_CHANGE):
                a, b = (parts[each][adapters.task].float() for each in _CHANGE)
                left, right = (a, b) if "embeddings" in module else (b, a)
                weight = parts["original"].float()
                yield f"{module}.weight", torch.addmm(weight, left, right, alpha=adapters.scale)
                del held[module]
