"""transformers' continuous batching on a workload, to be measured against.

Owns how it is run. Must not know our engine.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import torch
import transformers

from scripts.gpu.model_shapes import Shape


def measure_transformers(
    shape: Shape,
    prompts: Sequence[list[int]],
    num_outputs: Sequence[int],
    *,
    limit_s: float,
    device: str = "cuda",
) -> dict[str, Any]:
    """Output tokens a second by the clock on the wall; one request first, untimed. If time is up
    before all have ended, "finished_tok_s" instead: tokens of those that have, which is less than
    what was computed.

    Returns:
        "failed" and the reason instead, if this version cannot do it: a peer is no part of what is
        checked.
    """
    try:
        return _measure(shape, prompts, num_outputs, limit_s, device)
    except Exception as error:
        return {"failed": f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"}


def _measure(
    shape: Shape,
    prompts: Sequence[list[int]],
    num_outputs: Sequence[int],
    limit_s: float,
    device: str,
) -> dict[str, Any]:
    config = transformers.AutoConfig.for_model(**shape)
    with torch.device(device):
        model = transformers.AutoModelForCausalLM.from_config(
            config, dtype=torch.bfloat16, attn_implementation="sdpa"
        ).eval()
    settings = transformers.GenerationConfig(
        do_sample=True, temperature=0.6, eos_token_id=-1, pad_token_id=0, max_new_tokens=4096
    )
    manager = model.init_continuous_batching(generation_config=settings)
    manager.start()
    try:
        manager.add_request(prompts[0], max_new_tokens=4)
        if manager.get_result(timeout=limit_s) is None:
            return {"failed": f"its first request took more than {limit_s:g} s"}
        started_s = time.perf_counter()
        for prompt, number in zip(prompts, num_outputs, strict=True):
            manager.add_request(prompt, max_new_tokens=number)
        num_finished = num_tokens = 0
        while num_finished < len(prompts):
            left_s = started_s + limit_s - time.perf_counter()
            result = manager.get_result(timeout=max(0.01, left_s)) if left_s > 0 else None
            if result is None:
                break
            if result.error is not None:
                return {"failed": str(result.error)[:300]}
            num_finished += 1
            num_tokens += len(result.generated_tokens)
        seconds = time.perf_counter() - started_s
    finally:
        manager.stop(block=True, timeout=10)
    name = "output_tok_s" if num_finished == len(prompts) else "finished_tok_s"
    return {
        name: round(num_tokens / seconds, 1),
        "seconds": round(seconds, 2),
        "num_finished": num_finished,
        "num_requests": len(prompts),
    }
