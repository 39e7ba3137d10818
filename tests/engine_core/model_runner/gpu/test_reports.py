"""Log-probabilities of prompts from both runners against transformers' log_softmax: in chunks, with
a warm cache, with preemption, each position once."""

import numpy as np
import pytest
import torch
import transformers
from engine_loop import EngineLoop, few_blocks, make_scheduler

from engine_core.model_runner import prompt_logprobs
from protocol.outputs import FinishReason, Logprobs
from protocol.sampling import SamplingParams

V = 131
LENGTHS = (1, 2, 8, 17, 41)


@pytest.fixture(params=["host", "device"])
def any_runner(request, reference, make_runner, ops):
    """A runner's maker and how many steps it may have in flight."""
    is_native = ops.name != "torch-cpu"
    if request.param == "host":
        if not is_native:
            pytest.skip("once is enough")
        return make_runner, 1
    if is_native or getattr(reference.config, "sliding_window", None):
        pytest.skip("the device has operations of its own; windows are the host's case")
    return request.getfixturevalue("make_device_runner"), 2


def make_loop(reference, any_runner, *, swap=False, num_blocks=None, reports=None, **scheduling):
    make, depth = any_runner
    blocks = few_blocks(reference) | ({} if num_blocks is None else {"num_blocks": num_blocks})
    runner = make(max_num_seqs=8, max_model_len=64, **blocks, **reports or {})
    scheduler = make_scheduler(
        runner.config.layout,
        swap=swap,
        depth=depth,
        max_num_seqs=8,
        max_model_len=64,
        **{"max_num_batched_tokens": 96} | blocks | scheduling,
    )
    return EngineLoop(scheduler, runner, depth=depth)


def prompts(seed):
    """Of all these lengths; equal as far as they go."""
    draw = np.random.default_rng(seed)
    whole = draw.integers(8, V, max(LENGTHS)).tolist()
    return [whole[:length] for length in LENGTHS]


def assert_as_transformers(reference, prompt, parts, num_logprobs):
    """Every position but the first, once, in order."""
    found = Logprobs.joined(parts)
    if len(prompt) == 1:
        assert found is None
        return
    assert (found.num_positions, found.width) == (len(prompt) - 1, 1 + num_logprobs)
    shape = (found.num_positions, found.width)
    ids = torch.from_numpy(np.frombuffer(found.token_ids, "<i4").reshape(shape).astype(np.int64))
    values = torch.from_numpy(np.frombuffer(found.logprobs, "<f4").reshape(shape).copy())
    with torch.inference_mode():
        expected = reference(torch.tensor([prompt])).logits[0, :-1].float().log_softmax(-1)
    own = torch.tensor(prompt[1:])[:, None]
    assert (ids[:, :1] == own).all()
    torch.testing.assert_close(values, expected.gather(1, ids), atol=1e-4, rtol=0)
    torch.testing.assert_close(values[:, 1:], expected.topk(num_logprobs).values, atol=1e-4, rtol=0)
    ranks = torch.tensor(found.ranks)[:, None]
    least = (expected > expected.gather(1, own) + 1e-4).sum(1, keepdim=True) + 1
    most = (expected > expected.gather(1, own) - 1e-4).sum(1, keepdim=True) + 1
    assert ((least <= ranks) & (ranks <= most)).all()


@pytest.mark.parametrize(("swap", "budget"), [(False, 96), (True, 9)], ids=["whole", "chunks"])
def test_each_position_is_reported_once_and_right(reference, any_runner, swap, budget, monkeypatch):
    """The cache holds the prompts' blocks, and has too few of them; logits come in slices of 3."""
    monkeypatch.setattr(prompt_logprobs, "_SLICE_ENTRIES", 3 * V)
    loop = make_loop(reference, any_runner, swap=swap, max_num_batched_tokens=budget)
    plain = SamplingParams(max_tokens=2, temperature=0.0)
    loop.add("warm", prompts(0)[-1], plain)
    loop.finish()
    wanted = {}
    for number, prompt in enumerate(prompts(0)):
        num_logprobs = (0, 1, 5, V)[number % 4]
        params = SamplingParams(max_tokens=9, prompt_logprobs=num_logprobs, seed=1)
        loop.add(f"r{number}", prompt, params, num_sequences=1 + (number == 3))
        wanted[f"r{number}"] = prompt, num_logprobs
    loop.add("beside", prompts(1)[-1], plain)
    loop.finish()
    for name, (prompt, num_logprobs) in wanted.items():
        assert_as_transformers(reference, prompt, loop.prompt_logprobs[name], num_logprobs)
    assert "beside" not in loop.prompt_logprobs


@pytest.mark.parametrize("swap", [False, True])
def test_a_prompt_that_gives_way_in_its_middle_is_reported_once_and_whole(
    reference, any_runner, swap
):
    priority = {"max_num_batched_tokens": 7, "scheduling_policy": "priority"}
    num_blocks = 40 if getattr(reference.config, "sliding_window", None) else 13
    loop = make_loop(reference, any_runner, swap=swap, num_blocks=num_blocks, **priority)
    prompt = prompts(0)[-1]
    for number in range(3):
        params = SamplingParams(max_tokens=2, prompt_logprobs=1, seed=0)
        loop.add(f"r{number}", prompt, params, priority=9 - number)
        loop.step()
        loop.step()
    loop.finish()
    assert loop.scheduler.statistics().num_preemptions_forced
    for number in range(3):
        assert_as_transformers(reference, prompt, loop.prompt_logprobs[f"r{number}"], 1)


def test_a_request_that_reports_its_prompt_reads_no_cached_prefix_and_leaves_one(
    reference, any_runner
):
    loop = make_loop(reference, any_runner)
    prompt = prompts(0)[-1]
    for name, wanted in (("first", 1), ("second", 1), ("third", None)):
        loop.add(name, prompt, SamplingParams(max_tokens=3, prompt_logprobs=wanted, seed=0))
        loop.finish()
    assert loop.num_cached_tokens == {"first": 0, "second": 0, "third": 40}
    assert loop.tokens["first", 0] == loop.tokens["second", 0] == loop.tokens["third", 0]


PROCESSED = {
    "greedy": {"temperature": 0.0, "repetition_penalty": 1.4, "logit_bias": {9: 1.5, 40: -2.0}},
    "drawn": {"temperature": 1.7},
    "top k": {"temperature": 0.6, "top_k": 5, "repetition_penalty": 1.2},
    "top p": {"temperature": 1.3, "top_p": 0.8, "allowed_token_ids": tuple(range(10, 90))},
    "all": {"temperature": 0.8, "top_k": 40, "top_p": 0.9, "min_p": 0.02, "min_tokens": 3},
}


def processed_by_transformers(logits_V, tokens, num_output, params):
    """One row, by the processors that transformers has, in our order."""
    scores, ids = logits_V[None].clone(), torch.tensor([tokens])
    if params.allowed_token_ids is not None:
        others = sorted(set(range(V)) - set(params.allowed_token_ids))
        scores[:, others] = -torch.inf
    if num_output < params.min_tokens:
        scores[:, 7] = -torch.inf  # end of sequence
    for token_id, bias in params.logit_bias.items():
        scores[:, token_id] += bias
    if params.repetition_penalty != 1:
        scores = transformers.RepetitionPenaltyLogitsProcessor(params.repetition_penalty)(
            ids, scores
        )
    if params.temperature:
        scores = scores / params.temperature
        for warper, value, off in (
            (transformers.MinPLogitsWarper, params.min_p, 0.0),
            (transformers.TopKLogitsWarper, params.top_k, 0),
            (transformers.TopPLogitsWarper, params.top_p, 1.0),
        ):
            scores = scores if value == off else warper(value)(ids, scores)
    return scores[0]


@pytest.mark.parametrize("mode", ["raw_logits", "processed_logprobs", "processed_logits"])
def test_reports_are_of_what_the_mode_names(reference, any_runner, mode):
    """Some from the device, some from the host, some of tokens that are named; and prompts."""
    is_processed, are_logits = "processed" in mode, "logits" in mode
    reports = {"reports_processed": is_processed, "reports_logits": are_logits}
    loop = make_loop(reference, any_runner, reports=reports)
    wanted = [{"logprobs": 3}, {"logprobs": -1}, {"logprob_token_ids": (3, 130, 50)}]
    asked = {}
    for number, (name, kind) in enumerate(PROCESSED.items()):
        more = wanted[number % 3] | ({"prompt_logprobs": 2} if number == 1 else {})
        asked[name] = SamplingParams(max_tokens=5, seed=number, **kind, **more)
        loop.add(name, prompts(0)[2], asked[name])
    loop.finish()
    for name, params in asked.items():
        tokens = [*prompts(0)[2]]
        for place, (raw_ids, raw_values) in enumerate(loop.logprob_bytes[name, 0]):
            with torch.inference_mode():
                expected = reference(torch.tensor([tokens])).logits[0, -1].float()
            if is_processed:
                expected = processed_by_transformers(expected, tokens, place, params)
            expected = expected if are_logits else expected.log_softmax(-1)
            ids = np.frombuffer(raw_ids, "<i4").astype(np.int64)
            values = torch.from_numpy(np.frombuffer(raw_values, "<f4").copy())
            torch.testing.assert_close(values, expected[ids], atol=1e-4, rtol=1e-5)
            if not params.logprob_token_ids:
                best = expected.topk(len(ids) - 1).values
                torch.testing.assert_close(values[1:], best, atol=1e-4, rtol=1e-5)
            assert expected[ids[0]].isfinite()
            rank = int((expected > expected[ids[0]] + 1e-4).sum()) + 1
            most = int((expected > expected[ids[0]] - 1e-4).sum()) + 1
            assert rank <= loop.logprobs[name, 0][place] <= most
            tokens.append(int(ids[0]))
    found = Logprobs.joined(loop.prompt_logprobs["drawn"])
    values = np.frombuffer(found.logprobs, "<f4").reshape(-1, 3)
    with torch.inference_mode():
        expected = reference(torch.tensor([prompts(0)[2]])).logits[0, :-1].float()
    expected = expected if are_logits else expected.log_softmax(-1)
    torch.testing.assert_close(
        torch.from_numpy(values[:, 1:].copy()), expected.topk(2).values, atol=1e-4, rtol=1e-5
    )


def test_an_id_used_again_gets_no_report_of_the_request_before(reference, any_runner):
    loop = make_loop(reference, any_runner, max_num_batched_tokens=9)
    params = SamplingParams(max_tokens=2, prompt_logprobs=0, seed=0)
    loop.add("name", prompts(0)[-1], params)
    loop.step()
    loop.step()
    loop.abort("name")
    while loop.scheduler.has_work() and ("name", 0) not in loop.ends:
        loop.step()
    assert loop.ends.pop(("name", 0)) is FinishReason.ABORT
    loop.prompt_logprobs.clear()
    loop.add("name", prompts(1)[-1], params)
    loop.finish()
    assert_as_transformers(reference, prompts(1)[-1], loop.prompt_logprobs["name"], 0)


def test_named_tokens_are_reported_in_place_of_the_likeliest(reference, any_runner):
    """Beside a request that reports the likeliest, and with the numbers of the whole vocabulary."""
    loop = make_loop(reference, any_runner)
    named = (3, 130, 50)
    for name, wanted in {
        "named": {"logprob_token_ids": named},
        "top": {"logprobs": 3},
        "all": {"logprobs": -1},
    }.items():
        loop.add(name, prompts(0)[1], SamplingParams(max_tokens=4, seed=3, **wanted))
    loop.finish()
    for mine, top, whole in zip(
        *(loop.logprob_bytes[name, 0] for name in ("named", "top", "all")), strict=True
    ):
        ids, values = np.frombuffer(mine[0], "<i4"), np.frombuffer(mine[1], "<f4")
        assert tuple(ids[1:]) == named
        assert ids[0] == np.frombuffer(top[0], "<i4")[0]
        columns = np.frombuffer(whole[0], "<i4"), np.frombuffer(whole[1], "<f4")
        of_token = dict(zip(*columns, strict=True))
        np.testing.assert_allclose(values, [of_token[each] for each in ids], atol=1e-5)
    assert loop.logprobs["named", 0] == loop.logprobs["top", 0]
