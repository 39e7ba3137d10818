"""A model as a Hugging Face folder (config.json, *.safetensors, tokenizer files), or as its
config.json alone: the shape of random weights."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from engine_core.model_files.errors import ModelNotFound, UnsupportedModelFile
from engine_core.model_files.fingerprint import fingerprint_files
from engine_core.model_files.hf_tokenizer import read_folder_tokenizer, tokenizer_files
from engine_core.model_files.interface import EncoderFile, TokenizerFiles
from engine_core.model_files.json_file import read_json_object, read_json_object_if_present
from engine_core.model_files.quantised_folder import read_quantisation
from engine_core.model_files.quantised_layers import (
    Fields,
    Parts,
    QuantisedLayers,
    Tensors,
    dequantised,
)
from engine_core.model_files.random_layers import RandomLayers
from engine_core.model_files.safetensors_shards import (
    count_elements,
    find_safetensors_shards,
    read_safetensors,
)
from engine_core.models.text_part import TEXT_PLACES, inner_text, text_part, text_tensor

if TYPE_CHECKING:
    from kernels.interface.weights import WeightPart


_HOW_QUANTISED = ("quantization_config", "compression_config")


def resolve_eos_token_ids(
    configs: Iterable[Mapping[str, Any]], tokenizer: Callable[[], TokenizerFiles | None]
) -> tuple[int, ...]:
    """Ids of `eos_token_id` in the first config that has it, else of the tokenizer's eos_token.

    Args:
        configs: in order of precedence.
        tokenizer: asked only if no config answers.
    """
    for config in configs:
        value = config.get("eos_token_id")
        ids = value if isinstance(value, list) else [value]
        numbers = tuple(dict.fromkeys(i for i in ids if isinstance(i, int) and i >= 0))
        if numbers:
            return numbers
    files = tokenizer()
    eos_token = files.special_tokens.get("eos_token") if files is not None else None
    if files is None or eos_token is None:
        return ()
    eos_id = token_id(json.loads(files.tokenizer_json), eos_token)
    return () if eos_id is None else (eos_id,)


def token_id(tokenizer: dict[str, Any], token: str) -> int | None:
    """The id of a token by its text; None: there is no such token."""
    for added in tokenizer.get("added_tokens", ()):
        if added["content"] == token:
            return int(added["id"])
    vocab = tokenizer["model"].get("vocab", {})
    if isinstance(vocab, dict):
        return vocab.get(token)
    return next((i for i, (text, _) in enumerate(vocab) if text == token), None)


class HfFolder:
    """`ModelFiles` over a folder.

    Raises:
        ModelNotFound: no config.json or no weights.
        BrokenModelFile: a file is there and is not whole.
        UnsupportedModelFile: an adapter, weights in pickles, or quantised in a way that is not
            read.
    """

    given_tokenizer: TokenizerFiles | None = None
    mmproj: EncoderFile | None = None

    def __init__(self, folder: Path, *, name: str | None = None) -> None:
        self.path = folder
        self.name = name or folder.resolve().name
        self.config, _, how = _quantised(_read_config(folder), folder)
        self.generation_config: dict[str, Any] = read_json_object_if_present(
            folder / "generation_config.json"
        )
        self._shards = find_safetensors_shards(folder)
        self.weight_files = tuple(self._shards)
        names = [name for names in self._shards.values() for name in names]
        if text_part(self.config) is not None:
            # defaults of the whole and of its text differ, and the files say what is so
            heads = [name for name in names if (text_tensor(name) or "").startswith("lm_head.")]
            self.config["tie_word_embeddings"] = not heads
        self.quantised_types: frozenset[str] = frozenset()
        self._join: Callable[[Tensors], Parts] | None = None
        if how is not None:
            self.quantised_types = frozenset({how.type_name})
            self._join = how.joining(names, folder)

    @cached_property
    def eos_token_ids(self) -> tuple[int, ...]:
        configs = [self.generation_config, self.config, inner_text(self.config) or {}]
        return resolve_eos_token_ids(configs, lambda: read_folder_tokenizer(self.path))

    @property
    def num_weights(self) -> int:
        return count_elements(self._shards)

    @cached_property
    def fingerprint(self) -> str:
        configs = [self.path / "config.json", self.path / "generation_config.json"]
        files = [file for file in configs if file.is_file()]
        return fingerprint_files([*files, *tokenizer_files(self.path), *self.weight_files])

    def tensors(self, *, keeps_blocks: bool = False) -> Iterator[tuple[str, WeightPart]]:
        tensors = read_safetensors(self._shards)
        if self._join is None:
            return tensors
        parts = self._join(tensors)
        if keeps_blocks:
            return parts
        return ((name, dequantised(part)) for name, part in parts)

    def tokenizer(self) -> TokenizerFiles | None:
        return self.given_tokenizer or read_folder_tokenizer(self.path)


def _quantised(
    config: dict[str, Any], folder: Path
) -> tuple[dict[str, Any], Fields, QuantisedLayers | None]:
    """(what a plain folder's config.json would be, how this one is quantised as it says, and as it
    is read; None: it is not)."""
    inner = inner_text(config) or {}
    config = {name: inner[name] for name in _HOW_QUANTISED if inner.get(name)} | config
    how = read_quantisation(config, folder)
    fields: Fields = next((config[name] for name in _HOW_QUANTISED if config.get(name)), {})
    return _without(config, _HOW_QUANTISED), fields, how


def _without(config: dict[str, Any], names: Collection[str]) -> dict[str, Any]:
    """A config without fields of these names, nor its text's."""
    left = {name: value for name, value in config.items() if name not in names}
    inner = {place: left[place] for place in TEXT_PLACES if isinstance(left.get(place), dict)}
    return left | {place: _without(part, names) for place, part in inner.items()}


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


class ConfigOnly(HfFolder):
    """As a folder without weights and without a tokenizer. Named after the file, or after its
    folder if the file is called config.json.

    Attributes:
        random_layers: draws the layers that are quantised; None: none is.

    Raises:
        ModelNotFound: there is no such file.
        BrokenModelFile: it is not a JSON object.
        UnsupportedModelFile: quantised in a way that is not read, or not drawn.
    """

    def __init__(self, file: Path) -> None:
        if not file.is_file():
            raise ModelNotFound(f"{file} is not a file; name a config.json with --model-config")
        self.path = file
        self.name = file.resolve().parent.name if file.name == "config.json" else file.stem
        self.config, fields, how = _quantised(read_json_object(file), file.parent)
        self.random_layers = None if how is None else RandomLayers(fields, how, file)
        self.generation_config = {}
        self.weight_files, self._shards = (), {}
        self.quantised_types = frozenset() if how is None else frozenset({how.type_name})

    @cached_property
    def fingerprint(self) -> str:
        return fingerprint_files([self.path])

    def tensors(self, *, keeps_blocks: bool = False) -> Iterator[tuple[str, WeightPart]]:
        raise ModelNotFound(f"{self.path} has no weights beside it; use --load-format dummy")

    def tokenizer(self) -> TokenizerFiles | None:
        return None
