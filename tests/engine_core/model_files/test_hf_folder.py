"""Hugging Face folders: one file or shards, whole or damaged, and what is refused."""

import io
import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig, LlamaForCausalLM

from engine_core.errors import StartupError
from engine_core.model_files import (
    BrokenModelFile,
    ModelFilesError,
    ModelNotFound,
    UnsupportedModelFile,
    open_model_files,
)
from engine_core.model_files import safetensors_shards as shards
from engine_core.models.errors import ModelConfigError
from engine_core.models.registry import read_model_config
from engine_core.options.engine import EngineOptions
from engine_core.startup.before_torch import open_model


@pytest.fixture(scope="module")
def model() -> LlamaForCausalLM:
    torch.manual_seed(0)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=64,
            hidden_size=32,
            intermediate_size=48,
            num_hidden_layers=2,
            num_attention_heads=4,
            eos_token_id=[2, 7],
        )
    )


@pytest.fixture
def folder(tmp_path: Path, model: LlamaForCausalLM) -> Path:
    model.save_pretrained(tmp_path / "m")
    return tmp_path / "m"


@pytest.fixture
def sharded(tmp_path: Path, model: LlamaForCausalLM) -> Path:
    model.save_pretrained(tmp_path / "s", max_shard_size="20KB")
    assert len(list((tmp_path / "s").glob("*.safetensors"))) > 2
    return tmp_path / "s"


def opened(folder: Path):
    return open_model_files(str(folder), report=print)


@pytest.mark.parametrize("layout", ["folder", "sharded"])
def test_tensors_are_those_that_transformers_saved(layout, model, request) -> None:
    files = opened(request.getfixturevalue(layout))
    tensors = dict(files.tensors())
    assert tensors.keys() == model.state_dict().keys()
    for name, tensor in model.state_dict().items():
        torch.testing.assert_close(tensors[name], tensor, rtol=0, atol=0)
    assert files.config["model_type"] == "llama"
    assert files.name in ("m", "s")
    assert files.tokenizer() is None


def test_shards_without_an_index_are_found_by_name(sharded: Path, model) -> None:
    (sharded / "model.safetensors.index.json").unlink()
    assert dict(opened(sharded).tensors()).keys() == model.state_dict().keys()


@pytest.mark.parametrize("with_index", [True, False])
def test_a_missing_shard_is_named(sharded: Path, with_index: bool) -> None:
    if not with_index:
        (sharded / "model.safetensors.index.json").unlink()
    victim = sorted(sharded.glob("*.safetensors"))[1]
    victim.unlink()
    message = victim.name if with_index else "download the others"
    with pytest.raises(BrokenModelFile, match=message):
        opened(sharded)


def test_the_index_says_which_of_several_copies_counts(sharded: Path, model) -> None:
    first, *others = sorted(sharded.glob("*.safetensors"))
    stale = {name: torch.full_like(tensor, 9.0) for name, tensor in load_file(first).items()}
    for other in others:
        save_file(load_file(other) | stale, other)
    files = opened(sharded)
    tensors = list(files.tensors())
    assert len(tensors) == len(dict(tensors)) == len(model.state_dict())
    for name, tensor in tensors:
        torch.testing.assert_close(tensor, model.state_dict()[name], rtol=0, atol=0)
    assert files.num_weights == sum(tensor.numel() for tensor in model.state_dict().values())


def test_an_old_index_gives_way_to_whole_weights_where_its_shards_are_gone(
    folder: Path, sharded: Path, model
) -> None:
    index = folder / "model.safetensors.index.json"
    document = json.loads((sharded / index.name).read_text())
    index.write_text(json.dumps(document))
    files = opened(folder)
    assert dict(files.tensors()).keys() == model.state_dict().keys()
    assert files.weight_files == (folder / "model.safetensors",)
    # one that names the file, too, needs the others
    name = next(iter(document["weight_map"]))
    document["weight_map"][name] = "model.safetensors"
    index.write_text(json.dumps(document))
    with pytest.raises(BrokenModelFile, match="lacks"):
        opened(folder)


@pytest.mark.parametrize(
    "name",
    [
        "config.json", "generation_config.json", "model.safetensors", "tokenizer.json",
        "tokenizer_config.json", "special_tokens_map.json", "modules.json",
        "model.safetensors.index.json",
    ],
)  # fmt: skip
def test_a_file_that_this_user_may_not_read_ends_the_start_with_one_line(
    folder: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For root, who may read all, also what is no file of the system."""
    if not (folder / name).exists():
        (folder / name).write_text("[]" if name == "modules.json" else "{}")
    monkeypatch.setattr(io, "open", _refusing(folder / name, io.open))
    monkeypatch.setattr(Path, "read_bytes", _refusing(folder / name, Path.read_bytes))
    monkeypatch.setattr(shards, "safe_open", _refusing(folder / name, shards.safe_open))
    options = EngineOptions(model=str(folder), load_format="auto")
    options.multimodal.most_frame_bytes(options.model)
    with pytest.raises(StartupError, match=f"{name}.* cannot be read") as raised:
        open_model(options).files.eos_token_ids  # noqa: B018
    assert "\n" not in str(raised.value)


def _refusing(refused: Path, function):
    def opening(path, *more, **named):
        if str(path) == str(refused):
            raise PermissionError(13, "Permission denied", str(path))
        return function(path, *more, **named)

    return opening


def test_an_index_of_another_version_is_named(sharded: Path) -> None:
    index = sharded / "model.safetensors.index.json"
    content = json.loads(index.read_text())
    content["weight_map"]["model.absent.weight"] = next(iter(content["weight_map"].values()))
    index.write_text(json.dumps(content))
    with pytest.raises(BrokenModelFile, match=r"'model\.absent\.weight' is in model-"):
        opened(sharded)


def test_every_truncation_of_the_weights_is_named(folder: Path) -> None:
    weights = folder / "model.safetensors"
    whole = weights.read_bytes()
    for size in [0, 1, 7, 8, 9, 100, len(whole) // 2, len(whole) - 1]:
        weights.write_bytes(whole[:size])
        with pytest.raises(BrokenModelFile, match=r"model\.safetensors"):
            opened(folder)


@pytest.mark.parametrize(
    "garbage", [b"<html>" * 50, b"\xff" * 400, b"\x10\0\0\0\0\0\0\0" + b"[1, 2, 3, 4, 5] ", b"{}"]
)
def test_garbage_weights_are_named(folder: Path, garbage: bytes) -> None:
    (folder / "model.safetensors").write_bytes(garbage)
    with pytest.raises(BrokenModelFile, match=r"model\.safetensors.*download it again"):
        opened(folder)


def test_an_empty_folder_is_named(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFound, match=r"has no config\.json"):
        opened(tmp_path)


def test_a_folder_without_weights_is_named(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    with pytest.raises(ModelNotFound, match=r"has no weights \(\*\.safetensors\)"):
        opened(folder)


def test_pickled_weights_are_refused(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    with pytest.raises(UnsupportedModelFile, match=r"pytorch_model\.bin.*\.safetensors files"):
        opened(folder)


@pytest.mark.parametrize("content", ["", "{", "[1]", "\xff"])
def test_a_broken_config_is_named(folder: Path, content: str) -> None:
    (folder / "config.json").write_bytes(content.encode("latin-1"))
    with pytest.raises(BrokenModelFile, match=r"config\.json"):
        opened(folder)


def test_adapters_and_quantised_checkpoints_are_refused_by_name(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "awq"}
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(UnsupportedModelFile, match="quantised with awq"):
        opened(folder)
    (folder / "config.json").rename(folder / "adapter_config.json")
    with pytest.raises(UnsupportedModelFile, match="is an adapter"):
        opened(folder)


def test_end_tokens_come_from_generation_config_then_config(folder: Path) -> None:
    assert opened(folder).eos_token_ids == (2, 7)
    (folder / "generation_config.json").write_text('{"eos_token_id": 5, "temperature": 0.6}')
    files = opened(folder)
    assert files.eos_token_ids == (5,)
    assert files.generation_config["temperature"] == 0.6
    (folder / "generation_config.json").unlink()
    assert opened(folder).eos_token_ids == (2, 7)


def test_elements_are_counted_without_reading_them(folder: Path) -> None:
    files = opened(folder)
    assert files.num_weights == sum(tensor.numel() for _, tensor in files.tensors()) > 0


def test_fingerprint_follows_content_not_place_or_time(folder: Path, tmp_path: Path) -> None:
    before = opened(folder).fingerprint
    copy = tmp_path / "copy"
    copy.mkdir()
    for file in folder.iterdir():
        (copy / file.name).write_bytes(file.read_bytes())
    assert opened(copy).fingerprint == before
    save_file({"a": torch.ones(3)}, copy / "model.safetensors")
    assert opened(copy).fingerprint != before


def test_an_unreadable_file_is_a_model_files_error(folder: Path) -> None:
    (folder / "config.json").unlink()
    (folder / "config.json").mkdir()
    with pytest.raises(ModelFilesError):
        opened(folder)


def safetensors_bytes(header: object, num_bytes: int = 64) -> bytes:
    text = header if isinstance(header, str) else json.dumps(header)
    return len(text).to_bytes(8, "little") + text.encode() + bytes(num_bytes)


def entry(start: int, end: int, shape: object = (8,), dtype: str = "F32") -> dict[str, object]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [start, end]}


@pytest.mark.parametrize(
    "data",
    [
        (2**63).to_bytes(8, "little") + b"{}",
        (2**64 - 1).to_bytes(8, "little"),
        b"\0" * 8,
        safetensors_bytes({"a": entry(0, 32), "b": entry(16, 48)}),
        safetensors_bytes({"a": entry(0, 32), "b": entry(48, 64, (4,))}),
        safetensors_bytes({"a": entry(0, 32)}),
        safetensors_bytes({"a": entry(0, 128, (32,))}),
        safetensors_bytes({"a": entry(32, 0)}),
        safetensors_bytes({"a": entry(0, 64, (2**63, 2**63))}),
        safetensors_bytes({"a": entry(0, 64, (-16,))}),
        safetensors_bytes({"a": entry(0, 64, (16,), "PICKLE")}),
        safetensors_bytes({"a": entry(0, 60, (15,))}, 60) + b"tail",
        safetensors_bytes("[" * 5000),
        safetensors_bytes('{"a": NaN}'),
        safetensors_bytes("{}", 64),
    ],
)
def test_a_safetensors_header_that_cannot_be_true_is_named(folder: Path, data: bytes) -> None:
    (folder / "model.safetensors").write_bytes(data)
    with pytest.raises(BrokenModelFile, match=r"model\.safetensors .*download it again"):
        opened(folder)


def test_an_index_reaches_no_file_outside_its_folder(sharded: Path) -> None:
    index = sharded / "model.safetensors.index.json"
    document = json.loads(index.read_text())
    name = next(iter(document["weight_map"]))
    document["weight_map"][name] = "../" + sharded.name + "/" + document["weight_map"][name]
    index.write_text(json.dumps(document))
    with pytest.raises(BrokenModelFile, match="which is not in its folder"):
        opened(sharded)


@pytest.mark.parametrize(
    "change",
    [
        {"architectures": 5},
        {"architectures": [{}]},
        {"num_hidden_layers": 10**12},
        {"hidden_size": 2**40},
        {"vocab_size": -1},
        {"rms_norm_eps": float("nan")},
        {"rms_norm_eps": float("inf")},
        {"rope_parameters": {"rope_type": "default", "rope_theta": float("inf")}},
    ],
)
def test_a_config_with_impossible_numbers_is_refused(folder: Path, change) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | change))
    with pytest.raises(ModelConfigError, match=next(iter(change)).replace("parameters", "theta")):
        read_model_config(opened(folder).config)
