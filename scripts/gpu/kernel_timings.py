"""Kernels at the sizes of published models, beside what torch does on the same device."""

import itertools
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F

from kernels.interface.weights import ExpertRouting
from kernels.triton.activation import silu_and_mul
from kernels.triton.attention import decode
from kernels.triton.attention.lists import SHORTEST_SPLIT
from kernels.triton.fp8_rounding import reference_quantise_rows
from kernels.triton.linear.dense import dense_linear as own_linear
from kernels.triton.linear.expert_routing import route
from kernels.triton.linear.experts import TritonExpertWeights, mixture_of_experts
from kernels.triton.linear.fp8 import Float8Weight, float8_linear, prepare_float8
from kernels.triton.linear.quantised import dequantise_to
from kernels.triton.linear.quantised import quantised_linear as packed_linear
from kernels.triton.linear.quantised_weights import QuantisedWeight, quantise
from kernels.triton.norm import add_rms_norm
from scripts.gpu.timing import TimingGroup, Work
from tests.gpu.checks import (
    activation,
    attention,
    block_copies,
    dense_linear,
    fp8_linear,
    logits,
    logprobs,
    moe,
    norm,
    quantised_linear,
    rotary,
    sampling,
    step_inputs,
)
from tests.gpu.checks.attention import LLAMA, QWEN_SMALL, SMOL
from tests.gpu.checks.paged_step import Heads, Request

BF16, FP8 = torch.bfloat16, torch.float8_e4m3fn
VOCAB_SIZE = 151936
PROJECTIONS = ((4096, 6144), (4096, 28672), (14336, 4096), (4096, 128256))
"""Inputs and outputs of Llama-3.1-8B's products."""
NARROW = ((4096, 4096), (14336, 4096), (1024, 4096), (2048, 1024), (1024, 6144), (3072, 1024))
"""Of one row few bytes are read: o and down of Llama-3.1-8B, all of Qwen3-0.6B."""


def _rows(rows: int, width: int, device: str) -> torch.Tensor:
    return torch.randn(rows, width, dtype=BF16, device=device)


def time_norm(rows: int, width: int, *, device: str = "cuda") -> Work:
    """Addition and norm, as every layer has it twice."""
    x_TE, residual_TE = _rows(rows, width, device), _rows(rows, width, device)
    weight_E, out_TE = _rows(1, width, device)[0], torch.empty_like(x_TE)
    return Work(
        call=lambda: add_rms_norm(x_TE, residual_TE, weight_E, norm.EPS, out_TE=out_TE),
        num_bytes=4 * x_TE.numel() * x_TE.element_size(),
    )


def time_activation(rows: int, width: int, *, device: str = "cuda") -> Work:
    gate_up, out = _rows(rows, 2 * width, device), _rows(rows, width, device)
    return Work(call=lambda: silu_and_mul(gate_up, out_TF=out), num_bytes=6.0 * rows * width)


def time_rotary(shape: rotary.Shape, num_tokens: int, *, device: str = "cuda") -> Work:
    """One layer's; the tokens are read and written once."""
    inputs = rotary.Inputs(shape, num_tokens, BF16, device)
    inputs.slots_T.copy_(torch.arange(num_tokens))
    return Work(
        call=inputs.call,
        num_bytes=2.0 * inputs.qkv_TN.numel() * 2 + num_tokens * (16 + 2 * shape.rotary_size),
    )


def time_block_copies(pairs: int, num_layers: int, *, device: str = "cuda") -> Work:
    """One copy-on-write of some blocks in all layers of a model."""
    copier, blocks = block_copies.make_copier(num_layers, block_copies.BLOCK, 0, device)
    ids = torch.randperm(block_copies.NUM_BLOCKS)
    src_ids, dst_ids = ids[:pairs], ids[pairs : 2 * pairs]
    return Work(
        call=lambda: copier.copy(src_ids, dst_ids),
        num_bytes=2.0 * pairs * blocks.shape[1],
        fits_graph=False,
    )


def time_swaps(pairs: int, num_layers: int, *, device: str = "cuda") -> Work:
    """Scattered blocks of all layers of a model, to host memory and to other blocks again."""
    copier, blocks = block_copies.make_copier(num_layers, block_copies.BLOCK, pairs, device)
    ids = torch.randperm(block_copies.NUM_BLOCKS)
    host_ids = torch.randperm(pairs)

    def call() -> None:
        copier.swap_out(ids[:pairs], host_ids)
        copier.swap_in(host_ids, ids[pairs : 2 * pairs])

    return Work(
        call=call,
        num_bytes=2.0 * pairs * blocks.shape[1],
        fits_graph=False,
    )


LINEARS: dict[str, tuple[Callable[..., Any], Callable[[torch.Tensor, Any], object], float]] = {
    "torch linear bf16": (torch.Tensor.bfloat16, F.linear, 2.0),
    "own linear bf16": (torch.Tensor.bfloat16, own_linear, 2.0),
    "fp8 linear": (
        lambda weight: prepare_float8(*reference_quantise_rows(weight)),
        float8_linear,
        1.0,
    ),
    "int8 linear": (partial(quantise, num_bits=8, group_size=128), packed_linear, 1 + 4 / 128),
    "int4 linear": (partial(quantise, num_bits=4, group_size=128), packed_linear, 0.5 + 4 / 128),
}


def _blocks(weight: torch.Tensor, *, by_library: bool = False) -> Float8Weight:
    """float8 with a scale for 128 x 128 weights."""
    codes, scales = reference_quantise_rows(weight, grouped=True)
    scales = scales[::128].repeat_interleave(128, dim=0)
    return prepare_float8(codes, scales, blocks_by_library=by_library)


def _widened(x_TE: torch.Tensor, weight: QuantisedWeight) -> torch.Tensor:
    return F.linear(x_TE, dequantise_to(weight, x_TE.dtype))


LINEARS |= {
    "fp8 blocks": (_blocks, float8_linear, 1.0),
    "fp8 blocks by torch": (partial(_blocks, by_library=True), float8_linear, 1.0),
    "int4 groups of 32": (partial(quantise, num_bits=4, group_size=32), packed_linear, 0.625),
    "int4 groups of 32 with minima": (
        partial(quantise, num_bits=4, group_size=32, symmetric=False),
        packed_linear,
        0.75,
    ),
    "int4 groups of 128": (partial(quantise, num_bits=4, group_size=128), packed_linear, 0.53125),
    "int4 groups of 128, widened": (
        partial(quantise, num_bits=4, group_size=128),
        _widened,
        0.53125,
    ),
}
"""What prepares a weight, the product, and the bytes of an element with its share of a scale."""


def time_linear(kind: str, rows: int, inputs: int, outputs: int, *, device: str = "cuda") -> Work:
    """One of `LINEARS`, rounding included. The floor is that of bf16 products, which float8 may
    pass."""
    prepare, product, element_bytes = LINEARS[kind]
    weight = prepare(_rows(outputs, inputs, device).mul_(inputs**-0.5))
    x_TE = _rows(rows, inputs, device)
    return Work(
        call=lambda: product(x_TE, weight),
        num_bytes=element_bytes * outputs * inputs + 2.0 * rows * (inputs + outputs),
        num_flops=2.0 * rows * inputs * outputs,
    )


def time_experts(num_tokens: int, shape: moe.Shape, *, device: str = "cuda") -> Work:
    """The layer; at least the weights of all experts that random tokens choose are read."""
    x_TE, logits_TX, w_gate_up, w_down = moe.make_inputs(num_tokens, shape, BF16, device)
    _, top_k, width, features = shape
    experts = TritonExpertWeights(w_gate_up, w_down)
    routing = ExpertRouting(top_k=top_k, renormalise=True)
    ids_TA, _ = route(logits_TX, routing)
    num_used = int((torch.bincount(ids_TA.reshape(-1)) > 0).sum())
    return Work(
        call=lambda: mixture_of_experts(x_TE, logits_TX, experts, routing),
        num_bytes=2.0 * (num_used * 3 * width * features + 2 * num_tokens * width),
        num_flops=6.0 * num_tokens * top_k * width * features,
    )


def time_torch_attention(length: int, *, device: str = "cuda") -> Work:
    """torch's attention of Llama-3.1-8B: 32 query heads, 8 key/value heads of 128."""
    q, k, v = (
        torch.randn(1, heads, length, 128, dtype=BF16, device=device) for heads in (32, 8, 8)
    )
    return Work(
        call=lambda: F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True),
        num_bytes=2.0 * (2 * q.numel() + k.numel() + v.numel()),
        num_flops=4.0 * 32 * 128 * length * (length + 1) / 2,
    )


def time_attention(
    heads: Heads,
    decodes: Sequence[Request],
    prefills: Sequence[Request],
    *,
    ahead: bool = False,
    shortest_split: int = SHORTEST_SPLIT,
    device: str = "cuda",
) -> Work:
    """One layer's attention of a step that is planned already, with as many programs as are served.
    `ahead`, `shortest_split`: see `decode.AHEAD` and `SHORTEST_SPLIT`."""
    programs = decode.programs_a_multiprocessor(
        head_size=heads.head_size,
        group_size=heads.num_query_heads // heads.num_kv_heads,
        kv_bytes=(heads.kv_dtype or heads.dtype).itemsize,
    )
    step = attention.make_step(
        heads,
        decodes,
        prefills,
        device=device,
        a_multiprocessor=programs,
        shortest_split=shortest_split,
    )
    out = torch.empty_like(step.q_THD)

    def call() -> None:
        decode.AHEAD = ahead
        step.attend(out)

    return Work(
        call=call,
        num_bytes=step.num_bytes(),
        num_flops=step.num_flops() if prefills else 0.0,
    )


def time_masks(rows: int, vocab_size: int, *, device: str = "cuda") -> Work:
    """Logits are written where they become impossible; at the least the masks are read."""
    inputs = logits.Inputs(rows, vocab_size, device)
    return Work(
        call=lambda: inputs.mask(inputs.logits_RV),
        num_bytes=rows * (2 / 3) * vocab_size * (1 / 8 + 4 / 2),
    )


def time_penalties(rows: int, vocab_size: int, *, device: str = "cuda") -> Work:
    """Three of four rows: prompt bits and counts are read, logits read and written."""
    inputs = logits.Inputs(rows, vocab_size, device)
    return Work(
        call=lambda: inputs.penalise(inputs.logits_RV),
        num_bytes=rows * 0.75 * vocab_size * (1 / 8 + 4 + 8),
    )


def time_sampling(rows: int, vocab_size: int, limits: bool, *, device: str = "cuda") -> Work:
    """Reading the logits twice is what free rows need: once for the best, once with noise."""
    inputs = sampling.Inputs(rows, vocab_size, limits=limits, device=device)
    return Work(call=inputs.call, num_bytes=4.0 * inputs.logits_RV.numel())


def time_logprobs(rows: int, vocab_size: int, *, device: str = "cuda") -> Work:
    inputs = logprobs.Inputs(rows, vocab_size, device)
    return Work(call=inputs.call, num_bytes=4.0 * inputs.logits_RV.numel())


def time_step_inputs(num_rows: int, max_model_len: int = 8192, *, device: str = "cuda") -> Work:
    """A step of decodes in which no row changes."""
    shape = step_inputs.Shape(num_rows, 0, max_model_len=max_model_len)
    step = step_inputs.RandomStep(shape, num_updates=0, device=device)
    out = step.tensors((0, 0), device=device)
    num_blocks = -(-(step.num_computed + 1) // step_inputs.BLOCK_SIZE)
    a_sequence = 5 * 4 + 2 * 4 + 8 + 4  # words of the step, start and length, logits_at, its token
    # read; id and position; block and slot
    a_token = 4 + 2 * 8 + step_inputs.NUM_GROUPS * (4 + 8)
    return Work(
        call=lambda: step.run(out),
        num_bytes=float(
            num_rows * (a_sequence + a_token) + step_inputs.NUM_GROUPS * 2 * 4 * num_blocks.sum()
        ),
    )


Check = tuple[Callable[..., float], float]
"""What gives an error when it is called with a device, and the tolerance."""
Cases = Iterable[tuple[Any, ...]]
_BY_TORCH: Check = (lambda device: 0.0), 0.0
"""The product and the attention of torch have no check here."""


def _group(
    name: str, check: Check, title: str, prepare: Callable[..., Work], cases: Cases
) -> TimingGroup:
    """A timing for each case, its numbers put into the title."""
    timings = {title.format(*case): partial(prepare, *case) for case in cases}
    return TimingGroup(name, partial(check[0], device="cuda"), check[1], timings)


def elementwise_timings() -> list[TimingGroup]:
    widths = [(1, 4096), (64, 4096), (256, 4096), (8192, 4096), (256, 1024)]
    features = [(1, 14336), (64, 14336), (256, 14336), (8192, 14336), (256, 3072)]
    normed = partial(norm.check, 300, 4096, BF16), norm.BF16_ROUNDING
    activated = partial(activation.check, 300, 14336, BF16), activation.BF16_ROUNDING
    copied = partial(block_copies.check_copies, 100, overlapping=False), 0
    swapped = partial(block_copies.check_swaps, 40), 0
    copies = "copy {} blocks in {} layers"

    def rotary_group(name: str, *num_tokens: int) -> TimingGroup:
        shape = rotary.SHAPES[name]
        check = partial(rotary.check, shape, 333, BF16), rotary.ROUNDING
        title, prepare = f"rotary + cache {name} {{}} tokens", partial(time_rotary, shape)
        return _group(f"rotary {name}", check, title, prepare, [(n,) for n in num_tokens])

    return [
        _group("norm", normed, "add + norm {} x {}", time_norm, widths),
        _group("activation", activated, "silu x up {} x {}", time_activation, features),
        rotary_group("Llama-3.1-8B", 1, 256, 8192),
        rotary_group("Qwen3-0.6B", 256),
        _group("block copies", copied, copies, time_block_copies, [(1, 32), (64, 32)]),
        _group("swaps", swapped, "swap {} blocks of {} layers", time_swaps, [(200, 32)]),
    ]


def product_timings() -> list[TimingGroup]:
    few = [(rows, *shape) for shape in PROJECTIONS for rows in (1, 64, 256)]
    many = [(8192, *shape) for shape in PROJECTIONS if shape[1] < 128256]
    wide = [(rows, 4096, 28672) for rows in (1, 64, 256, 8192)]
    narrow = [(rows, *shape) for shape in NARROW for rows in (1, 16)]
    packed = [(1, 4096, 28672), (16, 4096, 28672), (64, 4096, 28672), (1, 4096, 4096)]
    own = partial(dense_linear.check, 63, 4096, 6144, BF16), dense_linear.ROUNDING
    rounded = partial(fp8_linear.check, 300, 4096, 3072), fp8_linear.ROUNDING
    routed = partial(moe.check, 1000, moe.QWEN3_MOE), moe.ROUNDING
    time_moe = partial(time_experts, shape=moe.QWEN3_MOE)

    def group(kind: str, check: Check, cases: Cases) -> TimingGroup:
        name, title = kind.removesuffix(" bf16"), f"{kind} {{}} x {{}} -> {{}}"
        return _group(name, check, title, partial(time_linear, kind), cases)

    def packed_group(bits: int) -> TimingGroup:
        check = partial(quantised_linear.check, 63, 3072, 4096, num_bits=bits)
        return group(f"int{bits} linear", (check, quantised_linear.ROUNDING), packed)

    return [
        group("torch linear bf16", _BY_TORCH, few + [case for case in narrow if case not in few]),
        group("own linear bf16", own, few + many),
        group("fp8 linear", rounded, wide),
        packed_group(8),
        packed_group(4),
        _group("moe", routed, "moe Qwen3-MoE {} tokens", time_moe, [(1,), (64,), (256,), (8192,)]),
    ]


def crossing_timings() -> list[TimingGroup]:
    """Where each kind of weight crosses bf16, and int4 crosses widening: variants in turn."""
    shapes = ((4096, 6144), (4096, 28672), (14336, 4096), (1024, 6144))
    kinds = ("torch linear bf16", "fp8 linear", "fp8 blocks", "fp8 blocks by torch")
    kinds += ("int4 groups of 32", "int4 groups of 32 with minima")
    kinds += ("int4 groups of 128", "int4 groups of 128, widened")
    timings: dict[str, Callable[[], Work]] = {}
    for rows, (inputs, outputs) in itertools.product((1, 16, 64, 65, 128, 256, 1024, 8192), shapes):
        for kind in kinds:
            if kind.endswith("by torch") and rows < 65:
                continue  # our kernel's
            title = f"crossing, {kind} {rows} x {inputs} -> {outputs}"
            timings[title] = partial(time_linear, kind, rows, inputs, outputs)
    check = partial(quantised_linear.check, 200, 3072, 4096, num_bits=4, device="cuda")
    return [TimingGroup("crossings", check, quantised_linear.ROUNDING, timings)]


VARIANTS: dict[str, dict[str, Any]] = {
    "": {},
    ", asked ahead": {"ahead": True},
    ", splits of 64": {"shortest_split": 64},
    ", splits of 64 asked ahead": {"shortest_split": 64, "ahead": True},
}
"""Ways to run decodes, by what titles of their rows end in."""


def attention_timings() -> list[TimingGroup]:
    def group(
        name: str,
        heads: Heads,
        decodes: Sequence[tuple[int, int]],
        prefills: dict[str, list[Request]],
        variants: Sequence[str] = ("",),
    ) -> TimingGroup:
        """Decodes of (batch, length), each in variants of `VARIANTS`."""
        timings: dict[str, Callable[[], Work]] = {}
        for (batch, length), variant in itertools.product(decodes, variants):
            title, requests = f"decode {name} {batch} x {length}{variant}", [(length, 1)] * batch
            timings[title] = partial(time_attention, heads, requests, [], **VARIANTS[variant])
        for title, requests in prefills.items():
            timings[f"prefill {name} {title}"] = partial(time_attention, heads, [], requests)
        run = partial(attention.check, heads, attention.DECODES, attention.PREFILLS)
        check = partial(run, device="cuda")
        return TimingGroup(f"attention {name}", check, attention.ROUNDING, timings)

    fp8 = attention.with_cache(LLAMA, FP8)
    whole = {"8192": [(8192, 8192)]}
    prefills = whole | {"4 x 2048": [(2048, 2048)] * 4, "2048 after 6144": [(8192, 2048)]}
    prefills |= {"50 after 50000": [(50_050, 50)]}
    decodes = [(1, 1024), (1, 32768), (64, 1024), (256, 1024)]
    title = "torch attention Llama-8B {}"
    return [
        group("Llama-8B", LLAMA, decodes, prefills, [*VARIANTS]),
        group("Llama-8B fp8", fp8, decodes[2:], whole, [*VARIANTS]),
        group("Qwen3-0.6B", QWEN_SMALL, [(256, 1024)], {}),
        group("SmolLM2", SMOL, [(64, 1024)], whole),
        _group("torch attention", _BY_TORCH, title, time_torch_attention, [(8192,)]),
    ]


def sampling_timings() -> list[TimingGroup]:
    def group(
        name: str, check: Callable[..., float], tolerance: float, prepare: Callable[..., Work]
    ) -> TimingGroup:
        title = name.replace("sampling", "sample") + " {} x {}"
        rows = [(number, VOCAB_SIZE) for number in (1, 64, 256)]
        return _group(name, (check, tolerance), title, prepare, rows)

    def sampling_group(name: str, limits: bool) -> TimingGroup:
        check = partial(sampling.check, 96, VOCAB_SIZE, limits=limits)
        return group(f"sampling {name}", check, 1, partial(time_sampling, limits=limits))

    steps = partial(step_inputs.check, step_inputs.Shape(64, 0), num_updates=20), 0
    num_rows = [(1,), (64,), (256,), (1024,)]
    return [
        group("masks", partial(logits.check_masks, 33, VOCAB_SIZE), 0, time_masks),
        group("penalties", partial(logits.check_penalties, 33, VOCAB_SIZE), 0, time_penalties),
        sampling_group("free", False),
        sampling_group("limits", True),
        group("logprobs", partial(logprobs.check, 63, VOCAB_SIZE), 1e-5, time_logprobs),
        _group("step inputs", steps, "step inputs {} rows", time_step_inputs, num_rows),
    ]


def all_timings() -> list[TimingGroup]:
    """All groups in the order of their worth."""
    return [
        *attention_timings(),
        *product_timings(),
        *elementwise_timings(),
        *sampling_timings(),
    ]
