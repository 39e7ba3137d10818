"""Logits of heads for multi-token prediction, on given hidden states, are those of the published
formula around transformers' layer."""

import pytest
import torch

from engine_core.models.errors import ModelWeightsError
from engine_core.models.loading import load_model, load_mtp_head
from tests.engine_core.models import latent_cases
from tests.engine_core.models.head_context import context_for
from tests.engine_core.models.qwen_hybrid_cases import CONFIGS, reference_model
from tests.mtp_heads import PublishedMTP

T = 21


def load(reference, tensors, ops):
    config, kept = reference.config.to_dict(), {"dtype": torch.float32, "ops": ops}
    target = load_model(config, tensors.items(), **kept)
    return load_mtp_head(config, tensors.items(), target, **kept)


@pytest.mark.parametrize(
    "name",
    [
        "qwen3.5",
        "qwen3.5, attention last, tied, biases",
        "qwen3.5 with experts",
        "qwen3-next, a dense layer",
        "deepseek-v3, YaRN",
        "glm-4.7-flash",
        "deepseek-v3.2, YaRN",
    ],
)
@torch.inference_mode()
def test_logits_and_states_are_those_of_the_published_formula(ops, name):
    reference = (reference_model if name in CONFIGS else latent_cases.reference_model)(name)
    published = PublishedMTP(reference)
    tensors = reference.state_dict() | published.tensors
    head, positions = load(reference, tensors, ops), torch.arange(T)
    assert head.state_layers == (reference.config.num_hidden_layers + 1,)
    generator = torch.Generator().manual_seed(1)
    size = reference.config.hidden_size
    expected_hidden = torch.randn(1, T, size, generator=generator)
    hidden = expected_hidden[0]
    next_ids = torch.randint(131, (T,), generator=generator)
    for _ in range(2):  # with the target's states, and with its own
        context = context_for(head, T, ops)
        logits, hidden = head.guess(head.remember(next_ids, positions, hidden, context), context)
        expected, expected_hidden = published(next_ids[None], expected_hidden)
        torch.testing.assert_close(logits, expected[0], rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(hidden, expected_hidden[0], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("ops", ["native"], indirect=True)
def test_a_checkpoint_without_the_head_or_with_another_is_refused(ops):
    reference = reference_model("qwen3.5")
    own, tensors = reference.state_dict(), PublishedMTP(reference).tensors
    with pytest.raises(ModelWeightsError, match=r"no tensors mtp\.\* and no model\.layers\.4\."):
        load(reference, own, ops)
    with pytest.raises(ModelWeightsError, match=r"of the head are missing: model\.fc\.weight"):
        load(reference, own | {name: tensors[name] for name in tensors if ".fc." not in name}, ops)
    more = own | tensors | {"mtp.layers.1.input_layernorm.weight": tensors["mtp.norm.weight"]}
    with pytest.raises(ModelWeightsError, match=r"no place in the head: model\.layers\.1\."):
        load(reference, more, ops)
