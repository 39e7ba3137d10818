"""Tiny models with latent attention, written as llama.cpp's converter would, give the logits of
transformers."""

import gguf
import pytest
import torch

from engine_core.model_files import open_model_files
from engine_core.models.loading import load_model
from tests.engine_core.models.decoder_cases import (
    assert_close,
    full_logits,
    random_model,
    sequences,
)
from tests.engine_core.models.latent_cases import minicpm3

LONG_ROPE = {
    "rope_type": "longrope",
    "rope_theta": 10_000.0,
    "short_factor": [1.0, 1.5, 2.5],
    "long_factor": [3.0, 4.0, 5.0],
    "original_max_position_embeddings": 128,
}
CONFIGS = {
    "minicpm3": minicpm3(
        hidden_size=48, v_head_dim=8, dim_model_base=256, rope_parameters=LONG_ROPE
    ),
}


def keys_of(config, arch):
    """What the converter's `set_gguf_parameters` writes."""
    return {
        "block_count": config.num_hidden_layers,
        "context_length": 128,
        "embedding_length": config.hidden_size,
        "feed_forward_length": config.intermediate_size,
        "attention.head_count": config.num_attention_heads,
        "attention.head_count_kv": config.num_key_value_heads,
        "attention.layer_norm_rms_epsilon": config.rms_norm_eps,
        "attention.q_lora_rank": config.q_lora_rank,
        "attention.kv_lora_rank": config.kv_lora_rank,
        "attention.key_length": config.qk_nope_head_dim + config.qk_rope_head_dim,
        "rope.dimension_count": config.qk_rope_head_dim,
    }


def tensors_of(config, state, arch):
    """What the converter's `modify_tensors` writes, by the names of the `gguf` package."""
    number = next(key for key, name in gguf.MODEL_ARCH_NAMES.items() if name == arch)
    names = gguf.get_tensor_name_map(number, config.num_hidden_layers)
    tensors = {}
    for name, tensor in state.items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        target = names.get_name(name, try_suffixes=(".weight", ".bias"))
        assert target is not None, name
        tensors[target] = tensor.numpy()
    for kind in ("short", "long"):
        if factors := config.rope_parameters.get(f"{kind}_factor"):
            tensors[f"rope_factors_{kind}.weight"] = torch.tensor(factors).numpy()
    return tensors


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("ops", ["torch"], indirect=True)
def test_a_file_gives_the_logits_of_transformers(name, paged_logits, ops, write_gguf):
    config, arch = CONFIGS[name], name.partition(",")[0]
    reference = random_model(config)
    keys = {f"{arch}.{key}": value for key, value in keys_of(config, arch).items()}
    tensors = tensors_of(config, reference.state_dict(), arch)
    file = write_gguf({"general.architecture": arch, **keys}, tensors)
    files = open_model_files(str(file), report=print)
    model = load_model(files.config, files.tensors(), dtype=torch.float32, ops=ops)
    token_lists = sequences((19, 5))
    assert_close(paged_logits(model, token_lists), full_logits(reference, token_lists))
