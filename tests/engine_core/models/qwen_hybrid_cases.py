"""Tiny random Qwens with gated delta nets, and what transformers makes of them."""

import functools

import torch
import transformers

from tests.engine_core.models.decoder_cases import random_model

M, A = "linear_attention", "full_attention"
_SHAPE = {
    "vocab_size": 131,
    "hidden_size": 36,
    "intermediate_size": 50,
    "num_attention_heads": 6,
    "num_key_value_heads": 3,
    "head_dim": 24,  # of which 6 turn
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 6,
    "linear_key_head_dim": 10,
    "linear_value_head_dim": 7,
    "max_position_embeddings": 128,
    "initializer_range": 0.15,
    "bos_token_id": 1,
    "eos_token_id": 7,
    "pad_token_id": 0,
}


def qwen3_5(layer_types, **options):
    return transformers.Qwen3_5TextConfig(
        **{**_SHAPE, "num_hidden_layers": len(layer_types), "layer_types": layer_types, **options}
    )


def qwen3_5_moe(layer_types, **options):
    shape = {**_SHAPE, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 22}
    shape = {**shape, "shared_expert_intermediate_size": 30, "layer_types": layer_types}
    del shape["intermediate_size"]
    return transformers.Qwen3_5MoeTextConfig(
        **{**shape, "num_hidden_layers": len(layer_types), **options}
    )


def qwen3_next(layer_types, **options):
    shape = {**_SHAPE, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 22}
    shape = {**shape, "shared_expert_intermediate_size": 30, "layer_types": layer_types}
    return transformers.Qwen3NextConfig(
        **{**shape, "num_hidden_layers": len(layer_types), **options}
    )


CONFIGS = {
    "qwen3.5": qwen3_5([M, M, A, M]),
    "qwen3.5, attention last, tied, biases": qwen3_5(
        [A, M, A],
        tie_word_embeddings=True,
        attention_bias=True,
        linear_conv_kernel_dim=3,
        linear_num_value_heads=2,
    ),
    "qwen3.5 with experts": qwen3_5_moe([M, A, M]),
    "qwen3.5 with experts, attention first and last, tied": qwen3_5_moe(
        [A, M, M, A], tie_word_embeddings=True, num_experts_per_tok=3
    ),
    "qwen3-next, a dense layer": qwen3_next([M, A, M], mlp_only_layers=[0]),
    "qwen3-next, attention last, not renormalised": qwen3_next([M, M, A], norm_topk_prob=False),
}


def spread_out(model):
    """Decays begin alike in every head, and slow ones are rare."""
    for name, parameter in model.named_parameters():
        if name.endswith((".A_log", ".dt_bias")):
            parameter.data = torch.randn_like(parameter)
    return model


@functools.cache
def reference_model(name):
    return spread_out(random_model(CONFIGS[name]))
