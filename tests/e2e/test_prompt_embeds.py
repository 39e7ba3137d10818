"""Hidden states in place of tokens, by a daemon: through LLM, AsyncLLM and HTTP, and over its
death."""

import asyncio
import base64
import contextlib

import httpx
import pytest
import safetensors.torch
import torch
from adapter_folders import make_adapter, merged_model
from daemons import running_daemon

from frontend import LLM, AsyncLLM, SamplingParams
from frontend.errors import InvalidInput
from tests.frontend.http.http_server import serving

pytestmark = pytest.mark.slow

TOKENS = list(range(5, 30))
OPTIONS = ("--num-blocks", 64, "--max-num-batched-tokens", 16, "--enable-prompt-embeds")
GREEDY = SamplingParams(max_tokens=30, temperature=0.0, ignore_eos=True, detokenize=False)


@pytest.fixture(scope="module")
def reference(tiny_llama):
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(tiny_llama).eval()
    model.generation_config.eos_token_id = None
    return model


@pytest.fixture(scope="module")
def states(reference):
    """Of no tokens."""
    scale = reference.get_input_embeddings().weight.std().detach()
    return torch.randn(25, 48, generator=torch.Generator().manual_seed(0)) * scale


@pytest.fixture(scope="module")
def expected(reference, states):
    with torch.inference_mode():
        return reference.generate(
            inputs_embeds=states[None],
            attention_mask=torch.ones(1, 25, dtype=torch.int64),
            max_new_tokens=30,
            do_sample=False,
        )[0].tolist()


@pytest.fixture(scope="module")
def daemon(tiny_llama):
    with running_daemon(tiny_llama, *OPTIONS, "--max-prompt-embeds", 4800) as daemon:
        yield daemon


def test_llm_takes_them_as_vllm_does(daemon, reference, states, expected):
    """Alone, beside token prompts, mixed with tokens, n samples. Proves S020."""
    embeddings = reference.get_input_embeddings()(torch.tensor(TOKENS))
    with contextlib.closing(LLM(address=daemon.address)) as llm:
        given, plain, same = llm.generate(
            [{"prompt_embeds": states}, TOKENS, {"prompt_embeds": embeddings}], GREEDY
        )
        assert given.outputs[0].token_ids == expected
        assert same.outputs[0].token_ids == plain.outputs[0].token_ids != expected
        again, mixed = llm.generate(
            [
                {"prompt_embeds": states.numpy()},
                {
                    "prompt_embeds": embeddings[3:20],
                    "prompt_token_ids": TOKENS,
                    "prompt_is_token_ids": [not 3 <= place < 20 for place in range(25)],
                },
            ],
            GREEDY,
        )
        assert (again.num_cached_tokens, given.num_cached_tokens) == (16, 0)
        assert again.outputs[0].token_ids == expected
        assert mixed.outputs[0].token_ids == plain.outputs[0].token_ids
        params = SamplingParams(n=3, seed=1, max_tokens=9, ignore_eos=True, detokenize=False)
        samples = llm.generate([TOKENS, {"prompt_embeds": embeddings}], params)
        first, second = ([each.token_ids for each in one.outputs] for one in samples)
        assert first == second
        with pytest.raises(InvalidInput, match="4992 bytes, the limit is 4800"):
            llm.generate({"prompt_embeds": torch.zeros(26, 48)}, GREEDY)
        (failed,) = llm.generate({"prompt_embeds": states / 0.0}, GREEDY)
        assert "not finite" in failed.outputs[0].detail
        (info,) = [llm.request_info(again.metrics.engine_request_id)]
        assert info.num_embedded_tokens == 25


def test_over_http_they_are_safetensors(daemon, states, expected):
    def post(**body):
        body = {"max_tokens": 30, "temperature": 0, "return_token_ids": True} | body
        body |= {"ignore_eos": True}
        return httpx.post(f"{url}/v1/completions", json=body, timeout=60)

    file = base64.b64encode(safetensors.torch.save({"rows": states})).decode()
    with serving(daemon.address) as url:
        answer = post(prompt_embeds=[file, file], prompt=TOKENS).json()
        assert [choice["token_ids"] == expected for choice in answer["choices"]] == [
            True,
            True,
            False,
        ]
        assert answer["usage"]["prompt_tokens"] == 75
        for wrong, reason in (
            ({"prompt_embeds": base64.b64encode(b"PK\x03\x04").decode()}, "safetensors.torch.save"),
            ({"prompt_embeds": file, "echo": True}, "echo with prompt_embeds"),
            ({"prompt_embeds": file, "prompt_logprobs": 1}, "prompt_logprobs with prompt_embeds"),
        ):
            refused = post(**wrong)
            assert (refused.status_code, reason in refused.text) == (400, True)


async def test_a_killed_daemon_that_comes_back_is_sent_them_again(tiny_llama, states, expected):
    """n samples, too, which then are requests of their own."""
    samples = SamplingParams(n=3, seed=1, max_tokens=100, ignore_eos=True, detokenize=False)

    async def last(llm, prompt, params, interrupt=None):
        async for output in llm.generate(prompt, params):
            if interrupt is not None and len(output.outputs[0].token_ids) >= 10:
                interrupt()
                interrupt = None
        return [each.token_ids for each in output.outputs]

    with running_daemon(tiny_llama, *OPTIONS) as daemon:
        async with AsyncLLM(daemon.address, reconnect_timeout_s=60) as llm:
            prompt = {"prompt_embeds": states}
            before = await last(llm, prompt, samples)
            tasks = [
                asyncio.create_task(last(llm, prompt, GREEDY)),
                asyncio.create_task(last(llm, prompt, samples, daemon.process.kill)),
            ]
            await asyncio.to_thread(daemon.process.wait)
            await asyncio.to_thread(daemon.start)
            greedy, after = await asyncio.wait_for(asyncio.gather(*tasks), 60)
            assert greedy == [expected]
            assert after == before


def test_they_come_from_disk_and_through_an_adapter(tiny_llama, tmp_path, reference, states):
    """With an adapter as transformers' model that it is merged into; neither finds the other's
    blocks, and a daemon after the first one finds those of both."""
    folder = make_adapter(tmp_path / "ann", tiny_llama, seed=1)
    merged = merged_model(tiny_llama, folder)
    merged.generation_config.eos_token_id = None
    states = torch.cat([states] * 4)
    expected = [
        model.generate(
            inputs_embeds=states[None],
            attention_mask=torch.ones(1, 100, dtype=torch.int64),
            max_new_tokens=30,
            do_sample=False,
        )[0].tolist()
        for model in (reference, merged)
    ]
    assert expected[0] != expected[1]
    options = (*OPTIONS, f"--adapter=ann={folder}", "--prefix-cache-dir", tmp_path / "disk")
    cached = []
    for _ in range(2):
        with (
            running_daemon(tiny_llama, *options) as daemon,
            contextlib.closing(LLM(address=daemon.address)) as llm,
        ):
            for adapter, tokens in zip((None, "ann"), expected, strict=True):
                [found] = llm.generate([{"prompt_embeds": states}], GREEDY, adapter=adapter)
                assert found.outputs[0].token_ids == tokens
                cached.append(found.num_cached_tokens)
    assert cached == [0, 0, 96, 96]
