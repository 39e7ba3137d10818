"""Prompts with images and sounds through scheduler and device runner, against transformers."""

import dataclasses
import itertools

import numpy as np
import pytest
import torch
from engine_loop import EngineLoop, make_scheduler
from fake_device import LateQueue, PaddedOperations
from runners import runner_config, spoiled
from test_multimodal import decoded_cell, prompts_of

from engine_core.devices import traits_of
from engine_core.model_runner.gpu import CudaQueue, GPUModelRunner
from engine_core.models.blocks import block
from engine_core.models.loading import load_model
from engine_core.models.multimodal.families import input_family
from engine_core.models.multimodal.tower import load_encoder
from kernels.triton.device_steps import TritonDeviceSteps
from kernels.triton.operations import TritonOperations
from protocol.sampling import SamplingParams
from tests.engine_core.models.tiny_multimodal import answer, make_model, make_prompt, save_model
from tests.gpu.device import DEVICE
from tests.kernels.torch_device_steps import TorchDeviceSteps

VOCAB = 120
TRITON_DEVICE = torch.device(DEVICE, 0 if DEVICE == "cuda" else None)
"""TEST_DEVICE=cuda makes it a GPU."""


@pytest.fixture
def make_loop(monkeypatch, tmp_path):
    """(model type, whether on Triton, ...) -> the loop of an engine with a step in flight. Tables
    of angles are those of a device: they do not grow."""

    def make(model_type, on_triton, *, budget, num_blocks=150, cache=64):
        monkeypatch.setattr(block, "traits_of", lambda device: traits_of("cuda"))
        ops = TritonOperations(TRITON_DEVICE) if on_triton else PaddedOperations()
        reference = make_model(model_type)
        config, options = reference.config.to_dict(), {}
        family = input_family(config)
        path = save_model(model_type, tmp_path)
        numbers = {"dtype": torch.float32, "num_threads": 1, "device": ops.device}
        encoder = load_encoder(path, family, **numbers)
        model = load_model(config, reference.state_dict().items(), dtype=torch.float32, ops=ops)
        limits = {"max_model_len": 128, "max_num_batched_tokens": budget}
        config = runner_config(model, ops, encoder=encoder, num_blocks=num_blocks, **limits)
        num_pools = len({spec.pool for spec in config.layout.group_specs})
        if num_pools > 1:  # of keys and of states
            num_blocks, options["checkpoint_interval"] = (num_blocks,) * num_pools, 8
            config = dataclasses.replace(config, num_blocks=num_blocks)
        steps = TritonDeviceSteps() if on_triton else TorchDeviceSteps()
        queue = CudaQueue(ops.device) if ops.device.type == "cuda" else LateQueue()
        runner = spoiled(GPUModelRunner(config, steps=steps, queue=queue))
        scheduler = make_scheduler(
            config.layout, depth=2, num_blocks=num_blocks, num_host_blocks=0, swap=False,
            max_num_seqs=8, max_num_encoder_input_tokens=64, encoder_cache_size=cache,
            disable_chunked_mm_input=family.is_bidirectional, **limits, **options,
        )  # fmt: skip
        return EngineLoop(scheduler, runner, depth=2)

    return make


def add(loop, model_type, name, parts, **more):
    """Returns what transformers answers, and the prompt's length."""
    ids, features = make_prompt(model_type, parts)
    images = [part for part in parts if not isinstance(part, int)]
    params = SamplingParams(temperature=0.0, ignore_eos=True, **more)
    loop.add(name, ids, params, mm_features=features)
    return len(ids), *answer(model_type, ids, images)


@pytest.mark.parametrize(
    "model_type",
    [
        "qwen2_5_vl",
        "qwen3_vl",
        "qwen3_5",
        "gemma3",
        "gemma4, rows see each other",
        "mistral3",
        "voxtral",
    ],
)
def test_a_crowd_in_flight_has_tokens_and_logprobs_of_transformers(make_loop, model_type):
    """In chunks, with few blocks, an encoder cache of one image, prefix hits, and graphs of
    decodes behind images."""
    is_gemma = model_type.startswith("gemma")  # which has several groups of layers
    budget, num_blocks = (40, 60 if model_type == "gemma3" else 24) if is_gemma else (9, 18)
    loop = make_loop(model_type, False, budget=budget, num_blocks=num_blocks, cache=24)
    expected = {}
    for number, (each, parts) in itertools.product(range(2), enumerate(prompts_of(model_type))):
        name = f"{number}-{each}"
        expected[name] = add(loop, model_type, name, parts, max_tokens=8, logprobs=VOCAB)
    loop.finish()
    for name, (num_prompt, tokens, logprobs) in expected.items():
        assert loop.tokens[name, 0] == tokens
        decoded = np.stack([decoded_cell(*cell) for cell in loop.logprob_bytes[name, 0]])
        assert np.abs(decoded - logprobs[num_prompt - 1 : -1].numpy()).max() < 1e-4
    assert loop.num_ahead
    assert loop.runner._queue.num_replayed
    assert model_type == "gemma3" or loop.scheduler.statistics().num_preemptions
    assert is_gemma or any(loop.num_cached_tokens.values())


@pytest.mark.slow
@pytest.mark.parametrize(
    "model_type", ["qwen2_5_vl", "qwen3_vl", "gemma3", "mistral3", "qwen2_audio"]
)
def test_interpreted_kernels_give_the_tokens_of_transformers(make_loop, model_type):
    """Two images in chunks beside a text, then decodes behind them."""
    loop = make_loop(model_type, True, budget=40 if model_type == "gemma3" else 9)
    _, _, two_images, text = prompts_of(model_type)
    expected = {"a": add(loop, model_type, "a", two_images, max_tokens=2)}
    expected["b"] = add(loop, model_type, "b", text, max_tokens=1)
    loop.finish()
    for name, (_, tokens, _) in expected.items():
        given = loop.tokens[name, 0]
        assert given == tokens[: len(given)]
    assert len(loop.runner.graphs)
