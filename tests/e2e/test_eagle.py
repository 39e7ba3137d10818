"""A daemon with an EAGLE-3 head from files: greedy tokens are transformers', with an adapter too;
sampled ones are the same again from the prefix cache and after a sleep."""

import json

import pytest
from adapter_folders import greedy_tokens, make_adapter, merged_model
from daemons import running_daemon
from safetensors.torch import save_file

from frontend import LLM, SamplingParams
from tests.eagle_heads import head_config, head_tensors

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

PROMPTS = [{"prompt_token_ids": list(range(first, first + 40))} for first in (3, 20, 50)]
SAMPLED = SamplingParams(max_tokens=30, temperature=1.0, seed=3, n=2, detokenize=False)


def test_tokens_are_the_models_own_also_after_a_sleep(tiny_llama, tmp_path):
    config = head_config(json.loads((tiny_llama / "config.json").read_text()), draft_vocab_size=50)
    (tmp_path / "config.json").write_text(json.dumps(config))
    save_file(head_tensors(config), tmp_path / "model.safetensors")
    adapter = make_adapter(tmp_path / "adapter", tiny_llama, seed=1)
    eagle = ("--speculative", "eagle", "--draft-model", tmp_path, "--num-speculative-tokens", 3)
    eagle += ("--adapter", f"mine={adapter}")
    greedy = SamplingParams(max_tokens=30, temperature=0.0, ignore_eos=True, detokenize=False)
    with running_daemon(tiny_llama, *eagle) as daemon, LLM(address=daemon.address) as llm:
        found = llm.generate(PROMPTS, greedy, use_tqdm=False)
        adapted = llm.generate(PROMPTS, greedy, use_tqdm=False, adapter="mine")
        sampled = [
            [part.token_ids for part in result.outputs]
            for result in llm.generate(PROMPTS, SAMPLED, use_tqdm=False)
        ]
        llm.sleep(2)
        llm.wake_up()
        again = llm.generate(PROMPTS, SAMPLED, use_tqdm=False)
        assert [[part.token_ids for part in result.outputs] for result in again] == sampled
        assert llm.statistics().num_draft_tokens > 0
    for results, folder in ((found, None), (adapted, adapter)):
        model = merged_model(tiny_llama, folder)
        for prompt, result in zip(PROMPTS, results, strict=True):
            expected = greedy_tokens(model, prompt["prompt_token_ids"], 30)
            assert list(result.outputs[0].token_ids) == expected
