"""What "auto" becomes, on a machine with a GPU and on one without."""

import pytest
import torch

from engine_core.startup.device import (
    choose_cache_dtype,
    choose_device,
    choose_dtype,
    defaults_of,
    dtype_name,
)

CPU, GPU = torch.device("cpu"), torch.device("cuda")


@pytest.mark.parametrize("sees_gpu", [True, False])
def test_a_gpu_is_taken_where_torch_sees_one_and_a_named_device_as_it_is(monkeypatch, sees_gpu):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: sees_gpu)
    assert choose_device("auto").type == ("cuda" if sees_gpu else "cpu")
    assert choose_device("cpu").type == "cpu"
    assert choose_device("cuda").type == "cuda"


@pytest.mark.parametrize(
    ("config", "on_gpu"),
    [
        ({"torch_dtype": "float16"}, torch.float16),
        ({"torch_dtype": "bfloat16"}, torch.bfloat16),
        ({"dtype": "float16"}, torch.float16),
        ({"torch_dtype": "torch.float16"}, torch.float16),
        ({"torch_dtype": "float32"}, torch.bfloat16),
        ({"dtype": None, "text_config": {"dtype": "float16"}}, torch.float16),
        ({"dtype": "int8"}, torch.bfloat16),
        ({}, torch.bfloat16),
    ],
)
def test_auto_is_float32_on_a_cpu_and_the_checkpoints_16_bits_on_a_gpu(config, on_gpu):
    assert choose_dtype("auto", CPU, config) == torch.float32
    assert choose_dtype("auto", GPU, config) == on_gpu


@pytest.mark.parametrize("name", ["float32", "bfloat16", "float16"])
def test_a_named_dtype_is_taken_on_either(name):
    for device in (CPU, GPU):
        assert dtype_name(choose_dtype(name, device, {"dtype": "float16"})) == name


def test_the_cache_is_as_the_model_or_8_bits():
    assert choose_cache_dtype("auto", torch.float16) == torch.float16
    assert choose_cache_dtype("fp8", torch.bfloat16) == torch.float8_e4m3fn
    assert choose_cache_dtype("int8", torch.float32) == torch.int8
    assert choose_cache_dtype("bfloat16", torch.float32) == torch.bfloat16
    assert choose_cache_dtype("auto", torch.float32, keeps_bytes=True) == torch.int8
    assert choose_cache_dtype("bfloat16", torch.float32, keeps_bytes=True) == torch.bfloat16


def test_a_gpu_has_larger_steps_and_takes_most_of_its_memory():
    assert defaults_of(CPU).max_num_batched_tokens == 128
    assert defaults_of(CPU, is_quantised=True).max_num_batched_tokens == 256
    assert (defaults_of(CPU).max_num_seqs, defaults_of(CPU).memory_fraction) == (128, 0.4)
    assert defaults_of(GPU).max_num_batched_tokens == 8192
    assert (defaults_of(GPU).max_num_seqs, defaults_of(GPU).memory_fraction) == (256, 0.9)
