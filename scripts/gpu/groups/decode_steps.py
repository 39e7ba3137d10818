"""Whole steps of published shapes: replayed decode graphs, a long prompt, and the real loop.

Weights are random, their shapes the published ones. The checks compare models of the same widths
and two layers with transformers (see `whole_models.compare`): in bf16, of whose error they may have
half as much again. Nothing here says that the full depth is right.
"""

from __future__ import annotations

import functools
from typing import Any

import torch

from scripts.gpu.frame import Check, Figure, Group, Timing, Work
from scripts.gpu.groups.whole_models import HALF_RATIO, compare
from scripts.gpu.model_shapes import (
    LLAMA_8B,
    QWEN3_8B,
    QWEN3_SMALL,
    Shape,
    decode_bytes,
    decode_flops,
    prefill_flops,
)

SHAPES = {"Llama-3.1-8B": LLAMA_8B, "Qwen3-8B": QWEN3_8B, "Qwen3-0.6B": QWEN3_SMALL}
CONTEXT = 1024
PREFILL = 8192
NUM_LOOP_STEPS = 60
MOST_SEQS = 256
CHECK_PROMPTS = (1, 16, 100, 129, 300, 513)


def check(
    shape: Shape,
    *,
    dtype: torch.dtype = torch.bfloat16,
    prompt_lengths: tuple[int, ...] = CHECK_PROMPTS,
    num_output: int = 6,
    device: str = "cuda",
) -> float:
    """Two layers with a small vocabulary: see `whole_models.compare`."""
    import transformers

    from scripts.gpu.tiny_models import VOCAB_SIZE

    few = dict(shape) | {"num_hidden_layers": 2, "vocab_size": VOCAB_SIZE, "layer_types": None}
    config = transformers.AutoConfig.for_model(**few)
    return compare(
        config,
        dtype,
        use_graphs=True,
        prompt_lengths=prompt_lengths,
        num_output=num_output,
        budget=max(prompt_lengths) * 3 // 5,
        device=device,
    )


def _engine(
    name: str,
    shape: Shape,
    device: str,
    *,
    most_seqs: int = MOST_SEQS,
    most_context: int = CONTEXT,
    most_prefill: int = PREFILL,
    dtype: torch.dtype = torch.bfloat16,
) -> Any:
    """That one's, with room for every step that is timed on it."""
    from scripts.gpu.engine_run import BLOCK_SIZE, Sizes
    from scripts.gpu.ready_engine import ReadyEngine, engine_of

    longest = max(most_prefill, most_context + most_output(most_seqs))
    a_sequence = -(-(most_context + most_output(most_seqs)) // BLOCK_SIZE)
    sizes = Sizes(
        max_num_seqs=most_seqs,
        max_model_len=longest,
        max_num_batched_tokens=max(most_prefill, most_seqs),
        num_blocks=max(most_seqs * a_sequence, -(-longest // BLOCK_SIZE)) + 1,
    )
    return engine_of(name, lambda: ReadyEngine(shape, sizes, dtype=dtype, device=device))


def most_output(num_seqs: int) -> int:
    """Tokens that a sequence of the loop may be given: the first one waits for all prompts."""
    return NUM_LOOP_STEPS + num_seqs


def prepare_decode(
    name: str,
    shape: Shape,
    batch: int,
    context: int = CONTEXT,
    *,
    device: str = "cuda",
    **most: Any,
) -> Work:
    """A decode step: its graph, replayed. `most`: see `_engine`."""
    engine = _engine(name, shape, device, **most)
    return Work(
        call=engine.decode(batch, context),
        num_bytes=decode_bytes(shape, batch=batch, context=context),
        num_flops=decode_flops(shape, batch=batch, context=context),
        fits_graph=False,
    )


def prepare_prefill(
    name: str, shape: Shape, num_tokens: int = PREFILL, *, device: str = "cuda", **most: Any
) -> Work:
    """One prompt in one step, from its plan to its token on the host."""
    engine = _engine(name, shape, device, **most)
    return Work(
        call=engine.prefill(num_tokens),
        num_bytes=decode_bytes(shape, batch=1, context=num_tokens),
        num_flops=prefill_flops(shape, num_tokens),
        fits_graph=False,
    )


def measure_loop(
    name: str,
    shape: Shape,
    batch: int,
    context: int = CONTEXT,
    num_steps: int = NUM_LOOP_STEPS,
    *,
    device: str = "cuda",
    **most: Any,
) -> dict[str, float]:
    """See `ReadyEngine.time_decodes`."""
    engine = _engine(name, shape, device, **most)
    figures: dict[str, float] = engine.time_decodes(batch, context, num_steps)
    return figures


def group() -> Group:
    checks = tuple(
        Check(f"{name}, 2 layers", functools.partial(check, shape), HALF_RATIO)
        for name, shape in SHAPES.items()
    )

    def decode(name: str, batch: int) -> Timing:
        work = functools.partial(prepare_decode, name, SHAPES[name], batch)
        return Timing(f"decode step {name} {batch} x {CONTEXT}", f"{name}, 2 layers", work)

    def loop(name: str, batch: int) -> Figure:
        figures = functools.partial(measure_loop, name, SHAPES[name], batch)
        return Figure(f"loop {name} {batch} x {CONTEXT}", f"{name}, 2 layers", figures)

    llama, large, small = SHAPES
    prefill = functools.partial(prepare_prefill, llama, LLAMA_8B)
    # an engine at a time: those of one model stand together, figures come last
    timings = (
        decode(large, 1),
        decode(llama, 1),
        decode(llama, 64),
        decode(llama, 256),
        Timing(f"prefill step {llama} {PREFILL}", f"{llama}, 2 layers", prefill),
        decode(small, 1),
        decode(small, 256),
    )
    figures = (loop(small, 1), loop(small, 256), loop(llama, 64))
    return Group("decode_steps", checks, timings, figures, needs_engine=True)
