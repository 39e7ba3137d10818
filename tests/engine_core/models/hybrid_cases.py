"""Tiny random decoders of which some layers keep a state, and what transformers makes of them."""

import functools
import tempfile

import torch
import transformers
from safetensors.torch import load_file

from tests.engine_core.models.decoder_cases import random_model

M, A, C, F, E = "linear_attention", "full_attention", "conv", "mlp", "moe"
W = "sliding_attention"
_SHAPE = {
    "vocab_size": 131,
    "hidden_size": 36,
    "num_attention_heads": 6,
    "num_key_value_heads": 3,
    "max_position_embeddings": 128,
    "initializer_range": 0.3,
    "bos_token_id": 1,
    "eos_token_id": 7,
    "pad_token_id": 0,
}
_MAMBA = {"mamba_n_heads": 6, "mamba_d_state": 10, "rms_norm_eps": 1e-5}


def granite(layer_types, **options):
    shape = {**_SHAPE, **_MAMBA, "intermediate_size": 22, "shared_intermediate_size": 50}
    return transformers.GraniteMoeHybridConfig(
        **{**shape, "num_hidden_layers": len(layer_types), "layer_types": layer_types, **options}
    )


def lfm2(layer_types, **options):
    return transformers.Lfm2Config(
        **{
            **_SHAPE,
            "intermediate_size": 50,
            "block_multiple_of": 6,
            "num_hidden_layers": len(layer_types),
            "layer_types": layer_types,
            **options,
        }
    )


def lfm3(layer_types, **options):
    return transformers.Lfm3Config(
        **{
            **_SHAPE,
            "intermediate_size": 50,
            "head_dim": 12,
            "sliding_window": 5,
            "num_hidden_layers": len(layer_types),
            "layer_types": layer_types,
            **options,
        }
    )


def lfm2_moe(layer_types, **options):
    shape = {**_SHAPE, "intermediate_size": 50, "moe_intermediate_size": 22, "num_experts": 5}
    return transformers.Lfm2MoeConfig(
        **{
            **shape,
            "num_experts_per_tok": 2,
            "num_dense_layers": 1,
            "num_hidden_layers": len(layer_types),
            "layer_types": layer_types,
            **options,
        }
    )


def nemotron_h(layer_types, **options):
    return transformers.NemotronHConfig(
        **{
            **_SHAPE,
            "intermediate_size": 50,
            "head_dim": 10,
            "layers_block_type": layer_types,
            "mamba_num_heads": 6,
            "mamba_head_dim": 7,
            "ssm_state_size": 10,
            "n_groups": 2,
            "time_step_min": 1e-9,  # see the family's file
            "n_routed_experts": 6,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 22,
            "moe_shared_expert_intermediate_size": 30,
            "routed_scaling_factor": 2.5,
            **options,
        }
    )


def bamba(num_layers, attn_layer_indices, **options):
    return transformers.BambaConfig(
        **{
            **_SHAPE,
            **_MAMBA,
            "intermediate_size": 50,
            "num_hidden_layers": num_layers,
            "attn_layer_indices": attn_layer_indices,
            "head_dim": 12,
            **options,
        }
    )


def falcon_h1(num_layers, **options):
    return transformers.FalconH1Config(
        **{
            **_SHAPE,
            **_MAMBA,
            "intermediate_size": 50,
            "num_hidden_layers": num_layers,
            "mamba_d_ssm": 42,
            "head_dim": 12,
            **options,
        }
    )


def minimax(layer_types, **options):
    return transformers.MiniMaxConfig(
        **{
            **_SHAPE,
            "intermediate_size": 26,
            "num_hidden_layers": len(layer_types),
            "layer_types": layer_types,
            "num_local_experts": 4,
            "head_dim": 10,
            "block_size": 8,
            **options,
        }
    )


def kimi_linear(layer_types, **options):
    shape = {**_SHAPE, "intermediate_size": 50, "moe_intermediate_size": 22}
    latent = {"kv_lora_rank": 14, "qk_nope_head_dim": 7, "qk_rope_head_dim": 6, "v_head_dim": 5}
    return transformers.KimiLinearConfig(
        **{
            **shape,
            **latent,
            "num_key_value_heads": 6,
            "initializer_range": 0.2,
            "routed_scaling_factor": 1.5,
            "linear_num_heads": 6,
            "linear_head_dim": 10,
            "num_local_experts": 6,
            "num_experts_per_tok": 2,
            "num_hidden_layers": len(layer_types),
            "layer_types": layer_types,
            **options,
        }
    )


CONFIGS = {
    "granite, dense": granite(
        [M, A, M],
        num_local_experts=0,
        embedding_multiplier=3.0,
        attention_multiplier=0.3,
        residual_multiplier=0.5,
        logits_scaling=2.0,
    ),
    "granite, experts, angles, tied": granite(
        [A, M, A],
        num_local_experts=4,
        mamba_n_groups=2,
        mamba_proj_bias=True,
        position_embedding_type="rope",
        tie_word_embeddings=True,
    ),
    "granite, experts, tied": granite(
        [M, A, M], num_local_experts=4, mamba_n_groups=3, tie_word_embeddings=True
    ),
    "lfm2, tied": lfm2([C, A, C]),
    "lfm2, biases, width of 4": lfm2(
        [A, C, C, A],
        conv_bias=True,
        conv_L_cache=4,
        tie_word_embeddings=False,
        block_auto_adjust_ff_dim=False,
    ),
    "lfm3, tied": lfm3([C, W, A]),
    "lfm3, biases, no gates": lfm3(
        [A, C, W],
        conv_bias=True,
        attention_bias=True,
        use_attention_gate=False,
        tie_word_embeddings=False,
    ),
    "lfm2-moe": lfm2_moe([C, A, C]),
    "lfm2-moe, all sparse, no bias, untied": lfm2_moe(
        [A, C],
        num_dense_layers=0,
        use_expert_bias=False,
        norm_topk_prob=False,
        routed_scaling_factor=1.5,
        tie_word_embeddings=False,
    ),
    "nemotron-h, Mamba first and last": nemotron_h([M, F, A, M]),
    "nemotron-h, a feed-forward first and last, biases, one group": nemotron_h(
        [F, M, A, F], use_bias=True, mlp_bias=True, n_groups=1, conv_kernel=3
    ),
    "nemotron-h, attention first and last": nemotron_h([A, M, F, A], use_conv_bias=False),
    "nemotron-h, experts": nemotron_h([M, E, A, E]),
    "nemotron-h, experts in groups and a latent space": nemotron_h(
        [E, F, A, M], n_group=3, topk_group=2, moe_latent_size=20, norm_topk_prob=False
    ),
    "nemotron-h, experts in a latent space": nemotron_h([M, E, A], moe_latent_size=20),
    "bamba": bamba(3, [1], mamba_n_groups=2),
    "bamba, biases, tied": bamba(
        3, [0, 2], tie_word_embeddings=True, attention_bias=True, mlp_bias=True
    ),
    "falcon-h1": falcon_h1(
        2,
        embedding_multiplier=2.0,
        lm_head_multiplier=0.4,
        mlp_multipliers=[0.7, 1.4],
        key_multiplier=0.6,
        attention_in_multiplier=1.3,
        attention_out_multiplier=0.8,
        ssm_multipliers=[0.9, 1.1, 0.8, 1.2, 0.7],
        ssm_in_multiplier=1.2,
        ssm_out_multiplier=0.9,
        mamba_n_groups=2,
        mamba_rms_norm=True,
        mamba_norm_before_gate=False,
    ),
    "falcon-h1, biases, no norm, tied": falcon_h1(
        3,
        tie_word_embeddings=True,
        attention_bias=True,
        mlp_bias=True,
        projectors_bias=True,
        mamba_proj_bias=True,
        mamba_conv_bias=False,
        attention_out_multiplier=0.8,
        key_multiplier=0.6,
        mlp_multipliers=[0.7, 1.4],
        ssm_multipliers=[0.9, 1.1, 0.8, 1.2, 0.7],
    ),
    "minimax": minimax(
        [M, A, M],
        full_attn_alpha_factor=1.7,
        linear_attn_alpha_factor=1.7,
        mlp_alpha_factor=1.7,
    ),
    "minimax, attention last, tied": minimax(
        [A, M, A],
        tie_word_embeddings=True,
        full_attn_alpha_factor=2.5,
        linear_attn_alpha_factor=1.7,
        mlp_alpha_factor=3.0,
        full_attn_beta_factor=0.9,
        linear_attn_beta_factor=1.2,
        mlp_beta_factor=0.8,
    ),
    "kimi-linear": kimi_linear([M, A, M], linear_head_dim=13),  # q_proj has as many rows in both
    "kimi-linear, attention last, groups": kimi_linear(
        [A, M, A],
        n_group=3,
        topk_group=2,
        mlp_layer_types=["sparse", "dense", "sparse"],
        q_lora_rank=10,
        moe_renormalize=False,
        linear_conv_kernel_dim=3,
    ),
    "falcon-h1, norm before gates": falcon_h1(1, mamba_rms_norm=True, mamba_d_ssm=None),
}


def spread_out(model):
    """Decays, steps, skips and biases begin alike in every head and expert."""
    for name, parameter in model.named_parameters():
        if name.endswith((".A_log", ".dt_bias", ".D")):
            parameter.data += torch.randn_like(parameter) * 0.3
    for name, buffer in model.named_buffers():
        if name.endswith(("expert_bias", "e_score_correction_bias")):
            buffer += torch.randn_like(buffer) * 0.3
    return model


def published(reference):
    """A model's tensors, by the names of its checkpoints."""
    with tempfile.TemporaryDirectory() as folder:
        reference.save_pretrained(folder)
        return load_file(f"{folder}/model.safetensors")


@functools.cache
def reference_model(name):
    return spread_out(random_model(CONFIGS[name]))
