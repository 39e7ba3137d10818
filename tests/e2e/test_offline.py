"""`LLM(model=...)`: a real engine of this process's own."""

import pytest

from frontend import LLM, InvalidInput, SamplingParams

PROMPTS = [[1, 2, 3], [number * 13 % 90 + 1 for number in range(40)], [50]]


def test_a_model_is_loaded_profiled_and_served_and_its_engine_ends_with_the_llm(tiny_llama):
    """Proves S188."""
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(tiny_llama, dtype=torch.float32).eval()
    params = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True, detokenize=False)
    with LLM(model=str(tiny_llama), dtype="float32", memory_fraction=0.001) as llm:
        process = llm._client._child._process
        outputs = llm.generate(
            [{"prompt_token_ids": prompt} for prompt in PROMPTS], params, use_tqdm=False
        )
        statistics = llm.statistics()
        with pytest.raises(InvalidInput, match="token id 97, the vocabulary ends at 96"):
            llm.generate([PROMPTS[0], [97]], params)
    for prompt, output in zip(PROMPTS, outputs, strict=True):
        ids = torch.tensor([prompt])
        expected = model.generate(
            ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=20,
            min_new_tokens=20, eos_token_id=None, pad_token_id=0,
        )  # fmt: skip
        assert output.outputs[0].token_ids == expected[0, len(prompt) :].tolist()
    assert statistics.num_blocks > 0
    assert statistics.num_finished["length"] == len(PROMPTS)
    assert process.returncode == 0
