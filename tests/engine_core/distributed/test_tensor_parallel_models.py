"""Models of several ranks against transformers' eager forward, on tiny random models: every family
at every number of ranks that can share it."""

import pytest
import torch
import transformers

from tests.engine_core.distributed.rank_models import paged_logits
from tests.engine_core.distributed.rank_processes import RankProcesses
from tests.engine_core.models import hybrid_cases, latent_cases, qwen_hybrid_cases

SHAPE = {
    "vocab_size": 131,
    "hidden_size": 48,
    "intermediate_size": 50,
    "num_hidden_layers": 2,
    "num_attention_heads": 12,
    "num_key_value_heads": 4,
    "max_position_embeddings": 128,
    "initializer_range": 0.3,
}
WINDOWS = {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1}
FEW_KEYS = {"num_key_value_heads": 2}
M, A, C = hybrid_cases.M, hybrid_cases.A, hybrid_cases.C
CASES = {
    "llama, kv heads in 4": (transformers.LlamaConfig(**SHAPE, head_dim=8), 4),
    "llama, biases, kv heads in 2 and repeated": (
        transformers.LlamaConfig(
            **SHAPE | {"num_key_value_heads": 2}, head_dim=8, attention_bias=True, mlp_bias=True
        ),
        4,
    ),
    "llama tied, 3 ranks": (
        transformers.LlamaConfig(
            **SHAPE | {"num_key_value_heads": 3, "tie_word_embeddings": True}, head_dim=8
        ),
        3,
    ),
    "mistral, window of 3": (
        transformers.MistralConfig(**SHAPE, head_dim=4, sliding_window=3),
        2,
    ),
    "qwen2, windows": (transformers.Qwen2Config(**SHAPE | WINDOWS), 2),
    "qwen3, biases": (transformers.Qwen3Config(**SHAPE, head_dim=10, attention_bias=True), 4),
    "gemma2": (transformers.Gemma2Config(**SHAPE, head_dim=8, sliding_window=5), 2),
    "glm4": (transformers.Glm4Config(**SHAPE, head_dim=8, pad_token_id=0), 2),
    "exaone4": (transformers.Exaone4Config(**SHAPE, sliding_window=5), 2),
    "ernie4_5": (transformers.Ernie4_5Config(**SHAPE, head_dim=8, use_bias=True), 2),
    "seed_oss": (transformers.SeedOssConfig(**SHAPE, head_dim=8, attention_out_bias=True), 2),
    "cohere2": (transformers.Cohere2Config(**SHAPE, sliding_window_pattern=2, logit_scale=2.0), 2),
    "hunyuan": (transformers.HunYuanDenseV1Config(**SHAPE, head_dim=8, pad_token_id=0), 2),
    "nemotron": (transformers.NemotronConfig(**SHAPE, head_dim=8, attention_bias=True), 2),
    "starcoder2": (transformers.Starcoder2Config(**SHAPE), 2),
    "gemma3, one kv head": (
        transformers.Gemma3TextConfig(
            **SHAPE | {"num_key_value_heads": 1, "num_hidden_layers": 7},
            head_dim=8,
            sliding_window=3,
            query_pre_attn_scalar=11,
            final_logit_softcapping=2.0,
        ),
        4,
    ),
    "gemma3, 3 ranks": (
        transformers.Gemma3TextConfig(
            **SHAPE | {"num_key_value_heads": 1, "vocab_size": 37}, head_dim=8, sliding_window=3
        ),
        3,
    ),
    "gemma4, keys are values": (
        transformers.Gemma4TextConfig(
            **SHAPE | {"num_key_value_heads": 2},
            head_dim=8,
            global_head_dim=12,
            num_global_key_value_heads=1,
            attention_k_eq_v=True,
            hidden_size_per_layer_input=0,
            sliding_window=3,
        ),
        2,
    ),
    "mixtral": (
        transformers.MixtralConfig(**SHAPE, num_local_experts=4, num_experts_per_tok=2),
        4,
    ),
    "qwen3 with experts": (
        transformers.Qwen3MoeConfig(
            **SHAPE,
            head_dim=8,
            num_experts=3,
            num_experts_per_tok=2,
            moe_intermediate_size=22,
            norm_topk_prob=True,
            mlp_only_layers=[0],
        ),
        2,
    ),
    "qwen2 with experts": (
        transformers.Qwen2MoeConfig(
            **SHAPE,
            num_experts=4,
            num_experts_per_tok=2,
            moe_intermediate_size=22,
            shared_expert_intermediate_size=30,
        ),
        4,
    ),
    "glm4 with experts": (
        transformers.Glm4MoeConfig(
            **SHAPE,
            head_dim=8,
            n_routed_experts=6,
            num_experts_per_tok=2,
            moe_intermediate_size=22,
            n_shared_experts=2,
            attention_bias=True,
            use_qk_norm=True,
            routed_scaling_factor=2.5,
        ),
        4,
    ),
    "hunyuan with experts": (
        transformers.HunYuanMoEV1Config(
            **SHAPE, head_dim=8, num_experts=3, moe_topk=2, pad_token_id=0
        ),
        2,
    ),
    "ernie 4.5 with experts": (
        transformers.Ernie4_5_MoeConfig(
            **SHAPE, moe_num_experts=4, moe_k=2, moe_intermediate_size=22, pad_token_id=0
        ),
        2,
    ),
    "qwen3.5": (qwen_hybrid_cases.qwen3_5([M, A, M], **FEW_KEYS), 2),
    "qwen3.5 with experts, key heads repeated": (
        qwen_hybrid_cases.qwen3_5_moe([M, A], linear_num_key_heads=1),
        3,
    ),
    "qwen3-next": (qwen_hybrid_cases.qwen3_next([A, M], **FEW_KEYS), 2),
    "granite, experts, two ranks a group": (
        hybrid_cases.granite(
            [M, A],
            num_local_experts=4,
            num_attention_heads=12,
            hidden_size=48,
            num_key_value_heads=4,
            mamba_n_heads=12,
            mamba_n_groups=2,
            mamba_proj_bias=True,
        ),
        4,
    ),
    "nemotron-h": (
        hybrid_cases.nemotron_h(
            [M, hybrid_cases.F, A, M], num_attention_heads=4, num_key_value_heads=2, use_bias=True
        ),
        2,
    ),
    "bamba, one group": (hybrid_cases.bamba(2, [1], mamba_n_groups=1), 3),
    "falcon-h1, norm before gates": (
        hybrid_cases.falcon_h1(
            1,
            mamba_n_groups=1,
            mamba_rms_norm=True,
            mamba_proj_bias=True,
            projectors_bias=True,
            key_multiplier=0.6,
            ssm_multipliers=[0.9, 1.1, 0.8, 1.2, 0.7],
        ),
        3,
    ),
    "lfm2, biases": (hybrid_cases.lfm2([C, A, C], conv_bias=True), 3),
    "deepseek-v2": (latent_cases.deepseek_v2(tie_word_embeddings=True), 3),
    "glm-4.7-flash": (latent_cases.glm4_moe_lite(q_lora_rank=None), 2),
    "glm-5, a shared layer": (
        latent_cases.glm_moe_dsa(indexer_types=["full", "shared", "full"]),
        3,
    ),
    "lfm3": (hybrid_cases.lfm3([C, A, "sliding_attention"]), 3),
}


def random_model(config):
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    model.set_experts_implementation("eager")
    for name, parameter in model.named_parameters():  # biases and norms begin as 0 or 1
        if name.endswith("bias") or "norm" in name:
            torch.nn.init.normal_(parameter, mean=parameter.mean().item(), std=0.3)
        elif name.endswith(("mlp.gate.weight", ".A_log", ".dt_bias", ".D")):  # begin alike
            torch.nn.init.normal_(parameter, std=0.3)
    return model.eval()


ON_TORCH = (
    "llama, biases, kv heads in 2 and repeated",
    "gemma3, 3 ranks",
    "mixtral",
    "granite, experts, two ranks a group",
)


@pytest.mark.parametrize(
    ("name", "ops_name"),
    [
        *((name, "native") for name in CASES),
        *((name, "torch") for name in ON_TORCH),
        pytest.param("qwen3 with experts", "triton", marks=pytest.mark.slow),
    ],
)
def test_ranks_have_the_logits_of_a_full_forward(
    name: str, ops_name: str, ranks: RankProcesses, tmp_path
) -> None:
    config, size = CASES[name]
    reference = random_model(config)
    reference.save_pretrained(tmp_path)
    generator = torch.Generator().manual_seed(1)
    sequences = [
        torch.randint(config.vocab_size, (length,), generator=generator).tolist()
        for length in ((4, 1) if ops_name == "triton" else (13, 1, 6))
    ]
    answers = ranks.run(paged_logits, tmp_path, sequences, ops_name, tp_size=size)
    with torch.inference_mode():
        for number, tokens in enumerate(sequences):
            expected = reference(torch.tensor([tokens])).logits[0]
            for logits in answers:
                assert torch.equal(logits[number], answers[0][number])
            torch.testing.assert_close(answers[0][number], expected, atol=5e-5, rtol=1e-4)
