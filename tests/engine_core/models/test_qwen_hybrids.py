"""Qwens with gated delta nets against transformers."""

import json

import pytest
import torch
import transformers
from safetensors.torch import load_file

from engine_core.devices import traits_of
from engine_core.errors import ConfigurationError
from engine_core.models.errors import ModelConfigError, UnsupportedArchitecture
from engine_core.models.registry import read_model_config
from engine_core.options.checks import check_layers
from tests.engine_core.models.decoder_cases import (
    assert_close,
    full_logits,
    load,
    sequences,
)
from tests.engine_core.models.qwen_hybrid_cases import (
    CONFIGS,
    A,
    M,
    qwen3_5,
    qwen3_5_moe,
    qwen3_next,
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


@pytest.mark.parametrize("name", ["Qwen3_5", "Qwen3_5Moe"])
@pytest.mark.parametrize("ops", ["native"], indirect=True)
def test_the_text_of_a_checkpoint_with_images_and_a_head_for_drafts(
    name, paged_logits, ops, tmp_path
):
    """Positions of text agree on all axes, so that M-RoPE is plain."""
    rotary = {"rope_type": "default", "rope_theta": 100.0, "partial_rotary_factor": 0.5}
    rotary |= {"mrope_section": [3, 2, 1], "mrope_interleaved": True}
    text = {"Qwen3_5": qwen3_5, "Qwen3_5Moe": qwen3_5_moe}[name]([M, A], rope_parameters=rotary)
    config = getattr(transformers, f"{name}Config")(
        text_config=text.to_dict(),
        vision_config={"depth": 1, "hidden_size": 8, "num_heads": 2, "out_hidden_size": 36},
    )
    torch.manual_seed(0)
    reference = getattr(transformers, f"{name}ForConditionalGeneration")(config).eval()
    if reference._can_set_experts_implementation():
        reference.set_experts_implementation("eager")
    reference.save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    tensors = load_file(tmp_path / "model.safetensors")
    tensors["mtp.layers.0.self_attn.q_proj.weight"] = torch.zeros(288, 36)
    model = load(config, tensors.items(), ops)
    assert_close(paged_logits(model, sequences((23,))), full_logits(reference, sequences((23,))))


@pytest.mark.parametrize(
    ("config", "options", "error", "reason"),
    [
        (qwen3_5([M]), {"hidden_act": "gelu_pytorch_tanh"}, UnsupportedArchitecture, "only silu"),
        (qwen3_5([M]), {"linear_num_value_heads": 5}, ModelConfigError, "5 heads .* share 2 key"),
        (qwen3_5([M]), {"layer_types": ["rnn"]}, UnsupportedArchitecture, '"rnn"'),
        (qwen3_5([M]), {"layer_types": [M, A]}, ModelConfigError, "2 layers .* is 1"),
        (qwen3_next([A]), {"num_experts_per_tok": 5}, ModelConfigError, "only 4 experts"),
    ],
)
def test_what_would_change_the_result_is_refused_by_name(config, options, error, reason):
    architecture = {"qwen3_5_text": "Qwen3_5ForCausalLM", "qwen3_next": "Qwen3NextForCausalLM"}
    fields = config.to_dict() | {"architectures": [architecture[config.model_type]]}
    with pytest.raises(error, match=reason):
        read_model_config(fields | options)


def test_a_gpu_refuses_states_that_its_kernels_do_not_take_by_name():
    fields = qwen3_5([M, A]).to_dict() | {"architectures": ["Qwen3_5ForCausalLM"]}
    wide = {**fields, "linear_key_head_dim": 300}
    check_layers(fields, traits_of("cuda"))
    check_layers(wide, traits_of("cpu"))
    check_layers({**wide, "layer_types": [A, A]}, traits_of("cuda"))
    with pytest.raises(ConfigurationError, match=r"300 elements a key, .* 256; .* --device cpu"):
        check_layers(wide, traits_of("cuda"))
