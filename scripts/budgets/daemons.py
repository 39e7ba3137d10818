"""Settings of the engine side by side: a daemon for each, which serve a trace in turns.

Owns the daemons and the order of turns. Must not know what the settings mean.
"""

import asyncio
import contextlib
import math
import random
import sys
import time
from typing import Any

from frontend import AsyncLLM, RequestOutputKind, SamplingParams
from scripts.budgets.promises import Promise, Served, table
from scripts.simulator.trace import TraceRequest


async def serve_in_turns(
    model: str,
    settings: dict[str, dict[str, Any]],
    traces: dict[str, list[list[TraceRequest]]],
    promise: Promise,
) -> dict[str, list[dict[str, Any]]]:
    """Rows of each trace, one for each setting.

    Args:
        settings: options of a daemon, by name.
        traces: by name, what is served in each turn.
    """
    rows: dict[str, list[dict[str, Any]]] = {}
    async with contextlib.AsyncExitStack() as daemons:
        llms = {}
        for name, options in settings.items():
            llms[name] = await AsyncLLM.launch(model, **options)
            daemons.push_async_callback(llms[name].close)
            # first touches are paid for before, and what a budget learns of a device once
            await _replay(llms[name], next(iter(traces.values()))[-1])
        for trace, turns in traces.items():
            served: dict[str, list[Served]] = {name: [] for name in settings}
            durations_s = dict.fromkeys(settings, 0.0)
            for number, requests in enumerate(turns):
                # everyone comes first, and after everyone else, at some time
                names = list(settings)
                random.Random(number).shuffle(names)
                for name in names:
                    seen, duration_s = await _replay(llms[name], requests)
                    served[name] += seen
                    durations_s[name] += duration_s
                    told = promise.row(name, seen, duration_s)
                    print(trace, number, told, file=sys.stderr, flush=True)
            rows[trace] = []
            for name, seen in served.items():
                row = promise.row(name, seen, durations_s[name])
                row["ttft_and_tpot_ms"] = [
                    [round(1e3 * one.ttft_s, 1), round(1e3 * one.tpot_s, 1)] for one in seen
                ]
                rows[trace].append(row)
            print(table(trace, rows[trace]), file=sys.stderr, flush=True)
    return rows


async def _replay(llm: AsyncLLM, requests: list[TraceRequest]) -> tuple[list[Served], float]:
    """Serves them in real time, until the last answer is there. Prompts are random tokens: nothing
    is found in the cache."""
    draw = random.Random()
    prompts = [
        [draw.randrange(100, 40_000) for _ in range(request.num_prompt_tokens)]
        for request in requests
    ]
    start = time.monotonic() + 0.1 - requests[0].arrival_s
    async with asyncio.TaskGroup() as group:
        tasks = [
            group.create_task(
                _one(llm, prompt, request.num_output_tokens, start + request.arrival_s)
            )
            for prompt, request in zip(prompts, requests, strict=True)
        ]
    return [task.result() for task in tasks], time.monotonic() - start - requests[0].arrival_s


async def _one(llm: AsyncLLM, prompt: list[int], num_output_tokens: int, due: float) -> Served:
    await asyncio.sleep(due - time.monotonic())
    params = SamplingParams(
        temperature=0.0,
        max_tokens=num_output_tokens,
        ignore_eos=True,
        detokenize=False,
        output_kind=RequestOutputKind.DELTA,
    )
    first = last = math.nan
    count = 0
    async for output in llm.generate({"prompt_token_ids": prompt}, params):
        num_new = sum(len(part.token_ids) for part in output.outputs)
        if num_new:
            last = time.monotonic()
            first = last if count == 0 else first
            count += num_new
    tpot_s = (last - first) / (count - 1) if count > 1 else math.nan
    return Served(first - due, tpot_s, count)
