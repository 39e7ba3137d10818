"""Models of transformers with the weights that a CPU keeps of a quantised folder. Not a test."""

from contextlib import AbstractContextManager
from pathlib import Path

import gguf
import torch
from quantised_folders import experts_one_by_one

from engine_core.model_files import open_model_files
from kernels.cpu.grouped_codes import as_blocks
from kernels.interface.weights import QuantisedTensor
from tests.engine_core.rounded_activations import inputs_in_bytes


def meant(part: QuantisedTensor) -> torch.Tensor:
    """What its blocks mean: float32 [N, E], as llama.cpp's package reads them."""
    if part.blocks == "MXFP4":  # as they are
        return part.dequantise()
    kind = gguf.GGMLQuantizationType[part.blocks]
    return torch.from_numpy(gguf.quants.dequantize(as_blocks(part).numpy(), kind))


def as_a_cpu_keeps_it(reference: torch.nn.Module, folder: Path) -> AbstractContextManager[None]:
    """Gives `reference` these weights; inside, the inputs of products with them are rounded."""
    whole = dict(reference.named_parameters())
    places = {name: parameter.data for name, parameter in whole.items()}
    for name, parameter in whole.items():
        if parameter.ndim == 3:
            parts = experts_one_by_one(name, parameter.data)
            places |= {f"{part}.weight": weight for part, weight in parts}
    kept = []
    for name, part in open_model_files(str(folder), report=print).tensors(keeps_blocks=True):
        if isinstance(part, QuantisedTensor) and part.blocks:
            place = places[name.removeprefix("language_model.")]
            place.copy_(meant(part))
            kept.append(place)
    assert kept
    return inputs_in_bytes(kept)
