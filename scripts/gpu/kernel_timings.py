"""Kernels at the sizes of published models, beside what torch does on the same device."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F

from kernels.interface.operations import ExpertRouting
from kernels.triton.activation import silu_and_mul
from kernels.triton.dense_linear import dense_linear as own_linear
from kernels.triton.fp8_linear import float8_linear, prepare_float8
from kernels.triton.kv_cache import copy_within
from kernels.triton.moe_linear import TritonExpertWeights, mixture_of_experts
from kernels.triton.moe_routing import route
from kernels.triton.norm import add_rms_norm
from kernels.triton.quantised_linear import quantised_linear as packed_linear
from scripts.gpu.timing import TimingGroup, Work
from tests.gpu.checks import (
    activation,
    attention,
    block_copies,
    dense,
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
    caches = block_copies.make_caches(num_layers, block_copies.BLOCK, device)
    ids = torch.randperm(block_copies.NUM_BLOCKS)
    src_ids, dst_ids = ids[:pairs], ids[pairs : 2 * pairs]
    return Work(
        call=lambda: copy_within(caches, src_ids, dst_ids),
        num_bytes=2.0 * num_layers * pairs * caches[0][0].numel() * 2,
    )


def time_linear(
    linear: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
    rows: int,
    inputs: int,
    outputs: int,
    *,
    device: str = "cuda",
) -> Work:
    x_TE, weight_NE = _rows(rows, inputs, device), _rows(outputs, inputs, device)
    weight_NE.mul_(inputs**-0.5)
    return Work(
        call=lambda: linear(x_TE, weight_NE),
        num_bytes=2.0 * (weight_NE.numel() + rows * (inputs + outputs)),
        num_flops=2.0 * rows * inputs * outputs,
    )


def time_float8_linear(rows: int, inputs: int, outputs: int, *, device: str = "cuda") -> Work:
    """Rounding included. The floor is that of bf16 products, which float8 may pass."""
    weight = prepare_float8(_rows(outputs, inputs, device).mul_(inputs**-0.5))
    x_TE = _rows(rows, inputs, device)
    return Work(
        call=lambda: float8_linear(x_TE, weight),
        num_bytes=float(outputs * inputs + 2 * rows * (inputs + outputs)),
        num_flops=2.0 * rows * inputs * outputs,
    )


def time_quantised_linear(
    rows: int, inputs: int, outputs: int, num_bits: int, *, device: str = "cuda"
) -> Work:
    weight = quantised_linear.make(outputs, inputs, num_bits, True, device)
    x_TE = _rows(rows, inputs, device)
    tensors = (weight.packed_NJ, weight.scales_NG, x_TE)
    return Work(
        call=lambda: packed_linear(x_TE, weight),
        num_bytes=sum(float(t.numel() * t.element_size()) for t in tensors) + 2.0 * rows * outputs,
        num_flops=2.0 * rows * outputs * inputs,
    )


def time_experts(num_tokens: int, shape: moe.Shape, *, device: str = "cuda") -> Work:
    """The layer; at least the weights of all experts that random tokens choose are read."""
    x_TE, logits_TX, w_gate_up, w_down = moe.make_inputs(num_tokens, shape, BF16, device)
    _, top_k, width, features = shape
    experts = TritonExpertWeights(w_gate_up, w_down)
    routing = ExpertRouting(top_k=top_k, renormalise=True)
    ids_TA, _ = route(logits_TX, top_k, renormalise=True)
    num_used = int((torch.bincount(ids_TA.reshape(-1)) > 0).sum())
    return Work(
        call=lambda: mixture_of_experts(x_TE, logits_TX, experts, routing),
        num_bytes=2.0 * (num_used * 3 * width * features + 2 * num_tokens * width),
        num_flops=6.0 * num_tokens * top_k * width * features,
    )


def time_torch_attention(length: int, *, device: str = "cuda") -> Work:
    """Of Llama-3.1-8B: 32 query heads, 8 key/value heads of 128."""
    q, k, v = dense.attention_inputs(length, device)
    return Work(
        call=lambda: dense.attend(q, k, v),
        num_bytes=2.0 * (2 * q.numel() + k.numel() + v.numel()),
        num_flops=4.0 * 32 * 128 * length * (length + 1) / 2,
    )


def time_attention(
    heads: Heads,
    decodes: Sequence[Request],
    prefills: Sequence[Request],
    programs_a_multiprocessor: int | None = None,
    *,
    device: str = "cuda",
) -> Work:
    """One layer's attention of a step that is planned already."""
    step = attention.make_step(
        heads, decodes, prefills, device=device, a_multiprocessor=programs_a_multiprocessor
    )
    out = torch.empty_like(step.q_THD)
    return Work(
        call=lambda: step.attend(out),
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


def time_step_inputs(shape: step_inputs.Shape, *, device: str = "cuda") -> Work:
    """A step of decodes in which no row changes."""
    step = step_inputs.RandomStep(shape, num_updates=0, device=device)
    out = step.tensors((0, 0), device=device)
    num_blocks = -(-(step.num_computed + 1) // step_inputs.BLOCK_SIZE)
    a_sequence = 5 * 4 + 2 * 4 + 8 + 4  # words of the step, start and length, logits_at, its token
    # read; id and position; block and slot
    a_token = 4 + 2 * 8 + step_inputs.NUM_GROUPS * (4 + 8)
    return Work(
        call=lambda: step.run(out),
        num_bytes=float(
            shape.num_sequences * a_sequence
            + shape.num_tokens * a_token
            + step_inputs.NUM_GROUPS * 2 * 4 * num_blocks.sum()
        ),
    )


def _each(
    name: str, prepare: Callable[..., Work], cases: Iterable[tuple[Any, ...]]
) -> dict[str, Callable[[], Work]]:
    """A timing for each case, its numbers put into the name."""
    return {name.format(*case): partial(prepare, *case) for case in cases}


def elementwise_timings() -> list[TimingGroup]:
    widths = [(1, 4096), (64, 4096), (256, 4096), (8192, 4096), (256, 1024)]
    features = [(1, 14336), (64, 14336), (256, 14336), (8192, 14336), (256, 3072)]

    def rotary_group(name: str, *num_tokens: int) -> TimingGroup:
        shape = rotary.SHAPES[name]
        check = partial(rotary.check, shape, 333, BF16, device="cuda")
        title, prepare = f"rotary + cache {name} {{}} tokens", partial(time_rotary, shape)
        timings = _each(title, prepare, [(number,) for number in num_tokens])
        return TimingGroup(f"rotary {name}", check, rotary.ROUNDING, timings)

    return [
        TimingGroup(
            "norm",
            partial(norm.check, 300, 4096, BF16, device="cuda"),
            norm.BF16_ROUNDING,
            _each("add + norm {} x {}", time_norm, widths),
        ),
        TimingGroup(
            "activation",
            partial(activation.check, 300, 14336, BF16, device="cuda"),
            activation.BF16_ROUNDING,
            _each("silu x up {} x {}", time_activation, features),
        ),
        rotary_group("Llama-3.1-8B", 1, 256, 8192),
        rotary_group("Qwen3-0.6B", 256),
        TimingGroup(
            "block copies",
            partial(block_copies.check_copies, 100, overlapping=False, device="cuda"),
            0,
            _each("copy {} blocks in {} layers", time_block_copies, [(1, 32), (64, 32)]),
        ),
    ]


def product_timings() -> list[TimingGroup]:
    few = [(rows, *shape) for shape in PROJECTIONS for rows in (1, 64, 256)]
    many = [(8192, *shape) for shape in PROJECTIONS if shape[1] < 128256]
    packed = [(1, 4096, 28672), (16, 4096, 28672), (64, 4096, 28672), (1, 4096, 4096)]

    def packed_group(bits: int) -> TimingGroup:
        check = partial(quantised_linear.check, 63, 3072, 4096, num_bits=bits, device="cuda")
        prepare = partial(time_quantised_linear, num_bits=bits)
        timings = _each(f"int{bits} linear {{}} x {{}} -> {{}}", prepare, packed)
        return TimingGroup(f"int{bits} linear", check, quantised_linear.ROUNDING, timings)

    return [
        TimingGroup(
            "torch linear",
            partial(dense.check_linear, 63, 4096, 6144, device="cuda"),
            dense.ROUNDING,
            _each("torch linear bf16 {} x {} -> {}", partial(time_linear, F.linear), few),
        ),
        TimingGroup(
            "own linear",
            partial(dense_linear.check, 63, 4096, 6144, BF16, device="cuda"),
            dense_linear.ROUNDING,
            _each("own linear bf16 {} x {} -> {}", partial(time_linear, own_linear), few + many),
        ),
        TimingGroup(
            "fp8 linear",
            partial(fp8_linear.check, 300, 4096, 3072, device="cuda"),
            fp8_linear.ROUNDING,
            _each(
                "fp8 linear {} x {} -> {}",
                time_float8_linear,
                [(rows, 4096, 28672) for rows in (1, 64, 256, 8192)],
            ),
        ),
        packed_group(8),
        packed_group(4),
        TimingGroup(
            "moe",
            partial(moe.check, 1000, moe.QWEN3_MOE, device="cuda"),
            moe.ROUNDING,
            _each(
                "moe Qwen3-MoE {} tokens",
                partial(time_experts, shape=moe.QWEN3_MOE),
                [(1,), (64,), (256,), (8192,)],
            ),
        ),
    ]


def attention_timings() -> list[TimingGroup]:
    def decode(heads: Heads, batch: int, length: int, programs: int) -> Callable[[], Work]:
        return partial(time_attention, heads, [(length, 1)] * batch, [], programs)

    def prefill(heads: Heads, *requests: Request) -> Callable[[], Work]:
        return partial(time_attention, heads, [], requests)

    def group(
        name: str, heads: Heads, timings: dict[str, Callable[[], Work]], **options: Any
    ) -> TimingGroup:
        check = partial(
            attention.check, heads, attention.DECODES, attention.PREFILLS, device="cuda", **options
        )
        return TimingGroup(f"attention {name}", check, attention.ROUNDING, timings)

    fp8 = attention.with_cache(LLAMA, FP8)
    return [
        group(
            "Llama-8B",
            LLAMA,
            {
                f"decode Llama-8B {batch} x {length}, {programs} programs": decode(
                    LLAMA, batch, length, programs
                )
                for batch, length in ((1, 1024), (1, 32768), (64, 1024), (256, 1024))
                for programs in (2, 4)
            }
            | {
                "prefill Llama-8B 8192": prefill(LLAMA, (8192, 8192)),
                "prefill Llama-8B 4 x 2048": prefill(LLAMA, *[(2048, 2048)] * 4),
                "prefill Llama-8B 2048 after 6144": prefill(LLAMA, (8192, 2048)),
            },
        ),
        group(
            "Llama-8B fp8",
            fp8,
            {
                "decode Llama-8B fp8 64 x 1024": decode(fp8, 64, 1024, 3),
                "decode Llama-8B fp8 256 x 1024": decode(fp8, 256, 1024, 3),
                "prefill Llama-8B fp8 8192": prefill(fp8, (8192, 8192)),
            },
            k_scale=0.5,
            v_scale=2.0,
        ),
        group(
            "Qwen3-0.6B",
            QWEN_SMALL,
            {"decode Qwen3-0.6B 256 x 1024": decode(QWEN_SMALL, 256, 1024, 3)},
        ),
        group(
            "SmolLM2",
            SMOL,
            {
                "decode SmolLM2 64 x 1024": decode(SMOL, 64, 1024, 3),
                "prefill SmolLM2 8192": prefill(SMOL, (8192, 8192)),
            },
        ),
        TimingGroup(
            "torch attention",
            partial(dense.check_attention, 1000, device="cuda"),
            dense.ROUNDING,
            {"torch attention Llama-8B 8192": partial(time_torch_attention, 8192)},
        ),
    ]


def sampling_timings() -> list[TimingGroup]:
    rows = [(1, VOCAB_SIZE), (64, VOCAB_SIZE), (256, VOCAB_SIZE)]

    def sampling_group(name: str, limits: bool) -> TimingGroup:
        check = partial(sampling.check, 96, VOCAB_SIZE, limits=limits, device="cuda")
        timings = _each(f"sample {name} {{}} x {{}}", partial(time_sampling, limits=limits), rows)
        return TimingGroup(f"sampling {name}", check, 1, timings)

    return [
        TimingGroup(
            "masks",
            partial(logits.check_masks, 33, VOCAB_SIZE, device="cuda"),
            0,
            _each("masks {} x {}", time_masks, rows),
        ),
        TimingGroup(
            "penalties",
            partial(logits.check_penalties, 33, VOCAB_SIZE, device="cuda"),
            0,
            _each("penalties {} x {}", time_penalties, rows),
        ),
        sampling_group("free", False),
        sampling_group("limits", True),
        TimingGroup(
            "logprobs",
            partial(logprobs.check, 63, VOCAB_SIZE, device="cuda"),
            1e-5,
            _each("logprobs {} x {}", time_logprobs, rows),
        ),
        TimingGroup(
            "step inputs",
            partial(step_inputs.check, step_inputs.Shape(64, 0), num_updates=20, device="cuda"),
            0,
            {
                f"step inputs {number} rows": partial(
                    time_step_inputs, step_inputs.Shape(number, 0)
                )
                for number in (1, 64, 256, 1024)
            },
        ),
    ]
