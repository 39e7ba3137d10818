"""Tiny random decoders with latent attention, and what transformers makes of them."""

import functools

import transformers

from tests.engine_core.models.decoder_cases import YARN_ROPE, random_model

_SHAPE = {
    "vocab_size": 131,
    "hidden_size": 36,
    "intermediate_size": 50,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 6,
    "max_position_embeddings": 128,
    "initializer_range": 0.3,
    "kv_lora_rank": 14,
    "q_lora_rank": 10,
    "qk_nope_head_dim": 7,
    "qk_rope_head_dim": 6,
    "v_head_dim": 5,
    "bos_token_id": 1,
    "eos_token_id": 7,
    "pad_token_id": 0,
}
LATENT_YARN = YARN_ROPE | {"mscale": 0.7, "mscale_all_dim": 1.1}

MISTRAL_YARN = YARN_ROPE | {"mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.4}
MISTRAL_YARN["original_max_position_embeddings"] = 16


def minicpm3(**options):
    return transformers.MiniCPM3Config(**{**_SHAPE, **options})


_SPARSE = {
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 22,
    "n_shared_experts": 2,
    "first_k_dense_replace": 1,
    "rms_norm_eps": 1e-2,  # not that of the latents' norms
}
_GROUPS = {"n_group": 4, "topk_group": 2}


def deepseek_v2(**options):
    return transformers.DeepseekV2Config(
        **{**_SHAPE, **_SPARSE, "qk_nope_head_dim": 8, **options}  # an odd head has no pairs there
    )


def deepseek_v3(**options):
    return transformers.DeepseekV3Config(**{**_SHAPE, **_SPARSE, **_GROUPS, **options})


def glm4_moe_lite(**options):
    return transformers.Glm4MoeLiteConfig(**{**_SHAPE, **_SPARSE, **options})


def mistral4(**options):
    sizes = {**_SHAPE, **_SPARSE, "rope_parameters": MISTRAL_YARN, "n_shared_experts": 1}
    return transformers.Mistral4Config(**{**sizes, **options})


_INDEX = {"index_n_heads": 9, "index_head_dim": 11, "index_topk": 13}  # 9 * 11 > the hidden size


def deepseek_v32(**options):
    return transformers.DeepseekV32Config(**{**_SHAPE, **_SPARSE, **_GROUPS, **_INDEX, **options})


def glm_moe_dsa(**options):
    return transformers.GlmMoeDsaConfig(**{**_SHAPE, **_SPARSE, **_INDEX, **options})


CONFIGS = {
    "minicpm3": minicpm3(),
    "minicpm3, whole queries, untied, YaRN": minicpm3(
        q_lora_rank=None,
        tie_word_embeddings=False,
        rope_parameters=LATENT_YARN,
        scale_emb=4,
        scale_depth=2.0,
        dim_model_base=24,
    ),
    "deepseek-v2, lite": deepseek_v2(q_lora_rank=None),
    "deepseek-v2, groups, YaRN, all sparse, tied": deepseek_v2(
        topk_method="group_limited_greedy",
        rope_parameters=LATENT_YARN,
        first_k_dense_replace=0,
        routed_scaling_factor=1.5,
        tie_word_embeddings=True,
        **_GROUPS,
    ),
    "deepseek-v3, YaRN": deepseek_v3(rope_parameters=LATENT_YARN),
    "deepseek-v3, halves, whole queries, not renormalised": deepseek_v3(
        rope_interleave=False, q_lora_rank=None, norm_topk_prob=False, n_group=1, topk_group=1
    ),
    "glm-4.7-flash": glm4_moe_lite(),
    "mistral-4": mistral4(),
    "mistral-4, halves, whole queries, all sparse, tied": mistral4(
        rope_interleave=False,
        q_lora_rank=None,
        first_k_dense_replace=0,
        norm_topk_prob=False,
        routed_scaling_factor=1.5,
        tie_word_embeddings=True,
    ),
    "deepseek-v3.2, YaRN": deepseek_v32(rope_parameters=LATENT_YARN),
    "glm-5, the last layer shares, tied": glm_moe_dsa(
        indexer_types=["full", "shared", "shared"], tie_word_embeddings=True
    ),
    "glm-5, a shared layer between": glm_moe_dsa(
        indexer_types=["full", "shared", "full"], index_topk=40
    ),
}


@functools.cache
def reference_model(name):
    return random_model(CONFIGS[name])
