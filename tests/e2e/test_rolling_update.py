"""Three daemons of one model get other weights one after another, under load; one is killed."""

import asyncio
import contextlib
import json
import sys

import pytest
from daemons import running_daemon, slow_program

from frontend import AsyncLLM, SamplingParams

pytestmark = pytest.mark.slow

OPTIONS = ("--num-blocks", 64, "--max-num-batched-tokens", 64)
STEP_S = 0.005
NUM_PROMPTS = 6


@pytest.fixture(scope="module")
def other_weights(tiny_llama, tmp_path_factory):
    """Of the same shape."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(1)
    folder = tmp_path_factory.mktemp("other-weights")
    LlamaForCausalLM(LlamaConfig.from_pretrained(tiny_llama)).save_pretrained(folder)
    return folder


def start(model):
    return running_daemon(model, *OPTIONS, program=slow_program(STEP_S))


async def answer(llm, number):
    params = SamplingParams(max_tokens=60, temperature=1.0, seed=number, ignore_eos=True)
    params.detokenize = False
    prompt = {"prompt_token_ids": [5 + number, *range(5, 30)]}
    outputs = [output async for output in llm.generate(prompt, params)]
    assert [output.finished for output in outputs].count(True) == 1
    [text] = outputs[-1].outputs
    assert text.finish_reason == "length", text.detail
    return text.token_ids


async def answers(llm):
    return await asyncio.gather(*(answer(llm, number) for number in range(NUM_PROMPTS)))


class Load:
    """Streams without a pause; what they got."""

    def __init__(self, llm):
        self.found = []
        self._is_over = False
        self._tasks = [
            asyncio.create_task(self._ask(llm, number)) for number in [*range(NUM_PROMPTS)] * 2
        ]

    async def _ask(self, llm, number):
        while not self._is_over:
            self.found.append((number, await answer(llm, number)))

    async def end(self):
        self._is_over = True
        await asyncio.gather(*self._tasks)
        return self.found


@contextlib.asynccontextmanager
async def update_of(addresses, model, *options):
    """`engine-client update-weights --rolling`, while it runs."""
    command = ["-m", "frontend.cli", "update-weights", str(model), "--rolling", "--json"]
    command += ["--address", ",".join(addresses), *options]
    pipe = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(
        sys.executable, *command, stdout=pipe, stderr=pipe
    )
    try:
        yield process
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


async def line_with(stream, text):
    while line := await stream.readline():
        if text in line.decode():
            return
    raise AssertionError(f"there was no line with {text!r}")


async def stopped(addresses, model, *options):
    """What it says."""
    async with update_of(addresses, model, *options) as update:
        _, log = await update.communicate()
    assert update.returncode == 1
    return log.decode()


async def test_no_request_is_lost_and_none_has_tokens_of_both(tiny_llama, other_weights, tmp_path):
    with contextlib.ExitStack() as stack:
        daemons = [stack.enter_context(start(tiny_llama)) for _ in range(3)]
        addresses = [each.address for each in daemons]
        async with AsyncLLM(addresses) as llm:
            old = await answers(llm)
            said = await stopped(addresses, tmp_path)
            assert f"the update stopped: {addresses[0]} refuses {tmp_path}" in said
            for each in addresses:
                assert f"{each}: weights version 0" in said

            load = Load(llm)
            while not (await llm.engines[0].statistics()).num_running:
                await asyncio.sleep(0.01)
            said = await stopped(addresses, other_weights, "--drain-timeout", "0.001")
            assert "did not end within 0.001 s" in said
            assert not any([await each.is_paused() for each in llm.engines])

            async with update_of(addresses, other_weights) as update:
                await line_with(update.stderr, f"{addresses[0]} serves again")
                daemons[2].kill()
                await asyncio.to_thread(daemons[2].start)
                said, log = await update.communicate()
            assert update.returncode == 0, log
            found = await load.end()
            new = await answers(llm)
    assert all(one != other for one, other in zip(old, new, strict=True))
    for number, tokens in found:
        assert tokens in (old[number], new[number])
    served = json.loads(said)
    assert {(each["state"], each["weights_version"]) for each in served} == {("running", 1)}
    assert len({each["fingerprint"] for each in served}) == 1
