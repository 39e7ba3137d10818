"""Configs with the keys of published files, which leave out what transformers would write."""

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import transformers

from engine_core.models.multimodal.families import input_family
from engine_core.models.registry import read_model_config
from engine_core.options.pooling import PoolingOptions
from engine_core.startup.pooled_files import PooledFiles

LINES = (Path(__file__).parent / "published_configs.jsonl").read_text().splitlines()
PUBLISHED = {line["name"]: line["config"] for line in map(json.loads, LINES)}


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_published_config_is_read_as_what_transformers_makes_of_it(name, tmp_path):
    """As it is written back, and with every key spelled out."""
    config = PUBLISHED[name]
    (tmp_path / "config.json").write_text(json.dumps(config))
    known = transformers.AutoConfig.from_pretrained(tmp_path)
    family = input_family(config)
    for use_diff in (True, False):
        whole = json.loads(known.to_json_string(use_diff=use_diff))
        whole["architectures"] = config["architectures"]
        assert read_model_config(config) == read_model_config(whole)
        if family is not None:
            assert family.most_rows == input_family(whole).most_rows


_SIZES = (
    *("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers"),
    *("num_attention_heads", "model_type"),
)


@pytest.mark.parametrize(
    "family",
    [
        *(
            "Arcee",
            "Cohere2",
            "Ernie4_5",
            "Ernie4_5_Moe",
            "Exaone4",
            "Gemma2",
            "Glm",
            "Glm4",
            "GptOss",
            "Granite",
            "HunYuanDenseV1",
            "HunYuanMoEV1",
            "Ministral3",
            "Nemotron",
            "Olmo2",
            "Olmo3",
            "Olmoe",
            "Phi3",
            "Qwen2Moe",
            "SeedOss",
            "SmolLM3",
            "Starcoder2",
        ),
        *(
            "MiniMax",
            "MiniCPM3",
            "Bamba",
            "FalconH1",
            "GraniteMoeHybrid",
            "Lfm2",
            "Lfm2Moe",
            "Lfm3",
            "KimiLinear",
        ),
        *("DeepseekV3", "Glm4MoeLite", "Mistral4"),
        *("Afmoe", "GraniteMoe", "GraniteMoeShared", "MiniMaxM2", "SolarOpen"),
    ],
)
def test_what_a_config_leaves_out_is_as_transformers_has_it(family):
    config = getattr(transformers, f"{family}Config")()
    whole = json.loads(config.to_json_string(use_diff=False))
    whole["architectures"] = [f"{family}ForCausalLM"]
    sizes = {name: whole[name] for name in (*_SIZES, "architectures") if name in whole}
    assert read_model_config(sizes) == read_model_config(whole)


@pytest.mark.parametrize(
    ("architecture", "generates"),
    [
        ("GPT2LMHeadModel", True),
        ("MarianMTModel", True),
        ("GPT2Model", False),
        ("BertModel", False),
    ],
)
def test_a_class_whose_name_ends_in_model_may_have_a_head_for_text(architecture, generates):
    files = SimpleNamespace(
        name="m",
        path=Path("m"),
        generation_config={},
        weight_files=(),
        quantised_types=(),
        given_tokenizer=None,
        mmproj=None,
        config={"architectures": [architecture]},
    )
    assert PooledFiles(files, PoolingOptions(), None).generates is generates
