"""Greedy tokens of the whole engine against transformers on SmolLM2-135M-Instruct, in fp32.

transformers runs once over prompt and answer together: at each position its best token must be the
one that the engine chose, given the same tokens before it. That is the same statement as equal
greedy generations, and says where two answers part. A difference counts only where transformers'
own best two logits lie more than 1e-3 apart.
"""

from pathlib import Path

import httpx
import pytest
from daemons import running_daemon
from raw_client import RawClient

from frontend import LLM, SamplingParams
from protocol.calls import ResetPrefixCache
from tests.frontend.http.http_server import serving

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

NUM_OUTPUT = 24
FLOATS = ("--dtype", "float32")
"""Dequantised, as transformers does; by default the file's own blocks run."""
SHORT = (1, 2, 15, 16, 17, 63, 64, 65, 128, 129, 257)
LENGTHS = (*SHORT, 513)
"""Edges of blocks (16), of a step (128) and of attention's tiles, and some between them."""


@pytest.fixture(scope="module")
def reference(smollm2, logits_by_transformers):
    return logits_by_transformers(smollm2)


@pytest.fixture(scope="module")
def prompts(smollm2):
    """Prompts of real text, of 1 to 513 tokens: this project's licence, from many places."""
    from tokenizers import Tokenizer

    from engine_core.model_files import open_model_files

    files = open_model_files(str(smollm2), report=print)
    tokenizer = Tokenizer.from_str(files.tokenizer().tokenizer_json.decode())
    text = (Path(__file__).parents[2] / "LICENSE").read_text()
    token_ids = tokenizer.encode(" ".join(text.split()), add_special_tokens=False).ids
    return [
        (token_ids + token_ids)[number * 97 : number * 97 + length]
        for number, length in enumerate(LENGTHS)
    ]


def assert_greedy(reference, prompt, tokens):
    """Every token is transformers' best, but for near ties."""
    logits_TV = reference(tuple(prompt), tuple(tokens))
    best_T2 = logits_TV.topk(2).values
    chosen_T = logits_TV[range(len(tokens)), tokens]
    behind_T = best_T2[:, 0] - chosen_T
    assert behind_T.max() <= 1e-3, f"prompt of {len(prompt)} tokens, at {behind_T.argmax()}"


def run_all(daemon, prompts):
    """Each prompt's tokens, all at once; statistics before and after."""
    with RawClient(daemon.address) as client:
        before = client.statistics()
        for number, prompt in enumerate(prompts):
            client.request(str(number), prompt, max_tokens=NUM_OUTPUT)
        results = client.collect(*map(str, range(len(prompts))), timeout_s=600)
        tokens = [results[str(number)][0] for number in range(len(prompts))]
        return tokens, before, client.statistics()


@pytest.fixture(scope="module")
def daemon(smollm2):
    """With the defaults."""
    with running_daemon(smollm2, *FLOATS, "--max-model-len", 1024) as daemon:
        yield daemon


@pytest.fixture(scope="module")
def small_steps(smollm2):
    """16 tokens a step, and no prefix cache."""
    options = ("--max-num-batched-tokens", 16, "--no-enable-prefix-caching")
    with running_daemon(smollm2, *FLOATS, "--max-model-len", 1024, *options) as daemon:
        yield daemon


@pytest.fixture(scope="module")
def together(daemon, prompts):
    """All prompts at once."""
    return run_all(daemon, prompts)[0]


def same_but_for_near_ties(reference, prompts, tokens, expected):
    """Answers may part only at a near tie, and must go on as transformers would from there."""
    for prompt, mine, theirs in zip(prompts, tokens, expected, strict=True):
        assert len(mine) == NUM_OUTPUT
        if mine != theirs:
            assert_greedy(reference, prompt, mine)


def test_all_at_once(reference, prompts, together):
    """Proves S233."""
    for prompt, tokens in zip(prompts, together, strict=True):
        assert len(tokens) == NUM_OUTPUT
        assert_greedy(reference, prompt, tokens)


def test_each_alone(reference, daemon, prompts, together):
    chosen = prompts[::3]
    with RawClient(daemon.address) as client:
        client.call(ResetPrefixCache())
        alone = [
            client.complete(prompt, request_id=f"alone {index}", max_tokens=NUM_OUTPUT)[0]
            for index, prompt in enumerate(chosen)
        ]
    same_but_for_near_ties(reference, chosen, alone, together[::3])


def test_loglikelihoods_through_llm_are_those_of_transformers(reference, daemon, prompts):
    """Of texts behind a context, and whether they are greedy, as docs/guides/evaluation.md says for
    lm-eval; each context's own best token among them."""
    contexts = [prompt[: len(prompt) // 2] for prompt in prompts[2:6]]
    texts = [prompt[len(prompt) // 2 :] for prompt in prompts[2:6]]
    best = [int(reference(tuple(each), (0,))[0].argmax()) for each in contexts]
    contexts, texts = contexts * 2, texts + [[token] for token in best]
    params = SamplingParams(max_tokens=1, temperature=0, prompt_logprobs=0)
    with LLM(address=daemon.address) as llm:
        asked = [context + text for context, text in zip(contexts, texts, strict=True)]
        outputs = llm.generate(asked, params, use_tqdm=False)
    greedy = []
    for context, text, output in zip(contexts, texts, outputs, strict=True):
        entries = output.prompt_logprobs[-len(text) :]
        own = [entry[token] for token, entry in zip(text, entries, strict=True)]
        logprobs_TV = reference(tuple(context), tuple(text)).log_softmax(-1)
        expected = float(logprobs_TV[range(len(text)), text].sum())
        assert sum(entry.logprob for entry in own) == pytest.approx(expected, abs=1e-3)
        greedy.append(all(entry.rank == 1 for entry in own))
        assert greedy[-1] == (logprobs_TV.argmax(-1).tolist() == text)
    assert greedy[4:] == [True] * 4 and not all(greedy[:4])


def test_with_a_budget_of_16_tokens_a_step_and_no_prefix_cache(
    reference, small_steps, prompts, together
):
    tokens, _, _ = run_all(small_steps, prompts[:-1])
    same_but_for_near_ties(reference, prompts[:-1], tokens, together[:-1])


def test_with_a_shared_prefix_of_200_tokens(reference, daemon, small_steps, prompts):
    shared = [prompts[-1][300:500] + prompt[:40] for prompt in prompts[7:10]]
    for engine, found in ((daemon, 2 * 192), (small_steps, 0)):
        tokens, before, after = run_all(engine, shared)
        assert after.num_cached_prompt_tokens - before.num_cached_prompt_tokens == found
        for prompt, answer in zip(shared, tokens, strict=True):
            assert_greedy(reference, prompt, answer)


def test_with_a_pool_so_small_that_requests_are_preempted_again_and_again(
    reference, smollm2, prompts, together
):
    short = prompts[: len(SHORT)]
    options = ("--num-blocks", 18, "--watermark", 0)
    with running_daemon(smollm2, *FLOATS, *options) as daemon:
        tokens, _, statistics = run_all(daemon, short)
    assert statistics.num_preemptions >= 3
    same_but_for_near_ties(reference, short, tokens, together[: len(SHORT)])


def test_echo_with_logprobs_is_transformers_log_softmax(reference, daemon, small_steps):
    """Without and with the prompt in the cache, and in chunks; as lm-eval asks for it."""
    text = "The capital of France is Paris. Naïve café, 日本語! " * 4
    body = {"prompt": text, "max_tokens": 0, "echo": True, "logprobs": 1, "prompt_logprobs": 2}
    answers = []
    for engine in (daemon, daemon, small_steps):
        with serving(engine.address) as url:
            answers.append(httpx.post(f"{url}/v1/completions", json=body, timeout=60))
            tokens = httpx.post(f"{url}/tokenize", json={"prompt": text}).json()["tokens"]
    logits_TV = reference((tokens[0],), tuple(tokens[1:]))
    expected_TV = logits_TV.float().log_softmax(-1)
    best_T2 = expected_TV.topk(2).values
    for answer in answers:
        (choice,) = answer.json()["choices"]
        assert choice["text"] == text
        first, *values = choice["logprobs"]["token_logprobs"]
        assert first is None
        assert len(values) == len(tokens) - 1 > 64
        for place, (token, value) in enumerate(zip(tokens[1:], values, strict=True)):
            assert value == pytest.approx(float(expected_TV[place, token]), abs=1e-4)
            found = choice["prompt_logprobs"][place + 1]
            assert found[str(token)]["logprob"] == value
            likeliest = sorted((each["logprob"] for each in found.values()), reverse=True)[:2]
            assert likeliest == pytest.approx(best_T2[place].tolist(), abs=1e-4)


def test_three_ranks_give_the_tokens_of_one(smollm2, daemon, prompts, reference):
    """9 heads and 3 key/value heads: a group of heads each. Seeded ones are those of the engine of
    one rank, to the first place where two tokens are nearly equal; here there is none."""
    chosen = [prompts[LENGTHS.index(length)] for length in (2, 17, 65, 257)]
    answers = []
    ranks = ("--max-model-len", 1024, "--tensor-parallel-size", 3)
    with (
        running_daemon(smollm2, *FLOATS, *ranks) as three,
        RawClient(three.address) as shared,
        RawClient(daemon.address) as client,
    ):
        for each in (shared, client):
            names = []
            for number, prompt in enumerate(chosen):
                for kind, options in (
                    ("greedy", {}),
                    ("seeded", {"temperature": 0.8, "seed": number, "top_p": 0.9}),
                    ("all", {"temperature": 1.0, "seed": number}),
                ):
                    names.append(f"{kind} {number}")
                    each.request(names[-1], prompt, max_tokens=12, **options)
            answers.append(each.collect(*names, timeout_s=600))
    found, expected = answers
    for number, prompt in enumerate(chosen):
        assert_greedy(reference, prompt, found[f"greedy {number}"][0])
    assert {name: tokens for name, (tokens, _) in found.items()} == {
        name: tokens for name, (tokens, _) in expected.items()
    }
