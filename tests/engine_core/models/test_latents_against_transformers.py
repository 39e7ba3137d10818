"""Models with latent attention against transformers."""

import json

import pytest
from safetensors.torch import load_file

from engine_core.devices import traits_of
from engine_core.errors import ConfigurationError
from engine_core.models.errors import UnsupportedArchitecture
from engine_core.models.registry import read_model_config
from engine_core.options.checks import check_layers
from tests.engine_core.models.decoder_cases import assert_close, full_logits, load, sequences
from tests.engine_core.models.latent_cases import (
    CONFIGS,
    deepseek_v2,
    deepseek_v3,
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
    ],
)
def test_what_would_change_the_result_is_refused_by_name(config, options, reason):
    with pytest.raises(UnsupportedArchitecture, match=reason):
        read_model_config(config().to_dict() | options)


def test_a_config_of_kimi_is_one_of_deepseek():
    known = deepseek_v3().to_dict() | {"architectures": ["DeepseekV3ForCausalLM"]}
    assert read_model_config(known | {"model_type": "kimi_k2"}) == read_model_config(known)


def test_a_gpu_is_refused_by_name():
    config = minicpm3().to_dict() | {"architectures": ["MiniCPM3ForCausalLM"]}
    check_layers(config, traits_of("cpu"))
    with pytest.raises(ConfigurationError, match=r"MiniCPM3ForCausalLM has latent .*--device cpu"):
        check_layers(config, traits_of("cuda"))
