"""What ranks run of a model in tests: it is loaded from its files, the whole logits come back."""

from pathlib import Path

import torch

from engine_core.distributed.collectives import Collectives
from engine_core.layers.vocabulary import gather_logits
from engine_core.model_files import open_model_files
from engine_core.models.interface import Model
from engine_core.models.loading import load_model
from kernels.cpu.library import load_library
from kernels.cpu.operations import CpuOperations
from kernels.interface.operations import Operations
from kernels.torch.operations import TorchOperations
from tests.engine_core.conftest import PagedRun, in_awkward_steps


class WholeLogits:
    """A rank's model with the logits of all ranks."""

    def __init__(self, model: Model, collectives: Collectives) -> None:
        self.model = model
        self.collectives = collectives
        self.spec = model.spec
        self.forward = model.forward

    def compute_logits(self, hidden_RE: torch.Tensor) -> torch.Tensor:
        logits_RV = self.model.compute_logits(hidden_RE)
        if logits_RV.shape[1] == self.spec.vocab_size:
            return logits_RV  # a device that samples on its own gets them all
        return gather_logits(logits_RV, self.spec.vocab_size, self.collectives)


def rank_operations(name: str) -> Operations:
    """`name`: "torch", "native", or "triton" under its interpreter."""
    if name == "triton":
        from kernels.triton.operations import TritonOperations

        return TritonOperations(torch.device("cpu"))
    return TorchOperations() if name == "torch" else CpuOperations(load_library(1))


def load_folder(
    collectives: Collectives, folder: Path, ops: Operations, dtype: torch.dtype = torch.float32
) -> Model:
    files = open_model_files(str(folder), report=print)
    return load_model(
        files.config,
        files.tensors(keeps_blocks=ops.weight_packing(dtype) is not None),
        dtype=dtype,
        ops=ops,
        collectives=collectives,
        block_inputs=(1, 32),
    )


def paged_logits(
    collectives: Collectives, folder: Path, sequences: list[list[int]], ops_name: str
) -> list[torch.Tensor]:
    """As the fixture of this name."""
    ops = rank_operations(ops_name)
    model = WholeLogits(load_folder(collectives, folder, ops), collectives)
    return in_awkward_steps(PagedRun(model, ops, sequences, 4, torch.float32))
