"""A config.json as a model without weights."""

import json

import pytest

from engine_core.model_files import BrokenModelFile, ConfigOnly, ModelNotFound


def written(folder, name="config.json", **config):
    file = folder / name
    file.write_text(json.dumps(config))
    return file


def test_it_is_named_after_its_folder_or_after_itself(tmp_path):
    folder = tmp_path / "llama-8b"
    folder.mkdir()
    assert ConfigOnly(written(folder)).name == "llama-8b"
    assert ConfigOnly(written(folder, "tiny.json")).name == "tiny"


def test_end_tokens_come_from_the_config_and_there_is_no_tokenizer(tmp_path):
    files = ConfigOnly(written(tmp_path, eos_token_id=[7, 8]))
    assert (files.eos_token_ids, files.tokenizer()) == ((7, 8), None)
    assert ConfigOnly(written(tmp_path, text_config={"eos_token_id": 3})).eos_token_ids == (3,)
    assert ConfigOnly(written(tmp_path)).eos_token_ids == ()


def test_equal_shapes_have_equal_fingerprints(tmp_path):
    first = ConfigOnly(written(tmp_path, "a.json", hidden_size=8)).fingerprint
    assert ConfigOnly(written(tmp_path, "b.json", hidden_size=8)).fingerprint == first
    assert ConfigOnly(written(tmp_path, "c.json", hidden_size=9)).fingerprint != first


def test_what_is_no_config_is_refused_and_so_is_asking_for_weights(tmp_path):
    with pytest.raises(ModelNotFound, match=r"is not a file; name a config\.json"):
        ConfigOnly(tmp_path)
    (tmp_path / "bad.json").write_text("[")
    with pytest.raises(BrokenModelFile, match=r"bad\.json"):
        ConfigOnly(tmp_path / "bad.json")
    with pytest.raises(ModelNotFound, match="--load-format dummy"):
        next(ConfigOnly(written(tmp_path)).tensors())
