"""What every case gives on an engine that nothing disturbs, and what transformers say of it."""

import asyncio
import dataclasses
from pathlib import Path
from typing import Any

from frontend import AsyncLLM
from tests.chaos.cases import Case
from tests.chaos.requests import Use, run_request


async def compute_references(address: str, cases: list[Case]) -> list[list[dict[str, Any]]]:
    """For each case its sequences."""
    async with AsyncLLM(address) as llm:
        answers = await asyncio.gather(*(run_request(llm, case, Use()) for case in cases))
    for case, answer in zip(cases, answers, strict=True):
        assert not answer.problems and answer.num_ends == 1, (case, answer)
    return [[dataclasses.asdict(sequence) for sequence in answer.sequences] for answer in answers]


def tokens_behind_transformers(
    model_path: Path, cases: list[Case], references: list[list[dict[str, Any]]], count: int
) -> list[float]:
    """For each token of the first `count` greedy cases by how much transformers' logit of it, given
    the tokens before it, is below its best. Weights are dequantised to float32."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    where = {"pretrained_model_name_or_path": model_path.parent, "gguf_file": model_path.name}
    model = AutoModelForCausalLM.from_pretrained(**where, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(**where)
    chosen = [case for case in cases if case.kind in ("greedy", "long")]
    chosen = [case for case in chosen if case.arguments["temperature"] == 0.0][:count]
    behind: list[float] = []
    for case in chosen:
        prompt = tokenizer(case.prompt)["input_ids"]
        tokens = references[case.number][0]["token_ids"]
        with torch.inference_mode():
            logits_TV = model(
                torch.tensor([prompt + tokens]), logits_to_keep=len(tokens) + 1
            ).logits[0, :-1]
        best_T = logits_TV.max(dim=-1).values
        behind += (best_T - logits_TV.gather(1, torch.tensor(tokens)[:, None])[:, 0]).tolist()
    return behind
