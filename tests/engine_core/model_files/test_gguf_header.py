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


def text(value: str) -> bytes:
    return struct.pack("<Q", len(value)) + value.encode()


def tensor(name: str, shape: tuple[int, ...], offset: int, kind: int = 0) -> bytes:
    sizes = struct.pack(f"<{len(shape)}Q", *shape)
    return text(name) + struct.pack("<I", len(shape)) + sizes + struct.pack("<IQ", kind, offset)


def header(num_tensors: int, num_keys: int, *parts: bytes) -> bytes:
    return b"GGUF" + struct.pack("<IQQ", 3, num_tensors, num_keys) + b"".join(parts) + bytes(512)


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (header(2**63, 0), "9223372036854775808 tensors, the limit is 262144"),
        (header(0, 2**63), "9223372036854775808 keys, the limit is 65536"),
        (
            header(0, 1, text("k") + struct.pack("<IIQ", 9, 8, 1 << 60)),
            "items in a list, the limit is 8388608",
        ),
        (header(0, 1, text("k") + struct.pack("<IIQ", 9, 4, 1 << 20)), "truncated"),
        (header(0, 1, struct.pack("<Q", 1 << 40)), "bytes in a text, the limit is 65536"),
        (header(0, 1, text("k") + struct.pack("<IQ", 8, 1 << 62)), "the limit is 67108864"),
        (header(0, 2, *[text("k") + struct.pack("<II", 4, 1)] * 2), "key 'k' occurs twice"),
        (header(2, 0, tensor("a", (8,), 0), tensor("a", (8,), 32)), "tensor 'a' occurs twice"),
        (header(2, 0, tensor("a", (16,), 0), tensor("b", (8,), 32)), "inside the one before it"),
        (header(2, 0, tensor("a", (8,), 0), tensor("b", (8,), 0)), "inside the one before it"),
        (header(1, 0, tensor("a", (8, 0), 0)), r"shape \[0, 8\], a dimension of 0"),
        (header(1, 0, tensor("a", (2**63, 2**63), 0)), "ends at byte"),
        (header(1, 0, tensor("a", (8,), 2**63)), "ends at byte"),
        (header(1, 0, tensor("a", (8,), 33)), "not aligned to 32"),
        (header(1, 0, tensor("a", (1, 1, 1, 1, 1), 0)), "5 dimensions"),
        (header(1, 0, tensor("a", (), 0, kind=8)), "rows of 1 elements, which Q8_0 cannot hold"),
    ],
)
def test_a_header_that_cannot_be_true_is_refused_with_value_and_limit(tmp_path, data, words):
    path = tmp_path / "x.gguf"
    path.write_bytes(data)
    with pytest.raises(BrokenModelFile, match=words) as refusal:
        read_gguf_header(path)
    assert str(path) in str(refusal.value)


def test_an_error_is_one_line_however_long_a_files_names_are(tmp_path: Path) -> None:
    path = tmp_path / "x.gguf"
    path.write_bytes(header(1, 0, tensor("a\n" * 30_000, (0,), 0)))
    with pytest.raises(BrokenModelFile) as refusal:
        read_gguf_header(path)
    line = str(refusal.value)
    assert len(line) <= 1000
    assert "\n" not in line
    assert line.startswith(str(path))
    assert line.endswith("download it again")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"llama.block_count": 2**32 - 1}, "num_hidden_layers is 4294967295, .*10000"),
        ({"llama.attention.head_count_kv": 0}, "num_key_value_heads is 0"),
        ({"llama.attention.key_length": 2**31}, "head_dim is 2147483648"),
        ({"llama.rope.freq_base": float("nan")}, "rope.freq_base is nan"),
        ({"tokenizer.ggml.tokens": 5}, "tokens is 5, it must be a list of str"),
        ({"tokenizer.ggml.model": ["gpt2"]}, "model is .*must be str"),
        ({"tokenizer.ggml.eos_token_id": "two"}, "eos_token_id is 'two', it must be int"),
        ({"tokenizer.ggml.merges": [1, 2]}, "merges is .*must be a list of str"),
    ],
)
def test_metadata_of_a_wrong_type_or_size_is_refused_by_name(
    write_gguf, tiny_llama_keys, change, words
):
    embedding = {"token_embd.weight": np.ones((8, 32), np.float32)}
    tokenizer = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": ["a", "b"],
        "llama.attention.value_length": change.get("llama.attention.key_length", 16),
        "llama.rope.dimension_count": change.get("llama.attention.key_length", 16),
    }
    path = write_gguf(tiny_llama_keys | tokenizer | change, embedding)
    with pytest.raises(ModelFilesError, match=words):
        open_model_files(str(path), report=print).tokenizer()


def test_rotary_factors_of_zero_are_refused(write_gguf, tiny_llama_keys) -> None:
    """Found by fuzzing: a division by zero."""
    tensors = {
        "token_embd.weight": np.ones((8, 32), np.float32),
        "rope_freqs.weight": np.zeros(8, np.float32),
    }
    path = write_gguf(tiny_llama_keys, tensors)
    with pytest.raises(ModelFilesError, match="division"):
        open_model_files(str(path), report=print)
