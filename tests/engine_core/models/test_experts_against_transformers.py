"""What of models with experts is checked against transformers beside their logits."""

import json

import pytest
import torch
import transformers
from safetensors.torch import load_file

from engine_core.models.errors import ModelConfigError, ModelWeightsError, UnsupportedArchitecture
from engine_core.models.registry import read_model_config
from kernels.cpu.operations import CpuOperations
from tests.engine_core.models.decoder_cases import (
    assert_close,
    full_logits,
    load,
    mixtral,
    qwen3_moe,
    random_model,
    reference_model,
    sequences,
)
from tests.engine_core.rounded_activations import inputs_in_bytes
from tests.native_kernels import native_library_or_skip

BLOCK = "model.layers.1.block_sparse_moe"


def test_only_the_spelled_names_of_a_config_are_needed(paged_logits, ops):
    """Defaults are those of transformers: eps, angles, number of experts, window."""
    left_out = ("rope_parameters", "rms_norm_eps", "num_experts_per_tok", "sliding_window")
    config = {**mixtral(8, 2).to_dict(), "architectures": ["MixtralForCausalLM"]}
    config = {key: value for key, value in config.items() if key not in left_out}
    reference = random_model(transformers.MixtralConfig.from_dict(dict(config)))
    model = load(config, reference.state_dict().items(), ops)
    assert_close(paged_logits(model, sequences((60,))), full_logits(reference, sequences((60,))))


def as_quantised(weight, floats):
    """The numbers that stand for a weight's in a format."""
    if floats == "int8":
        scales = weight.abs().amax(dim=-1, keepdim=True) / 127
        return torch.round(weight / scales) * scales
    groups = weight.reshape(*weight.shape[:-1], -1, 32)
    minima = groups.amin(dim=-1, keepdim=True).half().float()
    scales = ((groups.amax(dim=-1, keepdim=True) - minima) / 15).half().float()
    codes = torch.round((groups - minima) / scales).clamp(0, 15)
    return (codes * scales + minima).reshape(weight.shape)


@pytest.mark.parametrize("ops", ["native"], indirect=True)
@pytest.mark.parametrize("make", [mixtral, qwen3_moe])
@pytest.mark.parametrize("floats", ["int8", "int4"])
def test_quantised_weights_and_experts_differ_by_rounded_activations_only(
    make, floats, paged_logits, ops
):
    """All experts for each token: rounding might turn a choice between two that nearly tie."""
    sizes = {"hidden_size": 64, "head_dim": 16, "num_attention_heads": 4, "intermediate_size": 96}
    config = make(4, 4, **sizes, num_key_value_heads=2, initializer_range=0.1)
    if make is qwen3_moe:
        config.moe_intermediate_size = 32
    reference, token_lists = random_model(config), sequences((45, 1, 19))
    native = CpuOperations(native_library_or_skip(), linear_weights=floats)
    model = load(config.to_dict(), reference.state_dict().items(), native)
    ours = torch.cat(paged_logits(model, token_lists, on=native))
    weights = {
        name: each.data
        for name, each in reference.named_parameters()
        if each.ndim > 1 and not name.endswith("gate.weight")  # the routers
    }
    for name, weight in weights.items():
        is_table = "embed_tokens" in name or "lm_head" in name
        weight.copy_(as_quantised(weight, "int8" if is_table else floats))
    exact = torch.cat(full_logits(reference, token_lists))
    with inputs_in_bytes(weights.values()):
        rounded = torch.cat(full_logits(reference, token_lists))
    by_rounding = (rounded - exact).norm()
    assert 0.001 * exact.norm() < by_rounding < 0.05 * exact.norm()
    # where a value lies between two codes, the last bits of what came before decide
    assert (ours - rounded).norm() < 0.2 * by_rounding


@pytest.fixture(scope="module")
def mixtral_folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("mixtral")
    random_model(mixtral(3, 2)).save_pretrained(folder)
    config = json.loads((folder / "config.json").read_text())
    return config, load_file(folder / "model.safetensors")


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        (f"{BLOCK}.experts.2.w2.weight", lambda _: None, "1 tensors .*{name}"),
        (f"{BLOCK}.experts.3.w1.weight", lambda _: torch.zeros(50, 36), "no place.*{name}"),
        (
            f"{BLOCK}.experts.0.w1.weight",
            lambda tensor: tensor.T,
            r"{name} has shape \[36, 50\].*\[50, 36\]",
        ),
    ],
    ids=["missing", "too many", "another shape"],
)
def test_a_wrong_expert_is_named_as_the_files_name_it(mixtral_folder, ops, name, change, message):
    config, tensors = mixtral_folder
    changed = tensors | {name: change(tensors.get(name))}
    given = [(key, tensor) for key, tensor in changed.items() if tensor is not None]
    with pytest.raises(ModelWeightsError, match=message.format(name=name)):
        load(config, given, ops)


@pytest.mark.parametrize("ops", ["torch"], indirect=True)
def test_layers_behind_the_models_own_that_draft_are_left_out(ops):
    reference = reference_model("glm4_moe")
    tensors = {**reference.state_dict(), "model.layers.3.eh_proj.weight": torch.zeros(36, 72)}
    load(reference.config.to_dict(), tensors.items(), ops)


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"n_group": 4}, "n_group is 4"),
        ({"n_group": 3, "topk_group": 4}, "topk_group 4"),
        ({"mlp_layer_types": ["dense"] * 2}, "dense.* of each of 3 layers"),
        ({"n_routed_experts": 1}, "num_experts_per_tok is 2.*only 1"),
        ({"first_k_dense_replace": -1}, "first_k_dense_replace is -1"),
    ],
)
def test_impossible_options_of_deepseeks_experts_are_refused(options, reason):
    config = reference_model("glm4_moe").config.to_dict()
    config["architectures"] = ["Glm4MoeForCausalLM"]
    with pytest.raises(ModelConfigError, match=reason):
        read_model_config({**config, **options})


def test_fused_experts_of_another_number_are_named_one_by_one(ops):
    reference = random_model(qwen3_moe(4, 2))
    state = dict(reference.state_dict())
    name = "model.layers.2.mlp.experts.down_proj"
    state[name] = state[name][:3]
    with pytest.raises(ModelWeightsError, match=r"layers\.2\.mlp\.experts\.3\.down_proj\.weight"):
        load(reference.config.to_dict(), state.items(), ops)


@pytest.mark.parametrize(
    ("options", "error", "reason"),
    [
        ({"num_experts_per_tok": 5}, ModelConfigError, "num_experts_per_tok is 5.*only 4"),
        ({"num_local_experts": 3, "num_experts": 4}, ModelConfigError, "one number"),
        ({"mlp_only_layers": [3]}, ModelConfigError, r"mlp_only_layers is \[3\].*0 to 2"),
        ({"decoder_sparse_step": 0}, ModelConfigError, "decoder_sparse_step is 0"),
        ({"moe_intermediate_size": -1}, ModelConfigError, "moe_intermediate_size is -1"),
        ({"hidden_act": "gelu_pytorch_tanh"}, UnsupportedArchitecture, "only silu"),
    ],
)
def test_impossible_options_of_experts_are_refused_before_weights_are_read(
    options, error, reason, ops
):
    def unread():
        raise AssertionError("a tensor was read")
        yield

    config = {**qwen3_moe(4, 2).to_dict(), "architectures": ["Qwen3MoeForCausalLM"], **options}
    with pytest.raises(error, match=reason):
        load(config, unread(), ops)
