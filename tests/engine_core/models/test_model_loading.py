"""What does not fit is refused by name, and never loaded halfway."""

import pytest
import torch
import transformers

from engine_core.models.errors import ModelConfigError, ModelWeightsError, UnsupportedArchitecture
from engine_core.models.layer_cache import paged_keys
from engine_core.models.loading import load_model

CONFIG = transformers.LlamaConfig(
    vocab_size=50,
    hidden_size=16,
    intermediate_size=24,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=32,
    architectures=["LlamaForCausalLM"],
).to_dict()


def tensors(**config):
    torch.manual_seed(0)
    return transformers.LlamaForCausalLM(
        transformers.LlamaConfig.from_dict({**CONFIG, **config})
    ).state_dict()


def load(ops, weights=None, **config):
    weights = tensors() if weights is None else weights
    items = weights.items() if isinstance(weights, dict) else weights
    return load_model({**CONFIG, **config}, items, dtype=torch.float32, ops=ops)


def refuse_to_read():
    raise AssertionError("a tensor was read")
    yield


def test_unknown_architecture_names_itself_and_the_supported_ones(ops):
    with pytest.raises(UnsupportedArchitecture, match=r"OPTForCausalLM.*LlamaForCausalLM"):
        load(ops, refuse_to_read(), architectures=["OPTForCausalLM"], model_type="opt")


def test_model_type_serves_where_architectures_is_absent(ops):
    assert load(ops, architectures=None).spec.num_layers == 2
    with pytest.raises(UnsupportedArchitecture, match="model_type 'mamba'"):
        load(ops, refuse_to_read(), architectures=None, model_type="mamba")


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"hidden_act": "relu"}, "relu"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ({"rope_parameters": {"rope_type": "dynamic", "factor": 2.0}}, "dynamic"),
        ({"rope_scaling": {"type": "longrope", "factor": 2.0}}, "longrope"),
        ({"quantization_config": {"quant_method": "gptq"}}, "quantization_config"),
        (
            {
                "architectures": ["Qwen2ForCausalLM"],
                "layer_types": ["full_attention", "linear_attention"],
            },
            "linear_attention",
        ),
        (
            {
                "architectures": ["Qwen2ForCausalLM"],
                "layer_types": ["full_attention", "sliding_attention"],
            },
            "no window",
        ),
        (
            {"architectures": ["Gemma3ForCausalLM"], "use_bidirectional_attention": True},
            "use_bidirectional_attention is for Gemma3TextModel alone",
        ),
        (
            {"architectures": ["Gemma3ForCausalLM"], "attn_logit_softcapping": 50.0},
            "attn_logit_softcapping",
        ),
    ],
)
def test_options_without_exact_code_are_refused_before_weights_are_read(ops, options, reason):
    with pytest.raises(UnsupportedArchitecture, match=reason):
        load(ops, refuse_to_read(), **options)


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"hidden_size": None}, "hidden_size is missing"),
        ({"vocab_size": -1}, "vocab_size is -1"),
        ({"num_key_value_heads": 3}, "4 attention heads cannot share 3"),
        ({"rms_norm_eps": "small"}, "rms_norm_eps is 'small'"),
    ],
)
def test_impossible_config_is_an_error_that_names_the_field(ops, options, reason):
    with pytest.raises(ModelConfigError, match=reason):
        load(ops, refuse_to_read(), **options)


UP, NORM, HEAD = "model.layers.1.mlp.up_proj.weight", "model.norm.weight", "lm_head.weight"
BIAS = "model.layers.0.self_attn.q_proj.bias"


@pytest.mark.parametrize(
    ("left_out", "added", "message"),
    [
        (UP, {}, rf"1 tensors .*{UP}"),
        (HEAD, {}, HEAD),
        (None, {BIAS: torch.zeros(16)}, BIAS),
        (NORM, {NORM: torch.zeros(17)}, rf"{NORM} has shape \[17\].*\[16\]"),
        (None, {NORM: torch.zeros(16)}, f"{NORM} comes twice"),
    ],
    ids=["missing", "without the head of an untied model", "unexpected", "shape", "doubled"],
)
def test_a_tensor_that_does_not_fit_is_named(ops, left_out, added, message):
    items = [(name, tensor) for name, tensor in tensors().items() if name != left_out]
    with pytest.raises(ModelWeightsError, match=message):
        load(ops, [*items, *added.items()])


def test_old_inverse_frequencies_in_a_checkpoint_are_ignored(ops):
    weights = {**tensors(), "model.layers.0.self_attn.rotary_emb.inv_freq": torch.zeros(2)}
    assert load(ops, weights).spec.keys_of(0).key_size == 4


@pytest.mark.parametrize("head", ["absent", "equal", "different"])
def test_tied_head_follows_the_checkpoint_as_transformers_does(ops, head):
    weights = tensors()
    embedding = weights["model.embed_tokens.weight"]
    expected = embedding
    if head == "absent":
        del weights["lm_head.weight"]
    elif head == "equal":
        weights["lm_head.weight"] = embedding.clone()
    else:
        expected = weights["lm_head.weight"]
    model = load(ops, weights, tie_word_embeddings=True)
    hidden = torch.randn(3, 16)
    torch.testing.assert_close(model.compute_logits(hidden), hidden @ expected.T)


def test_spec_tells_the_cache_what_it_needs(ops):
    spec = load(ops).spec
    assert (spec.num_query_heads, spec.layers) == (4, paged_keys(2, 4, (None, None)))
    assert (spec.vocab_size, spec.max_model_len) == (50, 32)
