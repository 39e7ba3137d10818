"""Quantised files from the disk to log-probabilities, against transformers with their numbers."""

import contextlib

import pytest
import torch
import transformers
from float8_folders import RECIPES, float8_products, write_float8
from quantised_folders import METHODS, write_quantised

from engine_core.model_files import open_model_files
from engine_core.models.loading import load_model
from tests.engine_core.model_files import test_gguf_blocks as gguf_blocks
from tests.engine_core.model_files.conftest import write_gguf  # noqa: F401  a fixture
from tests.gpu.checks.whole_models import FLOAT32_ERROR
from tests.gpu.device import on_gpu
from tests.gpu.engine_run import EngineRun, RequestSpec, Sizes, triton_operations
from tests.gpu.tiny_models import random_reference, reference_logprobs

FP32 = torch.float32
SHAPE = {"vocab_size": 70, "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2}
SHAPE |= {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 64}
LLAMA = transformers.LlamaConfig(**SHAPE, initializer_range=0.1, max_position_embeddings=256)


def served(path, lengths, device):
    """By request (prompt, tokens, log-probabilities of all tokens), prompts in chunks."""
    files = open_model_files(str(path), report=print)
    ops = triton_operations(device, quantised_types=files.quantised_types)
    tensors = files.tensors(keeps_blocks=True)
    model = load_model(files.config, tensors, dtype=FP32, ops=ops, drops_zero_biases=True)
    assert set(ops.weight_packing(FP32).bytes_by_format()) - {"float32"}, "all was dequantised"
    longest, number = max(lengths) + 3, len(lengths)
    sizes = Sizes(
        max_num_seqs=number,
        max_model_len=longest,
        max_num_batched_tokens=max(lengths),
        num_blocks=number * -(-longest // 16),
        budget=max(lengths) * 2 // 3,
    )
    vocab_size = files.config["vocab_size"]
    requests = [
        RequestSpec(f"r{at}", torch.randint(vocab_size, (n,)).tolist(), 3, num_logprobs=vocab_size)
        for at, n in enumerate(lengths)
    ]
    answers = EngineRun(model, ops, sizes, dtype=FP32).generate(requests)
    return [
        (request.prompt, answer.tokens, answer.logprobs_of_all(vocab_size))
        for request, answer in ((each, answers[each.name]) for each in requests)
    ]


def logprobs_of(results, reference):
    """The reference's, of all that was generated."""
    return torch.cat([reference_logprobs(reference, *each[:2], device="cpu") for each in results])


def distances(results, reference):
    """Of each log-probability."""
    return (torch.cat([each[2] for each in results]) - logprobs_of(results, reference)).abs()


LENGTHS = {"cpu": (9,), "cuda": (1, 17, 70, 100)}


@pytest.mark.parametrize(
    "name", ["gptq 4 bits", *(on_gpu(name) for name in METHODS if name != "gptq 4 bits")]
)
def test_integers_of_a_folder_are_served_as_transformers_does(tmp_path, name, device):
    reference = random_reference(LLAMA, dtype=FP32, device="cpu")
    write_quantised(tmp_path, reference, METHODS[name])
    assert distances(served(tmp_path, LENGTHS[device], device), reference).max() < FLOAT32_ERROR


@pytest.mark.parametrize(
    "name", ["fp8 in blocks", *(on_gpu(name) for name in RECIPES if name != "fp8 in blocks")]
)
def test_float8_of_a_folder_is_served_as_transformers_would(tmp_path, name, device):
    """Held against what rounding costs: it flips where two sums differ by their last bit. A GPU's
    sums have 14, so there more of them flip, to neither side more than to the other."""
    reference, recipe = random_reference(LLAMA, dtype=FP32, device="cpu"), RECIPES[name]
    rounded = write_float8(tmp_path, reference, recipe)
    results = served(tmp_path, LENGTHS[device], device)
    exact = logprobs_of(results, reference)
    with float8_products(rounded, recipe) if recipe.activations else contextlib.nullcontext():
        distance = distances(results, reference).mean()
        cost = (logprobs_of(results, reference) - exact).abs().mean()
    if not recipe.activations:
        assert distance < FLOAT32_ERROR
        return
    assert distance < cost * (0.1 if device == "cpu" else 0.6)
    ours = torch.cat([each[2] for each in results])
    assert (ours - exact).abs().mean() < 1.2 * cost


@pytest.mark.parametrize("default", ["Q4_1", *map(on_gpu, ("Q4_0", "Q8_0"))])
def test_blocks_of_a_gguf_file_are_served_as_transformers_does(write_gguf, default, device):  # noqa: F811
    path = write_gguf(gguf_blocks.KEYS, gguf_blocks.tensors(default))
    files = open_model_files(str(path), report=print)
    config = transformers.AutoConfig.for_model(**files.config)
    reference = random_reference(config, dtype=FP32, device="cpu")
    reference.load_state_dict(dict(files.tensors()), strict=False)
    assert distances(served(path, LENGTHS[device], device), reference).max() < FLOAT32_ERROR
