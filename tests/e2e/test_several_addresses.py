"""Two daemons of one model: one is killed in the middle of streams, which go on at the other."""

import asyncio
import contextlib
import json
import subprocess
import sys

import httpx
import pytest
from daemons import running_daemon, slow_program

from frontend import AsyncLLM, BeamSearchParams, RequestOutputKind, SamplingParams

pytestmark = pytest.mark.slow

OPTIONS = ("--num-blocks", 64, "--max-num-batched-tokens", 64)
PARAMS = [
    SamplingParams(max_tokens=120, ignore_eos=True, detokenize=False, **more)
    for more in (
        {"temperature": 0.0},
        {"temperature": 1.0, "seed": 7},
        {"temperature": 0.8, "seed": 8, "n": 3, "top_p": 0.9},
        {"temperature": 1.0, "seed": 9, "logprobs": 3},
        {"temperature": 0.0, "repetition_penalty": 1.2},
        {"temperature": 1.0, "seed": 10, "output_kind": RequestOutputKind.FINAL_ONLY},
    )
]


def prompt(number):
    return {"prompt_token_ids": [5 + number, *range(5, 30)]}


async def answer(llm, number, params):
    """Tokens and log-probabilities of each sample; how often the request moved."""
    outputs = [output async for output in llm.generate(prompt(number), params)]
    assert [output.finished for output in outputs].count(True) == 1
    final = outputs[-1]
    parts = [(part.token_ids, part.logprobs, part.finish_reason) for part in final.outputs]
    return parts, final.metrics.num_resumptions


async def test_streams_of_a_killed_daemon_go_on_with_the_same_tokens_at_the_other_one(tiny_llama):
    beams = BeamSearchParams(beam_width=3, max_tokens=100, ignore_eos=True)
    with (
        running_daemon(tiny_llama, *OPTIONS) as one,
        running_daemon(tiny_llama, *OPTIONS) as other,
    ):
        async with AsyncLLM(other.address) as alone:
            expected = [await answer(alone, *each) for each in enumerate(PARAMS)]
            expected_beams = await alone.beam_search(prompt(0), beams)
        async with AsyncLLM([one.address, other.address]) as llm:
            tasks = [asyncio.create_task(answer(llm, *each)) for each in enumerate(PARAMS)]
            tasks.append(asyncio.create_task(llm.beam_search(prompt(0), beams)))
            while (await llm.engines[0].statistics()).num_generated_tokens < 100:
                await asyncio.sleep(0.01)
            one.process.kill()
            *answers, found_beams = await asyncio.wait_for(asyncio.gather(*tasks), 60)
            assert not llm.engines[0].session.is_connected
            left = await llm.engines[1].statistics()
    assert [parts for parts, _ in answers] == [parts for parts, _ in expected]
    assert [each.tokens for each in found_beams.sequences] == [
        each.tokens for each in expected_beams.sequences
    ]
    assert sum(num_moves for _, num_moves in answers) >= 2
    assert left.num_running == left.num_waiting == 0
    assert left.num_blocks_in_use == 0


async def until(condition):
    while not condition():
        await asyncio.sleep(0.01)


async def first_cached(llm, token_ids, **options):
    """Prompt tokens that were found in the cache."""
    params = SamplingParams(max_tokens=1, ignore_eos=True, detokenize=False)
    outputs = llm.generate({"prompt_token_ids": token_ids}, params, **options)
    return [output.num_cached_tokens async for output in outputs][-1]


async def test_each_router_knows_what_all_engines_hold_and_what_others_have_them_do(tiny_llama):
    options = ("--isolate-tenants", "--max-num-seqs", 2, "--num-blocks", 64)
    prompts = [[number, *range(40)] for number in range(50, 60)]
    with (
        running_daemon(tiny_llama, *options) as one,
        running_daemon(tiny_llama, *options) as other,
    ):
        addresses = [one.address, other.address]
        async with AsyncLLM(addresses) as first, AsyncLLM(addresses) as second:
            group = second.session
            await until(lambda: len(group.view.num_snapshots) == 2)
            for prompt in prompts:
                assert await first_cached(first, prompt, tenant="a") == 0
            assert all(first.session.num_sent), "they are shared out"
            await until(lambda: sum(group.view.index.num_blocks.values()) == 2 * len(prompts))
            for prompt in prompts:  # sent by another client, and again: found all the same
                assert await first_cached(second, prompt, tenant="a") == 32
            assert group.num_matched_tokens == 32 * len(prompts)
            assert await first_cached(second, prompts[0], tenant="b") == 0, "not its own"
            assert group.num_matched_tokens == 32 * len(prompts)
            for salt in (None, "s"):
                own = [await first_cached(first, prompts[1], cache_salt=salt) for _ in range(2)]
                assert own == [0, 32], "a client without a tenant is one"

            params = SamplingParams(max_tokens=150, ignore_eos=True, detokenize=False)
            stream = second.generate({"prompt_token_ids": [7] * 40}, params)
            await anext(stream)
            busy = group.loads.index(max(group.loads))
            await until(lambda: first.session.view.others_loads[busy] >= 40)
            assert first.session.view.others_loads[1 - busy] == group.view.others_loads[busy] == 0
            before = first.session.num_sent[busy]
            for number in range(3):
                await first_cached(first, [number] * 5)
            await stream.aclose()
            assert first.session.num_sent[busy] == before, "the idle one gets short prompts"
            await until(lambda: not first.session.view.others_loads.total())

            await first.engines[busy].reset_prefix_cache()
            await until(lambda: not group.view.index.num_blocks[busy])
            one.process.kill()
            other.process.kill()


@contextlib.contextmanager
def http_server(*addresses):
    command = [sys.executable, "-m", "frontend.cli", "http", "--port", "0"]
    command += ["--model", f"small={','.join(addresses)}"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        yield json.loads(process.stdout.readline())["url"]
    finally:
        process.terminate()
        process.communicate()


async def streamed(http, number):
    """An answer's text and how it ended."""
    body = {
        "model": "small",
        "messages": [{"role": "user", "content": f"Tell a story of {number} foxes."}],
        "max_tokens": 64,
        "seed": number,
        "temperature": 0.8,
        "stream": True,
    }
    text, reasons = "", []
    async with http.stream("POST", "/v1/chat/completions", json=body) as response:
        assert response.status_code == 200
        async for line in response.aiter_lines():
            if line.startswith("data: {"):
                (choice,) = json.loads(line.removeprefix("data: "))["choices"]
                text += choice["delta"].get("content") or ""
                reasons += [choice["finish_reason"]] if choice["finish_reason"] else []
    return text, reasons


async def test_over_http_streams_go_on_and_a_daemon_is_used_again_when_it_is_back(smollm2):
    """Two of three daemons are killed, one while the streams of the other have just moved."""
    with contextlib.ExitStack() as stack:
        slow = slow_program(0.01)
        daemons = [stack.enter_context(running_daemon(smollm2, program=slow)) for _ in range(3)]
        url = stack.enter_context(http_server(*(each.address for each in daemons)))
        async with httpx.AsyncClient(base_url=url, timeout=60) as http:
            ready = (await http.get("/ready")).json()
            names = [f"small at {each.address}" for each in daemons]
            assert ready == {"status": "ok", "engines": dict.fromkeys(names, "ok")}
            expected = await asyncio.gather(*(streamed(http, number) for number in range(9)))

            async with (
                AsyncLLM(daemons[0].address) as first,
                AsyncLLM(daemons[1].address) as second,
                asyncio.timeout(60),
            ):
                tasks = [asyncio.create_task(streamed(http, number)) for number in range(9)]
                for watching, daemon in zip((first, second), daemons, strict=False):
                    while (await watching.statistics()).num_running < 3:
                        await asyncio.sleep(0.001)
                    daemon.process.kill()
            assert await asyncio.wait_for(asyncio.gather(*tasks), 60) == expected
            assert (await http.get("/health")).status_code == 503
            assert (await http.get("/ready")).status_code == 200

            await asyncio.to_thread(daemons[0].start)
            assert (await http.get("/health")).json()["engines"][names[0]] == "ok"
            daemons[2].process.kill()
            found = await asyncio.gather(*(streamed(http, number) for number in range(4)))
            assert found == expected[:4]
