"""Models in stages give the tokens of one worker, to the bit where its bits do not depend on the
batch, and of transformers."""

import random

import numpy as np
import pytest
import torch
import transformers
from engine_loop import EngineLoop, make_scheduler
from runners import load_reference, runner_config, spoiled
from same_answers import draw_params
from stages_in_turn import StagesInTurn, load_stages

from engine_core.model_runner.config import plan_cache_layout
from engine_core.model_runner.cpu.runner import CPUModelRunner
from engine_core.models.errors import ModelConfigError
from engine_core.models.layer_cache import paged_keys
from engine_core.models.parallel.stages import split_layers
from engine_core.models.registry import read_model_config
from engine_core.scheduler import DraftTokenIds
from protocol.sampling import BeamSearchParams, SamplingParams
from tests.engine_core.model_runner.conftest import CONFIGS, SHAPE
from tests.engine_core.models.decoder_cases import random_model
from tests.engine_core.models.hybrid_cases import falcon_h1, spread_out

FAMILIES = {
    "llama, tied": transformers.LlamaConfig(**SHAPE, num_hidden_layers=5, tie_word_embeddings=True),
    "gemma3": CONFIGS["four groups"],
    "mixtral": transformers.MixtralConfig(
        **SHAPE | {"intermediate_size": 48},
        num_hidden_layers=4,
        num_local_experts=4,
        num_experts_per_tok=2,
    ),
}


@pytest.fixture(scope="module", params=FAMILIES)
def family(request):
    torch.manual_seed(1)
    config = FAMILIES[request.param]
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    return model.eval()


def prompt_of(length, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(131, (length,), generator=generator).tolist()


def loop_of(layout, runner, *, num_stages, num_blocks=150, swap=False, num_host_blocks=0, **more):
    limits = {"max_num_seqs": 8, "max_model_len": 64, "max_num_batched_tokens": 24}
    scheduler = make_scheduler(
        layout,
        num_blocks=num_blocks,
        num_host_blocks=num_host_blocks,
        swap=swap,
        depth=num_stages,
        pipeline_parallel_size=num_stages,
        min_micro_batch_tokens=4,
        **limits | more,
    )
    return EngineLoop(scheduler, runner, depth=num_stages)


def loops(reference, ops, num_stages, **options):
    """A worker alone, and as many stages."""
    sizes = {name: options[name] for name in ("num_blocks", "num_host_blocks") if name in options}
    whole = CPUModelRunner(runner_config(load_reference(reference, ops), ops, **sizes))
    stages = StagesInTurn(load_stages(reference, ops, num_stages), ops, **sizes)
    layout = whole.config.layout
    assert all(each.config.layout.group_specs == layout.group_specs for each in stages.stages)
    return (
        loop_of(layout, spoiled(whole), num_stages=1, **options),
        loop_of(layout, stages, num_stages=num_stages, **options),
    )


def assert_same(one, other, *, to_the_bit=False):
    assert other.tokens == one.tokens
    assert other.ends == one.ends
    assert other.logprobs == one.logprobs
    if to_the_bit:
        assert other.logprob_bytes == one.logprob_bytes
    for place, cells in one.logprob_bytes.items():
        pairs = zip(cells, other.logprob_bytes[place], strict=True)
        values = [[np.frombuffer(cell[1], "<f4") for cell in pair] for pair in pairs]
        np.testing.assert_allclose(*np.swapaxes(values, 0, 1), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("ops", ["native"], indirect=True)
def test_layers_that_keep_keys_and_a_state_in_stages(ops):
    """Which two caches of a block are a stage's."""
    pair = loops(spread_out(random_model(falcon_h1(3))), ops, 2)
    for loop in pair:
        for length in (30, 9):
            params = SamplingParams(max_tokens=12, ignore_eos=True, temperature=0.0, logprobs=2)
            loop.add(f"r{length}", prompt_of(length), params)
        loop.finish()
    assert_same(*pair, to_the_bit=True)


@pytest.mark.parametrize("num_stages", [2, 4])
def test_stages_give_the_tokens_of_one_worker_and_of_transformers(family, ops, num_stages):
    pair = loops(family, ops, num_stages)
    prompts = [prompt_of(length, length) for length in (3, 17, 30, 9, 17)]
    for loop in pair:
        for number, prompt in enumerate(prompts):
            seed = None if number < 2 else number
            temperature = 0.0 if number < 2 else 1.0
            loop.add(
                f"r{number}",
                prompt,
                SamplingParams(
                    max_tokens=12, ignore_eos=True, temperature=temperature, seed=seed, logprobs=2
                ),
            )
        loop.finish()
    is_invariant = ops.name.startswith("native") and family.config.model_type != "mixtral"
    assert_same(*pair, to_the_bit=is_invariant)
    assert pair[1].num_ahead > 10, "stages work at once"
    for number in (0, 1):
        tokens = list(prompts[number])
        with torch.inference_mode():
            for _ in range(12):
                tokens.append(int(family(torch.tensor([tokens])).logits[0, -1].argmax()))
        assert pair[1].tokens[f"r{number}", 0] == tokens[len(prompts[number]) :]


@pytest.mark.parametrize("seed", range(2))
def test_whatever_is_asked_preempted_cached_or_aborted_the_answers_are_one_workers(
    reference, ops, seed
):
    """Recompute and swap, chunks, cached prefixes, forks, beams, aborts."""
    draw = random.Random(seed)
    num_stages = 3 - seed % 2
    has_windows = getattr(reference.config, "sliding_window", None) is not None
    options = {
        "num_blocks": 110 if has_windows else 45,
        "num_host_blocks": draw.choice([0, 60]),
        "swap": draw.random() < 0.5,
    }
    pair = loops(reference, ops, num_stages, **options)
    shared = prompt_of(16, 99)
    asked = []
    for number in range(10):
        own = prompt_of(draw.randint(1, 30), number)
        prompt = shared + own[:12] if draw.random() < 0.5 else own
        kind = draw.choice(["one", "one", "one", "samples", "beams"])
        if kind == "beams":
            params = SamplingParams(max_tokens=8, ignore_eos=True)
            asked.append((prompt, params, {"num_sequences": 3, "beam_search": BeamSearchParams(3)}))
        else:
            num_sequences = 3 if kind == "samples" else 1
            asked.append((prompt, draw_params(draw), {"num_sequences": num_sequences}))
    aborted = f"r{draw.randrange(10)}"
    for loop in pair:
        for number, (prompt, params, more) in enumerate(asked):
            loop.add(f"r{number}", prompt, params, **more)
            loop.step()
            if number == 7:
                loop.abort(aborted)
        loop.finish()
        for place in [place for place in loop.ends if place[0] == aborted]:
            for found in (loop.tokens, loop.ends, loop.logprobs, loop.logprob_bytes):
                found.pop(place, None)
    assert_same(*pair)
    assert sum(pair[1].num_cached_tokens.values()) > 0


def test_drafts_that_are_verified_in_stages_give_the_same_tokens(reference, ops):
    pair = loops(reference, ops, 2)
    expected = {}
    for loop in pair:
        for name, length in {"a": 5, "b": 20}.items():
            loop.add(name, prompt_of(length), SamplingParams(max_tokens=20, temperature=0.0))
        if loop is pair[1]:
            expected = dict(pair[0].tokens)
        for step in range(400):
            for (name, _), tokens in expected.items():
                known = len(loop.tokens[name, 0])
                drafts = [*tokens[known : known + 2], (step % 131)]
                if known:
                    loop.scheduler.update_draft_token_ids(
                        DraftTokenIds(req_ids=[name], draft_token_ids=[drafts])
                    )
            loop.step()
            if not loop.scheduler.has_work():
                break
        loop.finish()
    assert_same(*pair)
    assert pair[1].scheduler.statistics().num_accepted_tokens > 10


def test_layers_are_split_by_what_a_token_reads_and_the_head_counts():
    def stages(num_stages, **sizes):
        config = transformers.LlamaConfig(**SHAPE | sizes).to_dict()
        config["architectures"] = ["LlamaForCausalLM"]
        return [len(each.layers) for each in split_layers(read_model_config(config), num_stages)]

    assert stages(3, num_hidden_layers=9, vocab_size=16) == [3, 3, 3]
    first, second = stages(2, num_hidden_layers=9, vocab_size=2000)
    assert first > second >= 1, "the head is many layers' work"
    assert stages(4, num_hidden_layers=4) == [1, 1, 1, 1]
    with pytest.raises(ModelConfigError, match="is 5, and the model has 4 layers"):
        stages(5, num_hidden_layers=4)


def test_a_stage_has_its_own_layers_share_of_a_block():
    """Proves S067."""
    layers = paged_keys(1, 4, ((3, 3, 3, None) * 5)[:18])
    a_layer = layers[0].block_bytes(4, torch.float32)
    whole = plan_cache_layout(layers, 4, torch.float32)
    for num_stages in (2, 3):
        size = 18 // num_stages
        layouts = [
            plan_cache_layout(layers, 4, torch.float32, range(start, start + size))
            for start in range(0, 18, size)
        ]
        for start, layout in zip(range(0, 18, size), layouts, strict=True):
            assert layout.group_specs == whole.group_specs
            own = range(start, start + size)
            assert list(layout.offsets) == sorted(own, key=layout.group_of)
            assert len({(layout.group_of(layer), layout.offsets[layer]) for layer in own}) == size
        most = whole.block_bytes + num_stages * a_layer
        assert sum(layout.block_bytes for layout in layouts) <= most
