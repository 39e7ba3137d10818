"""What checkpoints of Gemma 4 and Gemma 3n say and hold beside what
`test_logits_against_transformers` runs."""

import pytest
import torch

from engine_core.errors import ConfigurationError
from engine_core.models.errors import ModelConfigError, UnsupportedArchitecture
from engine_core.models.parallel.stages import split_layers
from engine_core.models.registry import read_model_config
from engine_core.options.engine import EngineOptions
from engine_core.options.refusals import refuse_unsupported
from engine_core.options.speculation import SpeculationOptions
from tests.engine_core.models.decoder_cases import (
    CONFIGS,
    assert_close,
    full_logits,
    gemma3n,
    gemma4,
    load,
    reference_model,
    sequences,
)

NAME = "gemma4 embeddings per layer, shared keys"
TABLE = "model.embed_tokens_per_layer.weight"


@pytest.mark.parametrize("ops", ["torch"], indirect=True)
def test_tensors_that_no_layer_reads_may_be_there(paged_logits, ops):
    """As E2B and E4B are published."""
    reference, config = reference_model(NAME), CONFIGS[NAME]
    tensors = dict(reference.state_dict())
    for layer in range(config.num_hidden_layers - config.num_kv_shared_layers, 5):
        for part in ("k_proj", "v_proj", "k_norm"):
            tensors[f"model.layers.{layer}.self_attn.{part}.weight"] = torch.ones(1)
    model = load(config.to_dict(), tensors.items(), ops)
    assert_close(paged_logits(model, sequences((9,))), full_logits(reference, sequences((9,))))


def test_the_table_is_read_where_it_lies(paged_logits, ops):
    """Neither copied nor packed: it is half of a model."""
    reference = reference_model(NAME)
    tensors = dict(reference.state_dict())
    tensors[TABLE] = torch.zeros_like(tensors[TABLE], dtype=torch.bfloat16)
    model = load(CONFIGS[NAME].to_dict(), tensors.items(), ops)
    tensors[TABLE].copy_(reference.state_dict()[TABLE])
    mine, other = paged_logits(model, sequences((9, 5))), full_logits(reference, sequences((9, 5)))
    assert all((a - b).abs().max() < 0.05 * b.std() for a, b in zip(mine, other, strict=True))


def test_sizes_of_full_layers_are_spelled_in_two_ways():
    config = gemma4(attention_k_eq_v=True, num_global_key_value_heads=1).to_dict()
    plain = config | {"per_layer_config": None, "global_head_dim": 14}
    plain["num_global_key_value_heads"] = 1
    assert read_model_config(plain).spec == read_model_config(config).spec
    ungated = read_model_config(plain | {"attention_k_eq_v": False})
    assert [ungated.spec.keys_of(layer).num_kv_heads for layer in range(4)] == [3] * 4


@pytest.mark.parametrize(
    ("options", "error", "reason"),
    [
        ({"use_bidirectional_attention": "all"}, UnsupportedArchitecture, '"all"'),
        ({"sliding_window": None}, UnsupportedArchitecture, "no window"),
        ({"num_kv_shared_layers": 3}, ModelConfigError, "is 3; of the 4 layers none before"),
        ({"num_kv_shared_layers": 9}, ModelConfigError, "is 9; of the 4"),
        ({"num_key_value_heads": 2}, ModelConfigError, "9 attention heads cannot share 2"),
    ],
)
def test_what_would_change_the_result_is_refused_by_name(options, error, reason):
    with pytest.raises(error, match=reason):
        read_model_config(gemma4().to_dict() | options)


@pytest.mark.parametrize(
    ("options", "error", "reason"),
    [
        ({"hidden_activation": "silu"}, UnsupportedArchitecture, "with silu, only gelu"),
        ({"hidden_size_per_layer_input": 0}, UnsupportedArchitecture, "without embeddings per"),
        ({"altup_active_idx": 4}, ModelConfigError, "is 4 of 4 streams"),
        ({"intermediate_size": [50]}, ModelConfigError, "intermediate_size must list 5 layers"),
        ({"activation_sparsity_pattern": [1.0] * 5}, ModelConfigError, "shares from 0 to 1"),
        ({"num_kv_shared_layers": 5}, ModelConfigError, "is 5; of the 5 layers"),
    ],
)
def test_what_would_change_gemma_3n_is_refused_by_name(options, error, reason):
    with pytest.raises(error, match=reason):
        read_model_config(gemma3n().to_dict() | options)


@pytest.mark.parametrize("ops", ["torch"], indirect=True)
def test_what_embeddings_per_layer_do_not_allow_is_refused_by_name(ops):
    config = gemma4(hidden_size_per_layer_input=10, vocab_size_per_layer_input=131)
    with pytest.raises(ModelConfigError, match="2, and each layer has embeddings of the tokens"):
        split_layers(read_model_config(config.to_dict()), 2)
    model = load(CONFIGS[NAME].to_dict(), reference_model(NAME).state_dict().items(), ops)
    with pytest.raises(ConfigurationError, match="each layer of Gemma has embeddings of a token"):
        refuse_unsupported(EngineOptions(model="m", enable_prompt_embeds=True), model, "Gemma")
    model = load(gemma3n().to_dict(), reference_model("gemma3n").state_dict().items(), ops)
    options = EngineOptions(
        model="m",
        speculation=SpeculationOptions(speculative="draft", draft_model="first-layers:2"),
    )
    with pytest.raises(ConfigurationError, match="with one residual stream, which Gemma 3n does"):
        refuse_unsupported(options, model, "Gemma 3n")
