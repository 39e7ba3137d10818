"""Damaged and foreign GGUF files are refused before a byte of a tensor is used."""

import struct
from pathlib import Path

import gguf
import numpy as np
import pytest

from engine_core.model_files import (
    BrokenModelFile,
    ModelFilesError,
    UnsupportedModelFile,
    open_model_files,
)
from engine_core.model_files.gguf.header import read_gguf_header


def test_header_equals_what_gguf_reader_sees(write_gguf, tiny_llama_keys) -> None:
    keys = tiny_llama_keys | {
        "a.bool": True,
        "a.text": "naïve 漢字",
        "a.texts": ["", "x", "😀"],
        "a.numbers": [1, 2, 3],
        "a.floats": [0.5, -1.0],
    }
    tensors = {"one": np.ones((3, 32), np.float32), "two": np.zeros((2, 2, 5), np.float16)}
    path = write_gguf(keys, tensors)
    header, reference = read_gguf_header(path), gguf.GGUFReader(path)
    for key, field in reference.fields.items():
        if not key.startswith("GGUF."):
            assert header.metadata[key] == field.contents(), key
    assert [
        (t.name, t.shape, t.quant_type, t.start_bytes, t.num_bytes) for t in header.tensors
    ] == [
        (t.name, tuple(t.shape[::-1]), t.tensor_type, t.data_offset, t.n_bytes)
        for t in reference.tensors
    ]


def test_every_truncation_is_a_named_error(tiny_llama_gguf: Path) -> None:
    whole = tiny_llama_gguf.read_bytes()
    for size in [*range(0, len(whole) - 128, 7), len(whole) - 200]:
        tiny_llama_gguf.write_bytes(whole[:size])
        with pytest.raises(BrokenModelFile, match=r"tiny\.gguf"):
            read_gguf_header(tiny_llama_gguf)


def test_every_flipped_header_byte_gives_a_result_or_a_named_error(tiny_llama_gguf: Path) -> None:
    whole = bytearray(tiny_llama_gguf.read_bytes())
    num_refused = 0
    for position in range(read_gguf_header(tiny_llama_gguf).tensors[0].start_bytes):
        damaged = bytearray(whole)
        damaged[position] ^= 0xFF
        tiny_llama_gguf.write_bytes(damaged)
        try:
            for _ in open_model_files(str(tiny_llama_gguf), report=print).tensors():
                pass
        except ModelFilesError:
            num_refused += 1
    assert num_refused > 100


def test_wrong_magic_is_named(tmp_path: Path) -> None:
    path = tmp_path / "x.gguf"
    path.write_bytes(b"<!DOCTYPE html>" * 100)
    with pytest.raises(BrokenModelFile, match=r"begins with b'<!DO'.*download it again"):
        open_model_files(str(path), report=print)


def test_empty_file_is_named(tmp_path: Path) -> None:
    path = tmp_path / "x.gguf"
    path.touch()
    with pytest.raises(BrokenModelFile, match="not a GGUF file"):
        open_model_files(str(path), report=print)


def test_big_endian_is_refused_by_name(write_gguf, tiny_llama_keys) -> None:
    path = write_gguf(tiny_llama_keys, {}, endianess=gguf.GGUFEndian.BIG)
    with pytest.raises(UnsupportedModelFile, match="big-endian"):
        open_model_files(str(path), report=print)


def test_version_1_is_refused_by_name(tmp_path: Path) -> None:
    path = tmp_path / "x.gguf"
    path.write_bytes(b"GGUF" + struct.pack("<IQQ", 1, 0, 0))
    with pytest.raises(UnsupportedModelFile, match="version 1"):
        open_model_files(str(path), report=print)


def test_a_tensor_beyond_the_end_of_the_file_is_named(tiny_llama_gguf: Path) -> None:
    whole = tiny_llama_gguf.read_bytes()
    tiny_llama_gguf.write_bytes(whole[:-100])
    with pytest.raises(BrokenModelFile, match=r"tensor 'blk\.0\.attn_norm\.weight' ends at byte"):
        open_model_files(str(tiny_llama_gguf), report=print)


def test_absurd_counts_do_not_allocate(tmp_path: Path) -> None:
    path = tmp_path / "x.gguf"
    key = struct.pack("<Q", 1) + b"k" + struct.pack("<IIQ", 9, 8, 1 << 60)
    path.write_bytes(b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + key)
    with pytest.raises(BrokenModelFile, match="truncated"):
        read_gguf_header(path)
