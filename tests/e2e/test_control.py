"""Pause, sleep and new weights on real daemons: streams go on with the right tokens."""

import asyncio
import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from daemons import running_daemon
from safetensors.torch import load_file, save_file

from frontend import LLM, AsyncLLM, SamplingParams
from frontend.errors import CallRefused, EngineDied, InvalidInput
from frontend.simulator.replay import verify
from frontend.simulator.step_trace import StepTrace
from protocol.errors import ErrorCode

pytestmark = pytest.mark.slow

PROMPT = [7 * n % 90 for n in range(40)]
OPTIONS = ("--num-blocks", 64, "--max-num-batched-tokens", 16)
SEEDED = SamplingParams(temperature=1.0, seed=5, max_tokens=150, ignore_eos=True, detokenize=False)


@pytest.fixture(scope="module")
def other_llama(tiny_llama, tmp_path_factory):
    """The same shape, other weights."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(1)
    folder = tmp_path_factory.mktemp("other-llama")
    config = LlamaConfig.from_pretrained(tiny_llama)
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


def says(folder, token_ids, num_tokens):
    """transformers' likeliest continuation."""
    from transformers import LlamaForCausalLM

    model = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    prompt = torch.tensor([token_ids])
    with torch.inference_mode():
        out = model.generate(
            prompt,
            attention_mask=torch.ones_like(prompt),
            do_sample=False,
            max_new_tokens=num_tokens,
            min_new_tokens=num_tokens,
            eos_token_id=None,
        )
    return out[0, len(token_ids) :].tolist()


def greedy(num_tokens):
    return SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True, detokenize=False)


class Stream:
    """A request that a task reads."""

    def __init__(self, llm, params, prompt=PROMPT):
        self.outputs = []
        self._read = llm.generate({"prompt_token_ids": prompt}, params)
        self.task = asyncio.create_task(self._follow())

    async def _follow(self):
        async for output in self._read:
            self.outputs.append(output)
        return self.outputs[-1]

    @property
    def tokens(self):
        return self.outputs[-1].outputs[0].token_ids if self.outputs else []

    async def has(self, num_tokens):
        while len(self.tokens) < num_tokens:
            await asyncio.sleep(0.002)


async def test_new_weights_in_the_middle_of_a_stream_compute_all_of_it_anew(
    tiny_llama, other_llama
):
    with running_daemon(tiny_llama, *OPTIONS) as daemon:
        async with AsyncLLM(daemon.address) as llm:
            stream = Stream(llm, greedy(100))
            await stream.has(10)
            await llm.pause_generation()
            await asyncio.sleep(0.1)
            first = list(stream.tokens)
            assert 10 <= len(first) < 100
            status = await llm.update_weights(other_llama)
            assert (status.state, status.weights_version) == ("paused", 1)
            await llm.resume_generation()
            output = await stream.task
            assert first == says(tiny_llama, PROMPT, len(first))
            rest = says(other_llama, [*PROMPT, *first], 100 - len(first))
            assert output.outputs[0].token_ids == first + rest
            assert output.weights_versions == [0, 1]
            # its prompt is cached under the old weights and, by now, under the new ones
            again = await Stream(llm, greedy(30)).task
            assert again.outputs[0].token_ids == says(other_llama, PROMPT, 30)
            assert again.weights_versions == [1]
            assert again.num_cached_tokens == 32
            await llm.update_weights(tiny_llama, version=0)
            back = await Stream(llm, greedy(30)).task
            assert back.outputs[0].token_ids == says(tiny_llama, PROMPT, 30)
            assert back.weights_versions == [0]
            assert back.num_cached_tokens == 32, "same files, same version"
            await llm.update_weights(tiny_llama, version=7)
            newest = await Stream(llm, greedy(30)).task
            assert newest.outputs[0].token_ids == back.outputs[0].token_ids
            assert newest.num_cached_tokens == 0, "same files, another version"
            assert (await llm.statistics()).weights_version == 7
        async with AsyncLLM(daemon.address) as llm:
            assert llm.model.weights_version == 7


async def test_weights_that_do_not_fit_are_refused_and_the_old_ones_serve_on(
    tiny_llama, other_llama, tmp_path
):
    def changed(name, change):
        folder = tmp_path / name
        shutil.copytree(other_llama, folder)
        tensors = load_file(folder / "model.safetensors")
        change(folder, tensors)
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
        return folder

    def shorten(folder, tensors):
        tensors["model.norm.weight"] = tensors["model.norm.weight"][:-1].clone()

    def deepen(folder, tensors):
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 4}))

    cases = {
        changed("short", shorten): "model.norm.weight has shape",
        changed("gone", lambda _, t: t.pop("model.layers.1.mlp.up_proj.weight")): "missing",
        changed("deep", deepen): "num_layers is 4, not 3",
        tmp_path / "nowhere": "does not exist",
    }
    with running_daemon(tiny_llama, *OPTIONS) as daemon:
        async with AsyncLLM(daemon.address) as llm:
            expected = await Stream(llm, SEEDED).task
            stream = Stream(llm, SEEDED)
            await stream.has(5)
            for folder, why in cases.items():
                with pytest.raises(CallRefused, match=why) as refused:
                    await llm.update_weights(folder)
                assert refused.value.code == ErrorCode.WEIGHTS_REFUSED
            with pytest.raises(CallRefused, match="version is 0"):
                await llm.update_weights(other_llama, version=0)
            for wrong in (llm.sleep(3), llm.pause_generation(mode="stop")):
                with pytest.raises(CallRefused, match="must be"):
                    await wrong
            with pytest.raises(InvalidInput, match="tags"):
                await llm.wake_up(tags=["weights"])
            output = await stream.task
            assert output.outputs[0].token_ids == expected.outputs[0].token_ids
            assert output.weights_versions == [0]


@pytest.mark.parametrize("level", [1, 2])
async def test_streams_sleep_with_the_engine_and_lose_nothing(smollm2, level):
    """Several at once, one of them of three samples."""
    prompts = [list(range(10 * n + 20, 10 * n + 90)) for n in range(4)]
    params = [
        SamplingParams(
            temperature=0.9, seed=n, max_tokens=40, ignore_eos=True, detokenize=False,
            n=3 if n == 2 else 1,
        )
        for n in range(4)
    ]  # fmt: skip
    with running_daemon(smollm2, "--kv-cache-memory", "512MiB") as daemon:
        async with AsyncLLM(daemon.address) as llm:
            expected = [
                await s.task
                for s in [Stream(llm, *each) for each in zip(params, prompts, strict=True)]
            ]
            await Stream(llm, greedy(1), [5] * 3000).task
            awake = resident_bytes(daemon)
            await llm.reset_prefix_cache()
            streams = [Stream(llm, *each) for each in zip(params, prompts, strict=True)]
            await streams[0].has(8)
            status = await llm.sleep(level)
            assert (status.state, status.num_requests) == ("asleep", 4)
            assert await llm.is_sleeping()
            asleep = resident_bytes(daemon)
            late = Stream(llm, params[3], prompts[3])
            num_tokens = len(streams[0].tokens)
            await asyncio.sleep(0.3)
            assert len(streams[0].tokens) == num_tokens
            with pytest.raises(CallRefused, match="wake_up"):
                await llm.resume_generation()
            [info] = [
                info
                for name in await llm.request_ids()
                if (info := await llm.request_info(name)).num_requests_ahead == 0
            ]
            assert (info.waits_for, info.why) == ("paused", "the engine sleeps")
            assert (await llm.wake_up()).state == "running"
            outputs = [await stream.task for stream in streams]
            assert [tokens_of(output) for output in outputs] == list(map(tokens_of, expected))
            assert tokens_of(await late.task) == tokens_of(expected[3])
            # keys and values of 3,000 tokens; and at level 2 the weights
            assert awake - asleep > (60 << 20 if level == 1 else 140 << 20)


def tokens_of(output):
    return [completion.token_ids for completion in output.outputs]


def resident_bytes(daemon):
    status = Path(f"/proc/{daemon.process.pid}/status").read_text()
    [line] = [line for line in status.splitlines() if line.startswith("VmRSS")]
    return int(line.split()[1]) << 10


async def test_an_engine_whose_files_are_gone_sleeps_on_until_they_are_back(
    tiny_llama, other_llama, tmp_path
):
    folder, away = tmp_path / "model", tmp_path / "away"
    shutil.copytree(tiny_llama, folder)
    with running_daemon(folder, *OPTIONS) as daemon:
        async with AsyncLLM(daemon.address) as llm:
            expected = tokens_of(await Stream(llm, SEEDED).task)
            stream = Stream(llm, SEEDED)
            await stream.has(20)
            await llm.sleep(2)
            folder.rename(away)
            with pytest.raises(CallRefused, match="does not exist"):
                await llm.wake_up()
            shutil.copytree(other_llama, folder)
            with pytest.raises(CallRefused, match="not those that were loaded"):
                await llm.wake_up()
            assert await llm.is_sleeping()
            shutil.rmtree(folder)
            away.rename(folder)
            await llm.wake_up()
            assert tokens_of(await stream.task) == expected
            # new weights may come while it sleeps
            await llm.sleep(2)
            stream = Stream(llm, greedy(20))
            assert (await llm.update_weights(other_llama)).state == "asleep"
            await llm.wake_up()
            assert tokens_of(await stream.task) == [says(other_llama, PROMPT, 20)]


async def test_an_engine_that_is_back_with_its_first_weights_does_not_go_on_with_later_ones(
    tiny_llama, other_llama
):
    with running_daemon(tiny_llama, *OPTIONS) as daemon:
        async with AsyncLLM(daemon.address) as llm:
            stream = Stream(llm, SEEDED)
            await stream.has(5)
            await llm.update_weights(other_llama)
            await stream.has(20)
            daemon.kill()
            await asyncio.to_thread(daemon.start)
            with pytest.raises(EngineDied, match="other weights"):
                await stream.task
            assert (await Stream(llm, greedy(3)).task).weights_versions == [0]


@pytest.mark.parametrize("change", ["pause", "sleep"])
async def test_a_drain_lets_a_paused_engine_finish(tiny_llama, change):
    with running_daemon(tiny_llama, *OPTIONS) as daemon:
        async with AsyncLLM(daemon.address) as llm:
            stream = Stream(llm, SEEDED)
            await stream.has(5)
            await (llm.pause_generation() if change == "pause" else llm.sleep(2))
            await asyncio.to_thread(daemon.stop)
            output = await stream.task
            assert len(output.outputs[0].token_ids) == 150
            assert daemon.process.returncode == 0


async def test_a_trace_of_pauses_sleeps_and_updates_replays(tiny_llama, other_llama, tmp_path):
    trace = tmp_path / "trace.jsonl"
    with running_daemon(tiny_llama, *OPTIONS, "--trace", trace) as daemon:
        async with AsyncLLM(daemon.address) as llm:
            streams = [Stream(llm, SEEDED) for _ in range(3)]
            for change in (
                llm.pause_generation, llm.resume_generation, llm.sleep, llm.wake_up,
                lambda: llm.update_weights(other_llama), lambda: llm.pause_generation(mode="wait"),
                llm.resume_generation,
            ):  # fmt: skip
                await streams[-1].has(0 if (await llm.ping()).state != "running" else 10)
                await change()
                await asyncio.sleep(0.3)
                streams.append(Stream(llm, SEEDED))
            for stream in streams:
                await stream.task
        daemon.stop()
    replay = verify(StepTrace(trace))
    assert replay.difference is None, replay.difference
    assert replay.num_requests == 10


def test_the_synchronous_client_and_the_command_line_have_the_same_calls(tiny_llama, other_llama):
    with running_daemon(tiny_llama, *OPTIONS) as daemon:

        def run(*arguments):
            done = subprocess.run(
                [sys.executable, "-m", "frontend.cli", *arguments, "--address", daemon.address],
                capture_output=True, text=True, timeout=60,
            )  # fmt: skip
            return done.returncode, done.stdout + done.stderr

        with LLM(address=daemon.address) as llm:
            assert run("pause") == (0, "paused, weights version 0, 0 unfinished requests\n")
            assert llm.resume_generation().state == "running"
            assert run("sleep", "--level", "2")[0] == 0
            assert llm.is_sleeping()
            assert run("update-weights", str(other_llama), "--weights-version", "3")[0] == 0
            code, text = run("wake-up", "--json")
            assert (code, json.loads(text)["weights_version"]) == (0, 3)
            assert llm.generate({"prompt_token_ids": PROMPT}, greedy(3), use_tqdm=False)
            code, text = run("update-weights", "/nowhere")
            assert code != 0
            assert "does not exist" in text
            assert "running, weights version 3" in run("info")[1]
