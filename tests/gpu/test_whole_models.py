"""Whole models against transformers, with the same random weights."""

import pytest
import torch

from kernels.triton.linear.few_rows import FewRowsProducts
from tests.gpu.checks import whole_models
from tests.gpu.checks.whole_models import EXPERTS_RATIO, FLOAT32_ERROR, HALF_RATIO, MODELS
from tests.gpu.device import DEVICE, on_gpu
from tests.gpu.model_shapes import PUBLISHED
from tests.gpu.tiny_models import HYBRIDS, random_reference, tiny_config

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
EXACT = 1e-4 if DEVICE == "cpu" else FLOAT32_ERROR
SMALL = {"prompt_lengths": (3, 7), "num_output": 2, "budget": 6, "num_layers": 1}


@pytest.mark.parametrize(
    ("name", "dtype", "use_graphs", "limit"),
    [
        *(on_gpu(name, FP32, graphs, FLOAT32_ERROR) for name in MODELS for graphs in (True, False)),
        *(
            on_gpu(name, BF16, True, EXPERTS_RATIO if name in whole_models.SPARSE else HALF_RATIO)
            for name in MODELS
        ),
        on_gpu("llama", FP16, True, HALF_RATIO),
    ],
)
def test_logprobs_are_those_of_transformers(name, dtype, use_graphs, limit, device):
    assert whole_models.check(name, dtype, use_graphs=use_graphs, device=device) <= limit


@pytest.mark.parametrize(("dtype", "limit"), [(FP32, FLOAT32_ERROR), (BF16, HALF_RATIO)])
@pytest.mark.gpu
def test_logprobs_of_quantised_weights_are_those_of_transformers(dtype, limit, device):
    error = whole_models.check("llama", dtype, use_graphs=True, is_quantised=True, device=device)
    assert error <= limit


@pytest.mark.parametrize(("name", "dtype"), [("llama", FP32), ("llama", BF16), ("gemma3", BF16)])
@pytest.mark.gpu
def test_prompts_of_more_tokens_than_a_step_are_as_transformers_has_them(name, dtype, device):
    sizes = {"prompt_lengths": (8_500, 40, 9_001), "budget": 8192}
    error = whole_models.check(name, dtype, use_graphs=True, device=device, **sizes)
    assert error <= (FLOAT32_ERROR if dtype is FP32 else HALF_RATIO)


@pytest.mark.parametrize(
    ("dtype", "sizes"),
    [
        (FP16, SMALL | {"prompt_lengths": (7,)}),
        on_gpu(BF16, {}),
        on_gpu(FP16, {"prompt_lengths": (1, 15, 17, 40)}),
    ],
)
def test_a_model_whose_steps_of_few_rows_have_our_own_products(dtype, sizes, device):
    few_rows = FewRowsProducts(torch.device(device), prefetch_bytes=1 << 18)
    error = whole_models.check(
        "llama", dtype, use_graphs=True, few_rows=few_rows, device=device, **sizes
    )
    assert error <= HALF_RATIO


def test_a_small_model_in_float32(device):
    sizes = SMALL | {"prompt_lengths": (1, 18), "budget": 12}
    assert whole_models.check("qwen3-moe", FP32, use_graphs=True, device=device, **sizes) < EXACT


@pytest.mark.parametrize(
    ("name", "dtype", "limit"),
    [*((name, FP32, EXACT) for name in HYBRIDS), ("qwen3.5", FP16, HALF_RATIO)],
)
def test_a_small_model_of_which_a_layer_keeps_a_state(name, dtype, limit, device):
    """A prompt in chunks that meet in a block, a graph's padding beside it, decodes."""
    sizes = SMALL | {"prompt_lengths": (1, 18), "budget": 12, "num_layers": 2}
    assert whole_models.check(name, dtype, use_graphs=True, device=device, **sizes) < limit


def test_a_small_model_in_16_bits_is_compared_with_the_same_in_float32(device):
    # bf16 is no dtype of the interpreter's products
    ratio = whole_models.check("llama", FP16, use_graphs=True, device=device, **SMALL)
    assert 0 < ratio < HALF_RATIO


def test_a_small_model_of_quantised_weights(device):
    error = whole_models.check(
        "llama", FP32, use_graphs=True, is_quantised=True, device=device, **SMALL
    )
    assert error < EXACT


def test_a_model_with_a_wrong_weight_is_seen(monkeypatch, device):
    right = whole_models.ours_of

    def wrong(reference, ops, *, dtype):
        ours = right(reference, ops, dtype=dtype)
        reference.lm_head.weight.data[5] += 0.1
        return ours

    monkeypatch.setattr(whole_models, "ours_of", wrong)
    sizes = SMALL | {"prompt_lengths": (3,), "num_output": 1}
    error = whole_models.check("llama", FP32, use_graphs=False, device=device, **sizes)
    assert error > FLOAT32_ERROR


TINY = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 2}
TINY = PUBLISHED["Qwen3-0.6B"] | TINY | {"num_key_value_heads": 1, "head_dim": 16}


@pytest.mark.parametrize(
    ("shape", "options", "limit"),
    [
        pytest.param(
            TINY, {"dtype": FP32, "prompt_lengths": (1, 18), "num_output": 2}, EXACT, id="tiny"
        ),
        *(on_gpu(shape, {}, HALF_RATIO, id=name) for name, shape in PUBLISHED.items()),
    ],
)
def test_two_layers_of_published_widths(shape, options, limit, device):
    assert whole_models.check_published(shape, device=device, **options) <= limit


def test_a_reference_in_16_bits_keeps_its_rotary_frequencies_exact():
    model = random_reference(tiny_config("llama"), dtype=BF16, device="cpu")
    assert {parameter.dtype for parameter in model.parameters()} == {BF16}
    assert model.model.rotary_emb.inv_freq.dtype == FP32
