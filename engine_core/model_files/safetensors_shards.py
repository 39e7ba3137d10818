"""The weights of a Hugging Face folder: its safetensors files, checked to be whole, read by
mmap."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from safetensors import SafetensorError, safe_open

from engine_core.model_files.errors import BrokenModelFile, ModelNotFound, UnsupportedModelFile
from engine_core.model_files.json_file import read_json_object

if TYPE_CHECKING:
    import torch

_INDEX = "model.safetensors.index.json"
_SINGLE = "model.safetensors"
_NUMBERED = re.compile(r"(?P<stem>.*)-\d{5}-of-(?P<count>\d{5})\.safetensors")


def find_safetensors_shards(folder: Path) -> dict[Path, tuple[str, ...]]:
    """The folder's weight files, in a fixed order, each checked to be whole; and the names of its
    tensors.

    Raises:
        ModelNotFound: no weights at all.
        UnsupportedModelFile: weights in another format only.
        BrokenModelFile: a shard is missing, truncated or garbage.
    """
    index = folder / _INDEX
    indexed: dict[str, str] = {}
    has_single = (folder / _SINGLE).is_file()
    if index.is_file():
        indexed = _read_index(index)
        names = sorted(set(indexed.values()))
        missing = [name for name in names if not (folder / name).is_file()]
        if missing and has_single and _SINGLE not in names:  # the index is an older version's
            indexed = {}
        elif missing:
            raise BrokenModelFile(
                f"{folder} lacks {len(missing)} of {len(names)} weight files that its index "
                f"names: {', '.join(missing[:5])}; download them into the folder"
            )
    if indexed:
        files = [folder / name for name in names]
    elif has_single:
        files = [folder / _SINGLE]
    else:
        files = _shards_by_name(folder)
    if not files:
        raise _no_weights(folder)
    shards: dict[Path, tuple[str, ...]] = {}
    owner: dict[str, str] = {}
    for shard in files:
        # what the index gives to another shard is an older copy
        found = (
            name for name in _tensor_names(shard) if indexed.get(name, shard.name) == shard.name
        )
        shards[shard] = tuple(found)
        for name in shards[shard]:
            if name in owner:
                raise BrokenModelFile(
                    f"tensor {name!r} is in both {folder / owner[name]} and {shard.name}; "
                    f"keep one set of weight files in the folder"
                )
            owner[name] = shard.name
    for name, file_name in indexed.items():
        if owner.get(name) != Path(file_name).name:
            raise BrokenModelFile(
                f"{index} says that {name!r} is in {file_name}, and it is not; the files are of "
                f"different versions: download all of them again"
            )
    return shards


def _read_index(index: Path) -> dict[str, str]:
    """The file of each tensor, in the index's folder."""
    weight_map = read_json_object(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise BrokenModelFile(f"{index} has no weight_map; download it again")
    indexed = {name: str(file_name) for name, file_name in weight_map.items()}
    names = sorted(set(indexed.values()))
    if strange := [name for name in names if Path(name).name != name]:
        raise BrokenModelFile(
            f"{index} names the weight file {strange[0]!r}, which is not in its folder; download "
            f"it again"
        )
    return indexed


def _shards_by_name(folder: Path) -> list[Path]:
    shards = sorted(folder.glob("*.safetensors"))
    if len(shards) > 1:
        shards = [s for s in shards if not s.name.startswith("consolidated")] or shards
    for shard in shards:
        match = _NUMBERED.fullmatch(shard.name)
        if match and len(shards) != int(match["count"]):
            raise BrokenModelFile(
                f"{folder} holds {len(shards)} weight files, {shard.name} is one of "
                f"{int(match['count'])}; download the others into the folder"
            )
    return shards


def _no_weights(folder: Path) -> Exception:
    other = sorted(p.name for p in folder.iterdir() if p.suffix in {".bin", ".pt", ".pth", ".h5"})
    if other:
        return UnsupportedModelFile(
            f"{folder} has its weights as {other[0]}, which is not read because loading it can "
            f"run code; use a version of the model with .safetensors files, or convert it with "
            f"transformers' save_pretrained"
        )
    return ModelNotFound(
        f"{folder} has no weights (*.safetensors); download the model's files into it"
    )


def _tensor_names(shard: Path) -> tuple[str, ...]:
    try:
        with safe_open(shard, framework="np") as stream:
            return tuple(stream.keys())
    except OSError as error:
        raise BrokenModelFile(f"{shard} cannot be read: {error}; check it") from error
    except SafetensorError as error:
        raise BrokenModelFile(
            f"{shard} is truncated or not a safetensors file ({shard.stat().st_size} bytes, "
            f"{error}); download it again"
        ) from error


def count_elements(shards: Mapping[Path, Iterable[str]]) -> int:
    """The number of elements of these tensors, without reading them."""
    total = 0
    for shard, names in shards.items():
        with safe_open(shard, framework="np") as stream:
            total += sum(math.prod(stream.get_slice(name).get_shape()) for name in names)
    return total


def read_safetensors(
    shards: Mapping[Path, Iterable[str] | None],
) -> Iterator[tuple[str, torch.Tensor]]:
    """The named tensors of each shard, None: all, mapped from the file when asked for.
    Raises BrokenModelFile: a shard changed since it was checked, or holds an unknown dtype."""
    for shard, names in shards.items():
        try:
            with safe_open(shard, framework="pt") as stream:
                for name in stream.keys() if names is None else names:
                    yield name, stream.get_tensor(name)
        except (SafetensorError, OSError) as error:
            raise BrokenModelFile(f"{shard}: {error}; download it again") from error
