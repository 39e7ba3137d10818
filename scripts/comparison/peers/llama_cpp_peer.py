"""llama-cpp-python's `Llama` in its own process. Options: model (a .gguf file), context.

One sequence at a time is all that this class decodes; batches are its server's business.
"""

from __future__ import annotations

import time
from typing import Any

from wire import Generate, NotMeasured, Record, Requests, TokenClock, serve


def _prepare(options: dict[str, Any]) -> tuple[dict[str, Any], Generate]:
    import llama_cpp

    threads = options.pop("threads")
    llama = llama_cpp.Llama(
        model_path=options.pop("model"),
        n_ctx=int(options.pop("context", 4096)),
        n_threads=threads,
        n_threads_batch=threads,
        verbose=False,
    )

    def generate(requests: Requests) -> list[Record]:
        if len(requests) > 1:
            raise NotMeasured("it decodes one sequence at a time; compare with its server")
        [(number, prompt)] = requests
        clock = TokenClock(time.perf_counter())
        # the generator goes on past end-of-sequence; temp 0 is greedy
        for count, _ in enumerate(llama.generate(prompt, temp=0.0, repeat_penalty=1.0), 1):
            clock.note(1)
            if count == number:
                break
        return [clock.record()]

    return {"version": llama_cpp.__version__}, generate


if __name__ == "__main__":
    serve(_prepare)
