"""What "auto" becomes, on a machine with a GPU and on one without."""

import pytest
import torch

from engine_core.startup.device import (
    Numbers,
    choose_cache_dtype,
    choose_device,
    choose_numbers,
    defaults_of,
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
def test_auto_is_the_checkpoints_16_bits_on_a_gpu(config, on_gpu):
    chosen = choose_numbers("auto", GPU, config)
    assert (chosen.activations, chosen.weights) == (on_gpu, "float32")
    assert chosen.reason


@pytest.mark.parametrize(
    ("options", "name", "reason"),
    [
        ({}, "bfloat16", "the checkpoint is float16, and this CPU has units for bfloat16"),
        ({"native_bfloat16": "widened"}, "float32", "this CPU has no units for bfloat16"),
        ({"native_bfloat16": None}, "float32", "this CPU has no units for bfloat16"),
        ({"config": {"torch_dtype": "float32"}}, "float32", "the checkpoint is float32"),
        ({"config": {}}, "float32", "the checkpoint is of no known dtype"),
        ({"has_blocks": True}, "float32", "the file's quantised blocks stay as they are"),
        ({"quantization": "int8"}, "float32", ""),
    ],
)
def test_auto_on_a_cpu_is_bfloat16_where_units_and_checkpoint_are_made_for_it(
    options, name, reason
):
    given = {"config": {"dtype": "float16"}, "native_bfloat16": "units"} | options
    chosen = choose_numbers("auto", CPU, **given)
    assert (chosen.name, chosen.activations) == (name, torch.float32)
    assert chosen.weights == options.get("quantization", name)
    assert chosen.reason.startswith(reason)
    assert bool(chosen.reason) == bool(reason)


@pytest.mark.parametrize("name", ["float32", "bfloat16", "float16"])
def test_a_named_dtype_is_taken_on_either(name):
    for device in (CPU, GPU):
        chosen = choose_numbers(name, device, {"dtype": "float16"})
        assert (chosen.name, chosen.activations) == (name, getattr(torch, name))
        assert not chosen.reason


def test_what_transformers_code_runs_is_not_packed_in_bfloat16():
    config = {"dtype": "bfloat16"}
    by_name = choose_numbers("bfloat16", CPU, config, native_bfloat16="widened")
    assert (by_name.weights, by_name.activations) == ("bfloat16", torch.float32)
    assert by_name.by_torch("?").activations == torch.bfloat16
    auto = choose_numbers("auto", CPU, config, native_bfloat16="units")
    assert auto.by_torch("so") == Numbers("float32", torch.float32, reason="so")
    int8 = choose_numbers("auto", CPU, config, quantization="int8")
    assert int8.by_torch("?") is int8


def test_the_cache_is_as_the_model_or_8_bits():
    half, full = Numbers("float16", torch.float16), Numbers("float32", torch.float32)
    native = Numbers("bfloat16", torch.float32, "bfloat16")
    assert choose_cache_dtype("auto", half) == torch.float16
    assert choose_cache_dtype("auto", native) == torch.bfloat16
    assert choose_cache_dtype("fp8", half) == torch.float8_e4m3fn
    assert choose_cache_dtype("int8", full) == torch.int8
    assert choose_cache_dtype("bfloat16", full) == torch.bfloat16
    assert choose_cache_dtype("auto", full, keeps_bytes=True) == torch.int8
    assert choose_cache_dtype("bfloat16", full, keeps_bytes=True) == torch.bfloat16


def test_a_gpu_has_larger_steps_and_takes_most_of_its_memory():
    for defaults, most, most_shared in (
        (defaults_of(CPU), 512, 128),
        (defaults_of(CPU, has_fewer_bits=True), 256, None),
        (defaults_of(GPU), 8192, None),
    ):
        assert defaults.max_num_batched_tokens == most
        assert defaults.max_num_shared_tokens == most_shared
    assert (defaults_of(CPU).max_num_seqs, defaults_of(CPU).memory_fraction) == (128, 0.4)
    assert (defaults_of(GPU).max_num_seqs, defaults_of(GPU).memory_fraction) == (256, 0.9)
