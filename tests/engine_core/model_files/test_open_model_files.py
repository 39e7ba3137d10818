"""What may follow --model and --tokenizer, in which order it is tried, and how it fails."""

import json
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer, models

from engine_core.model_files import (
    DownloadFailed,
    ModelNotFound,
    UnsupportedModelFile,
    open_model_files,
)
from engine_core.model_files.download import KNOWN_MODELS, find_known_model


def test_a_gguf_file_and_a_folder_with_one_open_alike(tiny_llama_gguf: Path) -> None:
    by_file = open_model_files(str(tiny_llama_gguf), report=print)
    by_folder = open_model_files(str(tiny_llama_gguf.parent), report=print)
    assert by_file.path == by_folder.path == tiny_llama_gguf
    assert by_file.name == "tiny"
    assert by_file.tokenizer() is None
    assert by_file.eos_token_ids == ()


def test_a_folder_with_several_gguf_files_asks_for_one(tiny_llama_gguf: Path) -> None:
    (tiny_llama_gguf.parent / "other.gguf").write_bytes(b"")
    with pytest.raises(UnsupportedModelFile, match=r"other\.gguf, tiny\.gguf.*name one"):
        open_model_files(str(tiny_llama_gguf.parent), report=print)


def test_an_encoder_of_images_beside_a_gguf_file_is_left_out(tiny_llama_gguf: Path) -> None:
    (tiny_llama_gguf.parent / "mmproj-tiny-F16.gguf").write_bytes(b"")
    assert open_model_files(str(tiny_llama_gguf.parent), report=print).path == tiny_llama_gguf


def test_later_parts_of_a_split_file_do_not_count_as_several(write_gguf, tiny_llama_keys) -> None:
    embedding = {"token_embd.weight": np.ones((8, 32), np.float32)}
    for part in range(1, 13):
        keys = tiny_llama_keys if part == 1 else {"general.architecture": "llama"}
        tensors = embedding if part == 1 else {}
        path = write_gguf(keys, tensors, name=f"m-{part:05d}-of-00012.gguf")
    assert open_model_files(str(path.parent), report=print).name == "m"


@pytest.mark.parametrize("model", ["/nowhere/model", "./absent.gguf", "x.gguf", "~/no/such", "a/"])
def test_a_path_that_does_not_exist_is_named(model: str) -> None:
    with pytest.raises(ModelNotFound, match="does not exist; check the path given as --model"):
        open_model_files(model, report=print)


@pytest.mark.parametrize("model", ["", "  "])
def test_an_empty_name_is_named(model: str) -> None:
    with pytest.raises(ModelNotFound, match="--model is empty"):
        open_model_files(model, report=print)


def test_an_unknown_name_lists_the_known_and_the_nearest() -> None:
    with pytest.raises(ModelNotFound, match=r"did you mean smollm2.*smollm2-135m-instruct, gemma3"):
        open_model_files("smollm-2", report=print)


def test_a_hub_id_without_network_says_what_to_do(monkeypatch, tmp_path: Path) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    lines: list[str] = []
    with pytest.raises(DownloadFailed, match=r"some-org/some-model.*--model"):
        open_model_files("some-org/some-model", report=lines.append)
    assert "some-org/some-model" in lines[0]


def test_names_and_aliases_are_unique_and_found_in_any_case() -> None:
    names = [name for model in KNOWN_MODELS for name in (model.name, *model.aliases)]
    assert len(names) == len(set(names))
    assert find_known_model("SmolLM2") is find_known_model("smollm2-135m-instruct")
    assert find_known_model("nothing") is None


@pytest.fixture
def tokenizer_folder(tmp_path: Path) -> Path:
    folder = tmp_path / "tokenizer"
    folder.mkdir()
    tokenizer = Tokenizer(models.WordLevel({"a": 0, "b": 1}, unk_token="a"))
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "b"}))
    return folder


@pytest.mark.parametrize("file", ["", "tokenizer.json"])
def test_the_tokenizer_may_come_from_elsewhere(
    file: str, tiny_llama_gguf: Path, tokenizer_folder: Path
) -> None:
    files = open_model_files(
        str(tiny_llama_gguf), tokenizer=str(tokenizer_folder / file), report=print
    )
    tokenizer = files.tokenizer()
    assert tokenizer is not None
    assert tokenizer.special_tokens == {"eos_token": "b"}
    assert next(name for name, _ in files.tensors()) == "model.embed_tokens.weight"
    assert files.fingerprint == open_model_files(str(tiny_llama_gguf), report=print).fingerprint
    assert files.num_weights == sum(tensor.numel() for _, tensor in files.tensors())


def test_a_tokenizer_that_is_not_there_is_named(tiny_llama_gguf: Path, tmp_path: Path) -> None:
    model = str(tiny_llama_gguf)
    with pytest.raises(ModelNotFound, match="check the path given as --tokenizer"):
        open_model_files(model, tokenizer=str(tmp_path / "absent"), report=print)
    with pytest.raises(ModelNotFound, match="holds no tokenizer"):
        open_model_files(model, tokenizer=str(tmp_path), report=print)
    with pytest.raises(ModelNotFound, match="holds no tokenizer"):
        open_model_files(model, tokenizer=model, report=print)
