"""Log-probabilities of prompts from both runners against transformers' log_softmax: in chunks, with
a warm cache, with preemption, each position once."""

import numpy as np
import pytest
import torch
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


def make_loop(reference, any_runner, *, swap=False, num_blocks=None, **scheduling):
    make, depth = any_runner
    blocks = few_blocks(reference) | ({} if num_blocks is None else {"num_blocks": num_blocks})
    runner = make(max_num_seqs=8, max_model_len=64, **blocks)
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
