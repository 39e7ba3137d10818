"""Which models run as one call a step on a CPU: every architecture of ours, by their bits."""

import pytest
import torch
import transformers

from engine_core.layers import rotary
from engine_core.models.families.table import SUPPORTED_ARCHITECTURES
from engine_core.models.loading import load_dummy_model
from engine_core.models.registry import find_family
from kernels.cpu.captured_forward import CapturedForward
from kernels.cpu.operations import CpuOperations
from tests.engine_core.models.decoder_cases import EXPERTS
from tests.engine_core.models.encoder_cases import CONFIGS as ENCODERS
from tests.engine_core.models.hybrid_cases import CONFIGS as HYBRIDS
from tests.engine_core.models.latent_cases import CONFIGS as LATENTS
from tests.engine_core.models.qwen_hybrid_cases import CONFIGS as QWEN_HYBRIDS
from tests.native_kernels import native_library_or_skip

SHAPE = {
    "vocab_size": 131,
    "hidden_size": 96,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 128,
}
SPARSE = {"moe_intermediate_size": 32, "num_experts": 5, "num_experts_per_tok": 2}
TEXT = SHAPE | {"rope_parameters": {"rope_type": "default", "mrope_section": [2, 3, 3]}}
DECODERS = {
    "llama": transformers.LlamaConfig(**SHAPE, attention_bias=True),
    "mistral": transformers.MistralConfig(**SHAPE, sliding_window=5, tie_word_embeddings=True),
    "qwen2": transformers.Qwen2Config(**SHAPE),
    "qwen3": transformers.Qwen3Config(**SHAPE),
    "gemma2": transformers.Gemma2Config(**SHAPE, sliding_window=6),
    "gemma3_text": transformers.Gemma3TextConfig(**SHAPE, sliding_window=6),
    "gemma4_text": transformers.Gemma4TextConfig(
        **SHAPE,
        global_head_dim=32,
        attention_k_eq_v=True,
        hidden_size_per_layer_input=0,
        layer_types=["full_attention", "sliding_attention", "full_attention"],
        sliding_window=6,
    ),
    "gemma4_text, experts": transformers.Gemma4TextConfig(
        **SHAPE,
        global_head_dim=32,
        hidden_size_per_layer_input=0,
        sliding_window=6,
        enable_moe_block=True,
        num_experts=5,
        top_k_experts=2,
        moe_intermediate_size=32,
    ),
    "gemma4_text, E": transformers.Gemma4TextConfig(
        **SHAPE,
        global_head_dim=32,
        hidden_size_per_layer_input=16,
        num_kv_shared_layers=1,
        layer_types=["full_attention", "sliding_attention", "full_attention"],
        sliding_window=6,
        vocab_size_per_layer_input=131,
    ),
    "mixtral": transformers.MixtralConfig(**SHAPE, num_local_experts=3, num_experts_per_tok=2),
    "qwen3_moe": transformers.Qwen3MoeConfig(**SHAPE, **SPARSE, mlp_only_layers=[1]),
    "qwen2_moe": transformers.Qwen2MoeConfig(**SHAPE, **SPARSE, shared_expert_intermediate_size=48),
    "smollm3": transformers.SmolLM3Config(**SHAPE, pad_token_id=0),
    "phi3": transformers.Phi3Config(**SHAPE, pad_token_id=0),
    "olmo2": transformers.Olmo2Config(**SHAPE),
    "olmo3": transformers.Olmo3Config(**SHAPE, sliding_window=6),
    "exaone4": transformers.Exaone4Config(**SHAPE, sliding_window=6, sliding_window_pattern=2),
    "seed_oss": transformers.SeedOssConfig(**SHAPE, attention_out_bias=True),
    "ernie4_5": transformers.Ernie4_5Config(**SHAPE),
    "glm4": transformers.Glm4Config(**SHAPE, pad_token_id=0),
    "glm": transformers.GlmConfig(**SHAPE, pad_token_id=0),
    "hunyuan_v1_dense": transformers.HunYuanDenseV1Config(**SHAPE, pad_token_id=0),
    "nemotron": transformers.NemotronConfig(**SHAPE),
    "starcoder2": transformers.Starcoder2Config(**SHAPE, sliding_window=6),
    "cohere2": transformers.Cohere2Config(**SHAPE, sliding_window=6, sliding_window_pattern=2),
    "olmoe": transformers.OlmoeConfig(**SHAPE, num_experts=5, num_experts_per_tok=2),
    "gpt_oss": transformers.GptOssConfig(
        **SHAPE, num_local_experts=5, num_experts_per_tok=2, sliding_window=6
    ),
    "granite": transformers.GraniteConfig(**SHAPE, residual_multiplier=0.22, logits_scaling=8.0),
    "arcee": transformers.ArceeConfig(**SHAPE),
    "qwen3_5_text": QWEN_HYBRIDS["qwen3.5"],
    "qwen3_5_text, attention last": QWEN_HYBRIDS["qwen3.5, attention last, tied, biases"],
    "qwen3_5_moe_text": QWEN_HYBRIDS["qwen3.5 with experts"],
    "qwen3_next": QWEN_HYBRIDS["qwen3-next, a dense layer"],
    "granitemoehybrid": HYBRIDS["granite, dense"],
    "granitemoehybrid, experts": HYBRIDS["granite, experts, tied"],
    "lfm2": HYBRIDS["lfm2, biases, width of 4"],
    "lfm3": HYBRIDS["lfm3, tied"],
    "lfm2_moe": HYBRIDS["lfm2-moe"],
    "nemotron_h": HYBRIDS["nemotron-h, Mamba first and last"],
    "nemotron_h, experts": HYBRIDS["nemotron-h, experts in a latent space"],
    "falcon_h1": HYBRIDS["falcon-h1"],
    "falcon_h1, no norm": HYBRIDS["falcon-h1, biases, no norm, tied"],
    "kimi_linear": HYBRIDS["kimi-linear"],
    "minimax": HYBRIDS["minimax"],
    "bamba": HYBRIDS["bamba, biases, tied"],
    "minicpm3": LATENTS["minicpm3"],
    "deepseek_v2": LATENTS["deepseek-v2, lite"],
    "deepseek_v3": LATENTS["deepseek-v3, YaRN"],
    "deepseek_v32": LATENTS["deepseek-v3.2, YaRN"],
    "glm_moe_dsa": LATENTS["glm-5, the last layer shares, tied"],
    "glm4_moe_lite": LATENTS["glm-4.7-flash"],
    **{name: EXPERTS[name] for name in ("glm4_moe", "solar_open", "dots1", "minimax_m2")},
    **{name: EXPERTS[name] for name in ("granitemoe", "granitemoeshared", "afmoe")},
    **{name: EXPERTS[name] for name in ("hunyuan_moe", "ernie4_5_moe")},
}
AXES = {"qwen2_vl": transformers.Qwen2VLConfig(text_config=TEXT)}
NOT_CAPTURED = {
    "gemma3n_text": "its streams",
    **dict.fromkeys(("ministral3", "mistral4"), "its scaled queries"),
}
"""Architectures of ours whose pass is not one call, and why."""


@pytest.fixture(scope="module")
def native():
    return native_library_or_skip()


def sequences():
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(131, (n,), generator=generator).tolist() for n in (45, 1, 33)]


@pytest.mark.parametrize("ops", ["torch"], indirect=True)
@pytest.mark.parametrize(
    ("name", "weights"),
    [(name, weights) for name in (*DECODERS, *AXES) for weights in ("float32", "bfloat16")]
    + [(name, weights) for name in ("llama", "qwen3_moe") for weights in ("int8", "int4")],
)
def test_every_decoder_of_ours_is_captured_and_has_the_same_bits(
    name, weights, native, paged_logits
):
    ops = CpuOperations(native, linear_weights=weights)
    model = load_dummy_model((DECODERS | AXES)[name].to_dict(), dtype=torch.float32, ops=ops)
    assert isinstance(model._forward, CapturedForward)
    captured = paged_logits(model, sequences(), on=ops)
    assert model._forward.is_captured
    model._forward = model._compute
    for ours, expected in zip(captured, paged_logits(model, sequences(), on=ops), strict=True):
        assert torch.equal(ours, expected)


def test_no_architecture_of_ours_is_left_out():
    """Decoders are those above, encoders those of `test_encoders_against_transformers`."""
    configs = [*DECODERS.values(), *(make() for make in ENCODERS.values())]
    tried = {config.model_type for config in configs}
    ours = {find_family({"architectures": [name]})[1] for name in SUPPORTED_ARCHITECTURES}
    # GTE by its first name, and T5's encoder, whose configurations are those of others
    assert {each.model_type for each in ours} - NOT_CAPTURED.keys() - {"new", "t5-encoder"} == tried


@pytest.mark.parametrize("ops", ["torch"], indirect=True)
def test_states_that_are_kept_are_those_of_single_operations(native, paged_logits):
    """Those that enter the first layer, the last one, and what leaves that; the result stays."""
    ops = CpuOperations(native)
    model = load_dummy_model(DECODERS["qwen3"].to_dict(), dtype=torch.float32, ops=ops)
    plain = paged_logits(model, sequences(), on=ops)
    model.keep_states([0, 2, 3])
    kept = []
    for _ in range(2):
        logits = paged_logits(model, sequences(), on=ops)
        assert all(torch.equal(one, other) for one, other in zip(logits, plain, strict=True))
        kept.append(model.states)
        model._forward = model._compute
    assert [state.shape[1] for state in kept[0]] == [96] * 3
    assert all(torch.equal(one, other) for one, other in zip(*kept, strict=True))
    assert not torch.equal(kept[0][1], kept[0][2])


@pytest.mark.parametrize("ops", ["torch"], indirect=True)
@pytest.mark.parametrize("name", ["llama", "mixtral"])
def test_activations_in_16_bits_are_run_as_they_are(name, native, paged_logits):
    ops = CpuOperations(native)
    model = load_dummy_model(DECODERS[name].to_dict(), dtype=torch.bfloat16, ops=ops)
    logits = paged_logits(model, sequences(), on=ops, dtype=torch.bfloat16)
    assert all(one.isfinite().all() for one in logits)
    assert model._forward.is_captured is False


@pytest.mark.parametrize("ops", ["torch"], indirect=True)
@pytest.mark.parametrize("name", ["llama", "gemma3_text"])  # one table, and two
def test_tables_that_grow_while_serving_change_no_bit(name, native, paged_logits, monkeypatch):
    config = DECODERS[name].to_dict()
    ops = CpuOperations(native)
    whole = paged_logits(
        load_dummy_model(config, dtype=torch.float32, ops=ops), sequences(), on=ops
    )
    monkeypatch.setattr(rotary, "_FIRST_ROWS", 2)
    model = load_dummy_model(
        config | {"max_position_embeddings": 10**9}, dtype=torch.float32, ops=ops
    )
    grown = paged_logits(model, sequences(), on=ops)
    assert model._forward.is_captured
    assert {len(table.cos_sin_PD) for table in model._tables} == {64}
    for ours, expected in zip(grown, whole, strict=True):
        assert torch.equal(ours, expected)
