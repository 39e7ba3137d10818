"""Greedy tokens against transformers on Gemma-3-270M: sliding windows and full layers in one model.

See test_smollm2_tokens for what is compared. The prompts cross the window of 512 tokens, in chunks
and with a pool that preempts, so that blocks leave the window, are reused and come back.
"""

from pathlib import Path

import pytest
from daemons import running_daemon
from raw_client import RawClient

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

BOS = 2
LENGTHS = (1, 40, 513, 640)


@pytest.fixture(scope="module")
def gemma3():
    from engine_core.model_files import open_model_files

    return open_model_files("gemma3-270m", report=print).path


@pytest.fixture(scope="module")
def prompts(gemma3):
    from tokenizers import Tokenizer

    from engine_core.model_files import open_model_files

    files = open_model_files(str(gemma3), report=print)
    tokenizer = Tokenizer.from_str(files.tokenizer().tokenizer_json.decode())
    text = (Path(__file__).parents[2] / "LICENSE").read_text()
    token_ids = tokenizer.encode(" ".join(text.split()), add_special_tokens=False).ids
    return [
        [BOS, *token_ids[number * 101 : number * 101 + length - 1]]
        for number, length in enumerate(LENGTHS)
    ]


@pytest.fixture(scope="module")
def reference(gemma3, logits_by_transformers):
    return logits_by_transformers(gemma3)


@pytest.mark.parametrize("options", [(), ("--num-blocks", 280, "--watermark", 0)])
def test_tokens_are_those_of_transformers(gemma3, prompts, reference, options):
    import torch

    with (
        running_daemon(gemma3, "--dtype", "float32", *options) as daemon,
        RawClient(daemon.address) as client,
    ):
        for number, prompt in enumerate(prompts * 2):
            client.request(str(number), prompt, max_tokens=16)
        results = client.collect(*map(str, range(2 * len(prompts))), timeout_s=300)
        statistics = client.statistics()
    if not options:  # the small pool evicts everything before it is asked for again
        assert statistics.num_cached_prompt_tokens > 0
    for number, prompt in enumerate(prompts):
        tokens, _ = results[str(number)]
        assert len(tokens) == 16
        assert results[str(number + len(prompts))][0] == tokens
        logits_TV = reference(tuple(prompt), tuple(tokens))
        chosen_T = logits_TV.gather(1, torch.tensor(tokens)[:, None])[:, 0]
        assert (logits_TV.amax(dim=1) - chosen_T).max() <= 1e-3, f"prompt of {len(prompt)} tokens"
