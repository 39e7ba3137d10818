"""Decoder-only language models on top of `engine_core.layers`.

Public: `load_model` and `load_dummy_model`, the `Model` that they return and its `KVCacheSpec`, and
the errors. Must not know the scheduler, the runner or files."""

from engine_core.models.errors import (
    ModelConfigError,
    ModelError,
    ModelWeightsError,
    UnsupportedArchitecture,
)
from engine_core.models.interface import KVCacheSpec, Model
from engine_core.models.loading import load_dummy_model, load_model
from engine_core.models.registry import SUPPORTED_ARCHITECTURES

__all__ = [
    "SUPPORTED_ARCHITECTURES",
    "KVCacheSpec",
    "Model",
    "ModelConfigError",
    "ModelError",
    "ModelWeightsError",
    "UnsupportedArchitecture",
    "load_dummy_model",
    "load_model",
]
