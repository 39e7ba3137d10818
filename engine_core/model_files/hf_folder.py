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
from engine_core.model_files.grouped_integers import (
    dequantised,
    find_layers,
    join_layers,
    read_quantisation,
)
from engine_core.model_files.hf_tokenizer import read_folder_tokenizer, tokenizer_files
from engine_core.model_files.interface import TokenizerFiles
from engine_core.model_files.json_file import read_json_object, read_json_object_if_present
from engine_core.model_files.safetensors_shards import (
    check_safetensors_header,
    find_safetensors_shards,
    read_safetensors,
)

if TYPE_CHECKING:
    from kernels.interface.weights import WeightPart


class HfFolder:
    """`ModelFiles` over a folder.

    Raises:
        ModelNotFound: no config.json or no weights.
        BrokenModelFile: a file is there and is not whole.
        UnsupportedModelFile: an adapter, weights in pickles, or quantised in a way that is not
            read.
    """

    def __init__(self, folder: Path, *, name: str | None = None) -> None:
        self.path = folder
        self.name = name or folder.resolve().name
        self.config = _read_config(folder)
        self._quantisation = read_quantisation(self.config, folder)
        # it describes the files, and `tensors` gives what a plain folder would hold
        self.config.pop("quantization_config", None)
        self.generation_config: dict[str, Any] = read_json_object_if_present(
            folder / "generation_config.json"
        )
        self._shards = find_safetensors_shards(folder)
        self._quantised_layers: dict[str, frozenset[str]] = {}
        if self._quantisation is not None:
            names = [name for shard in self._shards for name in check_safetensors_header(shard)]
            self._quantised_layers = find_layers(names, folder)

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

    @property
    def quantised_types(self) -> frozenset[str]:
        return frozenset({self._quantisation.type_name} if self._quantisation else ())

    def tensors(self, *, keeps_blocks: bool = False) -> Iterator[tuple[str, WeightPart]]:
        tensors = read_safetensors(self._shards)
        if self._quantisation is None:
            return tensors
        parts = join_layers(tensors, self._quantised_layers, self._quantisation)
        if keeps_blocks:
            return parts
        return ((name, dequantised(part)) for name, part in parts)

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
    return read_json_object(file)
