"""A model's layers for few rows, and its head, in one graph: cuBLAS's products beside ours, one
change at a time. The check compares two layers of the same widths."""

import functools
import itertools
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F

from kernels.triton.activation import silu_and_mul
from kernels.triton.attention.rotary_cache import rotary_and_cache
from kernels.triton.linear.few_rows import FewRowsProducts, ResidualNorm
from kernels.triton.norm import add_rms_norm
from scripts.gpu.step_timings import time_decode
from scripts.gpu.timing import TimingGroup, Work
from tests.gpu.checks import attention, rotary
from tests.gpu.checks.errors import row_error
from tests.gpu.checks.paged_step import Heads
from tests.gpu.model_shapes import PUBLISHED, Shape

EPS = 1e-5
ROUNDING = 5e-2
"""Of all roundings to bf16 in two layers; another order of sums moves each."""


WITHIN = "own, 0.25 MB ahead, norms and activation within"
VARIANTS: dict[str, dict[str, Any] | None] = {
    "cuBLAS": None,
    "own": {"dependent": False},
    "own, dependent": {},
    "own, 0.25 MB ahead": {"prefetch_bytes": 1 << 18},
    "own, 0.5 MB ahead": {"prefetch_bytes": 1 << 19},
    "own, 1 MB ahead": {"prefetch_bytes": 1 << 20},
    WITHIN: {"prefetch_bytes": 1 << 18},
}
"""Options of `FewRowsProducts`; None: the library's products."""
WHOLE_STEPS = ("own", "own, dependent", "own, 0.25 MB ahead")
"""Variants that are timed in a model's step, as the runner replays it, too."""


class Layers:
    """Random weights of a model's shape, and a token of each of `rows` sequences."""

    def __init__(
        self, shape: Shape, rows: int, context: int, dtype: torch.dtype, device: str
    ) -> None:
        E, width = shape["hidden_size"], shape["intermediate_size"]
        heads, kv_heads = shape["num_attention_heads"], shape["num_key_value_heads"]
        size = shape["head_dim"]

        def weight(outputs: int, inputs: int) -> torch.Tensor:
            drawn = torch.randn(outputs, inputs, dtype=dtype, device=device)
            return drawn.mul_(inputs**-0.5)

        sizes = ((heads + 2 * kv_heads) * size, E), (E, heads * size), (2 * width, E), (E, width)
        num_layers = shape["num_hidden_layers"]
        self.layers = [[weight(*each) for each in sizes] for _ in range(num_layers)]
        self.head = weight(shape["vocab_size"], E)
        self.norm_E = torch.rand(E, device=device).to(dtype)
        self.x_TE, self.residual_TE = (weight(rows, E) for _ in range(2))
        rotated = rotary.Shape(
            num_query_heads=heads,
            num_kv_heads=kv_heads,
            head_size=size,
            rotary_size=size,
            with_norm=shape["model_type"] == "qwen3",
        )
        self.rotary = rotary.Inputs(rotated, rows, dtype, device)
        of_layer = Heads(num_query_heads=heads, num_kv_heads=kv_heads, head_size=size, dtype=dtype)
        self.step = attention.make_step(of_layer, [(context, 1)] * rows, [], device=device)
        self.num_bytes = float(
            sum(each.nbytes for layer in self.layers for each in layer)
            + self.head.nbytes
            + num_layers * self.step.num_bytes()
        )

    def run(self, products: FewRowsProducts | None, *, within: bool = False) -> torch.Tensor:
        """Logits of the tokens. `within`: norms and activations are the products'."""
        linear = F.linear if products is None else products.linear
        x_TE, residual_TE = self.x_TE.clone(), self.residual_TE.clone()

        def normed(weight_NE: torch.Tensor, *, gated: bool = False) -> torch.Tensor:
            nonlocal residual_TE
            if within and products is not None:
                sums_TE = torch.empty_like(x_TE)
                norm = ResidualNorm(residual_TE, self.norm_E, EPS, sums_TE)
                residual_TE = sums_TE
                return products.linear(
                    x_TE, weight_NE, norm=norm, activation="silu" if gated else None
                )
            added_TE, residual_TE = add_rms_norm(x_TE, residual_TE, self.norm_E, EPS)
            out_TN = linear(added_TE, weight_NE)
            return silu_and_mul(out_TN) if gated else out_TN

        for qkv, output, gate_up, down in self.layers:
            own = self.rotary
            cache, params = own.cache_of(own.kv_B2KSD), own.params(x_TE.dtype)
            self.step.q_THD = rotary_and_cache(
                normed(qkv), own.positions_T, own.slots_T, cache, params
            )
            out_THD = self.step.attend(torch.empty_like(self.step.q_THD))
            x_TE = linear(out_THD.flatten(1), output)
            x_TE = linear(normed(gate_up, gated=True), down)
        return normed(self.head)


@functools.lru_cache(maxsize=1)
def _whole(name: str, rows: int) -> Layers:
    """One model's at a time are on the device."""
    return Layers(PUBLISHED[name], rows, 1024, torch.bfloat16, "cuda")


def _products(variant: str, device: str) -> FewRowsProducts | None:
    options = VARIANTS[variant]
    return None if options is None else FewRowsProducts(torch.device(device), **options)


def check_layers(
    shape: Shape,
    variant: str,
    rows: int = 1,
    context: int = 1024,
    *,
    dtype: torch.dtype = torch.bfloat16,
    device: str = "cuda",
) -> float:
    """The error of two layers and the head to the same ones with the library's products."""
    layers = Layers(shape | {"num_hidden_layers": 2}, rows, context, dtype, device)
    found = layers.run(_products(variant, device), within=variant == WITHIN)
    return row_error(found, layers.run(None))


def time_layers(name: str, variant: str, rows: int = 1) -> Work:
    """The variant's graph, replayed."""
    layers, products = _whole(name, rows), _products(variant, "cuda")
    call = partial(layers.run, products, within=variant == WITHIN)
    call()  # which compiles
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()

    def replay(_kept: object = products) -> None:  # the graph has their counters' address
        graph.replay()

    return Work(call=replay, num_bytes=layers.num_bytes, fits_graph=False)


def time_step(name: str, variant: str) -> Work:
    """The whole step with the variant's products, as the runner replays it."""
    sizes = {"most_seqs": 1, "most_prefill": 1024, "most_prefix": 0}
    return time_decode(name, 1, few_rows=_products(variant, "cuda"), **sizes)


def few_rows_timings() -> list[TimingGroup]:
    """A group a model and variant, so that one that is wrong stops no other."""
    groups: list[TimingGroup] = []
    for name, variant in itertools.product(("Llama-3.1-8B", "Qwen3-0.6B"), VARIANTS):
        timings = {f"layers {name} 1 x 1024, {variant}": partial(time_layers, name, variant)}
        if variant in WHOLE_STEPS:
            timings[f"few rows step {name} 1 x 1024, {variant}"] = partial(time_step, name, variant)
        check = partial(check_layers, PUBLISHED[name], variant)
        groups.append(TimingGroup(f"few rows {name}, {variant}", check, ROUNDING, timings))
    return groups
