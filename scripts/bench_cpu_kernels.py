"""The native dense products beside torch's prepacked ones, at SmolLM2-135M's shapes.

    python scripts/bench_cpu_kernels.py
    python scripts/bench_cpu_kernels.py --rows 1 64 --kinds float32 int8 Q4_1 --isa avx2
    python scripts/bench_cpu_kernels.py --rows 1 64 --rounds 20 --step

All products of a shape take turns in one process, so a ratio is one of the same minute; the best of
several rounds is given. `--step` times all products of one step of the model, 30 layers and the
logits, with weights that no cache holds. With ENGINE_CORE_NATIVE_THREADS=1 the clock is the
thread's own, which other programs disturb less. A row is microseconds, GFLOP/s, GB/s of weights
and the ratio of torch's time to it. The last line is one JSON document.
"""

import argparse
import json
import time
from collections.abc import Callable, Sequence
from functools import partial

import numpy as np
import torch

from kernels.cpu.gguf_blocks import pack_gguf
from kernels.cpu.library import ISA_NAMES, NativeLibrary, load_library
from kernels.cpu.linear import NativeLinear
from kernels.cpu.weights import PackedLinear, pack_float, quantise_int4, quantise_int8
from kernels.torch import linear as torch_linear

SHAPES = {
    "qkv": (960, 576),
    "attention_out": (576, 576),
    "gate_up": (3072, 576),
    "down": (576, 1536),
    "logits": (49152, 576),
}
NUM_LAYERS = 30
# inputs and bytes of a block, and where its float16 scales lie
GGUF_BLOCKS = {
    "Q8_0": (32, 34, (0,)),
    "Q4_0": (32, 18, (0,)),
    "Q4_1": (32, 20, (0, 2)),
    "Q4_K": (256, 144, (0, 2)),
    "Q6_K": (256, 210, (208,)),
}
OWN_KINDS = {"float32": pack_float, "int8": quantise_int8, "int4": quantise_int4}
Product = Callable[[torch.Tensor], torch.Tensor]


def gguf_weight(
    library: NativeLibrary, type_name: str, num_outputs: int, num_inputs: int
) -> PackedLinear:
    """Random codes with scales near 1 / 128."""
    inputs, num_bytes, halves = GGUF_BLOCKS[type_name]
    shape = (num_outputs * num_inputs // inputs, num_bytes)
    blocks = np.random.default_rng(0).integers(0, 256, shape).astype(np.uint8)
    for at in halves:
        blocks[:, at + 1] = 0x20
    return pack_gguf(library, blocks, type_name, num_outputs, num_inputs)


def products(
    library: NativeLibrary, shape: tuple[int, int], kinds: Sequence[str]
) -> dict[str, tuple[Product, int]]:
    """torch's product and each of `kinds` that exists for the shape, with its weight's bytes."""
    num_outputs, num_inputs = shape
    weight_NE = torch.randn(shape)
    linear = NativeLinear(library)
    prepared = torch_linear.prepare_linear(weight_NE, None)
    made: dict[str, tuple[Product, int]] = {
        "torch": (lambda x: torch_linear.linear(x, prepared), weight_NE.numel() * 4)
    }
    for kind in kinds:
        if kind in OWN_KINDS:
            weight = OWN_KINDS[kind](library, weight_NE)
        elif num_inputs % GGUF_BLOCKS[kind][0]:
            continue
        else:
            weight = gguf_weight(library, kind, num_outputs, num_inputs)
        made[kind] = (partial(linear, weight=weight), weight.num_bytes)
    return made


def best_times(cases: list[Callable[[], object]], rounds: int) -> list[float]:
    """Seconds of each, the cases in turn; a case runs some 5 ms at a time."""
    clock = time.thread_time if torch.get_num_threads() == 1 else time.perf_counter
    repeats = []
    for case in cases:
        case()
        start = clock()
        case()
        repeats.append(max(1, int(0.005 / max(clock() - start, 1e-6))))
    best = [float("inf")] * len(cases)
    for _ in range(rounds):
        for index, case in enumerate(cases):
            start = clock()
            for _ in range(repeats[index]):
                case()
            best[index] = min(best[index], (clock() - start) / repeats[index])
    return best


def report(
    name: str, rows: int, kinds: list[str], times: list[float], flops: int, sizes: list[int]
) -> dict[str, object]:
    print(f"{name}, {rows} rows")
    results = {}
    for kind, seconds, size in zip(kinds, times, sizes, strict=True):
        results[kind] = {
            "us": round(seconds * 1e6, 1),
            "gflops": round(flops / seconds / 1e9, 1),
            "gb_per_s": round(size / seconds / 1e9, 1),
            "torch_time_ratio": round(times[0] / seconds, 2),
        }
        print(
            f"  {kind:8} {seconds * 1e6:10.1f} us {flops / seconds / 1e9:8.1f} GFLOP/s "
            f"{size / seconds / 1e9:6.1f} GB/s   x {times[0] / seconds:5.2f}"
        )
    return {"shape": name, "rows": rows, "kinds": results}


def run_shapes(
    library: NativeLibrary, rows: list[int], rounds: int, kinds: Sequence[str]
) -> list[dict[str, object]]:
    reports = []
    for name, shape in SHAPES.items():
        made = products(library, shape, kinds)
        num_outputs, num_inputs = shape
        for num_rows in rows:
            x = torch.randn(num_rows, num_inputs)
            times = best_times([partial(run, x) for run, _ in made.values()], rounds)
            flops = 2 * num_rows * num_outputs * num_inputs
            sizes = [size for _, size in made.values()]
            label = f"{name} {num_inputs} -> {num_outputs}"
            reports.append(report(label, num_rows, list(made), times, flops, sizes))
    return reports


def run_step(
    library: NativeLibrary, rows: list[int], rounds: int, kinds: Sequence[str]
) -> list[dict[str, object]]:
    layer = [shape for name, shape in SHAPES.items() if name != "logits"]
    shapes = [*layer * NUM_LAYERS, SHAPES["logits"]]
    layers = [products(library, shape, kinds) for shape in shapes]
    everywhere = [kind for kind in layers[0] if all(kind in made for made in layers)]
    reports = []
    for num_rows in rows:
        inputs = {width: torch.randn(num_rows, width) for _, width in shapes}

        def step(kind: str, inputs: dict[int, torch.Tensor] = inputs) -> None:
            for made, (_, width) in zip(layers, shapes, strict=True):
                made[kind][0](inputs[width])

        times = best_times([partial(step, kind) for kind in everywhere], rounds)
        flops = 2 * num_rows * sum(outputs * inputs for outputs, inputs in shapes)
        sizes = [sum(made[kind][1] for made in layers) for kind in everywhere]
        reports.append(report("all products of a step", num_rows, everywhere, times, flops, sizes))
    return reports


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 4, 16, 64, 256, 512])
    parser.add_argument("--rounds", type=int, default=10)
    all_kinds = [*OWN_KINDS, *GGUF_BLOCKS]
    parser.add_argument("--kinds", nargs="+", default=all_kinds, choices=all_kinds)
    parser.add_argument("--isa", choices=ISA_NAMES, help="not the machine's best, but this one")
    parser.add_argument("--step", action="store_true", help="whole steps in place of single shapes")
    options = parser.parse_args()
    library = load_library()
    torch.set_num_threads(library.num_threads)
    run = run_step if options.step else run_shapes
    with library.forced_isa(options.isa or library.machine_isa):
        reports = run(library, options.rows, options.rounds, options.kinds)
        facts = {"threads": library.num_threads, "isa": library.isa}
    print(json.dumps({**facts, "reports": reports}))


if __name__ == "__main__":
    main()
