"""Real daemons of a hybrid, layers with a recurrent state beside layers with keys: equal tokens,
whatever runs beside a request and wherever its past is found."""

import asyncio
import os
import random
import signal

import pytest
import torch
from daemons import running_daemon
from processes import children_of, wait_until_gone

from frontend import LLM, AsyncLLM, SamplingParams

pytestmark = pytest.mark.slow

BLOCK = 16
SHARED = 1000
TOKENS = 48


@pytest.fixture(scope="module")
def tiny_hybrid(tmp_path_factory):
    """A folder with a random Qwen3.5 of 97 tokens and no tokenizer."""
    from transformers import Qwen3_5ForCausalLM, Qwen3_5TextConfig

    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("tiny-hybrid")
    config = Qwen3_5TextConfig(
        vocab_size=97,
        hidden_size=48,
        intermediate_size=96,
        num_hidden_layers=4,
        layer_types=["linear_attention", "linear_attention", "full_attention", "linear_attention"],
        num_attention_heads=6,
        num_key_value_heads=2,
        head_dim=16,
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        linear_key_head_dim=12,
        linear_value_head_dim=20,
        max_position_embeddings=4096,
        eos_token_id=96,
        bos_token_id=0,
        initializer_range=0.3,
    )
    Qwen3_5ForCausalLM(config).save_pretrained(folder)
    return folder


def prompt(seed, length):
    draw = random.Random(seed)
    return [draw.randrange(1, 96) for _ in range(length)]


def ask(llm, prompts, **params):
    """(tokens of each sequence, prompt's tokens that were found) of each prompt, all at once."""
    wanted = SamplingParams(
        **{"max_tokens": TOKENS, "temperature": 0.0, "ignore_eos": True, "detokenize": False}
        | params
    )
    outputs = llm.generate([{"prompt_token_ids": ids} for ids in prompts], wanted, use_tqdm=False)
    return [
        ([list(each.token_ids) for each in output.outputs], output.num_cached_tokens)
        for output in outputs
    ]


def tokens_of(answers):
    return [tokens for tokens, _ in answers]


PROMPTS = [prompt(n, length) for n, length in enumerate((1, 5, 16, 17, 33, 150, 301))]
PROMPTS.append(prompt(50, 9) * 7)
SAMPLED = {"temperature": 0.8, "seed": 7, "n": 3}


@pytest.fixture(scope="module")
def undisturbed(tiny_hybrid):
    """Each prompt alone, whole in one step: greedy, and three samples."""
    options = ("--max-num-batched-tokens", 512, "--no-enable-prefix-caching")
    with running_daemon(tiny_hybrid, *options) as daemon, LLM(address=daemon.address) as llm:
        greedy = [tokens_of(ask(llm, [each]))[0] for each in PROMPTS]
        sampled = [tokens_of(ask(llm, [each], **SAMPLED))[0] for each in PROMPTS[3:]]
    return greedy, sampled


@pytest.mark.parametrize(
    "options",
    [
        ("--max-num-batched-tokens", 7, "--max-num-seqs", 3),
        ("--max-num-batched-tokens", 23, "--num-blocks", 90),
        ("--max-num-batched-tokens", 64, "--num-blocks", 90, "--host-cache-memory", "64MiB"),
    ],
    ids=["steps of 7", "few blocks", "host memory"],
)
def test_tokens_are_those_of_an_undisturbed_run(tiny_hybrid, undisturbed, options):
    greedy, sampled = undisturbed
    with running_daemon(tiny_hybrid, *options) as daemon, LLM(address=daemon.address) as llm:
        for _ in range(2):  # the second time their pasts are found
            assert tokens_of(ask(llm, PROMPTS)) == greedy
        assert tokens_of(ask(llm, PROMPTS[3:], **SAMPLED)) == sampled


def test_rejected_drafts_are_taken_back(tiny_hybrid):
    """Of answers that say the same again and again, with changes."""
    params = {"max_tokens": 150, "temperature": 0.7, "seed": 3, "logit_bias": {5: 9.0, 6: 8.0}}
    with running_daemon(tiny_hybrid) as daemon, LLM(address=daemon.address) as llm:
        plain = [tokens_of(ask(llm, [each], **params))[0] for each in PROMPTS]
    drafts = ("--speculative", "suffix", "--num-speculative-tokens", 6)
    with running_daemon(tiny_hybrid, *drafts) as daemon, LLM(address=daemon.address) as llm:
        for _ in range(8):  # how many drafts are worth their price depends on the machine
            assert tokens_of(ask(llm, PROMPTS, **params)) == plain
            statistics = llm.statistics()
            if statistics.num_draft_tokens > statistics.num_accepted_tokens > 0:
                break
        assert statistics.num_draft_tokens > statistics.num_accepted_tokens > 0


def test_prompts_that_share_a_thousand_tokens_find_them(tiny_hybrid):
    shared = prompt(100, SHARED)
    prompts = [shared + prompt(n, 20 + n) for n in range(8)]
    daemon = running_daemon(tiny_hybrid, "--no-enable-prefix-caching")
    with daemon as daemon, LLM(address=daemon.address) as llm:
        alone = [tokens_of(ask(llm, [each]))[0] for each in prompts]
    most = (SHARED - 1) // BLOCK * BLOCK
    with running_daemon(tiny_hybrid) as daemon, LLM(address=daemon.address) as llm:
        at_once = ask(llm, prompts)
        assert tokens_of(at_once) == alone
        # the second may come when the first has its last chunk: it starts further before
        assert sorted(found for _, found in at_once)[2:] == [most] * 6
    with running_daemon(tiny_hybrid) as daemon, LLM(address=daemon.address) as llm:
        ask(llm, [shared], max_tokens=1)
        behind = [ask(llm, [each])[0] for each in prompts]
        assert tokens_of(behind) == alone
        assert [found for _, found in behind] == [most] * 8


def test_each_turn_of_a_conversation_finds_all_but_a_block_of_its_past(tiny_hybrid, tmp_path):
    folder = ("--prefix-cache-dir", tmp_path / "prompts")
    with running_daemon(tiny_hybrid, *folder) as daemon, LLM(address=daemon.address) as llm:
        past, known = prompt(200, 45), 0
        for turn in range(10):
            ((tokens,), found) = ask(llm, [past], max_tokens=20 + turn)[0]
            assert found >= known - BLOCK
            known = len(past) + len(tokens) - 1  # the last token is not computed
            past = past + tokens + prompt(300 + turn, 11)
        edited = past[:-11] + prompt(999, 15)
        assert ask(llm, [edited])[0][1] >= known - BLOCK
        answer = ask(llm, [past])[0][0]
    daemon = running_daemon(tiny_hybrid, "--no-enable-prefix-caching")
    with daemon as daemon, LLM(address=daemon.address) as llm:
        assert ask(llm, [past])[0][0] == answer


async def test_streams_outlive_a_killed_engine(tiny_hybrid, undisturbed):
    with running_daemon(tiny_hybrid, "--supervise", "--max-num-batched-tokens", 64) as daemon:
        async with AsyncLLM(daemon.address, reconnect_timeout_s=60) as llm:

            async def stream(ids, kill):
                params = SamplingParams(
                    max_tokens=TOKENS, temperature=0.0, ignore_eos=True, detokenize=False
                )
                async for output in llm.generate({"prompt_token_ids": ids}, params):
                    if kill and len(output.outputs[0].token_ids) >= 5:
                        kill = False
                        (engine,) = children_of(daemon.process.pid)
                        os.kill(engine, signal.SIGKILL)
                        wait_until_gone(engine)
                return [list(output.outputs[0].token_ids)]

            streams = [stream(ids, n == len(PROMPTS) - 1) for n, ids in enumerate(PROMPTS)]
            assert await asyncio.wait_for(asyncio.gather(*streams), 90) == undisturbed[0]
