"""Logits of EAGLE-3 heads on given hidden states are those of the published formula, in every
spelling of a checkpoint."""

import pytest
import torch

from engine_core.models.errors import ModelConfigError, ModelWeightsError, UnsupportedArchitecture
from engine_core.models.heads.eagle_config import read_eagle_config
from engine_core.models.loading import load_dummy_model, load_eagle_head
from tests.eagle_heads import PublishedHead, head_config, head_tensors
from tests.engine_core.models.head_context import context_for

TARGET = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 32,
    "intermediate_size": 40, "num_hidden_layers": 9, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": 61, "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "tie_word_embeddings": True,
}  # fmt: skip
PART = {"draft_vocab_size": 25}
T = 21


def speculators(config):
    """As the speculators library nests it."""
    own = ("draft_vocab_size", "norm_before_fc", "norm_output", "fc_norm", "architectures")
    inner = {name: value for name, value in config.items() if name not in own}
    outer = {name: config[name] for name in own if name in config}
    return outer | {"speculators_model_type": "eagle3", "transformer_layer_config": inner}


@pytest.fixture(scope="module")
def target(ops):
    return load_dummy_model(TARGET, dtype=torch.float32, ops=ops)


def load(config, tensors, target, ops):
    return load_eagle_head(config, tensors.items(), target, dtype=torch.float32, ops=ops)


@pytest.mark.parametrize(
    ("options", "own_embedding"),
    [
        ({}, False),
        (PART, True),
        (PART | {"norm_before_residual": True, "norm_before_fc": True}, False),
        (PART | {"fc_norm": True, "norm_output": True}, False),
        (PART | {"hidden_size": 24, "target_hidden_size": 32}, True),
    ],
)
@torch.inference_mode()
def test_logits_and_states_are_those_of_the_published_formula(ops, target, options, own_embedding):
    config = head_config(TARGET, **options)
    tensors = head_tensors(config, own_embedding=own_embedding)
    generator = torch.Generator().manual_seed(1)
    states = [torch.randn(T, 32, generator=generator) for _ in range(3)]
    next_ids = torch.randint(61, (T,), generator=generator)
    head, positions = load(config, tensors, target, ops), torch.arange(T)
    assert head.state_layers == (2, 4, 6)
    embedding = target.vocabulary.embed(torch.arange(61))
    published = PublishedHead(config, tensors, embedding)
    hidden, expected_hidden = head.combine(states), published.combine(states)
    for _ in range(2):  # with the target's states, and with its own
        torch.testing.assert_close(hidden, expected_hidden, rtol=1e-4, atol=1e-4)
        context = context_for(head, T, ops)
        logits, hidden = head.guess(head.remember(next_ids, positions, hidden, context), context)
        expected, expected_hidden = published(next_ids, expected_hidden)
        columns = torch.arange(expected.shape[1]) + tensors.get("d2t", 0)
        assert logits.shape == (T, 61)
        torch.testing.assert_close(logits[:, columns], expected, rtol=1e-4, atol=1e-4)
        assert int(logits.isfinite().sum()) == expected.numel()
    for part in (head._compute_keys, head._compute_guess):
        assert getattr(part, "is_captured", True), "an operation is not native"


@pytest.mark.parametrize("ops", ["native"], indirect=True)
@torch.inference_mode()
def test_spellings_of_one_head_are_one_head(ops, target):
    config = head_config(TARGET, **PART, norm_before_residual=True)
    tensors = head_tensors(config)
    renamed = {name.replace("midlayer.", "layers.0."): each for name, each in tensors.items()}
    spellings = [
        (config, tensors),
        (config, {"model." * ("lm_head" not in name) + name: tensors[name] for name in tensors}),
        (speculators(config) | {"eagle_aux_hidden_state_layer_ids": [2, 4, 6]}, renamed),
        (config | {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 3, 5]}}, renamed),
    ]
    states = [torch.randn(T, 32) for _ in range(3)]
    answers = []
    for each, parts in spellings:
        head = load(each, parts, target, ops)
        assert head.state_layers == (2, 4, 6)
        context = context_for(head, T, ops)
        ids = positions = torch.arange(T)
        hidden = head.combine(states)
        answers.append(head.guess(head.remember(ids, positions, hidden, context), context)[0])
    assert all(torch.equal(each, answers[0]) for each in answers)


def test_the_speculators_library_norms_before_the_residual_by_default(target):
    shape = target.config
    assert read_eagle_config(speculators(head_config(TARGET)), shape).norm_before_residual
    assert not read_eagle_config(head_config(TARGET), shape).norm_before_residual


@pytest.mark.parametrize("ops", ["native"], indirect=True)
@pytest.mark.parametrize(
    ("options", "error", "why"),
    [
        ({"num_hidden_layers": 2}, UnsupportedArchitecture, "of 2 layers are not supported"),
        ({"target_hidden_size": 64}, ModelConfigError, "states of 64, the model's have 32"),
        ({"draft_vocab_size": 62}, ModelConfigError, "is 62, the vocabulary has 61"),
        ({"eagle_aux_hidden_state_layer_ids": [2, 4, 10]}, ModelConfigError, "the model has 9"),
        ({"eagle_aux_hidden_state_layer_ids": [2, 2, 3]}, ModelConfigError, "one of them twice"),
        ({"eagle_config": {"use_aux_hidden_state": False}}, UnsupportedArchitecture, "use_aux"),
        ({"parallel_drafting": True}, UnsupportedArchitecture, "parallel_drafting True"),
        ({"layer_types": ["sliding_attention"]}, UnsupportedArchitecture, "sliding attention"),
        ({"fc_norm": True}, ModelWeightsError, "3 tensors of the head are missing: model.fc_norm"),
        ({"rms_norm_eps": "small"}, ModelConfigError, "rms_norm_eps"),
    ],
)
def test_what_a_head_may_not_be(ops, target, options, error, why):
    tensors = head_tensors(head_config(TARGET))
    with pytest.raises(error, match=why):
        load(head_config(TARGET, **options), tensors, target, ops)


@pytest.mark.parametrize("ops", ["native"], indirect=True)
def test_tensors_that_do_not_fit_are_refused(ops, target):
    config = head_config(TARGET, **PART)
    tensors = head_tensors(config)
    width = torch.zeros(32, 64)
    wrong = [
        ({"fc.weight": width}, UnsupportedArchitecture, "EAGLE-1 are not supported"),
        ({"midlayer.mlp.up_proj.weight": width}, ModelWeightsError, "config.json asks for"),
        ({"d2t": tensors["d2t"] + 40}, ModelWeightsError, "the vocabulary has 61"),
        ({"mask_hidden": torch.zeros(96)}, ModelWeightsError, "no place in the head: mask_hidden"),
    ]
    for changed, error, why in wrong:
        with pytest.raises(error, match=why):
            load(config, tensors | changed, target, ops)
    for left_out in ("d2t", "lm_head.weight", "midlayer.hidden_norm.weight"):
        rest = {name: tensor for name, tensor in tensors.items() if name != left_out}
        with pytest.raises(ModelWeightsError, match=f"missing: .*{left_out.split('.', 1)[-1]}"):
            load(config, rest, target, ops)


def test_heads_are_not_for_gemma(ops):
    gemma = TARGET | {"architectures": ["Gemma3ForCausalLM"], "model_type": "gemma3_text"}
    target = load_dummy_model(gemma | {"head_dim": 8}, dtype=torch.float32, ops=ops)
    with pytest.raises(UnsupportedArchitecture, match="not for Gemma"):
        load(head_config(TARGET), head_tensors(head_config(TARGET)), target, ops)
