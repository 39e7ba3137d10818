"""Model files: from what follows `--model` to a config, tensors and a tokenizer.

Hugging Face folders, GGUF files, known names and hub ids all come out alike, as `ModelFiles`. Must
not know what a model computes; only names, shapes and the conventions of file formats."""

from engine_core.model_files.errors import (
    BrokenModelFile,
    DownloadFailed,
    ModelFilesError,
    ModelNotFound,
    UnsupportedModelFile,
    unreadable,
)
from engine_core.model_files.hf_folder import ConfigOnly
from engine_core.model_files.interface import ModelFiles, TokenizerFiles
from engine_core.model_files.open import open_model_files

__all__ = [
    "BrokenModelFile",
    "ConfigOnly",
    "DownloadFailed",
    "ModelFiles",
    "ModelFilesError",
    "ModelNotFound",
    "TokenizerFiles",
    "UnsupportedModelFile",
    "open_model_files",
    "unreadable",
]
