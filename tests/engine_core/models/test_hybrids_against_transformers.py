"""Models of which some layers keep a recurrent state, against transformers."""

import json

import pytest
from safetensors.torch import load_file

from engine_core.models.errors import ModelConfigError, UnsupportedArchitecture
from engine_core.models.registry import read_model_config
from tests.engine_core.models.decoder_cases import assert_close, full_logits, load, sequences
from tests.engine_core.models.hybrid_cases import (
    CONFIGS,
    A,
    E,
    M,
    falcon_h1,
    granite,
    kimi_linear,
    lfm2,
    lfm3,
    minimax,
    nemotron_h,
)
from tests.engine_core.models.hybrid_cases import reference_model as reference_of


@pytest.mark.parametrize("name", CONFIGS)
def test_a_saved_folder_gives_the_logits_of_a_full_forward(name, paged_logits, ops, tmp_path):
    """Any mix of chunks and decodes, over shuffled blocks that begin as garbage."""
    reference = reference_of(name)
    reference.save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    model = load(config, load_file(tmp_path / "model.safetensors").items(), ops)
    assert_close(paged_logits(model, sequences()), full_logits(reference, sequences()))


@pytest.mark.parametrize(
    ("config", "options", "error", "reason"),
    [
        (granite([M]), {"time_step_limit": [0.01, 5.0]}, UnsupportedArchitecture, r"only \(0, inf"),
        (granite([M]), {"mamba_d_head": 13}, ModelConfigError, "6 Mamba heads of 13 .* the 72"),
        (granite([M]), {"mamba_n_groups": 4}, ModelConfigError, "4 groups cannot share 6"),
        (granite([M]), {"hidden_act": "gelu_pytorch_tanh"}, UnsupportedArchitecture, "only silu"),
        (granite([M]), {"num_hidden_layers": 3}, ModelConfigError, "1 layers have .* is 3"),
        (lfm2([A]), {"layer_types": ["conv", "rnn"]}, UnsupportedArchitecture, '"rnn"'),
        (lfm2([A]), {"layer_types": "conv"}, ModelConfigError, "must say what each layer is"),
        (minimax([A]), {"postnorm": False}, UnsupportedArchitecture, "postnorm False of MiniMax"),
        (minimax([A]), {"shared_intermediate_size": 8}, UnsupportedArchitecture, "size 8 of Mini"),
        (lfm3([A]), {"use_sandwich_norm": False}, UnsupportedArchitecture, "only true"),
        (nemotron_h([A, M]), {"layers_block_type": ["rnn"]}, UnsupportedArchitecture, '"rnn"'),
        (nemotron_h([E]), {"n_group": 4}, ModelConfigError, "n_group is 4.* do not suit 6 experts"),
        (nemotron_h([E]), {"n_group": 3, "num_experts_per_tok": 3}, ModelConfigError, "tok 3"),
        (kimi_linear([A]), {"mla_use_nope": False}, UnsupportedArchitecture, "only True"),
        (falcon_h1(1), {"ssm_multipliers": [1.0]}, ModelConfigError, "must be 5 numbers"),
        (nemotron_h([A]), {"mlp_hidden_act": "silu"}, UnsupportedArchitecture, "only relu2"),
    ],
)
def test_what_would_change_the_result_is_refused_by_name(config, options, error, reason):
    with pytest.raises(error, match=reason):
        read_model_config(config.to_dict() | options)


def test_names_of_layers_and_of_fields_of_older_files_are_read():
    pattern = {"layers_block_type": None, "hybrid_override_pattern": "M-*M"}
    new = nemotron_h([M, "mlp", A, M]).to_dict()
    assert read_model_config(new | pattern) == read_model_config(new)
    new = granite([M, A]).to_dict()
    old = {"layer_types": ["mamba", "attention"]}
    assert read_model_config(new | old) == read_model_config(new)
    new = kimi_linear([M, A], linear_head_dim=12, mlp_layer_types=["dense", "sparse"]).to_dict()
    attends = {"full_attn_layers": [2], "kda_layers": [1], "head_dim": 12, "num_heads": 6}
    old = {"layer_types": None, "linear_attn_config": attends | {"short_conv_kernel_size": 4}}
    old |= {"linear_head_dim": None, "mlp_layer_types": None, "first_k_dense_replace": 1}
    old |= {"moe_router_activation_func": "sigmoid", "moe_layer_freq": 1, "mla_use_nope": True}
    assert read_model_config(new | old) == read_model_config(new)
    new = minimax([M, A], mlp_alpha_factor=3.5).to_dict()
    old = {"mlp_alpha_factor": None, "layernorm_mlp_alpha": 3.5, "attn_type_list": [0, 1]}
    old |= {"layer_types": None, "postnorm": True, "shared_intermediate_size": 0, "rotary_dim": 10}
    assert read_model_config(new | old) == read_model_config(new)
    new = lfm2(["conv", A]).to_dict()
    old = {"layer_types": None, "full_attn_idxs": [1], "block_ff_dim": 50, "intermediate_size": 9}
    assert read_model_config(new | old) == read_model_config(new)
