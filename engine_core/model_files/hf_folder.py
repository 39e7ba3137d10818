"""A model as a Hugging Face folder: config.json, *.safetensors, tokenizer files.

Must not know where the folder came from, nor what the config means to the model code.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from engine_core.model_files.eos_tokens import resolve_eos_token_ids
from engine_core.model_files.errors import ModelNotFound, UnsupportedModelFile
from engine_core.model_files.fingerprint import fingerprint_files
from engine_core.model_files.hf_tokenizer import read_folder_tokenizer, tokenizer_files
from engine_core.model_files.interface import TokenizerFiles
from engine_core.model_files.json_file import read_json_object, read_json_object_if_present
from engine_core.model_files.safetensors_shards import find_safetensors_shards, read_safetensors

if TYPE_CHECKING:
    from kernels.weight_packing import WeightPart


class HfFolder:
    """`ModelFiles` over a folder.

    Raises:
        ModelNotFound: no config.json or no weights.
        BrokenModelFile: a file is there and is not whole.
        UnsupportedModelFile: an adapter, weights in pickles, or a quantised checkpoint.
    """

    def __init__(self, folder: Path, *, name: str | None = None) -> None:
        self.path = folder
        self.name = name or folder.resolve().name
        self.config = _read_config(folder)
        self.generation_config: dict[str, Any] = read_json_object_if_present(
            folder / "generation_config.json"
        )
        self._shards = find_safetensors_shards(folder)

    @cached_property
    def eos_token_ids(self) -> tuple[int, ...]:
        text_config = self.config.get("text_config")
        configs = [self.generation_config, self.config]
        if isinstance(text_config, dict):
            configs.append(text_config)
        return resolve_eos_token_ids(configs, self.tokenizer)

    @cached_property
    def fingerprint(self) -> str:
        configs = [self.path / "config.json", self.path / "generation_config.json"]
        files = [file for file in configs if file.is_file()]
        return fingerprint_files([*files, *tokenizer_files(self.path), *self._shards])

    @property
    def weight_files(self) -> tuple[Path, ...]:
        return self._shards

    def tensors(self, *, keeps_blocks: bool = False) -> Iterator[tuple[str, WeightPart]]:
        return read_safetensors(self._shards)

    def tokenizer(self) -> TokenizerFiles | None:
        return read_folder_tokenizer(self.path)


def _read_config(folder: Path) -> dict[str, Any]:
    file = folder / "config.json"
    if not file.is_file():
        if (folder / "adapter_config.json").is_file():
            raise UnsupportedModelFile(
                f"{folder} is an adapter (adapter_config.json), not a model; merge it into its "
                f"base model with peft's merge_and_unload and serve that"
            )
        raise ModelNotFound(
            f"{folder} has no config.json, so it is not a model folder; name the folder that "
            f"holds config.json and *.safetensors, or a .gguf file"
        )
    config = read_json_object(file)
    quantization = config.get("quantization_config")
    if quantization:
        method = quantization.get("quant_method") if isinstance(quantization, dict) else None
        raise UnsupportedModelFile(
            f"{folder} is quantised with {method or 'an unnamed method'}, which is not read; use "
            f"the unquantised model, or a .gguf of it"
        )
    return config
