"""Prompts with images through scheduler and CPU runner, against transformers.

Proves S021 and S221 for each family of models."""

import dataclasses

import numpy as np
import pytest
import torch
from engine_loop import EngineLoop, make_scheduler
from runners import runner_config, spoiled

from engine_core.model_runner.cpu.runner import CPUModelRunner
from engine_core.models.loading import load_model
from engine_core.models.multimodal.families import input_family
from engine_core.models.multimodal.tower import load_encoder
from kernels.backends import select_operations
from protocol.sampling import SamplingParams
from tests.engine_core.models.tiny_multimodal import (
    CONFIGS,
    answer,
    make_image,
    make_model,
    make_prompt,
    save_model,
)

VOCAB = 120


@pytest.fixture(scope="module")
def ops():
    return select_operations(torch.device("cpu"))


@pytest.fixture(scope="module", params=CONFIGS)
def family(request, tmp_path_factory, ops):
    """(model type, our decoder, the encoder read from a saved folder)."""
    model_type = request.param
    config = make_model(model_type).config.to_dict()
    path = save_model(model_type, tmp_path_factory.mktemp(model_type))
    encoder = load_encoder(path, input_family(config), dtype=torch.float32, num_threads=1)
    model = load_model(
        config, make_model(model_type).state_dict().items(), dtype=torch.float32, ops=ops
    )
    return model_type, model, encoder


def make_loop(family, ops, *, budget=64, encoder_budget=64, cache=64, num_blocks=150, **options):
    _, model, encoder = family
    config = runner_config(model, ops, encoder=encoder, max_model_len=128, num_blocks=num_blocks)
    num_pools = len({spec.pool for spec in config.layout.group_specs})
    if num_pools > 1:  # of keys and of states
        num_blocks, options["checkpoint_interval"] = (num_blocks,) * num_pools, 8
        config = dataclasses.replace(config, num_blocks=num_blocks)
    runner = spoiled(CPUModelRunner(config))
    scheduler = make_scheduler(
        config.layout, num_blocks=num_blocks, num_host_blocks=0, swap=False, max_model_len=128,
        max_num_seqs=8, max_num_batched_tokens=budget, max_num_encoder_input_tokens=encoder_budget,
        encoder_cache_size=cache, disable_chunked_mm_input=encoder.family.is_bidirectional,
        **options,
    )  # fmt: skip
    return EngineLoop(scheduler, runner, depth=1)


def params(**more):
    return SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True, **more)


def prompts_of(model_type):
    sizes = [(4, 4), (2, 6), (6, 4)]
    first, second, third = (make_image(model_type, n, size) for n, size in enumerate(sizes))
    return [
        [first, 5],
        [3, second],
        [2, first, 1, third, 1, first, 4],
        [9],
    ]


def columns(reports):
    """Log-probabilities [positions, V] by token id, of full reports."""
    rows = []
    for report in reports:
        ids = np.frombuffer(report.token_ids, np.int32).reshape(-1, report.width)[:, 1:]
        values = np.frombuffer(report.logprobs, np.float32).reshape(-1, report.width)[:, 1:]
        out = np.zeros_like(values)
        np.put_along_axis(out, ids.astype(np.int64), values, axis=1)
        rows.append(out)
    return np.concatenate(rows)


@pytest.mark.parametrize("budget", [1, 3, 64])
def test_logits_and_tokens_are_those_of_transformers(family, ops, budget):
    model_type = family[0]
    if family[2].family.is_bidirectional:
        budget = max(budget, 16)
    loop = make_loop(family, ops, budget=budget)
    expected = {}
    for number, parts in enumerate(prompts_of(model_type)):
        ids, features = make_prompt(model_type, parts)
        name = f"r{number}"
        loop.add(name, ids, params(prompt_logprobs=VOCAB, logprobs=VOCAB), mm_features=features)
        images = [part for part in parts if not isinstance(part, int)]
        expected[name] = (len(ids), *answer(model_type, ids, images))
    loop.finish()
    for name, (num_prompt, tokens, logprobs) in expected.items():
        assert loop.tokens[name, 0] == tokens
        reported = columns(loop.prompt_logprobs[name])
        assert np.abs(reported - logprobs[: num_prompt - 1].numpy()).max() < 1e-4
        decoded = np.stack([decoded_cell(*cell) for cell in loop.logprob_bytes[name, 0]])
        assert np.abs(decoded - logprobs[num_prompt - 1 : -1].numpy()).max() < 1e-4


def decoded_cell(ids, values):
    out = np.zeros(VOCAB, np.float32)
    out[np.frombuffer(ids, np.int32)[1:]] = np.frombuffer(values, np.float32)[1:]
    return out


def test_tokens_are_the_same_in_a_crowd_with_few_blocks_and_cached_prefixes(family, ops):
    """Preempted, in chunks, with an encoder cache that holds one image, with equal prompts that
    begin alike and with samples that fork."""
    model_type = family[0]
    is_gemma = model_type.startswith("gemma")  # which has several groups of layers
    least, num_blocks = (40, 60 if model_type == "gemma3" else 24) if is_gemma else (7, 21)
    loop = make_loop(family, ops, budget=least, encoder_budget=24, cache=24, num_blocks=num_blocks)
    expected = {}
    for number in range(3):
        for each, parts in enumerate(prompts_of(model_type)):
            ids, features = make_prompt(model_type, parts)
            images = [part for part in parts if not isinstance(part, int)]
            name = f"r{number}-{each}"
            samples = 2 if number == 2 else 1
            loop.add(name, ids, params(), mm_features=features, num_sequences=samples)
            expected[name] = answer(model_type, ids, images)[0]
    loop.finish()
    for name, tokens in expected.items():
        assert loop.tokens[name, 0] == tokens
    statistics = loop.scheduler.statistics()
    assert statistics.num_preemptions
    assert is_gemma or any(loop.num_cached_tokens.values())


def test_images_of_equal_places_and_other_content_share_no_blocks(family, ops):
    model_type = family[0]
    loop = make_loop(family, ops)
    for name, seed in (("a", 1), ("b", 2), ("c", 1)):
        ids, features = make_prompt(model_type, [1, make_image(model_type, seed), 3])
        loop.add(name, ids, params(), mm_features=features)
        loop.finish()
        image = make_image(model_type, seed)
        assert loop.tokens[name, 0] == answer(model_type, ids, [image])[0]
    assert not loop.num_cached_tokens["b"]
    assert loop.num_cached_tokens["c"]
    assert loop.scheduler.statistics().num_encoder_inputs == 2
