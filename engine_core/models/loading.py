"""Config and tensors to a model that runs.

Owns the pairing of the tensors that come with those that the model takes, and the errors about
it. Must not know files: tensors come as (name, tensor) in any order, one at a time.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch

from engine_core.layers.parameters import Placements
from engine_core.models.errors import ModelWeightsError
from engine_core.models.interface import Model
from engine_core.models.registry import Architecture, find_architecture, read_model_config
from kernels.interface import Operations

_RECOMPUTED_SUFFIXES = ("rotary_emb.inv_freq",)
"""Tensors that old checkpoints carry and that follow from the config."""
_MOST_NAMES = 5


def load_model(
    config: Mapping[str, Any],
    tensors: Iterable[tuple[str, torch.Tensor]],
    *,
    dtype: torch.dtype,
    ops: Operations,
    max_model_len: int | None = None,
) -> Model:
    """Build the model of a config.json and fill it.

    Args:
        config: as in config.json, old or new spelling.
        tensors: with the names of Hugging Face checkpoints, each read once and dropped, so that
            beside the model no more than one layer is in memory.
        dtype: of weights and activations.
        max_model_len: positions to prepare for, if fewer than the model was made for.

    Raises:
        UnsupportedArchitecture: no exact code here. Raised before the first tensor is read.
        ModelConfigError: the config has impossible values.
        ModelWeightsError: the tensors do not match the config.
    """
    name, architecture = find_architecture(config)
    resolved = read_model_config(config)
    model = architecture.model_class(
        resolved, dtype=dtype, ops=ops, num_positions=max_model_len or resolved.max_model_len
    )
    pending = model.placements()
    _place(pending, tensors, architecture, name)
    missing = pending.keys() - model.vocabulary.optional_names
    if missing:
        raise ModelWeightsError(
            f"{len(missing)} tensors of {name} are missing: {_listed(missing)}; "
            "the model files are incomplete, or config.json belongs to another model"
        )
    model.vocabulary.finish_loading()
    return model


def _place(
    pending: Placements,
    tensors: Iterable[tuple[str, torch.Tensor]],
    architecture: Architecture,
    name: str,
) -> None:
    """Hand every tensor to its place; what is left in `pending` did not come."""
    placed: set[str] = set()
    unexpected: list[str] = []
    for file_name, tensor in tensors:
        if file_name.startswith(architecture.ignored_prefixes or ("\0",)):
            continue
        target = _renamed(file_name, architecture)
        placement = pending.pop(target, None)
        if placement is None:
            if target in placed:
                raise ModelWeightsError(f"tensor {file_name} comes twice; the files overlap")
            if not target.endswith(_RECOMPUTED_SUFFIXES):
                unexpected.append(file_name)
            continue
        if tuple(tensor.shape) != placement.shape:
            raise ModelWeightsError(
                f"tensor {file_name} has shape {list(tensor.shape)}, config.json asks for "
                f"{list(placement.shape)}; the two belong to different models"
            )
        placement.store(tensor)
        placed.add(target)
    if unexpected:
        raise ModelWeightsError(
            f"{len(unexpected)} tensors have no place in {name}: {_listed(unexpected)}; "
            "config.json belongs to another model, or leaves out an option"
        )


def _renamed(file_name: str, architecture: Architecture) -> str:
    for prefix, replacement in architecture.tensor_prefixes:
        if file_name.startswith(prefix):
            return replacement + file_name.removeprefix(prefix)
    return file_name


def _listed(names: Iterable[str]) -> str:
    ordered = sorted(names)
    more = len(ordered) - _MOST_NAMES
    return ", ".join(ordered[:_MOST_NAMES]) + (f" and {more} more" if more > 0 else "")
