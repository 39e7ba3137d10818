"""Writers of small model files for the tests of this folder."""

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

WriteGguf = Callable[..., Path]


def add_key(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    match value:
        case bool():
            writer.add_bool(key, value)
        case int():
            writer.add_uint32(key, value)
        case float():
            writer.add_float32(key, value)
        case str():
            writer.add_string(key, value)
        case list():
            writer.add_array(key, value)
        case _:
            raise TypeError(key)


def write_in(
    folder: Path,
    keys: dict[str, Any],
    tensors: dict[str, Any],
    *,
    name: str = "tiny.gguf",
    endianess: gguf.GGUFEndian = gguf.GGUFEndian.LITTLE,
) -> Path:
    path = folder / name
    keys = dict(keys)
    writer = gguf.GGUFWriter(path, keys.pop("general.architecture"), endianess=endianess)
    for key, value in keys.items():
        add_key(writer, key, value)
    for tensor_name, tensor in tensors.items():
        if isinstance(tensor, tuple):
            writer.add_tensor(tensor_name, tensor[0], raw_dtype=tensor[1])
        else:
            writer.add_tensor(tensor_name, np.ascontiguousarray(tensor))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.fixture
def write_gguf(tmp_path: Path) -> WriteGguf:
    """write_gguf(keys, tensors, name=...): tensors are arrays, or (bytes array, quant type)."""
    return functools.partial(write_in, tmp_path)


TINY_LLAMA_KEYS: dict[str, Any] = {
    "general.architecture": "llama",
    "llama.block_count": 1,
    "llama.context_length": 64,
    "llama.embedding_length": 32,
    "llama.feed_forward_length": 32,
    "llama.attention.head_count": 2,
    "llama.attention.layer_norm_rms_epsilon": 1e-5,
}


@pytest.fixture
def tiny_llama_keys() -> dict[str, Any]:
    return dict(TINY_LLAMA_KEYS)


@pytest.fixture
def tiny_llama_gguf(write_gguf: WriteGguf, tiny_llama_keys: dict[str, Any]) -> Path:
    """A file that opens: one layer's norm and an embedding of 8 tokens."""
    embedding = np.arange(8 * 32, dtype=np.float32).reshape(8, 32)
    norm = np.ones(32, dtype=np.float32)
    tensors = {"token_embd.weight": embedding, "blk.0.attn_norm.weight": norm}
    return write_gguf(tiny_llama_keys, tensors)
