"""What "auto" becomes, on a machine with a GPU and on one without."""

import logging
import re
from pathlib import Path

import pytest
import torch

from engine_core.options.engine import EngineOptions
from engine_core.options.pooling import PoolingOptions
from engine_core.options.speculation import SpeculationOptions
from engine_core.startup import device as device_choice
from engine_core.startup.device import (
    Numbers,
    choose_cache_dtype,
    choose_device,
    choose_numbers,
    defaults_of,
    refused_gpu,
    unseen_gpu,
)
from engine_core.startup.pooled_files import PooledFiles
from kernels.backends import UnsupportedDevice

CPU, GPU = torch.device("cpu"), torch.device("cuda")


LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "intermediate_size": 64,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
    "vocab_size": 9,
}


class Config:
    """Of `ModelFiles` what says whether a device can run the model."""

    name, path, generation_config, weight_files = "tiny", Path("tiny"), {}, ()
    quantised_types, given_tokenizer, mmproj = frozenset(), None, None

    def __init__(self, config):
        self.config = config


def chosen_for(config, **options):
    files = PooledFiles(Config(config), PoolingOptions(), None)
    return choose_device(EngineOptions(model="tiny", **options), files)


@pytest.mark.parametrize("sees_gpu", [True, False])
def test_a_gpu_is_taken_where_torch_sees_one_and_a_named_device_as_it_is(monkeypatch, sees_gpu):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: sees_gpu)
    monkeypatch.setattr(device_choice, "check_cuda", lambda gpu: gpu)
    monkeypatch.setattr(device_choice, "unseen_gpu", lambda: "")
    for name in ("LlamaForCausalLM", "GPT2LMHeadModel", "BertModel"):
        config = LLAMA | {"architectures": [name]}
        assert chosen_for(config) == (torch.device("cuda" if sees_gpu else "cpu"), "")
    for name in ("cpu", "cuda"):
        assert chosen_for({"architectures": ["MPNetModel"]}, device=name)[0].type == name


@pytest.mark.parametrize(
    ("config", "options", "reason"),
    [
        (
            {"architectures": ["T5ForConditionalGeneration"], "is_encoder_decoder": True},
            {},
            "T5ForConditionalGeneration is an encoder-decoder model",
        ),
        ({"architectures": ["MPNetModel"]}, {}, "MPNetModel has a learned bias of distances"),
        (LLAMA | {"head_dim": 640}, {}, "heads of 640 elements, a GPU takes at most 512"),
        (LLAMA, {"block_size": 24}, "--block-size is 24; on a GPU it must be a power of two"),
        (LLAMA, {"prefix_cache_dir": Path("kept")}, "--prefix-cache-dir keeps blocks of a CPU"),
        (
            LLAMA,
            {
                "speculation": SpeculationOptions(
                    speculative="eagle", draft_model="m", draft_quantization="int8"
                )
            },
            "--draft-quantization int8 runs on a CPU only",
        ),
    ],
)
def test_what_a_gpu_cannot_run_goes_to_the_cpu_and_the_log_says_why(
    monkeypatch, caplog, config, options, reason
):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(device_choice, "check_cuda", lambda gpu: gpu)
    chosen, why = chosen_for(config, **options)
    assert chosen.type == "cpu"
    assert reason in why
    assert [(record.levelno, why in record.message) for record in caplog.records] == [
        (logging.WARNING, True)
    ]


def test_an_old_gpu_is_left_alone(monkeypatch):
    def refuse(gpu):
        raise UnsupportedDevice("the kernels need 8.0")

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(device_choice, "check_cuda", refuse)
    assert chosen_for(LLAMA) == (torch.device("cpu"), "the kernels need 8.0")


@pytest.mark.parametrize(
    ("built_for", "hidden", "cure"),
    [
        (None, None, "without CUDA; .* pip install --force-reinstall torch=="),
        ("13.0", None, r"for CUDA 13.0, which the driver \(535.104.05\) .* update the driver"),
        ("13.0", "", "^$"),
    ],
)
def test_a_gpu_that_torch_does_not_see_is_said_with_the_cure(
    monkeypatch, tmp_path, built_for, hidden, cure
):
    monkeypatch.setattr(torch.version, "cuda", built_for)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if hidden is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", hidden)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert unseen_gpu(tmp_path) == ""
    version = tmp_path / "proc/driver/nvidia/version"
    version.parent.mkdir(parents=True)
    version.write_text("NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.104.05  Sat Aug 19\n")
    assert re.search(cure, unseen_gpu(tmp_path))


def test_a_gpu_that_runs_nothing_is_refused_with_the_reason(monkeypatch):
    def refuse(gpu):
        raise UnsupportedDevice("the kernels need 8.0")

    monkeypatch.setattr(device_choice, "unseen_gpu", lambda: "get another torch")
    assert refused_gpu() == "get another torch"
    monkeypatch.setattr(device_choice, "unseen_gpu", lambda: "")
    monkeypatch.setattr(device_choice, "check_cuda", refuse)
    assert refused_gpu() == "the kernels need 8.0"
    monkeypatch.setattr(device_choice, "check_cuda", lambda gpu: gpu)
    assert refused_gpu() == ""


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
