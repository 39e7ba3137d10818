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


def minicpm3(**options):
    return transformers.MiniCPM3Config(**{**_SHAPE, **options})


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
}


@functools.cache
def reference_model(name):
    return random_model(CONFIGS[name])
