"""One linear layer in a file of its own, beside the weights of a model."""

from pathlib import Path

import torch
from safetensors.torch import load_file

from engine_core.model_files.errors import BrokenModelFile, ModelNotFound


def read_linear(
    folder: Path, names: tuple[str, ...], prefix: str = ""
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """(weight [outputs, inputs], bias or None) in float32, of the first of these files that there
    is: safetensors, or a state dict of PyTorch, which is read without running code.
    Raises ModelNotFound, BrokenModelFile."""
    file = next((found for name in names if (found := folder / name).is_file()), None)
    if file is None:
        raise ModelNotFound(
            f"{folder} has no {' or '.join(names)}; copy the file from where the model is from"
        )
    try:
        if file.suffix == ".safetensors":
            tensors = load_file(file)
        else:
            tensors = torch.load(file, map_location="cpu", weights_only=True)
        weight, bias = tensors[f"{prefix}weight"].float(), tensors.get(f"{prefix}bias")
        (num_outputs, _), bias = weight.shape, None if bias is None else bias.float()
        if bias is not None and bias.shape != (num_outputs,):
            raise ValueError(f"its bias is {tuple(bias.shape)} for {num_outputs} outputs")
    except Exception as error:  # of many kinds, whatever is wrong with the file
        raise BrokenModelFile(
            f"{file} is not one layer, with {prefix}weight, in tensors alone: {error}; get it again"
        ) from error
    return weight, bias
