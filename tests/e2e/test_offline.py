"""`LLM(model=...)`: a script with an engine of its own, as users write it."""

import pytest

from frontend import LLM, SamplingParams

PROMPTS = ["The capital of France is", "1 2 3 4 5 6", "Once upon a time"]


def test_a_model_of_ones_own_serves_what_was_asked_and_no_more(tiny_llama):
    """The cache is as large as asked; the tokens are those of transformers. Proves S188."""
    import torch
    from transformers import AutoModelForCausalLM

    prompt = [number * 13 % 90 + 1 for number in range(40)]
    reference = AutoModelForCausalLM.from_pretrained(tiny_llama, dtype=torch.float32).eval()
    with torch.inference_mode():
        answer = reference.generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
            do_sample=False,
            max_new_tokens=20,
            eos_token_id=-1,
            pad_token_id=0,
        )
    params = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True, detokenize=False)
    with LLM(model=str(tiny_llama), num_blocks=32) as llm:
        [output] = llm.generate({"prompt_token_ids": prompt}, params, use_tqdm=False)
        assert llm.statistics().num_blocks == 32
    assert output.outputs[0].token_ids == answer[0, len(prompt) :].tolist()


@pytest.mark.slow
def test_texts_of_a_batch_come_in_the_prompts_order_and_are_those_of_each_alone(smollm2):
    """Proves S188, S189, S190."""
    params = SamplingParams(temperature=0, max_tokens=12)
    with LLM(model=str(smollm2), max_model_len=256) as llm:
        outputs = llm.generate(PROMPTS, params, use_tqdm=False)
        alone = [llm.generate(prompt, params, use_tqdm=False)[0] for prompt in PROMPTS]
    assert [output.prompt for output in outputs] == PROMPTS
    texts = [output.outputs[0].text for output in outputs]
    assert texts == [output.outputs[0].text for output in alone]
    assert "Paris" in texts[0]
    assert all(len(output.outputs[0].token_ids) == 12 for output in outputs)
