"""Decode steps of a batch with adapters, and without one where adapters are served."""

from typing import Annotated

import torch
from cyclopts import Parameter

from engine_core.adapters.pool import AdapterPool
from engine_core.model_files import open_model_files
from engine_core.models import Model as LanguageModel
from engine_core.models.decoder import Decoder
from kernels.cpu.library import load_library
from kernels.cpu.operations import CpuOperations
from kernels.interface.lora import LoRAPart
from scripts.benchmarks import DEFAULT_MODEL, Json, Model, report
from scripts.benchmarks.best_times import Threads, set_threads
from scripts.benchmarks.cpu_model import GreedyRun
from scripts.load.report import log

_PROMPT, _OUTPUT = 32, 16
_KEYS = "abcdefghijklmnop"


def adapters(
    model: Model = DEFAULT_MODEL,
    *,
    rank: Annotated[int, Parameter(help="Of each adapter, on all linear layers.")] = 16,
    rounds: Annotated[int, Parameter(help="Of all cases in turn; the best of each counts.")] = 5,
    blocks: Annotated[bool, Parameter(help="Weights as the file holds them; else float32.")] = True,
    threads: Threads = None,
    json: Json = None,
) -> None:
    """Tokens/s of 16 requests that decode together, with 0, 1, 4 and 16 adapters among them.

    With one thread times are of the processor, so that other work does not count."""
    set_threads(threads)
    ops = CpuOperations(load_library(), keeps_blocks=blocks)
    files = open_model_files(model, report=log)
    sizes = {
        "max_rows": len(_KEYS),
        "max_length": _PROMPT + _OUTPUT + 1,
        "max_tokens": len(_KEYS) * (_PROMPT + _OUTPUT + 1),
    }
    plain = GreedyRun(ops, files, keeps_blocks=blocks, **sizes)
    served = GreedyRun(
        ops,
        files,
        keeps_blocks=blocks,
        make_pool=lambda loaded: _random_pool(loaded, ops, rank),
        **sizes,
    )
    prompts = [[7 * row + place for place in range(_PROMPT)] for row in range(len(_KEYS))]
    cases = {
        "adapters not served": (plain, 0),
        "served, none asked for": (served, 0),
        **{f"{number} in the batch": (served, number) for number in (1, 4, 16)},
    }
    best = dict.fromkeys(cases, float("inf"))
    for _ in range(rounds):
        for name, (run, number) in cases.items():
            keys = [_KEYS[row % number] if number else None for row in range(len(_KEYS))]
            answers = run.generate(prompts, _OUTPUT, adapters=keys)
            best[name] = min(best[name], answers.rest_s)
    num_tokens = len(_KEYS) * (_OUTPUT - 1)
    rates = {name: num_tokens / seconds for name, seconds in best.items()}
    base = rates["adapters not served"]
    for name, rate in rates.items():
        log(f"{name:24} {rate:8.1f} tokens/s {100 * rate / base:6.1f} %")
    weights = "blocks" if blocks else "float32"
    report({"rank": rank, "weights": weights, "tokens_per_s": rates}, json)


def _random_pool(model: LanguageModel, ops: CpuOperations, rank: int) -> AdapterPool:
    assert isinstance(model, Decoder)
    pool = AdapterPool(
        model,
        ops,
        num_slots=len(_KEYS),
        max_rank=rank,
        max_num_tokens=len(_KEYS) * (_PROMPT + _OUTPUT),
        dtype=torch.float32,
    )
    for slot, key in enumerate(_KEYS):
        parts = {
            index: {
                number: LoRAPart(
                    torch.randn(rank, linear.num_inputs) * 0.01, torch.randn(size, rank) * 0.01
                )
                for number, (_, size) in enumerate(linear.parts)
            }
            for index, linear in enumerate(model.linears)
        }
        pool.place(slot, key, pool.prepare(parts))
    return pool
