"""What the runner can launch of each Triton kernel, for shapes of models in use.

Functions stand in the order of the kernel files. Only a pointer's dtype, and whether a number is 1
or a multiple of 16, change what is compiled.
"""

import dataclasses
import itertools
from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

import torch
import triton

from kernels.interface.recurrence import GatedNormParams, RecurrenceParams, RecurrenceShape
from kernels.interface.sampling_rows import num_mask_words
from kernels.interface.step_inputs import PackedLayout
from kernels.interface.weights import ExpertRouting
from kernels.triton import (
    activation,
    block_copies,
    fp8_rounding,
    norm,
    one_shot_sums,
    step_inputs,
)
from kernels.triton.attention import decode as attention_decode
from kernels.triton.attention import gluon_prefill, rotary_cache
from kernels.triton.attention import latent as attention_latent
from kernels.triton.attention import lists as attention_lists
from kernels.triton.attention import prefill as attention_prefill
from kernels.triton.attention import work as attention_work
from kernels.triton.device_limits import HOPPER_SHARED_BYTES, SHORT_SHARED_BYTES
from kernels.triton.fp8_rounding import SCALE_STRIDES
from kernels.triton.linear import dense as dense_linear
from kernels.triton.linear import expert_routing as moe_routing
from kernels.triton.linear import experts as moe_linear
from kernels.triton.linear import few_rows, gguf_blocks, lora
from kernels.triton.linear import fp8 as fp8_linear
from kernels.triton.linear import quantised as quantised_linear
from kernels.triton.linear import quantised_experts as moe_quantised
from kernels.triton.linear import quantised_weights as packed_weights
from kernels.triton.recurrence import convolution, gates, recur
from kernels.triton.sampling import columns as sampling_columns
from kernels.triton.sampling import logits_processors, logprobs, row_maxima, truncation
from kernels.triton.sampling import sample as sampling
from kernels.triton.sampling.row_maxima import TILE, num_splits

BF16, FP16, FP32, FP8 = torch.bfloat16, torch.float16, torch.float32, torch.float8_e4m3fn
INT8, INT32, INT64 = torch.int8, torch.int32, torch.int64
SHARED_BYTES = {
    80: 163 * 1024, 86: 99 * 1024, 89: 99 * 1024, 90: 227 * 1024, 100: 227 * 1024, 120: 99 * 1024,
}  # fmt: skip
"""What a thread block may have, by ten times the compute capability."""
VOCABULARIES = {151936: BF16, 50257: FP32}
"""A multiple of 16, and not; with the dtype of its logits."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class KernelVariant:
    """One specialisation of one kernel.

    Attributes:
        name: of the variant, unique in its kernel file: "decode bf16 G=3 D=64 S=16".
        kernel: the `@triton.jit` function.
        arguments: by parameter name: a dtype for a pointer, a number for a scalar.
        constants: the `tl.constexpr` parameters.
        num_warps, num_stages: as launched.
        needs_prefetch: a pipelined loop must have copies under way while it computes.
        asks_ahead: must prefetch something before it waits for the kernel before it.
        needs_wgmma: the compiled code must use Hopper's tensor-core instructions.
        is_for_hopper: other GPUs than sm_90 never get it.
        max_registers: most registers a thread; 255 is the machine's limit.
        max_spill_bytes: most bytes of spilled registers, stores and loads together; above 0 only
            with a `spill_reason`, which stands in the table.
    """

    name: str
    kernel: Any
    arguments: Mapping[str, Any]
    constants: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    num_warps: int = 4
    num_stages: int = 3
    needs_prefetch: bool = False
    asks_ahead: bool = False
    needs_wgmma: bool = False
    is_for_hopper: bool = False
    max_registers: int = 255
    max_spill_bytes: int = 0
    spill_reason: str = ""

    @property
    def uses_fp8(self) -> bool:
        """Such a cache, and such weights, are refused below compute capability 8.9."""
        return FP8 in self.arguments.values()

    @property
    def module(self) -> str:
        """Import name of the kernel's file."""
        return str(self.kernel.fn.__module__)


def variants(
    shared_bytes: int = HOPPER_SHARED_BYTES, *, has_fp8: bool = True
) -> list[KernelVariant]:
    """All of them, on a GPU that gives a thread block so much shared memory."""
    groups = (
        activations,
        decode_attention,
        partial(latent_attention, shared_bytes),
        partial(prefill_attention, shared_bytes),
        prompts_in_gluon,
        attention_work_lists,
        copied_blocks,
        dense_products,
        few_rows_products,
        float8_products,
        reported_logprobs,
        adapters_beside_products,
        expert_products,
        quantised_experts,
        expert_routing,
        norms,
        sums_over_ranks,
        logit_penalties,
        partial(quantised_products, shared_bytes),
        quantised_weights,
        recurrent_layers,
        convolutions_and_gates,
        rotary_and_cache,
        maxima_of_rows,
        sampled_tokens,
        columns_of_sampling,
        inputs_of_a_step,
        masks_of_tokens,
        truncations,
    )
    listed = [variant for group in groups for variant in group()]
    return [each for each in listed if has_fp8 or not each.uses_fp8]


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _pointers(dtype: torch.dtype | None, names: str) -> dict[str, Any]:
    return dict.fromkeys((f"{name}_ptr" for name in names.split()), dtype)


def _taken(kernel: Any, values: Mapping[str, Any]) -> dict[str, Any]:
    """Those of the values that are parameters of the kernel."""
    return {name: values[name] for name in kernel.arg_names if name in values}


def _scale_strides(num_scales: int, *, in_columns: bool = False) -> dict[str, int]:
    """Of scales of activations of float8, so many a row."""
    return dict(zip(SCALE_STRIDES, (1, 300) if in_columns else (num_scales, 1), strict=True))


ROUNDINGS: dict[str, dict[str, Any]] = {
    "row": {"ROUNDS": True, "IS_GIVEN": False, "GROUP": 0},
    "group": {"ROUNDS": True, "IS_GIVEN": False, "GROUP": fp8_rounding.GROUP},
    "a given scale": {"ROUNDS": True, "IS_GIVEN": True, "GROUP": 0},
}
"""What `fp8_rounding.rounding_constants` can be."""


def activations() -> Iterator[KernelVariant]:
    """Feed-forward widths of models in use, both activations, plain and rounded."""
    for width, is_gelu, dtype in (
        *((width, False, BF16) for width in (3072, 4864, 14336)),
        (10240, True, BF16),
        (14336, False, FP16),
        (14336, False, FP32),
        (10240, True, FP32),
    ):
        yield KernelVariant(
            name=f"{'gelu' if is_gelu else 'silu'} F={width} out {dtype}",
            kernel=activation.activation_kernel,
            arguments={"gate_up_ptr": dtype, "out_ptr": dtype}
            | {"gate_up_stride_t": 2 * width, "out_stride_t": width},
            constants=activation.constants_of(width, activation.BLOCK_SIZE_F, is_gelu)
            | {"PDL": True},
        )
    for (name, rounding), (width, is_gelu) in itertools.product(
        ROUNDINGS.items(), ((3072, False), (14336, False), (10240, True))
    ):
        constants = activation.rounded_constants(width, rounding, is_gelu=is_gelu)
        yield KernelVariant(
            name=f"{'gelu' if is_gelu else 'silu'} F={width} rounded by {name}",
            kernel=activation.activation_rounded_kernel,
            arguments={"gate_up_ptr": BF16, "out_ptr": FP8, "scales_ptr": FP32}
            | {"given_ptr": FP32, "gate_up_stride_t": 2 * width}
            | _scale_strides(width // rounding["GROUP"] if rounding["GROUP"] else 1),
            constants=constants | {"PDL": True},
            num_warps=activation.num_warps_of(constants["BLOCK_F"]),
        )


def _attention_arguments(
    kv_heads: int, group: int, head_size: int, block_size: int, dtype: Any, kv_dtype: Any
) -> dict[str, Any]:
    """What the kernels of prefill and decode both take; a cache of [B, 2, K, S, D]."""
    return {
        "q_THD": dtype,
        "k_cache_BKSD": kv_dtype,
        "v_cache_BKSD": kv_dtype,
        "block_table_RM": INT32,
        "alibi_slopes_H": FP32,
        "table_stride": 99,
        "q_token_stride": kv_heads * group * head_size,
        "q_head_stride": head_size,
        **dict.fromkeys(("partial_out", "partial_lse", "sinks_H"), FP32),
        "out_THD": dtype,
        "out_token_stride": kv_heads * group * head_size,
        "out_head_stride": head_size,
        "score_scale": 0.1,
        "multiplier": 0.1,
        "window": 512,
    }


def _attention_constants(
    kv_heads: int, block_size: int, head_size: int, options: str
) -> dict[str, Any]:
    names = ("WINDOW", "SOFTCAP", "ALIBI", "SINKS")
    flags = {f"HAS_{name}": name in options for name in names}
    head = block_size * head_size
    strides = {"BLOCK_STRIDE": 2 * kv_heads * head, "HEAD_STRIDE": head, "SLOT_STRIDE": head_size}
    flags["BY_BITS"] = "BITS" in options
    return {"K": kv_heads, "S": block_size, "PDL": True} | strides | flags


SERVED_HEADS = (  # name, dtype, K, G, D, S, cache dtype
    ("bf16 G=4 D=128 S=16", BF16, 8, 4, 128, 16, BF16),
    ("bf16 G=3 D=64 S=16", BF16, 3, 3, 64, 16, BF16),
    ("bf16 G=7 D=64 S=64", BF16, 8, 7, 64, 64, BF16),
    ("bf16 G=1 D=80 S=16", BF16, 32, 1, 80, 16, BF16),
    ("bf16 G=2 D=256 S=16", BF16, 8, 2, 256, 16, BF16),
    ("fp8 G=4 D=128 S=16", BF16, 8, 4, 128, 16, FP8),
    ("fp8 G=3 D=64 S=16", BF16, 8, 3, 64, 16, FP8),
    ("fp8 G=2 D=256 S=16", BF16, 8, 2, 256, 16, FP8),
    ("bf16 G=8 D=512 S=16", BF16, 2, 8, 512, 16, BF16),
    ("fp8 G=8 D=512 S=16", BF16, 2, 8, 512, 16, FP8),
    ("fp16 G=4 D=128 S=128", FP16, 8, 4, 128, 128, FP16),
    ("fp16 G=4 D=128 S=16 of fp8", FP16, 8, 4, 128, 16, FP8),
    ("fp32 G=3 D=64 S=16", FP32, 8, 3, 64, 16, FP32),
    ("fp32 G=4 D=128 S=16", FP32, 8, 4, 128, 16, FP32),
)
"""Of models served most, in both kinds of cache; both attention kernels have them."""


EDGE_SPILL_BYTES = 128
EDGE_SPILL = (
    "some numbers around the loop over keys, none in it; decodes of two warps, or prompts in tiles "
    "of 64 keys, do not spill and are slower"
)
JOIN_SPILL_BYTES = 16
JOIN_SPILL = (
    "one or two numbers while splits are joined, once a sequence; float32 is for checking answers, "
    "and the runner launches decodes of one query token"
)


def decode_attention() -> Iterator[KernelVariant]:
    """Heads served, and the options."""
    cases: list[tuple[tuple[Any, ...], str, int]] = [(heads, "", 1) for heads in SERVED_HEADS]
    cases += [
        (("bf16 G=4 D=128 S=16 window", BF16, 8, 4, 128, 16, BF16), "WINDOW", 1),
        (("bf16 G=2 D=256 S=16 window softcap", BF16, 8, 2, 256, 16, BF16), "WINDOW SOFTCAP", 1),
        (("bf16 G=1 D=128 S=16 alibi", BF16, 8, 1, 128, 16, BF16), "ALIBI", 1),
        (("bf16 G=4 D=128 S=16 5 queries", BF16, 8, 4, 128, 16, BF16), "", 5),
        (("fp8 G=8 D=128 S=16 8 queries", BF16, 8, 8, 128, 16, FP8), "", 8),
        (("bf16 G=8 D=128 S=32", BF16, 8, 8, 128, 32, BF16), "", 1),
        (("fp32 G=4 D=128 S=16 window", FP32, 8, 4, 128, 16, FP32), "WINDOW", 1),
        (("bf16 G=8 D=64 S=16 window sinks", BF16, 8, 8, 64, 16, BF16), "WINDOW SINKS", 1),
        (("fp8 G=4 D=128 S=16 by bits", BF16, 8, 4, 128, 16, FP8), "BITS", 1),
        (("fp8 G=3 D=64 S=16 by bits", BF16, 8, 3, 64, 16, FP8), "BITS", 1),
        (("fp16 G=4 D=128 S=16 of fp8 by bits", FP16, 8, 4, 128, 16, FP8), "BITS", 1),
    ]
    ahead = (SERVED_HEADS[0], SERVED_HEADS[1], SERVED_HEADS[5])
    cases += [((f"{name}, asked ahead", *heads), "AHEAD", 1) for name, *heads in ahead]
    for (name, dtype, kv_heads, group, head_size, block_size, kv_dtype), options, queries in cases:
        constants, launch = attention_decode.configuration(
            group_size=group,
            head_size=head_size,
            max_queries=queries,
            kv_bytes=kv_dtype.itemsize,
            split_bound=64,
        )
        spills: dict[str, Any] = {}
        if dtype == FP32 or queries > 5:
            spills = {"max_spill_bytes": JOIN_SPILL_BYTES, "spill_reason": JOIN_SPILL}
        elif kv_dtype == FP8 or options in ("WINDOW SOFTCAP", "AHEAD"):
            spills = {"max_spill_bytes": EDGE_SPILL_BYTES, "spill_reason": EDGE_SPILL}
        yield KernelVariant(
            name=f"decode {name}",
            kernel=attention_decode.decode_kernel,
            arguments=_attention_arguments(kv_heads, group, head_size, block_size, dtype, kv_dtype)
            | {"splits_W8": INT32, "counts_3": INT32, "arrivals_RK": INT32},
            constants=constants
            | _attention_constants(kv_heads, block_size, head_size, options)
            | {"AHEAD": options == "AHEAD"},
            # of one warp: other programs' copies are under way
            needs_prefetch=launch["num_warps"] > 1,
            **spills,
            **launch,
        )


WIDE_SPILL_BYTES = 450
WIDE_SPILL = (
    "float32 as three products holds a tile's queries twice; of tiles of 64 and 128 rows, 16 and "
    "32 keys, 1 and 2 stages, 4 to 16 warps this spills least, and float32 is for checking answers"
)


def latent_attention(shared_bytes: int) -> Iterator[KernelVariant]:
    """V2-Lite, V3 and MiniCPM3, decodes and tiles."""
    rows = attention_latent.tile_rows(shared_bytes)
    for heads, latent, rotary in ((16, 512, 64), (128, 512, 64), (40, 256, 32)):
        of_program = attention_latent.heads_of_program(heads, rows)
        for split_bound in (64, 0):
            constants, launch = attention_latent.configuration(
                num_heads=heads,
                groups=heads // of_program,
                rotary=rotary,
                latent=latent,
                shared_bytes=shared_bytes,
                split_bound=split_bound,
            )
            size = latent + rotary
            yield KernelVariant(
                name=f"{'decode' if split_bound else 'tiles'} bf16 H={heads} R={rotary} L={latent}",
                kernel=attention_latent.latent_kernel,
                arguments={
                    **dict.fromkeys(("q_THD", "cache_BSD", "out_THL"), BF16),
                    **dict.fromkeys(
                        ("block_table_RM", "entries_W8", "counts_3", "arrivals_RK"), INT32
                    ),
                    **dict.fromkeys(("partial_out", "partial_lse"), FP32),
                    "table_stride": 99,
                    "q_token_stride": heads * size,
                    "q_head_stride": size,
                    "out_token_stride": heads * latent,
                    "out_head_stride": latent,
                    "multiplier": 0.1,
                },
                constants=constants
                | {"S": 16, "BLOCK_STRIDE": 16 * size, "SLOT_STRIDE": size, "PDL": True},
                **launch,
            )


LONG_SPILL_BYTES = 1536
LONG_SPILL = (
    "float8 keys of 512 elements become 16-bit ones in registers, beside results that fill them; "
    "of 16 and 32 keys, 4 to 16 warps this spills least"
)


def prefill_attention(shared_bytes: int) -> Iterator[KernelVariant]:
    """Heads served, and the options."""
    cases: list[tuple[tuple[Any, ...], str]] = [(heads, "") for heads in SERVED_HEADS]
    cases += [
        (("bf16 G=4 D=128 S=16 window", BF16, 8, 4, 128, 16, BF16), "WINDOW"),
        (("bf16 G=2 D=256 S=16 window softcap", BF16, 8, 2, 256, 16, BF16), "WINDOW SOFTCAP"),
        (("bf16 G=1 D=128 S=16 alibi", BF16, 8, 1, 128, 16, BF16), "ALIBI"),
        (("bf16 G=8 D=64 S=16 window sinks", BF16, 8, 8, 64, 16, BF16), "WINDOW SINKS"),
        (("bf16 G=4 D=128 S=16 splits", BF16, 8, 4, 128, 16, BF16), ""),
        (("bf16 G=3 D=64 S=16 splits", BF16, 3, 3, 64, 16, BF16), ""),
        (("bf16 G=2 D=256 S=16 splits", BF16, 8, 2, 256, 16, BF16), ""),
        (("bf16 G=8 D=512 S=16 splits", BF16, 2, 8, 512, 16, BF16), ""),
        (("fp8 G=4 D=128 S=16 splits", BF16, 8, 4, 128, 16, FP8), ""),
        (("bf16 G=8 D=64 S=16 splits window sinks", BF16, 8, 8, 64, 16, BF16), "WINDOW SINKS"),
        (("fp32 G=3 D=64 S=16 splits", FP32, 8, 3, 64, 16, FP32), ""),
        (("fp32 G=3 D=64 S=16 window", FP32, 8, 3, 64, 16, FP32), "WINDOW"),
        (("fp32 G=4 D=128 S=16 window", FP32, 8, 4, 128, 16, FP32), "WINDOW"),
        (("bf16 G=1 D=64 S=8 both sides", BF16, 12, 1, 64, 8, BF16), "BOTH"),
        (("bf16 G=3 D=256 S=8 both sides window", BF16, 1, 3, 256, 8, BF16), "BOTH WINDOW"),
        (("bf16 G=2 D=256 S=16 ends", BF16, 8, 2, 256, 16, BF16), "ENDS"),
        (("bf16 G=2 D=256 S=16 ends window", BF16, 8, 2, 256, 16, BF16), "ENDS WINDOW"),
        (("bf16 G=2 D=256 S=16 splits ends", BF16, 8, 2, 256, 16, BF16), "ENDS"),
        (("fp8 G=2 D=256 S=16 ends window", BF16, 8, 2, 256, 16, FP8), "ENDS WINDOW"),
        (("bf16 G=8 D=512 S=16 ends", BF16, 2, 8, 512, 16, BF16), "ENDS"),
        (("fp8 G=8 D=512 S=16 ends", BF16, 2, 8, 512, 16, FP8), "ENDS"),
        (("fp8 G=4 D=128 S=16 by bits", BF16, 8, 4, 128, 16, FP8), "BITS"),
        (("fp8 G=3 D=64 S=16 by bits", BF16, 8, 3, 64, 16, FP8), "BITS"),
        (("fp16 G=4 D=128 S=16 of fp8 by bits", FP16, 8, 4, 128, 16, FP8), "BITS"),
    ]
    for (name, dtype, kv_heads, group, head_size, block_size, kv_dtype), options in cases:
        is_wide = dtype == FP32 and head_size > 64
        if is_wide and shared_bytes < SHORT_SHARED_BYTES:
            continue  # refused by the planner
        spills: dict[str, Any] = {}
        if is_wide:
            spills = {"max_spill_bytes": WIDE_SPILL_BYTES, "spill_reason": WIDE_SPILL}
        elif kv_dtype == FP8:
            spills = {"max_spill_bytes": EDGE_SPILL_BYTES, "spill_reason": EDGE_SPILL}
            if head_size > 256:
                spills = {"max_spill_bytes": LONG_SPILL_BYTES, "spill_reason": LONG_SPILL}
        constants, launch = attention_prefill.configuration(
            group_size=group,
            head_size=head_size,
            kv_bytes=kv_dtype.itemsize,
            shared_bytes=shared_bytes,
            tile_slots=128 // kv_heads if "splits" in name else 0,
        )
        yield KernelVariant(
            name=f"prefill {name}",
            kernel=attention_prefill.prefill_kernel,
            arguments=_attention_arguments(kv_heads, group, head_size, block_size, dtype, kv_dtype)
            | dict.fromkeys(("tiles_W8", "counts_3", "arrivals", "ends_T"), INT32)
            | {"first_prefill": 0},
            constants=constants
            | _attention_constants(kv_heads, block_size, head_size, options)
            | {"BOTH_SIDES": "BOTH" in options, "HAS_ENDS": "ENDS" in options},
            needs_prefetch=dtype != FP32,
            needs_wgmma=True,
            **spills,
            **launch,
        )


def prompts_in_gluon() -> Iterator[KernelVariant]:
    """Both head sizes and dtypes, with and without splits, and the options together."""
    for name, dtype, group, head_size, block_size, slots, options in (
        ("bf16 G=4 D=128 S=128 splits", BF16, 4, 128, 128, 16, ""),
        ("fp16 G=1 D=128 S=64 window", FP16, 1, 128, 64, 0, "WINDOW"),
        ("bf16 G=3 D=64 S=16", BF16, 3, 64, 16, 0, ""),
        ("bf16 G=8 D=64 S=16 splits window sinks", BF16, 8, 64, 16, 16, "WINDOW SINKS"),
        ("bf16 G=4 D=128 S=16", BF16, 4, 128, 16, 0, ""),
    ):
        constants, launch = gluon_prefill.configuration(group, head_size, slots)
        arguments = _attention_arguments(8, group, head_size, block_size, dtype, dtype)
        yield KernelVariant(
            name=f"prefill {name}",
            kernel=gluon_prefill.gluon_prefill_kernel,
            arguments=arguments
            | dict.fromkeys(("tiles_W8", "counts_3", "arrivals", "ends_T"), INT32)
            | {"first_prefill": 0},
            constants=constants
            | _attention_constants(8, block_size, head_size, options)
            | {"BOTH_SIDES": False, "HAS_ENDS": False},
            needs_wgmma=True,
            is_for_hopper=True,
            **launch,
        )


def attention_work_lists() -> Iterator[KernelVariant]:
    """Of steps of decodes, of prefills and of both, for groups of 3 and 4 heads."""
    for group, kv_heads, has_splits, has_tiles in (
        (4, 8, True, True),
        (4, 8, True, False),
        (3, 3, False, True),
    ):
        limits = attention_work.WorkLimits(
            max_requests=256,
            max_prefill_tokens=8192,
            max_seq_len=8192,
            num_query_heads=group * kv_heads,
            num_kv_heads=kv_heads,
            head_size=128,
        )
        what = [name for name, has in (("splits", has_splits), ("tiles", has_tiles)) if has]
        yield KernelVariant(
            name=f"list {' and '.join(what)}, G={group}",
            kernel=attention_lists.list_work_kernel,
            arguments=dict.fromkeys(("query_start_loc_R1", "seq_lens_R", "counts_3"), INT32)
            | dict.fromkeys(("splits_W8", "tiles_W8", "tile_splits_W8"), INT32)
            | {"num_requests": 64, "window": 1 << 30},
            constants=attention_work.list_constants(limits, has_decodes=has_splits)
            | {"HAS_SPLITS": has_splits, "HAS_TILES": has_tiles, "PDL": True},
        )


def copied_blocks() -> Iterator[KernelVariant]:
    """Of Llama-3.1-8B: within the device, and to and from staging memory."""
    yield KernelVariant(
        name="move blocks of 32 layers K=8 S=16 D=128",
        kernel=block_copies.move_blocks_kernel,
        arguments=_pointers(INT64, "src dst src_ids dst_ids"),
        constants={"W": 32 * 2 * 8 * 16 * 128 * 2 // 8, "BLOCK_W": block_copies._BLOCK_W},
        num_warps=block_copies.NUM_WARPS,
    )


def dense_products() -> Iterator[KernelVariant]:
    """Projections of models in use: wide and narrow, odd vocabularies, biases, all dtypes."""
    for N, E, dtype, has_bias in (
        (6144, 4096, BF16, False),
        (28672, 4096, BF16, False),
        (4096, 14336, BF16, False),
        (128256, 4096, BF16, False),
        (1152, 896, BF16, True),
        (50257, 768, BF16, False),
        (576, 1536, BF16, False),
        (2560, 2570, BF16, True),
        (28672, 4096, FP16, False),
        (6144, 4096, FP32, False),
    ):
        constants, launch = dense_linear.configuration(N, E, dtype)
        yield KernelVariant(
            name=f"dense N={N} E={E} {dtype}{' bias' * has_bias}",
            kernel=dense_linear.dense_linear_kernel,
            arguments=_pointers(dtype, "x weight bias out")
            | {"num_rows": 16, "x_stride_t": E, "weight_stride_n": E, "out_stride_t": N},
            constants=constants | {"HAS_BIAS": has_bias},
            needs_wgmma=dtype != FP32,
            **launch,
        )


def few_rows_products() -> Iterator[KernelVariant]:
    """Of Llama-3.1-8B and Qwen3-0.6B, and a width that is no multiple; with what may be within."""
    for N, E, norms, gated, dtype in (
        (6144, 4096, False, False, BF16),
        (6144, 4096, True, False, BF16),
        (4096, 14336, False, False, BF16),
        (14336, 4096, False, True, BF16),
        (14336, 4096, True, True, BF16),
        (128256, 4096, False, False, BF16),
        (4096, 1024, True, False, BF16),
        (3072, 1024, True, True, BF16),
        (1024, 3072, False, False, BF16),
        (1152, 896, True, False, BF16),
        (6144, 4096, False, False, FP16),
    ):
        constants = few_rows.configuration(N, E, norms=norms, gated=gated)
        launch = {name: constants.pop(name) for name in ("num_warps", "num_stages")}
        kinds = " norm" * norms + " gated" * gated
        yield KernelVariant(
            name=f"few rows N={N} E={E} {_name(dtype)}{kinds}",
            kernel=few_rows.few_rows_linear_kernel,
            arguments=_pointers(dtype, "x weight out")
            | _pointers(dtype if norms else None, "residual norm sums")
            | {"bias_ptr": dtype if N == 1152 else None, "arrivals_ptr": INT32}
            | {"parts_ptr": FP32 if constants["SPLITS"] > 1 else None, "num_rows": 16, "eps": 1e-6}
            | {
                "x_stride_t": E,
                "residual_stride_t": E if norms else 0,
                "weight_stride_n": E,
                "prefetch_steps": 16,
            },
            constants=constants | {"HAS_BIAS": N == 1152, "IS_GELU": False, "PDL": True},
            needs_prefetch=True,
            asks_ahead=True,
            needs_wgmma=True,
            **launch,
        )


def sums_over_ranks() -> Iterator[KernelVariant]:
    """In one shot, of few and of the most ranks."""
    for dtype, world in itertools.product((BF16, FP32), (2, one_shot_sums.MAX_RANKS)):
        constants = one_shot_sums.sum_constants(world, 256 << 10, dtype.itemsize)
        num_warps = constants.pop("num_warps")
        yield KernelVariant(
            name=f"one shot {_name(dtype)} W={world}",
            kernel=one_shot_sums.one_shot_sum_kernel,
            arguments={"x_N": dtype, "bases_W": INT64, "rounds_P": INT32, "num": 4096, "rank": 2},
            constants=constants,
            num_warps=num_warps,
        )


def float8_products() -> Iterator[KernelVariant]:
    """Rounding of rows that fit one block, of longer ones, by a given scale and by groups; products
    of both kinds of scales, in splits and not."""
    for dtype, width, is_given in (
        *((dtype, width, False) for dtype in (BF16, FP16) for width in (4096, 14336)),
        (BF16, 14336, True),
    ):
        yield KernelVariant(
            name=f"quantise {_name(dtype)} rows of {width}{', given' * is_given}",
            kernel=fp8_rounding.quantise_rows_kernel,
            arguments={"x_ptr": dtype, "q_ptr": FP8, "scale_ptr": FP32, "x_stride": width}
            | {"given_ptr": FP32 if is_given else None},
            constants=fp8_rounding.row_constants(width) | {"IS_GIVEN": is_given, "PDL": True},
        )
    for width, in_columns in ((2048, False), (14336, False), (14336, True)):
        yield KernelVariant(
            name=f"quantise groups of rows of {width}{', in columns' * in_columns}",
            kernel=fp8_rounding.quantise_groups_kernel,
            arguments={"x_ptr": BF16, "q_ptr": FP8, "scale_ptr": FP32, "x_stride": width}
            | _scale_strides(width // 128, in_columns=in_columns),
            constants=fp8_rounding.group_constants(width) | {"PDL": True},
        )
    for outputs, inputs, grouped in ((6144, 4096, True), (6144, 4096, False), (576, 2048, True)):
        # 576 outputs are no whole blocks: a scale each
        rows, groups = outputs // 128 if grouped and outputs % 128 == 0 else outputs, inputs // 128
        weight = fp8_linear.Float8Weight(
            weight_NE=torch.empty(outputs, inputs, dtype=FP8, device="meta"),
            scales_NG=torch.empty(rows, groups if grouped else 1, device="meta"),
        )
        tiles = [(16, True, False), (32, True, False), (64, True, False), (128, False, False)]
        if groups == 32 and grouped:  # also read by the library
            tiles += [(64, True, True)]
        for rows, in_splits, in_columns in tiles:
            constants, launch = fp8_linear.product_configuration(weight, rows, in_splits=in_splits)
            splits = constants["SPLITS"]
            yield KernelVariant(
                name=f"float8 {inputs} -> {outputs}, {rows} rows{', grouped' * grouped}"
                + ", in columns" * in_columns,
                kernel=fp8_linear.float8_kernel,
                arguments=_pointers(FP8, "q w")
                | _pointers(FP32, "scale w_scale")
                | {"bias_ptr": None, "out_ptr": BF16 if splits == 1 else FP32, "num_rows": rows}
                | _scale_strides(groups if grouped else 1, in_columns=in_columns),
                constants=constants | {"HAS_BIAS": False, "PDL": True},
                max_spill_bytes=16 if outputs % 128 and rows == 128 else 0,
                spill_reason="a scale an output of 128, masks of both sides" * (rows == 128),
                needs_wgmma=True,
                **launch,
            )


def adapters_beside_products() -> Iterator[KernelVariant]:
    """Projections of models in use, fused and not, small and large ranks."""
    tile = {"BLOCK_T": lora.BLOCK_SIZE_T, "BLOCK_R": lora.BLOCK_SIZE_R}
    for N, E, parts, rank, dtype in (
        (6144, 4096, 3, 16, BF16),
        (28672, 4096, 2, 64, BF16),
        (4096, 14336, 1, 256, BF16),
        (1152, 896, 3, 16, FP16),
        (576, 1536, 1, 16, FP32),
    ):
        constants = {"PARTS": parts, "RANK": rank, **tile}
        words = _pointers(INT32, "ranks tiles")
        yield KernelVariant(
            name=f"shrink E={E} parts={parts} rank={rank} {dtype}",
            kernel=lora.lora_shrink_kernel,
            arguments=_pointers(dtype, "x a") | {"hidden_ptr": FP32, "x_stride_t": E} | words,
            constants=constants | {"E": E, "BLOCK_E": lora.BLOCK_SIZE_E},
        )
        yield KernelVariant(
            name=f"expand N={N} parts={parts} rank={rank} {dtype}",
            kernel=lora.lora_expand_kernel,
            arguments=_pointers(dtype, "b out")
            | {"hidden_ptr": FP32, "blocks_ptr": INT32, "out_stride_t": N}
            | words,
            constants=constants | {"N": N, "BLOCK_N": lora.BLOCK_SIZE_N},
        )


def reported_logprobs() -> Iterator[KernelVariant]:
    """Both launches."""
    pointers = _pointers(FP32, "logits best sum top out")
    pointers |= _pointers(INT32, "num_rows num_logprobs above top_id out_ids rank")
    pointers |= _pointers(INT64, "tokens")
    for vocab_size, dtype in VOCABULARIES.items():
        splits = num_splits(vocab_size)
        values = pointers | {"stride_r": vocab_size, "V": vocab_size, "S": splits, "K": 20}
        values["logits_ptr"] = dtype
        padded = {"SPLITS": triton.next_power_of_2(splits)}
        for name, kernel, more, warps in (
            ("splits", logprobs.split_kernel, {}, logprobs.WARPS),
            ("merge", logprobs.merge_kernel, padded, 1),
        ):
            yield KernelVariant(
                name=f"{name} V={vocab_size}",
                kernel=kernel,
                arguments=_taken(kernel, values),
                constants={"TILE": TILE} | more,
                num_warps=warps,
            )


def expert_products() -> Iterator[KernelVariant]:
    """Of Qwen3-30B-A3B (E 2048, F 768) in each dtype; combination, with weights as they are and
    rounded."""
    kinds = [(dtype, rows) for dtype in (BF16, FP16) for rows in (16, 64, 128)]
    kinds += [(FP32, 16)]
    plain = [(*kind, gated, False) for kind in kinds for gated in (True, False)]
    kinds = [*plain, (BF16, 64, True, True)]
    for (dtype, tile_rows, gated, biased), is_gelu in [
        *((kind, False) for kind in kinds),
        *(((BF16, rows, True, False), True) for rows in (16, 64, 128)),
    ]:
        num_outputs, num_inputs = (768, 2048) if gated else (2048, 768)
        constants, launch = moe_linear.configuration(tile_rows, dtype, gated)
        yield KernelVariant(
            name=f"{'gate_up' if gated else 'down'} {_name(dtype)} tiles of {tile_rows}"
            f"{', biases' * biased}{', gelu' * is_gelu}",
            kernel=moe_linear.grouped_product_kernel,
            arguments=_pointers(INT32, "sorted tile_expert tile_start tile_stop")
            | _pointers(dtype, "a w out")
            | {"bias_ptr": dtype if biased else None}
            | {"max_tiles": 152, "a_stride": num_inputs},
            constants={"N": num_outputs, "K": num_inputs, "PAIRS_A_ROW": 8 if gated else 1}
            | {"GATED": gated, "SQUARED": not gated, "CLAMPED": biased, "HAS_BIAS": biased}
            | {"IS_GELU": is_gelu}
            | constants,
            needs_wgmma=tile_rows >= 64,
            **launch,
        )
    for dtype, weights in ((BF16, FP32), (BF16, BF16), (FP16, FP16), (FP32, FP32)):
        yield KernelVariant(
            name=f"combine {_name(dtype)}{', rounded' * (weights != FP32)}",
            kernel=moe_linear.combine_kernel,
            arguments={"y_ptr": dtype, "weights_ptr": weights, "out_ptr": dtype},
            constants={"E": 2048, "TOP_K": 8, "BLOCK_E": moe_linear.COMBINED_AT_ONCE},
        )


def quantised_experts() -> Iterator[KernelVariant]:
    """Of Qwen3-30B-A3B: 4 bits as GGUF and GPTQ have them, float8 widened and multiplied."""
    of_experts = [(name, *rest) for name, *rest in LAYOUTS if name in _EXPERT_LAYOUTS]
    for gated, tile_rows in itertools.product((True, False), (16, 64, 128)):
        rows, num_inputs = 128 * (1536 if gated else 2048), 2048 if gated else 768
        names = [*(name for name, *_ in of_experts), "float8", "float8 in blocks"]
        for name in names:
            if name.startswith("float8") and name not in _EXPERT_LAYOUTS:
                groups = num_inputs // 128 if name.endswith("blocks") else 1
                weight: moe_quantised.ExpertStack = fp8_linear.Float8Weight(
                    weight_NE=torch.empty(rows, num_inputs, dtype=FP8, device="meta"),
                    scales_NG=torch.empty(
                        rows // 128 if groups > 1 else rows, groups, device="meta"
                    ),
                )
                pointers = {"a_ptr": FP8, "a_scale_ptr": FP32, "w_ptr": FP8, "scales_ptr": FP32}
                pointers |= {"offsets_ptr": None, "supers_ptr": None}
            else:
                layout = next(each for each in LAYOUTS if each[0] == name)
                _, bits, group, has_offsets, scales = layout
                packed, _ = _packed(layout)
                weight = packed_weights.QuantisedWeight(
                    num_bits=bits,
                    group_size=group,
                    num_inputs=num_inputs,
                    num_outputs=rows,
                    packed_NJ=torch.empty(rows, num_inputs * bits // 8, device="meta"),
                    scales_NG=torch.empty(rows, num_inputs // group, device="meta"),
                    offsets_NG=torch.empty(0, device="meta") if has_offsets else None,
                    levels=LEVELS.get(name, ()),
                )
                pointers = {"a_ptr": BF16, "a_scale_ptr": None, "w_ptr": packed["packed_ptr"]}
                pointers["supers_ptr"] = packed["supers_ptr"]
                pointers |= {"scales_ptr": scales, "offsets_ptr": scales if has_offsets else None}
            pointers["bias_ptr"] = None
            constants, launch = moe_quantised.grouped_configuration(
                weight, 128, tile_rows, BF16, "silu" if gated else None
            )
            yield KernelVariant(
                name=f"{'gate_up' if gated else 'down'} {name} tiles of {tile_rows}",
                kernel=moe_quantised.grouped_quantised_kernel,
                arguments=_pointers(INT32, "sorted tile_expert tile_start tile_stop")
                | pointers
                | {"out_ptr": BF16, "max_tiles": 152, "a_stride": num_inputs},
                constants=constants | {"PAIRS_A_ROW": 8 if gated else 1},
                needs_wgmma=True,
                **launch,
            )


_EXPERT_LAYOUTS = ("Q4_K", "int4 groups of 128", "Q6_K", "float8 groups of 128", "MXFP4")
_EXPERT_LAYOUTS += ("Q5_K", "Q2_K", "IQ2_XS")


def expert_routing() -> Iterator[KernelVariant]:
    """Routing of Mixtral, Qwen3-MoE, Gemma 4 and DeepSeek-V3, and sorting for them."""
    kinds = ((BF16, FP32), (FP32, FP32), (BF16, BF16), (FP16, FP16))
    for name, num_experts, routing in (
        ("Mixtral", 8, ExpertRouting(top_k=2, renormalise=True)),
        ("Qwen3-MoE", 128, ExpertRouting(top_k=8, renormalise=True)),
        (
            "Gemma 4",
            128,
            ExpertRouting(top_k=8, renormalise=True, scale_X=torch.empty(128, device="meta")),
        ),
        (
            "DeepSeek-V3",
            256,
            ExpertRouting(
                top_k=8,
                renormalise=True,
                scores="sigmoid",
                bias_X=torch.empty(256, device="meta"),
                num_groups=8,
                top_groups=4,
                epsilon=1e-20,
                scale=2.5,
            ),
        ),
    ):
        for dtype, weights in kinds:
            yield KernelVariant(
                name=f"route {name} {_name(dtype)}{', rounded' * (weights != FP32)}",
                kernel=moe_routing.route_kernel,
                arguments={"logits_ptr": dtype, "slots_ptr": INT64}
                | {"bias_ptr": FP32, "scales_ptr": FP32, "ids_ptr": INT32, "weights_ptr": weights}
                | {"num_tokens": 64, "logits_stride": num_experts},
                constants=moe_routing.route_constants(num_experts, routing, has_slots=True),
            )
        for tile_rows in (16, 64, 128):
            yield KernelVariant(
                name=f"place {name} tiles of {tile_rows}",
                kernel=moe_routing.place_pairs_kernel,
                arguments=_pointers(INT32, "ids counts sorted tile_expert tile_start tile_stop")
                | {"num_pairs": 512, "max_tiles": 160},
                constants=moe_routing.place_constants(num_experts, tile_rows),
            )
    yield KernelVariant(
        name="count",
        kernel=moe_routing.count_pairs_kernel,
        arguments=_pointers(INT32, "ids counts") | {"num_pairs": 512},
        constants={"BLOCK_P": moe_routing.PAIRS_AT_ONCE},
    )


def norms() -> Iterator[KernelVariant]:
    """Widths of models in use, with and without residual, plain and rounded, Gemma's weight."""
    for E, has_residual, weight, out in (
        (1024, False, BF16, BF16),
        (1024, True, BF16, BF16),
        (896, True, BF16, BF16),
        (4096, False, BF16, BF16),
        (4096, True, BF16, BF16),
        (5376, False, FP32, BF16),
        (2560, True, FP32, BF16),
        (8192, True, BF16, BF16),
        (4096, True, FP16, FP16),
        (2560, True, FP32, FP16),
        (4096, False, FP32, FP32),
        (4096, True, FP32, FP32),
    ):
        plain = {"ROUNDS": False, "IS_GIVEN": False, "GROUP": 0, "HAS_RESIDUAL": has_residual}
        name = f"E={E}{' add' * has_residual} weight {weight} out {out}"
        yield _norm(name, E, weight, out, out, plain)
    for (name, rounding), (E, weight) in itertools.product(
        ROUNDINGS.items(), ((4096, BF16), (5376, FP32), (16384, BF16))
    ):
        name = f"E={E} add weight {weight} rounded by {name}"
        yield _norm(name, E, weight, BF16, FP8, rounding | {"HAS_RESIDUAL": True})


def _norm(
    name: str,
    E: int,
    weight: torch.dtype,
    dtype: torch.dtype,
    out: torch.dtype,
    constants: Mapping[str, Any],
) -> KernelVariant:
    rounds = constants["ROUNDS"]
    return KernelVariant(
        name=f"rms_norm {name}",
        kernel=norm.rms_norm_kernel,
        arguments=_pointers(dtype, "x residual")
        | {"weight_ptr": weight, "out_ptr": out, "eps": 1e-6}
        | {"scales_ptr": FP32 if rounds else weight}
        | {"given_ptr": FP32 if constants["IS_GIVEN"] else weight}
        | dict.fromkeys(("x_stride_t", "residual_stride_t", "out_stride_t"), E)
        | _scale_strides(E // constants["GROUP"] if constants["GROUP"] else 1),
        constants=norm.constants_of(E) | {"PDL": True, **constants},
        num_warps=norm.num_warps_of(E),
    )


def logit_penalties() -> Iterator[KernelVariant]:
    """Penalties, the lists, the count."""
    values = _pointers(FP32, "logits repetition presence frequency bias")
    values |= _pointers(
        INT32, "num_rows prompt_bits counts num_min_tokens_ids min_tokens_ids draft"
    )
    values |= _pointers(INT32, "num_biases bias_ids") | _pointers(INT64, "state_row tokens")
    values |= {"is_counted_ptr": torch.bool, "num_rows_given": 256, "M": 1024}
    block = {"BLOCK": logits_processors.BLOCK_SIZE}
    for name, kernel, vocab_size, constants in (
        ("penalties V=151936", logits_processors.penalties_kernel, 151936, {"TILE": TILE}),
        ("penalties V=50257", logits_processors.penalties_kernel, 50257, {"TILE": TILE}),
        ("adjust", logits_processors.adjust_kernel, 151936, block),
        ("count", logits_processors.count_kernel, 151936, block),
    ):
        sizes = {"stride_r": vocab_size, "V": vocab_size}
        sizes |= {"W": num_mask_words(vocab_size)}
        yield KernelVariant(
            name=name,
            kernel=kernel,
            arguments=_taken(kernel, values | sizes),
            constants=constants,
        )


LAYOUTS = (  # name, bits, inputs a group, offsets, dtype of scales; weights of 4096 x 4096
    ("Q4_0", 4, 32, False, FP16),
    ("Q4_1", 4, 32, True, FP16),
    ("Q4_K", 4, 32, True, INT8),
    ("Q5_1", 8, 32, True, FP16),
    ("Q5_K", 8, 32, True, INT8),
    ("Q8_0", 8, 32, False, FP16),  # and Q5_0
    ("MXFP4", 4, 32, False, FP16),
    ("Q2_K", 4, 16, True, INT8),
    ("Q3_K", 4, 16, False, INT8),
    ("Q6_K", 8, 16, False, INT8),
    ("TQ1_0", 4, 256, False, FP16),  # and TQ2_0
    ("IQ4_NL", 4, 32, False, FP16),
    ("IQ4_XS", 4, 32, False, INT8),  # and IQ1_S, IQ2_XXS, IQ3_S
    ("IQ3_XXS", 4, 32, False, INT8),
    ("IQ2_XS", 4, 16, False, INT8),  # and IQ2_S, IQ1_M
    ("nvfp4", 4, 16, False, FP32),
    ("bnb-nf4", 4, 64, False, FP32),
    ("int4 groups of 32", 4, 32, False, FP32),
    ("int4 groups of 32 with zeros", 4, 32, True, FP16),
    ("int4 groups of 64", 4, 64, False, FP16),
    ("int4 groups of 64 with zeros", 4, 64, True, FP16),
    ("int4 groups of 128", 4, 128, False, FP16),
    ("int4 groups of 128 with zeros", 4, 128, True, FP16),
    ("int4, a group a row, with zeros", 4, 4096, True, FP16),
    ("int8 groups of 32 with zeros", 8, 32, True, FP32),
    ("int8 groups of 64 with zeros", 8, 64, True, FP32),
    ("int8 groups of 128", 8, 128, False, FP16),
    ("int8 groups of 128 with zeros", 8, 128, True, FP32),
    ("float8 groups of 128", 8, 128, False, FP32),
    ("float8, a scale a row", 8, 4096, False, FP32),
)
"""Each layout that a file can give; int8 scales have supers."""
LEVELS = {"IQ4_NL": gguf_blocks.IQ4_LEVELS, "IQ4_XS": gguf_blocks.IQ4_LEVELS}
LEVELS |= {"IQ3_XXS": gguf_blocks.IQ3_XXS_LEVELS, "IQ2_XS": gguf_blocks.IQ2_LEVELS}
LEVELS |= {"bnb-nf4": tuple(1.0 / (1 + power) for power in range(16))}  # as many coefficients


def _packed(layout: tuple[str, int, int, bool, torch.dtype]) -> tuple[dict[str, Any], ...]:
    """Arguments and constants of a weight."""
    name, bits, group, has_offsets, scales = layout
    has_bytes = (bits == 4 and name not in ("MXFP4", "nvfp4")) or name.startswith("float8")
    arguments = {"packed_ptr": torch.uint8 if has_bytes else INT8, "scales_ptr": scales}
    arguments |= {"offsets_ptr": scales if has_offsets else None}
    arguments |= {"supers_ptr": FP32 if scales == INT8 else None}
    constants = {"LEVELS": LEVELS.get(name, ())}
    constants |= {"N": 4096, "K": 4096, "BITS": bits, "GROUP": group, "HAS_OFFSETS": has_offsets}
    constants["ZEROS"] = name.endswith("zeros")
    constants |= {"BLOCK_N": quantised_linear.BLOCK_N, "BLOCK_J": quantised_linear.BLOCK_J}
    return arguments, constants


def quantised_products(shared_bytes: int) -> Iterator[KernelVariant]:
    """Tiles of a few rows and of the most."""
    for layout in LAYOUTS:
        arguments, constants = _packed(layout)
        cases = [(rows, BF16, 4, False) for rows in (16, 64, 128)]
        if layout[0] in ("Q4_K", "Q6_K"):
            cases += [(32, BF16, 4, False), (64, FP16, 4, False), (64, BF16, 1, True)]
        for rows, dtype, splits, has_bias in cases:
            yield KernelVariant(
                name=f"{layout[0]}, {rows} rows of {_name(dtype)}{' with bias' * has_bias}",
                kernel=quantised_linear.few_rows_kernel,
                arguments=arguments
                | {"x_ptr": dtype, "bias_ptr": dtype if has_bias else None}
                | {"out_ptr": dtype if splits == 1 else FP32}
                | {"num_rows": rows, "x_stride": 4096},
                constants=constants
                | {"HAS_BIAS": has_bias, "SPLITS": splits, "BLOCK_M": rows}
                | {"BLOCK_N": quantised_linear.tile_outputs(rows), "PDL": True},
                needs_wgmma=True,
                **quantised_linear.launch_options(rows, shared_bytes),
            )
    yield KernelVariant(
        name="add parts",
        kernel=quantised_linear.add_parts_kernel,
        arguments={"parts_ptr": FP32, "bias_ptr": BF16, "out_ptr": BF16, "num_rows": 16},
        constants={"N": 4096, "SPLITS": 4, "HAS_BIAS": True}
        | {"BLOCK_N": quantised_linear.REDUCED_AT_ONCE, "PDL": True},
    )


def quantised_weights() -> Iterator[KernelVariant]:
    """To bfloat16."""
    for layout in LAYOUTS:
        arguments, constants = _packed(layout)
        yield KernelVariant(
            name=f"widen {layout[0]}",
            kernel=quantised_linear.dequantise_kernel,
            arguments=arguments | {"out_ptr": BF16},
            constants=constants,
        )


def rotary_and_cache() -> Iterator[KernelVariant]:
    """Models in use: full and partial rotation, with norm, fp8 cache, the write alone."""
    qwen3 = (16, 8, 128, 128, 16, True, True)
    strides = [f"{part}_stride_t" for part in "qkv"]
    strides += [f"{part}_stride_{axis}" for part in "kv" for axis in "bhs"]
    for name, (H, K, D, rotary_size, S, has_norm, has_rope), cache, dtype in (
        ("Gemma-3n-E4B", (8, 2, 256, 256, 16, True, True), BF16, BF16),
        ("Gemma-4-E4B", (8, 2, 512, 512, 16, True, True), BF16, BF16),
        ("Llama-3.1-8B", (32, 8, 128, 128, 16, False, True), BF16, BF16),
        ("Llama-3.1-8B fp8", (32, 8, 128, 128, 16, False, True), FP8, BF16),
        ("DeepSeek-V3", (128, 1, 576, 64, 16, False, True), BF16, BF16),
        ("Qwen3-0.6B", qwen3, BF16, BF16),
        ("Qwen3-0.6B S=128 fp8", (16, 8, 128, 128, 128, True, True), FP8, BF16),
        ("Qwen2.5-0.5B", (14, 2, 64, 64, 16, False, True), BF16, BF16),
        ("Phi-2", (32, 32, 80, 32, 16, False, True), BF16, BF16),
        ("Phi-4-mini", (24, 8, 128, 96, 16, False, True), BF16, BF16),
        ("norm, a small rest", (24, 8, 128, 96, 16, True, True), BF16, BF16),
        ("Gemma-3-4B", (8, 4, 256, 256, 16, True, True), BF16, BF16),
        ("no rotation", (0, 8, 128, 128, 16, False, False), BF16, BF16),
        ("Qwen3-0.6B torch.float16", qwen3, FP16, FP16),
        ("Qwen3-0.6B torch.float32", qwen3, FP32, FP32),
    ):
        yield KernelVariant(
            name=f"rotary_cache {name}",
            kernel=rotary_cache.rotary_cache_kernel,
            arguments=_pointers(dtype, "q k v")
            | _pointers(cache, "k_cache v_cache")
            | _pointers(INT64, "slots positions")
            | {"angles_ptr": dtype if has_rope else INT64}
            | _pointers(dtype if has_norm else INT64, "q_weight k_weight")
            | _pointers(dtype if "E4B" in name else INT64, "v_weight")
            | {"norm_eps": 1e-6}
            | dict.fromkeys(strides, 16 * D),
            constants=rotary_cache.constants_of(H, K, D, rotary_size)
            | {"S": S, "HAS_ROPE": has_rope, "HAS_Q_NORM": has_norm, "HAS_K_NORM": has_norm}
            | {"HAS_V_NORM": "E4B" in name, "PDL": True},
            num_warps=rotary_cache.num_warps_of(rotary_size),
        )


def maxima_of_rows() -> Iterator[KernelVariant]:
    for vocab_size, dtype in VOCABULARIES.items():
        yield KernelVariant(
            name=f"maxima V={vocab_size}",
            kernel=row_maxima.split_maxima_kernel,
            arguments={"logits_ptr": dtype, "best_ptr": FP32}
            | _pointers(INT32, "num_rows best_id")
            | {"stride_r": vocab_size, "V": vocab_size, "S": num_splits(vocab_size)},
            constants={"TILE": TILE},
        )


def sampled_tokens() -> Iterator[KernelVariant]:
    """With and without limits."""
    for vocab_size, dtype in VOCABULARIES.items():
        splits = num_splits(vocab_size)
        padded = triton.next_power_of_2(splits)
        shared = _pointers(FP32, "best noisy") | _pointers(INT32, "num_rows noisy_id")
        shared |= {"is_greedy_ptr": torch.bool, "S": splits}
        for truncates in (False, True):
            yield KernelVariant(
                name=f"noisy maxima V={vocab_size} truncates={truncates}",
                kernel=sampling.noisy_maxima_kernel,
                arguments=shared
                | _pointers(FP32, "temperature threshold")
                | {"logits_ptr": dtype}
                | _pointers(INT64, "seeds positions")
                | {"last_tie_ptr": INT32, "stride_r": vocab_size, "V": vocab_size},
                constants={"TRUNCATES": truncates, "SPLITS": padded, "TILE": TILE},
                num_warps=sampling.WARPS,
            )
        yield KernelVariant(
            name=f"choose V={vocab_size}",
            kernel=sampling.choose_kernel,
            arguments=shared | {"best_id_ptr": INT32, "out_ptr": INT64, "best_logit_ptr": FP32},
            constants={"SPLITS": padded},
            num_warps=1,
        )


def columns_of_sampling() -> Iterator[KernelVariant]:
    """One: the capacity is fixed while an engine runs."""
    kernel = sampling_columns.gather_sampling_columns_kernel
    dtypes = dict(zip(kernel.arg_names[3:], sampling_columns.DTYPES.values(), strict=False))
    yield KernelVariant(
        name="gather_sampling_columns",
        kernel=kernel,
        arguments=dtypes
        | {"packed_ptr": INT32, "numbers_ptr": INT32, "reals_ptr": FP32}
        | {"num_given": 255, "X": 4768},
        constants=step_inputs.columns_of(PackedLayout(256))
        | {"DRAFT_AT": PackedLayout(256).draft_at, "BLOCK": sampling_columns.BLOCK_SIZE},
        num_warps=sampling_columns.NUM_WARPS,
    )


RECURRENT_LAYERS = (  # name, rule, decays of a head, K, H, N, P, tokens a block, dtype
    ("gated delta", "delta", 1, 16, 32, 128, 128, 16, BF16),
    ("gated delta fp32", "delta", 1, 16, 16, 128, 128, 16, FP32),
    ("gated delta S=8", "delta", 1, 2, 4, 16, 16, 8, BF16),
    ("gated delta S=64", "delta", 1, 16, 32, 128, 128, 64, BF16),
    ("Kimi delta", "delta", 128, 32, 32, 128, 128, 16, BF16),
    ("Mamba-2", "discretised", 1, 8, 128, 128, 64, 16, BF16),
    ("Mamba-2 N=256", "discretised", 1, 1, 24, 256, 64, 16, FP16),
    ("fixed decays", "plain", 1, 64, 64, 128, 128, 16, BF16),
)
"""Of models in use."""
_STEP = {"query_start_loc_R1": INT32, "seq_lens_R": INT32, "block_table_RM": INT32}
_STEP |= {"block_stride": 417792, "table_stride": 99}


def recurrent_layers() -> Iterator[KernelVariant]:
    """Each in all forms of the kernel."""
    for name, rule, decay_size, K, H, N, P, block_size, dtype in RECURRENT_LAYERS:
        shape = RecurrenceShape(
            num_key_heads=K, num_heads=H, key_size=N, value_size=P, num_channels=0, width=0,
            dtype=dtype, decay_size=decay_size,
        )  # fmt: skip
        number, width = torch.empty(0), 2 * K * N + H * P
        params = RecurrenceParams(
            shape=shape, starts=(0, K * N, 2 * K * N), rate_H=number, rule=rule,
            bias_HD=None if rule == "plain" else number, normed=rule == "delta",
            skip_H=number if rule == "discretised" else None,
        )  # fmt: skip
        has_shares = rule == "delta"
        for form, by_blocks, takes_all in (
            ("tokens", False, False), ("blocks", True, False), ("all by blocks", True, True),
        ):  # fmt: skip
            constants = recur.constants_of(params, block_size, by_blocks, takes_all)
            yield KernelVariant(
                name=f"{name}, {form}",
                kernel=recur.recur_kernel,
                arguments=_STEP
                | dict.fromkeys(("qkv_TC", "a_TN", "b_TH", "out_TV"), dtype)
                | dict.fromkeys(("rate_H", "bias_HD", "skip_H", "states_BHNP"), FP32)
                | dict.fromkeys(("keys_BSKN", "updates_BSHP", "decays_BSHD"), FP32)
                | {"qkv_stride": width, "q_scale": 0.1}
                | {"a_stride": H * decay_size, "b_stride": H if has_shares else width},
                constants=constants | {"PDL": True},
                max_spill_bytes=64 if dtype is FP32 else 0,
                spill_reason="float32 rows, beside a state" if dtype is FP32 else "",
            )


def convolutions_and_gates() -> Iterator[KernelVariant]:
    """Of the same models, and LFM2's convolution, which has no activation."""
    for C, W, has_bias, has_silu, dtype in (
        (8192, 4, False, True, BF16), (10304, 4, True, True, FP16),
        (2048, 3, False, False, BF16), (6144, 4, False, True, FP32),
    ):  # fmt: skip
        yield KernelVariant(
            name=f"convolve C={C} W={W} {dtype}",
            kernel=convolution.convolve_kernel,
            arguments=_STEP
            | dict.fromkeys(("x_TC", "out_TC"), dtype)
            | dict.fromkeys(("tails_BVC", "inputs_BSC", "weight_WC", "bias_C"), FP32)
            | {"num_requests": 99, "x_stride": C + 64},
            constants={"C": C, "W": W, "S": 16, "HAS_BIAS": has_bias, "SILU": has_silu}
            | {"BLOCK_T": convolution.BLOCK_T, "BLOCK_C": convolution.BLOCK_C, "PDL": True},
        )
    rows = dict.fromkeys(("x_TN", "gate_TN", "out_TN"), BF16)
    for N, size, weights, activation_name, gate_first in (
        (4096, 128, 128, "silu", False), (4096, 128, 128, "sigmoid", False),
        (8192, 1024, 8192, "silu", True), (8192, 8192, 8192, "silu", True),
    ):  # fmt: skip
        params = GatedNormParams(
            weight_N=torch.empty(weights), size=size, eps=1e-6, activation=activation_name,
            gate_first=gate_first,
        )  # fmt: skip
        yield KernelVariant(
            name=f"gated norm N={N} by {size} {activation_name}",
            kernel=gates.gated_norm_kernel,
            arguments=rows
            | {"weight_N": FP32, "num_rows": 99, "eps": 1e-6, "x_stride": N, "gate_stride": N},
            constants=gates.norm_constants(N, params) | {"PDL": True},
            num_warps=gates.num_warps_of(size),
        )
    for is_sigmoid in (True, False):
        yield KernelVariant(
            name="gate by sigmoid" if is_sigmoid else "gate by product",
            kernel=gates.gate_kernel,
            arguments=rows | {"x_stride": 4096, "gate_stride": 4096},
            constants={"N": 4096, "BLOCK_N": gates.BLOCK, "IS_SIGMOID": is_sigmoid, "PDL": True},
        )


def inputs_of_a_step() -> Iterator[KernelVariant]:
    """One of each kernel for a block size and a capacity; both are fixed while an engine runs."""
    layout = PackedLayout(256)
    rows: dict[str, Any] = {"packed_ptr": INT32, "max_len": 8192, "M": 512}
    yield KernelVariant(
        name="apply_row_updates",
        kernel=step_inputs.apply_row_updates_kernel,
        arguments=rows | _pointers(INT32, "token_ids block_tables") | {"table_stride_g": 256 * 512},
        constants={"BLOCK": step_inputs.MOST_IDS},
        num_warps=step_inputs.NUM_WARPS,
    )
    for block_size in (16, 64):
        yield KernelVariant(
            name=f"prepare_step S={block_size}",
            kernel=step_inputs.prepare_step_kernel,
            arguments=rows
            | _pointers(INT64, "token_ids positions slots logits_at")
            | _pointers(INT32, "query_start seq_lens tables row_tokens row_tables")
            | {"row_table_stride_g": 256 * 512, "num_tokens": 255, "num_sequences": 255}
            | {"slot_stride_g": 255, "out_table_stride_g": 255},
            constants=step_inputs.columns_of(layout)
            | {"S": block_size, "SHIFT_AT": layout.shift_at, "BLOCK": step_inputs.BLOCK_SIZE},
            num_warps=step_inputs.NUM_WARPS,
        )
    yield KernelVariant(
        name="append_sampled",
        kernel=step_inputs.append_sampled_kernel,
        arguments={"packed_ptr": INT32, "max_len": 8192}
        | {"sampled_ptr": INT64, "row_tokens_ptr": INT32},
        constants=step_inputs.columns_of(layout) | {"BLOCK": step_inputs.BLOCK_SIZE},
        num_warps=step_inputs.NUM_WARPS,
    )


def masks_of_tokens() -> Iterator[KernelVariant]:
    for vocab_size in VOCABULARIES:
        yield KernelVariant(
            name=f"token masks V={vocab_size}",
            kernel=logits_processors.token_masks_kernel,
            arguments={"logits_ptr": FP32, "num_rows_ptr": INT32, "masks_ptr": INT32}
            | {"is_masked_ptr": torch.bool, "stride_r": vocab_size, "V": vocab_size}
            | {"mask_stride_r": num_mask_words(vocab_size)},
            constants={"TILE": TILE},
        )


def truncations() -> Iterator[KernelVariant]:
    """The four launches of a vocabulary."""
    pointers = _pointers(FP32, "logits temperature top_p min_p best pivots high bounds list")
    pointers |= _pointers(INT64, "top_k sums above target bound_above")
    pointers |= _pointers(INT32, "num_rows last_tie")
    pointers |= {"is_greedy_ptr": torch.bool, "threshold_ptr": FP32}
    for vocab_size, dtype in VOCABULARIES.items():
        splits = num_splits(vocab_size)
        values = pointers | {"stride_r": vocab_size, "V": vocab_size, "S": splits}
        values["logits_ptr"] = dtype
        constants = {"SPLITS": triton.next_power_of_2(splits), "TILE": TILE}
        launches = [
            (f"gather {at}", truncation.gather_kernel, {"ROUND": at}, truncation.WARPS)
            for at in (1, 2)
        ]
        for is_wide in (True, False):
            weighing = {"FLOAT64": is_wide}
            name = "" if is_wide else " in float32"
            launches += [
                (f"round {at}{name}", truncation.round_kernel, weighing | {"ROUND": at}, warps)
                for at, warps in enumerate((truncation.WARPS,) * truncation.NUM_ROUNDS)
            ]
            finish = truncation.finish_kernel, weighing, truncation.FINISH_WARPS
            launches.append((f"finish{name}", *finish))
        for name, kernel, more, warps in launches:
            yield KernelVariant(
                name=f"{name} V={vocab_size}",
                kernel=kernel,
                arguments=_taken(kernel, values),
                constants=constants | more,
                num_warps=warps,
            )
