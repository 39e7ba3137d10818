"""Random weights of a config's shape."""

import pytest
import torch

from engine_core.models.loading import draw_weight, load_dummy_model

CPU = torch.device("cpu")
LLAMA = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 24,
    "intermediate_size": 40, "num_hidden_layers": 2, "num_attention_heads": 3,
    "num_key_value_heads": 1, "vocab_size": 61, "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
}  # fmt: skip
MIXTRAL = LLAMA | {
    "architectures": ["MixtralForCausalLM"], "model_type": "mixtral", "num_local_experts": 4,
    "num_experts_per_tok": 2,
}  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("config", [LLAMA, LLAMA | {"tie_word_embeddings": True}, MIXTRAL])
def test_a_model_of_any_kind_runs_with_finite_logits(ops, paged_logits, config, dtype):
    model = load_dummy_model(config, dtype=dtype, ops=ops)
    [logits] = paged_logits(model, [[3, 1, 4, 1, 5, 9, 2, 6]], dtype=dtype)
    assert logits.isfinite().all()
    assert logits.std() > 0


def test_equal_names_give_equal_weights_and_others_differ():
    def draw(name):
        return draw_weight(name, (3, 5), dtype=torch.float32, device=CPU)

    assert torch.equal(draw("a.weight"), draw("a.weight"))
    assert not torch.equal(draw("a.weight"), draw("b.weight"))


def test_weights_have_the_models_dtype_and_norms_are_one():
    options = {"dtype": torch.bfloat16, "device": CPU}
    drawn = draw_weight("model.layers.0.mlp.up_proj.weight", (200, 300), **options)
    assert drawn.dtype == torch.bfloat16
    assert abs(drawn.float().std().item() - 0.02) < 0.001
    assert draw_weight("model.norm.weight", (7,), **options).tolist() == [1.0] * 7
