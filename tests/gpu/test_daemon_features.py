"""What clients may ask of a daemon beside plain tokens, over its socket: a tiny model's answers are
those of a daemon on a CPU. Without a GPU this rehearses it with two of these."""

import json

import pytest
import tokenizers
import torch
from structured_output.tiny_model import write_tiny_model
from structured_output.vocabularies import VOCAB_SIZE

from frontend import AsyncLLM, LoRARequest, SamplingParams
from frontend.event_loop import run
from frontend.sampling_params import StructuredOutputsParams
from tests.e2e.adapter_folders import make_adapter
from tests.gpu.daemon_run import DaemonRun
from tests.gpu.device import DEVICE

pytestmark = [pytest.mark.slow, *([pytest.mark.extended] if DEVICE == "cpu" else [])]

OPTIONS = ("--dtype", "float32", "--max-num-seqs", "8", "--max-model-len", "256")
OPTIONS += ("--num-blocks", "96", "--speculative", "ngram", "--convert", "embed")
OPTIONS += ("--enable-prompt-embeds", "--max-prompt-embeds", "4800")
AGAIN = [5, 6, 7, 8, 9, 10, 11, 12] * 5
"""A prompt in which n-grams are found."""
SCHEMA = {
    "type": "object",
    "properties": {"a": {"type": "integer", "minimum": 0, "maximum": 99}},
    "required": ["a"],
    "additionalProperties": False,
}


async def _tokens(llm, prompt=None, *, adapter=None, **params):
    given = {"max_tokens": 24, "temperature": 0.0, "ignore_eos": True, "detokenize": False}
    prompt = {"prompt_token_ids": AGAIN} if prompt is None else prompt
    stream = llm.generate(prompt, SamplingParams(**given | params), lora_request=adapter)
    return [output async for output in stream][-1].outputs[0].token_ids


async def _answers(address, model, other, adapter):
    """By feature: tokens, or vectors."""
    states = torch.randn(20, 48, generator=torch.Generator().manual_seed(0)) * 0.02
    async with AsyncLLM(address) as llm:
        found = {"plain": await _tokens(llm)}
        penalties = {"repetition_penalty": 1.3, "presence_penalty": 0.5, "frequency_penalty": 0.2}
        found["penalties"] = await _tokens(llm, **penalties)
        grammar = StructuredOutputsParams(json=SCHEMA)
        found["schema"] = await _tokens(llm, structured_outputs=grammar, ignore_eos=False)
        found["adapter"] = await _tokens(llm, adapter=LoRARequest("ann", 1, str(adapter)))
        found["embeds"] = await _tokens(llm, {"prompt_embeds": states})
        (vector,) = await llm.embed([AGAIN])
        found["pooled"] = vector.outputs.embedding
        await llm.sleep(2)
        await llm.wake_up()
        found["after sleep"] = await _tokens(llm)
        await llm.update_weights(other)
        found["new weights"] = await _tokens(llm)
        await llm.update_weights(model)
        statistics = await llm.statistics()
    assert statistics.num_accepted_tokens > 0
    assert statistics.num_compilations_after_ready == 0
    return found


def test_every_feature_gives_the_answers_of_a_cpu(device, tmp_path):
    model, other = (write_tiny_model(tmp_path / f"{seed}", seed=seed) for seed in (0, 1))
    adapter = make_adapter(tmp_path / "ann", model, seed=1)
    found = []
    for place in (device, "cpu"):
        options = (*OPTIONS, f"--adapter=ann={adapter}")
        with DaemonRun(model, device=place, options=options) as daemon:
            address = daemon.ready["address"]
            found.append(run(_answers(address, str(model), str(other), adapter)))
            assert daemon.stop() == 0
    ours, expected = found
    torch.testing.assert_close(
        torch.tensor(ours.pop("pooled")), torch.tensor(expected.pop("pooled")), atol=1e-4, rtol=0
    )
    assert ours == expected
    assert ours["plain"] == ours["after sleep"]
    assert len({*map(tuple, ours.values())}) == len(ours) - 1
    assert all(0 <= token < VOCAB_SIZE for tokens in ours.values() for token in tokens)
    assert json.loads(_text(model, ours["schema"])).keys() == {"a"}


def _text(model, tokens):
    return tokenizers.Tokenizer.from_file(str(model / "tokenizer.json")).decode(tokens)
