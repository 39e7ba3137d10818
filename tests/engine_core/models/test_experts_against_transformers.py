"""Models with experts against transformers' eager forward, on tiny random models."""

import json

import pytest
import torch
import transformers
from safetensors.torch import load_file

from engine_core.models.errors import ModelConfigError, ModelWeightsError, UnsupportedArchitecture
from engine_core.models.loading import load_dummy_model, load_model
from kernels.cpu.operations import CpuOperations
from kernels.triton.operations import TritonOperations
from tests.engine_core.rounded_activations import inputs_in_bytes
from tests.native_kernels import native_library_or_skip

SHAPE = {
    "vocab_size": 131,
    "hidden_size": 36,
    "intermediate_size": 50,
    "num_hidden_layers": 3,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "max_position_embeddings": 128,
    "initializer_range": 0.3,
}
BLOCK = "model.layers.1.block_sparse_moe"


def mixtral(num_experts, top_k, **options):
    return transformers.MixtralConfig(
        **{**SHAPE, "num_local_experts": num_experts, "num_experts_per_tok": top_k, **options}
    )


def qwen3_moe(num_experts, top_k, **options):
    return transformers.Qwen3MoeConfig(
        **{
            **SHAPE,
            "num_experts": num_experts,
            "num_experts_per_tok": top_k,
            "moe_intermediate_size": 22,
            "norm_topk_prob": True,
            **options,
        }
    )


def qwen2_moe(num_experts, top_k, **options):
    return transformers.Qwen2MoeConfig(
        **{
            **SHAPE,
            "num_experts": num_experts,
            "num_experts_per_tok": top_k,
            "moe_intermediate_size": 22,
            "shared_expert_intermediate_size": 30,
            **options,
        }
    )


def olmoe(num_experts, top_k, **options):
    return transformers.OlmoeConfig(
        **{**SHAPE, "num_experts": num_experts, "num_experts_per_tok": top_k, **options}
    )


CONFIGS = {
    "mixtral 2 of 8": mixtral(8, 2),
    "mixtral 1 of 3": mixtral(3, 1, head_dim=6),
    "mixtral 4 of 4, tied": mixtral(4, 4, tie_word_embeddings=True),
    "mixtral, window of 5": mixtral(4, 2, sliding_window=5),
    "qwen3 4 of 8": qwen3_moe(8, 4),
    "qwen3 2 of 3, not renormalised": qwen3_moe(3, 2, norm_topk_prob=False),
    "qwen3 1 of 4, heads of 10": qwen3_moe(4, 1, head_dim=10, attention_bias=True),
    "qwen3, every second layer": qwen3_moe(4, 2, decoder_sparse_step=2),
    "qwen3, dense layers by name": qwen3_moe(4, 2, mlp_only_layers=[0, 2]),
    "qwen3, all dense": qwen3_moe(4, 2, mlp_only_layers=[0, 1, 2]),
    "qwen3, window of 4 everywhere": qwen3_moe(
        4, 2, use_sliding_window=True, sliding_window=4, max_window_layers=2
    ),
    "olmoe 4 of 8": olmoe(8, 4),
    "qwen2 4 of 8": qwen2_moe(8, 4),
    "qwen2 2 of 4, renormalised, every second layer": qwen2_moe(
        4, 2, norm_topk_prob=True, decoder_sparse_step=2
    ),
    "qwen2, windows": qwen2_moe(
        4, 2, use_sliding_window=True, sliding_window=5, max_window_layers=2
    ),
    "olmoe 2 of 3, renormalised, biases": olmoe(3, 2, norm_topk_prob=True, attention_bias=True),
}


def random_model(config):
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    model.set_experts_implementation("eager")
    for name, parameter in model.named_parameters():
        if name.endswith("bias") or "norm" in name:  # they begin as 0 or 1
            torch.nn.init.normal_(parameter, mean=parameter.mean().item(), std=0.3)
        elif name.endswith("mlp.gate.weight"):  # Qwen's begin as 0: every expert alike
            torch.nn.init.normal_(parameter, std=0.3)
    return model.eval()


def sequences(lengths=(45, 1, 19, 33)):
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(131, (length,), generator=generator).tolist() for length in lengths]


def full_logits(model, token_lists):
    with torch.inference_mode():
        return [model(torch.tensor([tokens])).logits[0].float() for tokens in token_lists]


def load(config, tensors, ops, dtype=torch.float32):
    return load_model(config, tensors, dtype=dtype, ops=ops)


@pytest.mark.parametrize("name", CONFIGS)
def test_mixed_chunked_steps_give_the_logits_of_a_full_forward(name, paged_logits, ops):
    reference = random_model(CONFIGS[name])
    token_lists = sequences()
    model = load(reference.config.to_dict(), reference.state_dict().items(), ops)
    expected = full_logits(reference, token_lists)
    assert expected[0].std() > 0.1
    for ours, theirs in zip(paged_logits(model, token_lists), expected, strict=True):
        torch.testing.assert_close(ours, theirs, atol=5e-5, rtol=1e-4)


@pytest.mark.parametrize(
    "name", ["olmoe 2 of 3, renormalised, biases", "qwen2 2 of 4, renormalised, every second layer"]
)
@pytest.mark.parametrize("ops", ["torch"], indirect=True)
def test_the_gpu_kernels_give_the_logits_of_a_full_forward(name, paged_logits, ops):
    """Those families whose blocks differ from Qwen 3's, in the interpreter."""
    reference, on = random_model(CONFIGS[name]), TritonOperations(torch.device("cpu"))
    model = load(reference.config.to_dict(), reference.state_dict().items(), on)
    token_lists = sequences((6, 3))
    ours, theirs = paged_logits(model, token_lists, on=on), full_logits(reference, token_lists)
    torch.testing.assert_close(torch.cat(ours), torch.cat(theirs), atol=5e-5, rtol=1e-4)


def saved(config, folder):
    reference = random_model(config)
    reference.save_pretrained(folder)
    written = json.loads((folder / "config.json").read_text())
    return reference, written, load_file(folder / "model.safetensors")


@pytest.mark.parametrize(
    ("name", "expert"),
    [
        ("mixtral 2 of 8", f"{BLOCK}.experts.7.w3.weight"),
        ("qwen3, every second layer", "model.layers.1.mlp.experts.3.up_proj.weight"),
    ],
)
def test_saved_folder_holds_expert_by_expert_and_gives_the_same_model(
    name, expert, paged_logits, ops, tmp_path
):
    reference, config, tensors = saved(CONFIGS[name], tmp_path)
    assert expert in tensors
    [ours] = paged_logits(load(config, tensors.items(), ops), sequences((23,)), block_size=16)
    [theirs] = full_logits(reference, sequences((23,)))
    torch.testing.assert_close(ours, theirs, atol=5e-5, rtol=1e-4)


def test_only_the_spelled_names_of_a_config_are_needed(paged_logits, ops):
    """Defaults are those of transformers: eps, angles, number of experts, window."""
    left_out = ("rope_parameters", "rms_norm_eps", "num_experts_per_tok", "sliding_window")
    config = {**mixtral(8, 2).to_dict(), "architectures": ["MixtralForCausalLM"]}
    config = {key: value for key, value in config.items() if key not in left_out}
    reference = random_model(transformers.MixtralConfig.from_dict(dict(config)))
    [ours] = paged_logits(load(config, reference.state_dict().items(), ops), sequences((60,)))
    [theirs] = full_logits(reference, sequences((60,)))
    torch.testing.assert_close(ours, theirs, atol=5e-5, rtol=1e-4)


@pytest.mark.parametrize("make", [mixtral, qwen3_moe])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_as_close_to_float32_as_transformers(make, dtype, paged_logits, ops):
    reference = random_model(make(4, 2, initializer_range=0.1))
    token_lists = sequences((29, 12))
    exact = full_logits(reference, token_lists)
    halved = reference.to(dtype)
    theirs = full_logits(halved, token_lists)
    model = load(halved.config.to_dict(), halved.state_dict().items(), ops, dtype)
    for mine, other, true in zip(
        paged_logits(model, token_lists, dtype=dtype), theirs, exact, strict=True
    ):
        allowed = 1.5 * (other - true).abs().mean() + 1e-4
        assert (mine - true).abs().mean() <= allowed


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


@pytest.mark.parametrize("make", [mixtral, qwen3_moe])
def test_a_config_alone_gives_a_model_of_random_weights(make, paged_logits, ops):
    model = load_dummy_model(make(4, 2).to_dict(), dtype=torch.float32, ops=ops)
    [logits] = paged_logits(model, sequences((19,)))
    assert logits.isfinite().all()
    assert logits.std() > 0


@pytest.fixture(scope="module")
def mixtral_folder(tmp_path_factory):
    _, config, tensors = saved(mixtral(3, 2), tmp_path_factory.mktemp("mixtral"))
    return config, tensors


def test_a_missing_expert_tensor_is_named_as_the_files_name_it(mixtral_folder, ops):
    config, tensors = mixtral_folder
    name = f"{BLOCK}.experts.2.w2.weight"
    rest = {key: tensor for key, tensor in tensors.items() if key != name}
    with pytest.raises(ModelWeightsError, match=rf"1 tensors .*{name}"):
        load(config, rest.items(), ops)


def test_an_expert_too_many_is_named(mixtral_folder, ops):
    config, tensors = mixtral_folder
    name = f"{BLOCK}.experts.3.w1.weight"
    with pytest.raises(ModelWeightsError, match=rf"no place.*{name}"):
        load(config, {**tensors, name: torch.zeros(50, 36)}.items(), ops)


def test_a_wrong_shape_is_named_with_both_shapes(mixtral_folder, ops):
    config, tensors = mixtral_folder
    name = f"{BLOCK}.experts.0.w1.weight"
    with pytest.raises(ModelWeightsError, match=rf"{name} has shape \[36, 50\].*\[50, 36\]"):
        load(config, {**tensors, name: tensors[name].T}.items(), ops)


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
