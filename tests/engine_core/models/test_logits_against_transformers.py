"""Native models against transformers' eager forward, on tiny random models of awkward shape."""

import functools
import json

import pytest
import torch
import transformers

from engine_core.models.loading import load_model
from kernels.triton.operations import TritonOperations

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


def gemma3(**options):
    shape = {**SHAPE, "num_hidden_layers": 7, "num_key_value_heads": 1, "sliding_window": 3}
    return transformers.Gemma3TextConfig(
        **{**shape, "head_dim": 8, "query_pre_attn_scalar": 11, **options}
    )


def phi3(**options):
    return transformers.Phi3Config(**{**SHAPE, "pad_token_id": 0, **options})


CONFIGS = {
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
    "gemma3": gemma3(),
    "gemma3 softcap": gemma3(final_logit_softcapping=2.0, num_key_value_heads=3),
    "gemma3 scaled full layers": gemma3(
        rope_parameters={
            "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
        }
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


def random_model(config):
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    for name, parameter in model.named_parameters():  # biases and norms begin as 0 or 1
        if name.endswith("bias") or "norm" in name:
            torch.nn.init.normal_(parameter, mean=parameter.mean().item(), std=0.3)
    return model.eval()


@functools.cache
def reference_model(name):
    return random_model(CONFIGS[name])


def sequences(vocab_size, lengths=(45, 1, 19, 33)):
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(vocab_size, (n,), generator=generator).tolist() for n in lengths]


def full_logits(model, token_lists):
    with torch.inference_mode():
        return [model(torch.tensor([tokens])).logits[0].float() for tokens in token_lists]


@pytest.mark.parametrize("name", CONFIGS)
def test_mixed_chunked_steps_give_the_logits_of_a_full_forward(name, paged_logits, ops):
    """Proves S074 for the model side: any mix of chunks and decodes, over shuffled blocks."""
    reference = reference_model(name)
    token_lists = sequences(131)
    model = load_model(
        reference.config.to_dict(), reference.state_dict().items(), dtype=torch.float32, ops=ops
    )
    for ours, theirs in zip(
        paged_logits(model, token_lists), full_logits(reference, token_lists), strict=True
    ):
        torch.testing.assert_close(ours, theirs, atol=5e-5, rtol=1e-4)


@pytest.mark.parametrize(
    "name", ["smollm3", "phi3 window, a part of a head", "olmo2", "granite", "ministral3", "arcee"]
)
@pytest.mark.parametrize("ops", ["torch"], indirect=True)
def test_the_gpu_kernels_give_the_logits_of_a_full_forward(name, paged_logits, ops):
    """Those families whose blocks differ from Llama's, in the interpreter."""
    reference, on = reference_model(name), TritonOperations(torch.device("cpu"))
    model = load_model(
        reference.config.to_dict(), reference.state_dict().items(), dtype=torch.float32, ops=on
    )
    token_lists = sequences(131, (6, 3))
    ours, theirs = paged_logits(model, token_lists, on=on), full_logits(reference, token_lists)
    torch.testing.assert_close(torch.cat(ours), torch.cat(theirs), atol=5e-5, rtol=1e-4)


SAVED = (  # each family, with what a saved config.json spells out or leaves to its defaults
    "llama tied",
    "llama biases",
    "llama llama3 rope",
    "llama yarn rope untruncated",
    "mistral window 3",
    "mistral no window",
    "qwen2",
    "qwen2 windows in later layers",
    "qwen3 layer types",
    "gemma3 softcap",
    "gemma3 scaled full layers",
    "smollm3 windows",
    "phi3 window, a part of a head",
    "phi3 longrope",
    "olmo2 biases, tied",
    "granite",
    "ministral3",
    "arcee yarn, biases",
)


@pytest.mark.parametrize("name", SAVED)
def test_saved_folder_gives_the_same_model(name, paged_logits, ops, tmp_path):
    from safetensors.torch import load_file

    reference = reference_model(name)
    reference.save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    tensors = load_file(tmp_path / "model.safetensors")
    model = load_model(config, tensors.items(), dtype=torch.float32, ops=ops)
    token_lists = sequences(131, (23,))
    [ours] = paged_logits(model, token_lists, block_size=16)
    [theirs] = full_logits(reference, token_lists)
    torch.testing.assert_close(ours, theirs, atol=5e-5, rtol=1e-4)


OLD_SPELLINGS = {
    "theta alone": (llama, {"rope_theta": 700.0}),
    "linear by type": (llama, {"rope_scaling": {"type": "linear", "factor": 2.0}}),
    "yarn": (
        qwen2,
        {
            "rope_theta": 1000.0,
            "rope_scaling": {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32},
        },
    ),
    "llama3": (
        llama,
        {
            "rope_theta": 500.0,
            "rope_scaling": {k: v for k, v in LLAMA3_ROPE.items() if k != "rope_theta"},
        },
    ),
    "gemma3": (
        gemma3,
        {
            "rope_theta": 1e5,
            "rope_local_base_freq": 300.0,
            "rope_scaling": {"rope_type": "linear", "factor": 8.0},
            "sliding_window_pattern": 2,
        },
    ),
    "null scaling": (llama, {"rope_theta": 300.0, "rope_scaling": None}),
}


@pytest.mark.parametrize("name", OLD_SPELLINGS)
def test_old_spelling_of_options_is_read_as_transformers_reads_it(name, paged_logits, ops):
    family, options = OLD_SPELLINGS[name]
    config = family().to_dict()
    for field in ("rope_parameters", "layer_types", "_sliding_window_pattern"):
        config.pop(field, None)
    config.update(options)
    reference = random_model(type(family()).from_dict(json.loads(json.dumps(config))))
    model = load_model(config, reference.state_dict().items(), dtype=torch.float32, ops=ops)
    token_lists = sequences(131, (60,))
    [ours] = paged_logits(model, token_lists)
    [theirs] = full_logits(reference, token_lists)
    torch.testing.assert_close(ours, theirs, atol=5e-5, rtol=1e-4)


@pytest.mark.parametrize("family", [llama, qwen3, gemma3])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_as_close_to_float32_as_transformers(family, dtype, paged_logits, ops):
    reference = random_model(family(initializer_range=0.1))
    token_lists = sequences(131, (29, 12))
    exact = full_logits(reference, token_lists)
    halved = reference.to(dtype)
    theirs = full_logits(halved, token_lists)
    model = load_model(halved.config.to_dict(), halved.state_dict().items(), dtype=dtype, ops=ops)
    for mine, other, true in zip(
        paged_logits(model, token_lists, dtype=dtype), theirs, exact, strict=True
    ):
        allowed = 1.5 * (other - true).abs().mean() + 1e-4
        assert (mine - true).abs().mean() <= allowed


@pytest.mark.parametrize(
    ("name", "architecture"),
    [
        ("gemma3", "Gemma3ForConditionalGeneration"),
        ("ministral3", "Mistral3ForConditionalGeneration"),
    ],
)
def test_a_checkpoint_with_images_runs_as_its_text_model(name, architecture, paged_logits, ops):
    reference = reference_model(name)
    config = {
        "architectures": [architecture],
        "text_config": reference.config.to_dict(),
        "vision_config": {"hidden_size": 8},
    }
    tensors = {"vision_tower.patch.weight": torch.zeros(2)}
    for key, tensor in reference.state_dict().items():
        if key != "lm_head.weight" or not reference.config.tie_word_embeddings:
            tensors[f"language_model.{key}"] = tensor
    model = load_model(config, tensors.items(), dtype=torch.float32, ops=ops)
    token_lists = sequences(131, (17,))
    torch.testing.assert_close(
        paged_logits(model, token_lists)[0],
        full_logits(reference, token_lists)[0],
        atol=5e-5,
        rtol=1e-4,
    )


def test_explicit_frequency_factors_divide_the_frequencies(paged_logits, ops):
    """llama.cpp stores Llama 3's scaling as factors; both forms must be one model."""
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    reference = random_model(llama(rope_parameters=LLAMA3_ROPE))
    scaled, _ = ROPE_INIT_FUNCTIONS["llama3"](reference.config, None)
    plain = 1.0 / (500.0 ** (torch.arange(0, 8, 2) / 8))
    config = reference.config.to_dict()
    config["rope_parameters"] = {"rope_type": "default", "rope_theta": 500.0}
    config["rope_freq_factors"] = (plain / scaled).tolist()
    model = load_model(config, reference.state_dict().items(), dtype=torch.float32, ops=ops)
    token_lists = sequences(131, (40,))
    torch.testing.assert_close(
        paged_logits(model, token_lists)[0],
        full_logits(reference, token_lists)[0],
        atol=5e-5,
        rtol=1e-4,
    )
