"""A tiny model that takes images, as llama.cpp's two files, comes back as it was."""

import sys
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch

from engine_core.model_files import BrokenModelFile, UnsupportedModelFile, open_model_files
from engine_core.models.loading import load_model
from engine_core.models.multimodal.families import input_family
from engine_core.models.multimodal.tower import load_encoder
from kernels.backends import select_operations
from tests.engine_core.model_files.converted_tower import (
    PROJECTORS,
    as_q8_0,
    files_of,
    text_file,
    tower_file,
)
from tests.engine_core.models.tiny_multimodal import answer, make_image, make_model, make_prompt

sys.path.append(str(Path(__file__).parents[1] / "model_runner"))
from tests.engine_core.model_runner.test_multimodal import make_loop, params


@pytest.fixture
def ops():
    return select_operations(torch.device("cpu"))


def encoder_of(files):
    own = (files.mmproj.config, files.mmproj.tensors)
    family = input_family(files.config)
    return load_encoder(files.mmproj.file, family, own, dtype=torch.float32, num_threads=1)


@pytest.mark.parametrize("model_type", PROJECTORS)
def test_tokens_of_the_two_files_are_those_of_transformers(model_type, write_gguf, ops):
    path, _ = files_of(make_model(model_type), write_gguf)
    files = open_model_files(str(path), finds_mmproj=True, report=print)
    assert files.config["model_type"] == model_type
    model = load_model(files.config, files.tensors(), dtype=torch.float32, ops=ops)
    loop = make_loop((model_type, model, encoder_of(files)), ops)
    image, other = make_image(model_type, 1, (4, 4)), make_image(model_type, 2, (2, 6))
    for name, parts in (("a", [2, image, 3, other, 4]), ("b", [9])):
        ids, features = make_prompt(model_type, parts)
        loop.add(name, ids, params(), mm_features=features)
        loop.finish()
        images = [part for part in parts if not isinstance(part, int)]
        assert loop.tokens[name, 0] == answer(model_type, ids, images)[0]


def test_text_alone_is_what_is_asked_for(write_gguf):
    path, tower = files_of(make_model("qwen3_vl"), write_gguf)
    alone = open_model_files(str(path), report=print)
    assert alone.mmproj is None
    assert alone.config["model_type"] == "qwen3"
    named = open_model_files(str(path), mmproj=tower, report=print)
    assert named.config["text_config"]["rope_parameters"]["mrope_section"] == [4, 2, 2]
    assert named.fingerprint != alone.fingerprint
    assert named.mmproj.processor["image_std"] == [0.5, 0.5, 0.25]


def test_quantised_towers_are_read(write_gguf):
    model = make_model("gemma3")
    keys, tensors = tower_file(model)
    name = "v.blk.0.ffn_up.weight"
    blocks, kind = as_q8_0(tensors[name])
    tower = write_gguf(keys, {**tensors, name: (blocks, kind)}, name="mmproj.gguf")
    path = write_gguf(*text_file(model))
    files = open_model_files(str(path), mmproj=tower, report=print)
    read = files.mmproj.tensors()["model.vision_tower.encoder.layers.0.mlp.fc1.weight"]
    np.testing.assert_allclose(read.numpy(), gguf.quants.dequantize(blocks, kind), atol=1e-7)
    assert encoder_of(files).num_bytes


def test_of_several_files_none_is_guessed(write_gguf):
    path, _ = files_of(make_model("gemma3"), write_gguf)
    write_gguf(*tower_file(make_model("idefics3")), name="mmproj-other.gguf")
    (path.parent / "mmproj-broken.gguf").write_bytes(b"GGUF")
    lines = []
    files = open_model_files(str(path), finds_mmproj=True, report=lines.append)
    assert files.mmproj is not None
    assert [line.partition(":")[0] for line in lines] == [
        "no images by mmproj-broken.gguf", "no images by mmproj-other.gguf",
        "images by mmproj-tiny.gguf",
    ]  # fmt: skip
    write_gguf(*tower_file(make_model("gemma3")), name="mmproj-f16.gguf")
    files = open_model_files(str(path), finds_mmproj=True, report=lines.append)
    assert files.mmproj is None
    assert "mmproj-f16.gguf, mmproj-tiny.gguf; name one of them as --mmproj" in lines[-1]


@pytest.mark.parametrize(
    ("keys", "error", "words"),
    [
        ({"clip.projector_type": "gemma4v"}, UnsupportedModelFile,
         "projector 'gemma4v' for a text of architecture 'gemma3'.*gemma3, idefics3, pixtral.*"
         "--language-model-only"),
        ({"clip.vision.projection_dim": 33}, UnsupportedModelFile,
         "33, and the text's hidden size 32"),
        ({"clip.vision.patch_size": 0}, BrokenModelFile, "wrong type or value"),
        ({"clip.vision.block_count": None}, BrokenModelFile, r"lacks clip\.vision\.block_count"),
    ],
)  # fmt: skip
def test_another_tower_is_refused_by_name(keys, error, words, write_gguf):
    model = make_model("gemma3")
    own, tensors = tower_file(model)
    own = {key: value for key, value in (own | keys).items() if value is not None}
    path, tower = write_gguf(*text_file(model)), write_gguf(own, tensors, name="mmproj.gguf")
    with pytest.raises(error, match=words):
        open_model_files(str(path), mmproj=tower, report=print)


def test_what_the_text_or_the_tower_lacks_is_named(write_gguf, tmp_path):
    model = make_model("gemma3")
    keys, tensors = text_file(model)
    tokens = [each.replace("<start_of_image>", "x") for each in keys["tokenizer.ggml.tokens"]]
    path = write_gguf(keys | {"tokenizer.ggml.tokens": tokens}, tensors)
    tower = write_gguf(*tower_file(model), name="mmproj.gguf")
    with pytest.raises(UnsupportedModelFile, match="lacks the token <start_of_image>"):
        open_model_files(str(path), mmproj=tower, report=print)
    spare = [each.replace("image_soft_token", "unused98") for each in keys["tokenizer.ggml.tokens"]]
    path = write_gguf(keys | {"tokenizer.ggml.tokens": spare}, tensors)
    assert (
        open_model_files(str(path), mmproj=tower, report=print).config["image_token_index"] == 110
    )
    path = write_gguf(keys, tensors)
    own, parts = tower_file(model)
    more = {**parts, "v.class_embd": parts["v.post_ln.bias"]}
    with pytest.raises(UnsupportedModelFile, match=r"tensor 'v\.class_embd'"):
        other = write_gguf(own, more, name="mmproj.gguf")
        open_model_files(str(path), mmproj=other, report=print)
    with pytest.raises(UnsupportedModelFile, match=r"is for a GGUF file, and .* is a folder"):
        model.save_pretrained(tmp_path / "folder")
        open_model_files(str(tmp_path / "folder"), mmproj=tower, report=print)
