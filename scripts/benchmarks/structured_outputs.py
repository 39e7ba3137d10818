"""What a grammar costs in a step: decode steps of requests with one and without, in turn."""

import statistics
from typing import Annotated

from cyclopts import Parameter

from frontend import LLM, SamplingParams
from frontend.load.report import log
from frontend.sampling_params import StructuredOutputsParams
from scripts.benchmarks import (
    DEFAULT_MODEL,
    Json,
    Model,
    Repeat,
    cpu_seconds,
    report,
    running_daemon,
)

_MANY_TEXTS = {"type": "array", "items": {"type": "string"}, "minItems": 2000}
"""No answer is over before `tokens`."""


def structured_outputs(
    *,
    model: Model = DEFAULT_MODEL,
    rows: Annotated[int, Parameter(help="Requests at once.")] = 64,
    tokens: Annotated[int, Parameter(help="Of each answer.")] = 48,
    repeat: Repeat = 5,
    json: Json = None,
) -> None:
    """Milliseconds a step of ROWS requests at temperature 1 that all follow a JSON schema, beside
    the same number that follow none; wall clock and the daemon's CPU. The runs follow one another;
    a figure is the median of the pairs' ratios."""
    options = ["--model", model, "--max-num-seqs", str(rows), "--max-model-len", "512"]
    with running_daemon(options) as (daemon, ready), LLM(address=ready["address"]) as llm:
        plain = {"ignore_eos": True}
        led = {"structured_outputs": StructuredOutputsParams(json=_MANY_TEXTS)}
        times: dict[str, list[tuple[float, float]]] = {"plain": [], "grammar": []}
        for number in range(repeat + 1):
            for name, fields in (("plain", plain), ("grammar", led)):
                params = SamplingParams(
                    temperature=1.0, seed=7, max_tokens=tokens, detokenize=False, **fields
                )
                before, cpu_before = llm.statistics(), cpu_seconds(daemon.pid)
                outputs = llm.generate(
                    [f"Text {index}: " for index in range(rows)], params, use_tqdm=False
                )
                after, cpu_after = llm.statistics(), cpu_seconds(daemon.pid)
                assert all(len(output.outputs[0].token_ids) == tokens for output in outputs)
                num_steps = after.num_steps - before.num_steps
                if number:  # the first run compiles
                    step_s = (after.step_time_s - before.step_time_s) / num_steps
                    times[name].append((step_s, (cpu_after - cpu_before) / num_steps))
    figures = {
        f"{what} ms a step, {name}": round(1e3 * statistics.median(t[i] for t in each), 3)
        for i, what in enumerate(("wall", "CPU"))
        for name, each in times.items()
    }
    for i, what in enumerate(("wall", "CPU")):
        pairs = zip(times["plain"], times["grammar"], strict=True)
        ratio = statistics.median(led_run[i] / plain_run[i] for plain_run, led_run in pairs)
        figures[f"{what} overhead, %"] = round(100 * (ratio - 1), 2)
    for name, value in figures.items():
        log(f"{name:28}{value:9}")
    report({"model": model, "rows": rows, "figures": figures}, json)
