"""Time to the first token of a long prompt after kill -9, with blocks of prompts on disk or not."""

import os
import shlex
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from frontend import AsyncLLM, run
from scripts.benchmarks import (
    DEFAULT_MODEL,
    Json,
    Model,
    Repeat,
    first_token_s,
    report,
    running_daemon,
)
from scripts.comparison.figures import Figures

_WRITE_TIMEOUT_S = 60.0


def restart(
    *,
    model: Model = DEFAULT_MODEL,
    options: Annotated[str, Parameter(allow_leading_hyphen=True, help="Of the daemon.")] = "",
    num_tokens: Annotated[int, Parameter(help="Of the prompt.")] = 2000,
    repeat: Repeat = 5,
    json: Json = None,
) -> int:
    """A daemon computes the prompt, waits until its blocks are on disk and is killed. Then daemons
    with and without the folder take turns: each is started, asked for one token, and killed."""
    words = shlex.split(options)
    seconds: dict[str, list[float]] = {"without": [], "with": []}
    from_disk: list[int] = []
    with tempfile.TemporaryDirectory() as folder:
        with_disk = [*words, "--prefix-cache-dir", f"{folder}/prefixes"]
        first = measure_start(model, with_disk, num_tokens, is_written=True)
        for _ in range(repeat):
            seconds["without"].append(measure_start(model, words, num_tokens)["first_token_s"])
            again = measure_start(model, with_disk, num_tokens)
            seconds["with"].append(again["first_token_s"])
            from_disk.append(int(again["tokens_from_disk"]))
        num_bytes = sum(path.stat().st_size for path in Path(folder, "prefixes").iterdir())
    median = {name: round(statistics.median(each), 3) for name, each in seconds.items()}
    table = f"first token after kill -9, prompt of {num_tokens} tokens\n" + "\n".join(
        f"  {name:<8}{value:>8.3f} s" for name, value in median.items()
    )
    document = {
        "model": model,
        "options": options,
        "num_tokens": num_tokens,
        "writing_first_token_s": first["first_token_s"],
        "first_token_s": seconds,
        "median_first_token_s": median,
        "num_tokens_from_disk": from_disk,
        "bytes_on_disk": num_bytes,
    }
    report(document, json, table)
    return 0 if min(from_disk) > 0 else 1


def measure_start(
    model: str, options: Sequence[str], num_tokens: int, *, is_written: bool = False
) -> Figures:
    """One daemon, from a request to its first token; killed once its blocks are on
    disk. Raises EngineFailed: it did not start."""
    with running_daemon(["--model", model, *options]) as (daemon, ready):
        figures = run(ask(ready["address"], num_tokens, is_written))
        os.kill(daemon.pid, 9)
    return figures


async def ask(address: str, num_tokens: int, is_written: bool) -> Figures:
    async with AsyncLLM(address) as llm:
        prompt = [place * 7919 % llm.model.vocab_size for place in range(num_tokens)]
        elapsed_s = await first_token_s(llm, prompt)
        deadline_s = time.perf_counter() + _WRITE_TIMEOUT_S
        now = await llm.statistics()
        num_blocks = num_tokens // llm.model.block_size
        while is_written and now.num_disk_blocks < num_blocks:
            if time.perf_counter() > deadline_s:
                raise RuntimeError(f"{now.num_disk_blocks} of {num_blocks} blocks were written")
            now = await llm.statistics()
    return {"first_token_s": elapsed_s, "tokens_from_disk": now.num_disk_cached_prompt_tokens}
