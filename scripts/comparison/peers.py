"""Libraries in their own Python: `python peers.py KIND OPTIONS`, a line of JSON each way.

Needs the standard library and the peer's, nothing of this project.

    argument   {"model": ..., "threads": 2, ...}         the options
    out        {"event": "ready", "version": ...}
    in         [[num_output_tokens, prompt_token_ids], ...]
    out        {"event": "done", "records": [...]}
               or {"event": "failed", "reason": ...}

A record holds what was measured and nothing else: `finished_s` and `num_output_tokens` always,
`first_token_s`, `last_token_s` and `gaps_s` where the library tells when tokens come."""

import json
import os
import sys
import time
from collections.abc import Callable
from itertools import pairwise
from typing import Any

Requests = list[tuple[int, list[int]]]
Record = dict[str, Any]
Generate = Callable[[Requests], list[Record]]
Options = dict[str, Any]
Prepared = tuple[dict[str, Any], Generate]
"""What a library says of itself, and what answers requests that all come at once."""
Prepare = Callable[[Options], Prepared]
"""Takes (pops) its options."""


def serve(prepare: Prepare) -> None:
    """Run a peer's program until its input ends."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what a library prints is no answer

    def answer(document: dict[str, Any]) -> None:
        answers.write(json.dumps(document) + "\n")
        answers.flush()

    options = json.loads(sys.argv[2])
    try:
        facts, generate = prepare(options)
    # a peer may fail in any way: that is reported, never a figure
    except Exception as error:
        answer({"event": "failed", "reason": f"{type(error).__name__}: {error}"[:1000]})
        raise
    if options:  # nothing is accepted and ignored
        reason = f"this peer has no option {', '.join(options)}; omit it"
        answer({"event": "failed", "reason": reason})
        return
    answer({"event": "ready", **facts})
    for line in sys.stdin:
        requests = [(number, prompt) for number, prompt in json.loads(line)]
        try:
            answer({"event": "done", "records": generate(requests)})
        except Exception as error:
            answer({"event": "failed", "reason": f"{type(error).__name__}: {error}"[:1000]})


class TokenClock:
    """Times of one request's tokens, from the workload's start."""

    def __init__(self, started_s: float) -> None:
        self._started_s = started_s
        self._times_s: list[float] = []
        self._num_tokens = 0

    def note(self, num_tokens: int) -> None:
        """Note that so many tokens have come now."""
        if num_tokens > 0:
            self._times_s.append(time.perf_counter() - self._started_s)
            self._num_tokens += num_tokens

    def record(self) -> Record:
        """The request has ended now."""
        times_s = self._times_s
        return {
            "first_token_s": times_s[0] if times_s else None,
            "last_token_s": times_s[-1] if times_s else None,
            "finished_s": time.perf_counter() - self._started_s,
            "num_output_tokens": self._num_tokens,
            "gaps_s": [late - early for early, late in pairwise(times_s)],
        }


def untimed(num_tokens: int, finished_s: float) -> Record:
    """The record of a request whose tokens came without a time."""
    return {"finished_s": finished_s, "num_output_tokens": num_tokens}


def prepare_openvino(options: Options) -> Prepared:
    """OpenVINO GenAI's continuous batching. Options: model (a .gguf file or OpenVINO's folder),
    cache_gb, batched_tokens, precision (of arithmetic: bf16 or f32; its own choice)."""
    import numpy as np
    import openvino
    import openvino_genai

    scheduling = openvino_genai.SchedulerConfig()
    scheduling.cache_size = int(options.pop("cache_gb", 2))
    scheduling.max_num_batched_tokens = int(options.pop("batched_tokens", 256))
    scheduling.max_num_seqs = 256
    scheduling.enable_prefix_caching = True
    properties = {"INFERENCE_NUM_THREADS": options.pop("threads")}
    if "precision" in options:
        properties["INFERENCE_PRECISION_HINT"] = options.pop("precision")
    pipeline = openvino_genai.ContinuousBatchingPipeline(
        options.pop("model"), scheduling, "CPU", properties
    )
    count = 0

    def generate(requests: Requests) -> list[Record]:
        nonlocal count
        started_s = time.perf_counter()
        clocks, handles = [], []
        for number, prompt in requests:
            config = openvino_genai.GenerationConfig()
            config.max_new_tokens = number
            config.ignore_eos = True
            config.do_sample = False
            config.apply_chat_template = False
            tokens = openvino.Tensor(np.array([prompt], np.int64))
            handles.append(pipeline.add_request(count, tokens, config))
            clocks.append(TokenClock(started_s))
            count += 1
        records: list[Record | None] = [None] * len(requests)
        while pipeline.has_non_finished_requests():
            pipeline.step()
            for at, handle in enumerate(handles):
                if records[at] is None:
                    while handle.can_read():
                        for output in handle.read().values():
                            clocks[at].note(len(output.generated_ids))
                    if handle.get_status() != openvino_genai.GenerationStatus.RUNNING:
                        records[at] = clocks[at].record()
        return [record or clock.record() for record, clock in zip(records, clocks, strict=True)]

    return {"version": openvino_genai.__version__}, generate


def prepare_vllm(options: Options) -> Prepared:
    """vLLM's `LLM`. Options: model (a folder), dtype, max_model_len, kv_cache_gb, enforce_eager."""
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
        kind = kinds.DELTA if len(requests) == 1 else kinds.CUMULATIVE
        params = [
            vllm.SamplingParams(
                temperature=0.0, max_tokens=number, ignore_eos=True, output_kind=kind
            )
            for number, _ in requests
        ]
        prompts = [{"prompt_token_ids": prompt} for _, prompt in requests]
        if len(requests) == 1:
            return [_one(prompts[0], params[0])]
        started_s = time.perf_counter()
        outputs = llm.generate(prompts, params, use_tqdm=False)
        finished_s = time.perf_counter() - started_s
        return [untimed(len(output.outputs[0].token_ids), finished_s) for output in outputs]

    def _one(prompt: Any, params: Any) -> Record:
        clock = TokenClock(time.perf_counter())
        engine = llm.llm_engine
        engine.add_request(f"one-{time.monotonic_ns()}", prompt, params)
        while engine.has_unfinished_requests():
            for output in engine.step():
                clock.note(len(output.outputs[0].token_ids))
        return clock.record()

    return {"version": vllm.__version__}, generate


PEERS: dict[str, Prepare] = {
    "openvino": prepare_openvino,
    "vllm": prepare_vllm,
}

if __name__ == "__main__":
    del sys.path[0]  # this folder: no library shall find our modules
    serve(PEERS[sys.argv[1]])
