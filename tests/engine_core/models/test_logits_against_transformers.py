"""Native models against transformers' eager forward, on tiny random models of awkward shape."""

import json

import pytest
import torch
import transformers
from safetensors.torch import load_file

from kernels.triton.operations import TritonOperations
from tests.engine_core.models.decoder_cases import (
    CONFIGS,
    LLAMA3_ROPE,
    assert_close,
    deepseek_like,
    full_logits,
    gemma3,
    llama,
    load,
    mixtral,
    qwen2,
    qwen3,
    qwen3_moe,
    random_model,
    reference_model,
    sequences,
)


@pytest.mark.parametrize("name", CONFIGS)
def test_mixed_chunked_steps_give_the_logits_of_a_full_forward(name, paged_logits, ops):
    """Proves S074 for the model side: any mix of chunks and decodes, over shuffled blocks."""
    reference = reference_model(name)
    model = load(reference.config.to_dict(), reference.state_dict().items(), ops)
    assert_close(paged_logits(model, sequences()), full_logits(reference, sequences()))


@pytest.mark.parametrize(
    "name",
    [
        *("smollm3", "phi3 window, a part of a head", "granite", "ministral3"),
        "olmoe 2 of 3, renormalised, biases",
        "gemma2 low caps, untied, biases",
        "cohere2",
        "starcoder2",
        "hunyuan",
        "nemotron",
        "gemma4 embeddings per layer, shared keys",
        "gemma4 keys are values, untied, biases",
        "gemma4 with experts",
        "gemma3n",
        "qwen2_moe 2 of 4, renormalised, every second layer",
        "glm4_moe, groups, biases, tied",
    ],
)
@pytest.mark.parametrize("ops", ["torch"], indirect=True)
def test_the_gpu_kernels_give_the_logits_of_a_full_forward(name, paged_logits, ops):
    """Families whose blocks differ from those that run in the interpreter elsewhere."""
    reference, on = reference_model(name), TritonOperations(torch.device("cpu"))
    model = load(reference.config.to_dict(), reference.state_dict().items(), on)
    token_lists = sequences((6, 3))
    assert_close(paged_logits(model, token_lists, on=on), full_logits(reference, token_lists))


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
    "gemma2 low caps, untied, biases",
    "gemma3 softcap",
    "gemma3 scaled full layers",
    "gemma4 keys are values, untied, biases",
    "gemma4 embeddings per layer, shared keys",
    "gemma3n",
    "smollm3 windows",
    "phi3 window, a part of a head",
    "phi3 longrope",
    "olmo2 biases, tied",
    "olmo3 yarn, biases, tied",
    "exaone4",
    "seed_oss other biases, tied",
    "ernie4_5 biases, untied",
    "glm4",
    "glm",
    "starcoder2",
    "hunyuan",
    "hunyuan_moe",
    "nemotron biases, all of a head, tied",
    "ernie4_5_moe",
    "cohere2 untied, biases",
    "granite",
    "ministral3",
    "arcee yarn, biases",
    "mixtral 2 of 8",
    "qwen3_moe, every second layer",
    "glm4_moe, groups, biases, tied",
    "solar_open",
    "dots1, windows, biases",
    "minimax_m2",
    "granitemoeshared",
    "afmoe",
)


@pytest.mark.parametrize("name", SAVED)
def test_saved_folder_gives_the_same_model(name, paged_logits, ops, tmp_path):
    reference = reference_model(name)
    reference.save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    tensors = load_file(tmp_path / "model.safetensors")
    names = " ".join(tensors)  # of experts one by one, or as Granite has them
    has_experts = "experts.0" in names or "block_sparse_moe.input_linear" in names
    assert has_experts == ("experts" in " ".join(reference.state_dict()))
    model = load(config, tensors.items(), ops)
    token_lists = sequences((23,))
    assert_close(
        paged_logits(model, token_lists, block_size=16), full_logits(reference, token_lists)
    )


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
    model = load(config, reference.state_dict().items(), ops)
    assert_close(paged_logits(model, sequences((60,))), full_logits(reference, sequences((60,))))


@pytest.mark.parametrize(
    "config",
    [
        *(make(initializer_range=0.1) for make in (llama, qwen3, gemma3)),
        *(make(4, 2, initializer_range=0.1) for make in (mixtral, qwen3_moe)),
        deepseek_like(transformers.Glm4MoeConfig, initializer_range=0.1),
    ],
    ids=lambda config: config.model_type,
)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_as_close_to_float32_as_transformers(config, dtype, paged_logits, ops):
    reference, token_lists = random_model(config), sequences((29, 12))
    exact = full_logits(reference, token_lists)
    halved = reference.to(dtype)
    theirs = full_logits(halved, token_lists)
    model = load(halved.config.to_dict(), halved.state_dict().items(), ops, dtype)
    for mine, other, true in zip(
        paged_logits(model, token_lists, dtype=dtype), theirs, exact, strict=True
    ):
        allowed = 1.5 * (other - true).abs().mean() + 1e-4
        assert (mine - true).abs().mean() <= allowed


@pytest.mark.parametrize(
    ("name", "architecture"),
    [
        ("gemma3", "Gemma3ForConditionalGeneration"),
        ("gemma3n", "Gemma3nForConditionalGeneration"),
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
    model = load(config, tensors.items(), ops)
    assert_close(paged_logits(model, sequences((17,))), full_logits(reference, sequences((17,))))


def test_explicit_frequency_factors_divide_the_frequencies(paged_logits, ops):
    """llama.cpp stores Llama 3's scaling as factors; both forms must be one model."""
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    reference = random_model(llama(rope_parameters=LLAMA3_ROPE))
    scaled, _ = ROPE_INIT_FUNCTIONS["llama3"](reference.config, None)
    plain = 1.0 / (500.0 ** (torch.arange(0, 8, 2) / 8))
    config = reference.config.to_dict()
    config["rope_parameters"] = {"rope_type": "default", "rope_theta": 500.0}
    config["rope_freq_factors"] = (plain / scaled).tolist()
    model = load(config, reference.state_dict().items(), ops)
    assert_close(paged_logits(model, sequences((40,))), full_logits(reference, sequences((40,))))
