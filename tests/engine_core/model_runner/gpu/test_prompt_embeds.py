"""Hidden states in place of embeddings, through scheduler and runner: against transformers, and
against the tokens whose embeddings they are."""

import numpy as np
import pytest
import torch
from engine_loop import EngineLoop, few_blocks, make_scheduler

from engine_core.scheduler.records.prompt_content import EmbeddedRows
from protocol.sampling import BeamSearchParams, SamplingParams

PLENTY = {"num_blocks": 140, "num_host_blocks": 60}


def greedy(number, **params):
    return SamplingParams(max_tokens=number, temperature=0.0, ignore_eos=True, **params)


def rows_of(start, states_NE):
    data = memoryview(states_NE.contiguous().view(torch.uint8).numpy().tobytes())
    name = str(states_NE.dtype).removeprefix("torch.")
    return EmbeddedRows(start, start + len(states_NE), name, data)


def prompt_of(length, seed):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(131, (length,), generator=generator).tolist()


def states_of(reference, length, seed):
    """Of the size of embeddings, and of no token."""
    generator = torch.Generator().manual_seed(seed)
    with torch.inference_mode():
        scale = reference.get_input_embeddings()(torch.arange(131)).std()
    return torch.randn(length, 36, generator=generator) * scale


@torch.inference_mode()
def expected_of(reference, tokens, spans, number):
    """What transformers' generate makes of `inputs_embeds`; log-probabilities of its choices."""
    embeds = reference.get_input_embeddings()(torch.tensor([tokens])).clone()
    for start, states in spans:
        embeds[0, start : start + len(states)] = states
    output = reference.generate(
        inputs_embeds=embeds,
        attention_mask=torch.ones(embeds.shape[:2], dtype=torch.int64),
        max_new_tokens=number,
        min_new_tokens=number,
        do_sample=False,
        output_logits=True,
        return_dict_in_generate=True,
    )
    logprobs = torch.cat(output.logits).log_softmax(1).max(1).values
    return output.sequences[0].tolist(), logprobs


BACKENDS = [("native", False), ("torch", True)]
pytestmark = pytest.mark.parametrize(("ops", "on_device"), BACKENDS, indirect=["ops"])


@pytest.fixture
def make_loop(on_device, reference, make_runner, make_device_runner):
    """(blocks, **options of the scheduler) -> an engine's loop over either runner."""

    def make(blocks, **options):
        runner = (make_device_runner if on_device else make_runner)(**blocks)
        depth = 2 if on_device else 1
        limits = {"max_num_seqs": 8, "max_model_len": 64, "max_num_batched_tokens": 64}
        limits |= {"swap": False} | options
        scheduler = make_scheduler(runner.config.layout, depth=depth, **blocks, **limits)
        return EngineLoop(scheduler, runner, depth=depth)

    return make


@pytest.mark.parametrize(("budget", "swap"), [(7, False), (8, True)])
def test_mixed_prompts_in_a_crowd_have_the_tokens_of_transformers(
    make_loop, reference, swap, budget
):
    """In chunks of any size, preempted, beside plain prompts. Proves S020."""
    blocks = few_blocks(reference)
    blocks["num_blocks"] //= 2
    loop = make_loop(blocks, swap=swap, max_num_batched_tokens=budget)
    wanted = {}
    for number in range(8):
        name, length = str(number), 9 + 4 * number
        tokens = prompt_of(length, number)
        spans = []
        if number % 4:
            spans.append((number % 3, states_of(reference, 1 + number, number)))
        if number % 2:
            spans.append((length - 3, states_of(reference, 3, 9)))
        wanted[name] = tokens, spans
        loop.add(
            name,
            tokens,
            greedy(19, logprobs=0),
            prompt_embeds=tuple(rows_of(start, states) for start, states in spans),
        )
    loop.finish()
    assert loop.scheduler.pool.counters.num_preemptions > 0
    for name, (tokens, spans) in wanted.items():
        expected, logprobs = expected_of(reference, tokens, spans, 19)
        assert loop.tokens[name, 0] == expected
        ours = [np.frombuffer(values, "<f4")[0] for _, values in loop.logprob_bytes[name, 0]]
        assert torch.allclose(torch.tensor(ours), logprobs, atol=1e-4, rtol=0)


def test_embeddings_of_tokens_have_the_bits_of_the_tokens(make_loop, reference):
    """A span of them, and all of them. Nothing is shared with the plain prompt."""
    loop = make_loop(PLENTY, max_num_batched_tokens=9)
    tokens = prompt_of(23, 0)
    with torch.inference_mode():
        states = reference.get_input_embeddings()(torch.tensor(tokens))
    for name, spans in {"plain": [], "part": [(3, 17)], "whole": [(0, 23)]}.items():
        rows = tuple(rows_of(start, states[start:stop]) for start, stop in spans)
        loop.add(name, tokens, greedy(9, logprobs=3), prompt_embeds=rows)
        loop.finish()
    for name in ("part", "whole"):
        assert loop.tokens[name, 0] == loop.tokens["plain", 0]
        assert loop.logprob_bytes[name, 0] == loop.logprob_bytes["plain", 0]
        assert loop.num_cached_tokens[name] == 0


def test_equal_leading_rows_share_blocks_and_others_do_not(make_loop, reference):
    """Proves S020."""
    loop = make_loop(PLENTY)
    states, other = states_of(reference, 30, 1), states_of(reference, 30, 2)
    changed = states.clone()
    changed[9, 35] += 1e-3
    for name, rows, cached in (
        ("first", states, 0),
        ("same", states, 28),
        ("longer", torch.cat([states, other]), 28),
        ("one element", changed, 8),
        ("half", states.half(), 0),
        ("another", other, 0),
    ):
        embeds = (rows_of(0, rows),)
        loop.add(name, [0] * len(rows), greedy(2), prompt_embeds=embeds)
        loop.finish()
        assert loop.num_cached_tokens[name] == cached, name
    assert loop.tokens["first", 0] == loop.tokens["same", 0]
    expected, _ = expected_of(reference, [0] * 30, [(0, changed)], 2)
    assert loop.tokens["one element", 0] == expected


def test_samples_and_beams_of_such_a_prompt_are_those_of_its_tokens(make_loop, reference):
    tokens = prompt_of(21, 4)
    with torch.inference_mode():
        states = reference.get_input_embeddings()(torch.tensor(tokens))
    results = []
    for rows in ((), (rows_of(0, states[:11]), rows_of(15, states[15:]))):
        loop = make_loop(few_blocks(reference), max_num_batched_tokens=16)
        for number in range(2):
            loop.add(
                f"samples {number}",
                tokens,
                SamplingParams(max_tokens=14, seed=number, ignore_eos=True),
                num_sequences=3,
                prompt_embeds=rows,
            )
        loop.add(
            "beams",
            tokens,
            greedy(10),
            num_sequences=3,
            beam_search=BeamSearchParams(beam_width=3),
            prompt_embeds=rows,
        )
        loop.finish()
        results.append(dict(loop.tokens))
    assert results[0] == results[1]
    assert len(results[0]) == 9


def test_ids_that_stand_for_rows_are_counted_by_no_penalty(make_loop, reference):
    """Two tokens lead by far, and the prompt names one of them. Proves S020."""
    states, found = states_of(reference, 9, 5), set()
    for placeholder in (3, 5):
        loop = make_loop(PLENTY)
        params = greedy(1, repetition_penalty=2.0, logit_bias={3: 99.0, 5: 99.0})
        loop.add("a", [placeholder] * 9 + [8], params, prompt_embeds=(rows_of(0, states),))
        loop.add("b", [placeholder] * 10, params, prompt_embeds=(rows_of(0, states),))
        loop.finish()
        found.add(loop.tokens["a", 0][0])
        assert loop.tokens["b", 0] == [8 - placeholder]  # its last one is a token
    assert len(found) == 1
