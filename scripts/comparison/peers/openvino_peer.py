"""OpenVINO GenAI's continuous batching in its own process. Options: model (a .gguf file or a folder
of OpenVINO's), cache_gb, batched_tokens."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
from wire import Generate, Record, Requests, TokenClock, serve


def _prepare(options: dict[str, Any]) -> tuple[dict[str, Any], Generate]:
    import openvino
    import openvino_genai

    scheduling = openvino_genai.SchedulerConfig()
    scheduling.cache_size = int(options.pop("cache_gb", 2))
    scheduling.max_num_batched_tokens = int(options.pop("batched_tokens", 256))
    scheduling.max_num_seqs = 256
    scheduling.enable_prefix_caching = True
    pipeline = openvino_genai.ContinuousBatchingPipeline(
        options.pop("model"),
        scheduling,
        "CPU",
        {"INFERENCE_NUM_THREADS": options.pop("threads")},
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


if __name__ == "__main__":
    serve(_prepare)
