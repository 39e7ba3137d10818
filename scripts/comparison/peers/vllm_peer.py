"""vLLM's `LLM` in its own process. Options: model (a folder), dtype, max_model_len, block_size,
kv_cache_gb, enforce_eager."""

from __future__ import annotations

import os
import time
from typing import Any

from wire import Generate, Record, Requests, TokenClock, serve, untimed


def _prepare(options: dict[str, Any]) -> tuple[dict[str, Any], Generate]:
    threads = options.pop("threads")
    os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", f"0-{threads - 1}" if threads > 1 else "0")
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", str(options.pop("kv_cache_gb", 2)))
    # one process: no messages between engine and caller
    os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    import vllm

    llm = vllm.LLM(
        model=options.pop("model"),
        dtype=options.pop("dtype", "float32"),
        max_model_len=int(options.pop("max_model_len", 4096)),
        enforce_eager=options.pop("enforce_eager", "false") == "true",
        seed=0,
    )
    kinds = vllm.sampling_params.RequestOutputKind

    def generate(requests: Requests) -> list[Record]:
        if len(requests) == 1:
            return [_one(llm, kinds.DELTA, *requests[0])]
        params = [
            vllm.SamplingParams(temperature=0.0, max_tokens=number, ignore_eos=True)
            for number, _ in requests
        ]
        prompts = [{"prompt_token_ids": prompt} for _, prompt in requests]
        started_s = time.perf_counter()
        outputs = llm.generate(prompts, params, use_tqdm=False)
        finished_s = time.perf_counter() - started_s
        return [untimed(len(output.outputs[0].token_ids), finished_s) for output in outputs]

    def _one(llm: Any, kind: Any, number: int, prompt: list[int]) -> Record:
        params = vllm.SamplingParams(
            temperature=0.0, max_tokens=number, ignore_eos=True, output_kind=kind
        )
        clock = TokenClock(time.perf_counter())
        engine = llm.llm_engine
        engine.add_request(f"one-{time.monotonic_ns()}", {"prompt_token_ids": prompt}, params)
        while engine.has_unfinished_requests():
            for output in engine.step():
                clock.note(len(output.outputs[0].token_ids))
        return clock.record()

    return {"version": vllm.__version__}, generate


if __name__ == "__main__":
    serve(_prepare)
