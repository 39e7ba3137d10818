"""transformers' beam search on a tiny random Llama, and that model's log-probabilities."""

import contextlib
import functools
from collections.abc import Iterator

import numpy as np
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from protocol.outputs import Logprobs
from protocol.sampling import BeamSearchParams

VOCAB_SIZE = 48
PROMPT = [5, 9, 2, 30]


@functools.cache
def tiny_llama() -> LlamaForCausalLM:
    """In float64, so that the same prefix has the same logits in any batch; its head is scaled so
    that likelihoods differ as a trained model's do."""
    torch.manual_seed(3)
    config = LlamaConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=128,
        bos_token_id=None,
        eos_token_id=None,
    )
    model = LlamaForCausalLM(config).double().eval()
    with torch.no_grad():
        model.lm_head.weight.mul_(20.0)
    return model


@contextlib.contextmanager
def one_thread() -> Iterator[None]:
    """So small a model loses more by threads than it gains."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@torch.no_grad()
@one_thread()
def likeliest(model: LlamaForCausalLM, prefixes: list[list[int]], count: int) -> list[Logprobs]:
    """As the engine's sampler reports them: the sampled token, then the likeliest."""
    logits = model(torch.tensor(prefixes)).logits[:, -1].float()
    top = torch.log_softmax(logits, dim=-1).topk(min(count, VOCAB_SIZE))
    return [
        Logprobs(
            num_positions=1,
            width=len(ids) + 1,
            token_ids=np.array([ids[0], *ids], dtype="<i4").tobytes(),
            logprobs=np.array([values[0], *values], dtype="<f4").tobytes(),
            ranks=[1],
        )
        for ids, values in zip(top.indices.tolist(), top.values.tolist(), strict=True)
    ]


@one_thread()
def reference(
    model: LlamaForCausalLM, params: BeamSearchParams, max_tokens: int, eos: list[int], **options
) -> tuple[list[list[int]], list[float]]:
    """Generated tokens and scores of transformers, best first."""
    found = model.generate(
        torch.tensor([PROMPT]),
        num_beams=params.beam_width,
        num_return_sequences=params.beam_width,
        do_sample=False,
        length_penalty=params.length_penalty,
        early_stopping=params.early_stopping,
        max_new_tokens=max_tokens,
        eos_token_id=eos or None,
        pad_token_id=VOCAB_SIZE - 1,
        output_scores=True,
        return_dict_in_generate=True,
        **options,
    )
    rows = []
    for sequence in found.sequences[:, len(PROMPT) :].tolist():
        end = next((i + 1 for i, token in enumerate(sequence) if token in eos), len(sequence))
        rows.append(sequence[:end])
    scores = getattr(found, "sequences_scores", None)  # width 1 is plain greedy search there
    return rows, [] if scores is None else scores.tolist()
