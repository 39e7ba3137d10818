"""Tiny random decoders of awkward shapes, of every family, and what transformers makes of them."""

import functools

import torch
import transformers

from engine_core.models.loading import load_model

LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 500.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
YARN_ROPE = {
    "rope_type": "yarn",
    "rope_theta": 1000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 32,
}
NTK_ALPHA = {"rope_type": "dynamic", "rope_theta": 300.0, "alpha": 7.0, "factor": 1.0}
SHAPE = {
    "vocab_size": 131,
    "hidden_size": 36,
    "intermediate_size": 50,
    "num_hidden_layers": 3,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "max_position_embeddings": 128,
    "initializer_range": 0.3,
}


def llama(**options):
    return transformers.LlamaConfig(**{**SHAPE, "head_dim": 8, **options})


def mistral(**options):
    return transformers.MistralConfig(**{**SHAPE, "head_dim": 4, **options})


def qwen2(**options):
    return transformers.Qwen2Config(**{**SHAPE, **options})


def qwen3(**options):
    return transformers.Qwen3Config(**{**SHAPE, "head_dim": 10, **options})


def gemma2(**options):
    shape = {**SHAPE, "sliding_window": 5, "head_dim": 8, "query_pre_attn_scalar": 11}
    return transformers.Gemma2Config(**{**shape, "attn_logit_softcapping": 3.0, **options})


def gemma3(**options):
    shape = {**SHAPE, "num_hidden_layers": 7, "num_key_value_heads": 1, "sliding_window": 3}
    return transformers.Gemma3TextConfig(
        **{**shape, "head_dim": 8, "query_pre_attn_scalar": 11, **options}
    )


def gemma4(**options):
    shape = {**SHAPE, "num_hidden_layers": 4, "head_dim": 8, "global_head_dim": 14}
    return transformers.Gemma4TextConfig(
        **{
            **shape,
            "sliding_window": 5,
            "layer_types": ["sliding_attention", "full_attention"] * 2,
            "hidden_size_per_layer_input": 0,
            "final_logit_softcapping": 4.0,
            **options,
        }
    )


def gemma3n(**options):
    shape = {**SHAPE, "num_hidden_layers": 5, "head_dim": 8, "sliding_window": 5}
    return transformers.Gemma3nTextConfig(
        **{
            **shape,
            "intermediate_size": [50, 50, 60, 50, 50],
            "layer_types": ["full_attention", *["sliding_attention", "full_attention"] * 2],
            "activation_sparsity_pattern": [0.95, 0.7, 0.0, 0.0, 0.6],
            "num_kv_shared_layers": 2,
            "hidden_size_per_layer_input": 10,
            "vocab_size_per_layer_input": 120,
            "laurel_rank": 6,
            "initializer_range": 0.13,
            **options,
        }
    )


def cohere2(**options):
    shape = {**SHAPE, "sliding_window": 5, "sliding_window_pattern": 3, "logit_scale": 0.25}
    return transformers.Cohere2Config(**{**shape, **options})


def phi3(**options):
    return transformers.Phi3Config(**{**SHAPE, "pad_token_id": 0, **options})


def mixtral(num_experts, top_k, **options):
    return transformers.MixtralConfig(
        **{**SHAPE, "num_local_experts": num_experts, "num_experts_per_tok": top_k, **options}
    )


def qwen3_moe(num_experts, top_k, **options):
    return transformers.Qwen3MoeConfig(
        **{
            **SHAPE,
            "num_experts": num_experts,
            "num_experts_per_tok": top_k,
            "moe_intermediate_size": 22,
            "norm_topk_prob": True,
            **options,
        }
    )


def qwen2_moe(num_experts, top_k, **options):
    return transformers.Qwen2MoeConfig(
        **{
            **SHAPE,
            "num_experts": num_experts,
            "num_experts_per_tok": top_k,
            "moe_intermediate_size": 22,
            "shared_expert_intermediate_size": 30,
            **options,
        }
    )


def olmoe(num_experts, top_k, **options):
    return transformers.OlmoeConfig(
        **{**SHAPE, "num_experts": num_experts, "num_experts_per_tok": top_k, **options}
    )


def gpt_oss(num_experts, top_k, **options):
    shape = {**SHAPE, "num_hidden_layers": 4, "head_dim": 8, "sliding_window": 7}
    sizes = {"num_local_experts": num_experts, "num_experts_per_tok": top_k}
    return transformers.GptOssConfig(**{**shape, **sizes, **options})


def deepseek_like(kind, **options):
    """Experts as DeepSeek-V3 has them, two of six for each token."""
    shape = {**SHAPE, "head_dim": 8, "moe_intermediate_size": 22, "n_routed_experts": 6}
    shape |= {"num_experts_per_tok": 2, "n_shared_experts": 2, "pad_token_id": 0}
    return kind(**{**shape, "routed_scaling_factor": 2.5, **options})


def granite_moe(kind, **options):
    factors = {"embedding_multiplier": 12.0, "attention_multiplier": 0.3}
    factors |= {"residual_multiplier": 0.22, "logits_scaling": 8.0}
    return kind(**{**SHAPE, "num_local_experts": 4, **factors, **options})


DENSE = {
    "llama": llama(),
    "llama tied": llama(tie_word_embeddings=True),
    "llama biases": llama(attention_bias=True, mlp_bias=True),
    "llama grouped by 7": llama(hidden_size=56, num_attention_heads=7, num_key_value_heads=1),
    "llama multi head": llama(num_key_value_heads=9),
    "llama llama3 rope": llama(rope_parameters=LLAMA3_ROPE),
    "llama yarn rope": llama(rope_parameters=YARN_ROPE),
    "llama yarn rope untruncated": llama(
        rope_parameters={**YARN_ROPE, "truncate": False, "beta_fast": 4.0, "attention_factor": 1.3}
    ),
    "llama linear rope": llama(
        rope_parameters={"rope_type": "linear", "factor": 3.0, "rope_theta": 100.0}
    ),
    "llama gelu": llama(hidden_act="gelu_pytorch_tanh"),
    "mistral window 3": mistral(sliding_window=3),
    "mistral window 16": mistral(sliding_window=16),
    "mistral window 1": mistral(sliding_window=1),
    "mistral no window": mistral(sliding_window=None),
    "qwen2": qwen2(),
    "qwen2 windows in later layers": qwen2(
        use_sliding_window=True, sliding_window=5, max_window_layers=1
    ),
    "qwen2 tied": qwen2(tie_word_embeddings=True),
    "qwen3": qwen3(),
    "qwen3 biases": qwen3(attention_bias=True, tie_word_embeddings=True),
    "qwen3 layer types": qwen3(
        use_sliding_window=True,
        sliding_window=4,
        layer_types=["sliding_attention", "full_attention", "sliding_attention"],
    ),
    "gemma2": gemma2(),
    "gemma2 low caps, untied, biases": gemma2(
        attn_logit_softcapping=0.7,
        final_logit_softcapping=None,
        layer_types=["full_attention", "sliding_attention", "full_attention"],
        tie_word_embeddings=False,
        attention_bias=True,
    ),
    "gemma2 no caps": gemma2(attn_logit_softcapping=None, num_key_value_heads=1),
    "gemma3": gemma3(),
    "gemma3 softcap": gemma3(final_logit_softcapping=2.0, num_key_value_heads=3),
    "gemma3 scaled full layers": gemma3(
        rope_parameters={
            "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
        }
    ),
    "gemma4": gemma4(),
    "gemma4 keys are values, untied, biases": gemma4(
        attention_k_eq_v=True,
        num_global_key_value_heads=1,
        tie_word_embeddings=False,
        attention_bias=True,
        final_logit_softcapping=None,
    ),
    "gemma4 embeddings per layer, shared keys": gemma4(
        num_hidden_layers=5,
        layer_types=["full_attention", *["sliding_attention", "full_attention"] * 2],
        num_kv_shared_layers=3,
        use_double_wide_mlp=True,
        hidden_size_per_layer_input=10,
        vocab_size_per_layer_input=131,
    ),
    "gemma4 with experts": gemma4(
        enable_moe_block=True,
        num_experts=5,
        top_k_experts=2,
        moe_intermediate_size=22,
        attention_k_eq_v=True,
    ),
    "gemma3n": gemma3n(),
    "gemma3n three streams, untied, biases": gemma3n(
        altup_num_inputs=3,
        altup_active_idx=1,
        altup_correct_scale=False,
        tie_word_embeddings=False,
        attention_bias=True,
        num_kv_shared_layers=0,
    ),
    "smollm3": transformers.SmolLM3Config(**SHAPE, no_rope_layer_interval=2, pad_token_id=0),
    "smollm3 windows": transformers.SmolLM3Config(
        **SHAPE,
        no_rope_layers=[0, 1, 0],
        use_sliding_window=True,
        sliding_window=5,
        pad_token_id=0,
    ),
    "phi3": phi3(),
    "phi3 window, a part of a head": phi3(
        sliding_window=7, rope_parameters={"rope_type": "default", "partial_rotary_factor": 0.5}
    ),
    "phi3 longrope": phi3(
        original_max_position_embeddings=64,
        rope_parameters={
            "rope_type": "longrope",
            "partial_rotary_factor": 0.5,
            "short_factor": [1.0, 1.5],
            "long_factor": [3.0, 4.0],
        },
        hidden_size=72,
    ),
    "ministral3": transformers.Ministral3Config(
        **SHAPE,
        head_dim=8,
        rope_parameters={
            **YARN_ROPE,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
            "llama_4_scaling_beta": 0.4,
            "original_max_position_embeddings": 16,
        },
    ),
    "olmo2": transformers.Olmo2Config(**SHAPE),
    "olmo2 biases, tied": transformers.Olmo2Config(
        **SHAPE, attention_bias=True, tie_word_embeddings=True
    ),
    "olmo3": transformers.Olmo3Config(**{**SHAPE, "num_hidden_layers": 4}, sliding_window=5),
    "olmo3 yarn, biases, tied": transformers.Olmo3Config(
        **SHAPE,
        sliding_window=7,
        layer_types=["full_attention", "sliding_attention", "full_attention"],
        rope_parameters={
            "full_attention": YARN_ROPE,
            "sliding_attention": {"rope_type": "default", "rope_theta": 1000.0},
        },
        attention_bias=True,
        tie_word_embeddings=True,
    ),
    "exaone4": transformers.Exaone4Config(**{**SHAPE, "num_hidden_layers": 5}, sliding_window=5),
    "exaone4 no window, tied": transformers.Exaone4Config(
        **SHAPE,
        head_dim=6,
        sliding_window=None,
        layer_types=["full_attention"] * 3,
        rope_parameters=LLAMA3_ROPE,
        tie_word_embeddings=True,
    ),
    "seed_oss": transformers.SeedOssConfig(**SHAPE, head_dim=8),
    "seed_oss other biases, tied": transformers.SeedOssConfig(
        **SHAPE,
        head_dim=4,
        attention_bias=False,
        attention_out_bias=True,
        mlp_bias=True,
        tie_word_embeddings=True,
    ),
    "ernie4_5": transformers.Ernie4_5Config(**SHAPE, head_dim=8),
    "ernie4_5 biases, untied": transformers.Ernie4_5Config(
        **SHAPE, head_dim=6, use_bias=True, tie_word_embeddings=False
    ),
    "glm4": transformers.Glm4Config(**SHAPE, head_dim=8, pad_token_id=0),
    "glm4 no biases, tied": transformers.Glm4Config(
        **SHAPE,
        head_dim=10,
        rope_parameters={"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.4},
        attention_bias=False,
        tie_word_embeddings=True,
        pad_token_id=0,
    ),
    "glm": transformers.GlmConfig(**SHAPE, head_dim=8, pad_token_id=0),
    "starcoder2": transformers.Starcoder2Config(**SHAPE, sliding_window=5),
    "starcoder2 no biases, untied": transformers.Starcoder2Config(
        **SHAPE, use_bias=False, tie_word_embeddings=False
    ),
    "cohere2": cohere2(),
    "cohere2 untied, biases": cohere2(
        layer_types=["full_attention", "sliding_attention", "full_attention"],
        logit_scale=0.7,
        tie_word_embeddings=False,
        attention_bias=True,
    ),
    "hunyuan": transformers.HunYuanDenseV1Config(
        **SHAPE,
        head_dim=8,
        rope_parameters=NTK_ALPHA,
        pad_token_id=0,
    ),
    "hunyuan biases, tied": transformers.HunYuanDenseV1Config(
        **SHAPE, head_dim=10, attention_bias=True, tie_word_embeddings=True, pad_token_id=0
    ),
    "nemotron": transformers.NemotronConfig(**SHAPE, head_dim=8),
    "nemotron biases, all of a head, tied": transformers.NemotronConfig(
        **SHAPE,
        head_dim=6,
        rope_parameters={"rope_type": "default", "rope_theta": 1e3, "partial_rotary_factor": 1.0},
        attention_bias=True,
        mlp_bias=True,
        tie_word_embeddings=True,
    ),
    "granite": transformers.GraniteConfig(
        **SHAPE,
        embedding_multiplier=12.0,
        attention_multiplier=0.3,
        residual_multiplier=0.22,
        logits_scaling=8.0,
    ),
    "granite biases, tied": transformers.GraniteConfig(
        **SHAPE, attention_bias=True, mlp_bias=True, tie_word_embeddings=True
    ),
    "arcee": transformers.ArceeConfig(**SHAPE, head_dim=8),
    "arcee yarn, biases": transformers.ArceeConfig(
        **SHAPE, rope_parameters=YARN_ROPE, attention_bias=True, mlp_bias=True
    ),
}
EXPERTS = {
    "mixtral 2 of 8": mixtral(8, 2),
    "mixtral 1 of 3": mixtral(3, 1, head_dim=6),
    "mixtral 4 of 4, tied": mixtral(4, 4, tie_word_embeddings=True),
    "mixtral, window of 5": mixtral(4, 2, sliding_window=5),
    "qwen3_moe 4 of 8": qwen3_moe(8, 4),
    "qwen3_moe 2 of 3, not renormalised": qwen3_moe(3, 2, norm_topk_prob=False),
    "qwen3_moe 1 of 4, heads of 10": qwen3_moe(4, 1, head_dim=10, attention_bias=True),
    "qwen3_moe, every second layer": qwen3_moe(4, 2, decoder_sparse_step=2),
    "qwen3_moe, dense layers by name": qwen3_moe(4, 2, mlp_only_layers=[0, 2]),
    "qwen3_moe, all dense": qwen3_moe(4, 2, mlp_only_layers=[0, 1, 2]),
    "qwen3_moe, window of 4 everywhere": qwen3_moe(
        4, 2, use_sliding_window=True, sliding_window=4, max_window_layers=2
    ),
    "olmoe 4 of 8": olmoe(8, 4),
    "qwen2_moe 4 of 8": qwen2_moe(8, 4),
    "qwen2_moe 2 of 4, renormalised, every second layer": qwen2_moe(
        4, 2, norm_topk_prob=True, decoder_sparse_step=2
    ),
    "qwen2_moe, windows": qwen2_moe(
        4, 2, use_sliding_window=True, sliding_window=5, max_window_layers=2
    ),
    "olmoe 2 of 3, renormalised, biases": olmoe(3, 2, norm_topk_prob=True, attention_bias=True),
    "gpt_oss 2 of 4": gpt_oss(4, 2),
    "gpt_oss 1 of 3, full first, tied": gpt_oss(
        3,
        1,
        layer_types=["full_attention", "sliding_attention"] * 2,
        rope_parameters={**YARN_ROPE, "truncate": False},
        tie_word_embeddings=True,
    ),
    "glm4_moe": deepseek_like(transformers.Glm4MoeConfig, use_qk_norm=True),
    "glm4_moe, groups, biases, tied": deepseek_like(
        transformers.Glm4MoeConfig,
        n_group=3,
        topk_group=2,
        norm_topk_prob=False,
        attention_bias=True,
        tie_word_embeddings=True,
        first_k_dense_replace=0,
        n_shared_experts=1,
    ),
    "solar_open": deepseek_like(transformers.SolarOpenConfig),
    "dots1": deepseek_like(transformers.Dots1Config, norm_topk_prob=True),
    "dots1, windows, biases": deepseek_like(
        transformers.Dots1Config,
        sliding_window=5,
        max_window_layers=1,
        attention_bias=True,
        first_k_dense_replace=2,
    ),
    "minimax_m2": transformers.MiniMaxM2Config(
        **SHAPE,
        head_dim=8,
        num_local_experts=6,
        num_experts_per_tok=2,
        rope_parameters={"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5},
    ),
    "hunyuan_moe": transformers.HunYuanMoEV1Config(
        **SHAPE,
        head_dim=8,
        num_experts=5,
        moe_topk=[2, 2, 2],
        rope_parameters=NTK_ALPHA,
        pad_token_id=0,
    ),
    "ernie4_5_moe": transformers.Ernie4_5_MoeConfig(
        **{**SHAPE, "num_hidden_layers": 4},
        moe_intermediate_size=22,
        moe_num_experts=6,
        moe_k=2,
        moe_layer_start_index=0,
        moe_layer_end_index=2,
        moe_layer_interval=2,
        pad_token_id=0,
    ),
    "ernie4_5_moe, all sparse, nothing shared, untied": transformers.Ernie4_5_MoeConfig(
        **SHAPE,
        moe_intermediate_size=22,
        moe_num_experts=5,
        moe_k=3,
        moe_num_shared_experts=0,
        moe_layer_start_index=0,
        tie_word_embeddings=False,
        pad_token_id=0,
    ),
    "granitemoe": granite_moe(transformers.GraniteMoeConfig, tie_word_embeddings=True),
    "granitemoeshared": granite_moe(
        transformers.GraniteMoeSharedConfig, shared_intermediate_size=30, attention_bias=True
    ),
    "afmoe": transformers.AfmoeConfig(
        **SHAPE,
        head_dim=8,
        moe_intermediate_size=22,
        num_experts=6,
        num_experts_per_tok=2,
        num_shared_experts=1,
        route_scale=2.5,
        sliding_window=5,
        global_attn_every_n_layers=2,
        mup_enabled=True,
    ),
}
CONFIGS = DENSE | EXPERTS


def random_model(config):
    torch.manual_seed(0)
    make = transformers.AutoModelForCausalLM.from_config
    if config.model_type == "mistral4":  # transformers knows it as the text of others alone
        make = transformers.Mistral4ForCausalLM._from_config
    model = make(config, attn_implementation="eager")
    if model._can_set_experts_implementation():
        model.set_experts_implementation("eager")
    for name, buffer in model.named_buffers():
        if name.endswith("layer_scalar"):
            buffer.uniform_(0.5, 1.5)
    for name, parameter in model.named_parameters():
        is_plain = name.endswith(("bias", "sinks", "scale")) or "norm" in name
        if is_plain:  # they begin as 0 or 1
            torch.nn.init.normal_(parameter, mean=parameter.mean().item(), std=0.3)
        elif name.endswith(("gate.weight", "router.weight")):  # most begin as 0: experts alike
            torch.nn.init.normal_(parameter, std=0.3)
    for name, tensor in (*model.named_buffers(), *model.named_parameters()):
        if name.endswith("e_score_correction_bias"):
            torch.nn.init.normal_(tensor, std=0.3)
    return model.eval()


@functools.cache
def reference_model(name):
    return random_model(CONFIGS[name])


def sequences(lengths=(45, 1, 19, 33)):
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(131, (n,), generator=generator).tolist() for n in lengths]


def full_logits(model, token_lists):
    with torch.inference_mode():
        return [model(torch.tensor([tokens])).logits[0].float() for tokens in token_lists]


def load(config, tensors, ops, dtype=torch.float32):
    return load_model(config, tensors, dtype=dtype, ops=ops)


def assert_close(ours, theirs):
    assert theirs[0].std() > 0.1
    for mine, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine, other, atol=5e-5, rtol=1e-4)
