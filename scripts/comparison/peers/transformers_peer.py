"""transformers' `generate` in its own process: a static batch, prompts padded on the left. Options:
model (a folder), dtype."""

from __future__ import annotations

import time
from typing import Any

from wire import Generate, Record, Requests, TokenClock, serve, untimed


def _prepare(options: dict[str, Any]) -> tuple[dict[str, Any], Generate]:
    import torch
    import transformers

    torch.set_num_threads(options.pop("threads"))
    model = transformers.AutoModelForCausalLM.from_pretrained(
        options.pop("model"), dtype=getattr(torch, options.pop("dtype", "float32"))
    ).eval()

    class Streamer:
        """Told of the prompt first, then of each token."""

        def __init__(self, clock: TokenClock) -> None:
            self._clock = clock
            self._has_prompt = False

        def put(self, value: Any) -> None:
            if self._has_prompt:
                self._clock.note(value.numel())
            self._has_prompt = True

        def end(self) -> None:
            pass

    @torch.inference_mode()
    def generate(requests: Requests) -> list[Record]:
        number = requests[0][0]
        width = max(len(prompt) for _, prompt in requests)
        ids = torch.tensor([[0] * (width - len(p)) + p for _, p in requests])
        mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for _, p in requests])
        clock = TokenClock(time.perf_counter())
        started_s = time.perf_counter()
        output = model.generate(
            ids,
            attention_mask=mask,
            do_sample=False,
            min_new_tokens=number,
            max_new_tokens=max(number for number, _ in requests),
            pad_token_id=0,
            streamer=Streamer(clock) if len(requests) == 1 else None,
        )
        finished_s = time.perf_counter() - started_s
        if len(requests) == 1:
            return [clock.record()]
        return [untimed(output.shape[1] - width, finished_s) for _ in requests]

    return {"version": transformers.__version__}, generate


if __name__ == "__main__":
    serve(_prepare)
