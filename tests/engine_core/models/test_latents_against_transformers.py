"""Models with latent attention against transformers."""

import json

import pytest
from safetensors.torch import load_file

from engine_core.devices import traits_of
from engine_core.errors import ConfigurationError
from engine_core.models.errors import ModelConfigError, UnsupportedArchitecture
from engine_core.models.parallel.stages import split_layers
from engine_core.models.registry import read_model_config
from engine_core.options.checks import check_layers
from tests.engine_core.models.decoder_cases import assert_close, full_logits, load, sequences
from tests.engine_core.models.latent_cases import (
    CONFIGS,
    deepseek_v2,
    deepseek_v3,
    deepseek_v32,
    glm_moe_dsa,
    minicpm3,
    reference_model,
)


@pytest.mark.parametrize("name", CONFIGS)
def test_a_saved_folder_gives_the_logits_of_a_full_forward(name, paged_logits, ops, tmp_path):
    """Any mix of chunks and decodes, over shuffled blocks that begin as garbage."""
    reference = reference_model(name)
    reference.save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    model = load(config, load_file(tmp_path / "model.safetensors").items(), ops)
    assert_close(paged_logits(model, sequences()), full_logits(reference, sequences()))


@pytest.mark.parametrize(
    ("config", "options", "reason"),
    [
        (minicpm3, {"attention_bias": True}, "attention_bias with latent attention is not supp"),
        (
            minicpm3,
            {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0}},
            'rope type "dynamic"',
        ),
        (deepseek_v2, {"topk_method": "noaux_tc"}, 'topk_method "noaux_tc" of DeepSeek V2 is not'),
        (deepseek_v2, {"norm_topk_prob": True}, "norm_topk_prob of DeepSeek V2 is not supported"),
        (deepseek_v2, {"scoring_func": "sigmoid"}, 'scoring_func "sigmoid" .* only "softmax"'),
        (deepseek_v3, {"moe_layer_freq": 2}, 'scoring_func "sigmoid" with moe_layer_freq 2 is not'),
        (
            deepseek_v32,
            {"q_lora_rank": None},
            "an indexer with q_lora_rank None and index_head_dim",
        ),
        (deepseek_v32, {"index_head_dim": 4}, "index_head_dim 4 is not .* 6 elements that turn"),
    ],
)
def test_what_would_change_the_result_is_refused_by_name(config, options, reason):
    with pytest.raises(UnsupportedArchitecture, match=reason):
        read_model_config(config().to_dict() | options)


def test_layers_that_share_a_choice_are_read_however_they_are_told():
    config = glm_moe_dsa().to_dict() | {"indexer_types": None}

    def kept(**options):
        return [kept.index_size for kept in read_model_config(config | options).spec.layers]

    assert kept(index_topk_pattern="FSF") == kept(indexer_types=["full", "shared", "full"])
    assert kept(index_topk_freq=2, index_skip_topk_offset=1) == [11, 0, 11]
    assert kept() == [11, 11, 11]
    with pytest.raises(ModelConfigError, match=r"\['shared', 'full', 'full'\], .* of the first"):
        kept(index_topk_pattern="SFF")
    shared = read_model_config(config | {"index_topk_pattern": "FSF"})
    with pytest.raises(ModelConfigError, match="1 layers attend keys that other layers choose"):
        split_layers(shared, 2)
    assert len(split_layers(read_model_config(config), 2)) == 2


def test_a_config_of_kimi_is_one_of_deepseek():
    known = deepseek_v3().to_dict() | {"architectures": ["DeepseekV3ForCausalLM"]}
    assert read_model_config(known | {"model_type": "kimi_k2"}) == read_model_config(known)


def test_a_gpu_is_refused_by_name():
    config = deepseek_v32().to_dict() | {"architectures": ["DeepseekV32ForCausalLM"]}
    check_layers(config, traits_of("cpu"))
    with pytest.raises(ConfigurationError, match=r"DeepseekV32ForC.* an indexer .*--device cpu"):
        check_layers(config, traits_of("cuda"))
