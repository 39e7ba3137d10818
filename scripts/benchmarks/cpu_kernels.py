"""The native dense products beside torch's, alone, at SmolLM2-135M's shapes."""

import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Annotated, Any, Literal, get_args

import numpy as np
import torch
from cyclopts import Parameter

from frontend.load.report import log
from kernels.cpu.library import ISA_NAMES, NativeLibrary, load_library
from kernels.cpu.linear import NativeLinear
from kernels.cpu.weights import (
    GGUF_KINDS,
    PackedLinear,
    pack_bfloat16,
    pack_float,
    pack_parts,
    quantise_int4,
    quantise_int8,
)
from kernels.interface.weights import QuantisedTensor
from kernels.torch import linear as torch_linear
from scripts.benchmarks import Json, Rows, report

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
OWN_KINDS = {
    "float32": pack_float,
    "bfloat16": pack_bfloat16,
    "int8": quantise_int8,
    "int4": quantise_int4,
}
Kind = Literal["float32", "bfloat16", "int8", "int4", "Q8_0", "Q4_0", "Q4_1", "Q4_K", "Q6_K"]
ALL_KINDS: tuple[Kind, ...] = get_args(Kind)
Shape = tuple[int, int]
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
    rows = {"blocks": torch.from_numpy(blocks.reshape(num_outputs, -1))}
    part = QuantisedTensor(
        type_name, (num_outputs, num_inputs), rows, decode=lambda _: torch.empty(0)
    )
    return pack_parts(library, GGUF_KINDS[type_name], [part])


def products(
    library: NativeLibrary, shape: Shape, kinds: Sequence[str]
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


_STEP = (
    "All products of one step of the model, 30 layers and the logits, with weights that no cache "
    "holds, in place of single shapes."
)


def cpu_kernels(
    *,
    rows: Rows = (1, 4, 16, 64, 256, 512),
    rounds: int = 10,
    kinds: Annotated[
        tuple[Kind, ...], Parameter(consume_multiple=True, negative="", help="Of weights.")
    ] = ALL_KINDS,
    isa: Annotated[str | None, Parameter(help="Not the machine's best, but this one.")] = None,
    step: Annotated[bool, Parameter(help=_STEP)] = False,
    json: Json = None,
) -> None:
    """With ENGINE_CORE_NATIVE_THREADS=1 the clock is the thread's own, which other programs disturb
    less."""
    if isa is not None and isa not in ISA_NAMES:
        raise ValueError(f"--isa is {isa}, it must be one of {', '.join(ISA_NAMES)}")
    library = load_library()
    torch.set_num_threads(library.num_threads)
    cases: dict[str, list[Shape]] = {f"{n} {i} -> {o}": [(o, i)] for n, (o, i) in SHAPES.items()}
    if step:
        layer = [shape for name, shape in SHAPES.items() if name != "logits"]
        cases = {"all products of a step": [*layer * NUM_LAYERS, SHAPES["logits"]]}
    with library.forced_isa(isa or library.machine_isa):
        reports: list[dict[str, Any]] = []
        for name, shapes in cases.items():
            layers = [products(library, shape, kinds) for shape in shapes]
            common = [kind for kind in layers[0] if all(kind in made for made in layers)]
            for num_rows in rows:
                inputs = {width: torch.randn(num_rows, width) for _, width in shapes}
                xs = [inputs[width] for _, width in shapes]
                calls = [partial(_run, [made[kind][0] for made in layers], xs) for kind in common]
                times = best_times(calls, rounds, 0.005)
                flops = 2 * num_rows * sum(num_outputs * width for num_outputs, width in shapes)
                log(f"{name}, {num_rows} rows")
                results = {}
                for kind, seconds in zip(common, times, strict=True):
                    size = sum(made[kind][1] for made in layers)
                    results[kind] = figures = {
                        "us": round(seconds * 1e6, 1),
                        "gflops": round(flops / seconds / 1e9, 1),
                        "gb_per_s": round(size / seconds / 1e9, 1),
                        "torch_time_ratio": round(times[0] / seconds, 2),
                    }
                    log(
                        f"  {kind:8} {figures['us']:10.1f} us {figures['gflops']:8.1f} GFLOP/s "
                        f"{figures['gb_per_s']:6.1f} GB/s   x {figures['torch_time_ratio']:5.2f}"
                    )
                reports.append({"shape": name, "rows": num_rows, "kinds": results})
        document = {"threads": library.num_threads, "isa": library.isa, "reports": reports}
    report(document, json)


def _run(products: Sequence[Product], xs: Sequence[torch.Tensor]) -> None:
    for product, x in zip(products, xs, strict=True):
        product(x)


def clock() -> float:
    """Seconds: of this thread's work where it is the only one, else of the wall."""
    return time.thread_time() if torch.get_num_threads() == 1 else time.perf_counter()


def best_times(cases: Sequence[Callable[[], object]], rounds: int, seconds: float) -> list[float]:
    """Best seconds a call of each; in each round every case runs for about `seconds`."""
    repeats = []
    for case in cases:
        case()
        start = clock()
        case()
        repeats.append(max(1, int(seconds / max(clock() - start, 1e-6))))
    best = [float("inf")] * len(cases)
    for _ in range(rounds):
        for index, case in enumerate(cases):
            start = clock()
            for _ in range(repeats[index]):
                case()
            best[index] = min(best[index], (clock() - start) / repeats[index])
    return best
