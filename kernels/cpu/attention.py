"""What the native library's attention, and rotation with the cache write, are given.

Block tables, lengths and starts are checked by the library at each call, before it reads the cache.
"""

import ctypes
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch

from kernels.cpu.kv_cache import block_shapes, format_of
from kernels.cpu.library import FLOAT, INT64, POINTER, members
from kernels.cpu.tensor_checks import check_tensor, optional_address
from kernels.interface.kv_cache import KVCache, KVShape
from kernels.interface.operations import (
    AttentionMetadata,
    AttentionParams,
    AttentionPlanner,
    AttentionSpec,
    RotaryParams,
)
from kernels.interface.special_inputs import PositionScores


class AttentionGeometry(ctypes.Structure):
    """Mirrors `AttentionGeometry` of src/graph.h."""

    _fields_ = [
        *members(INT64, "num_requests", "num_tokens", "table_width", "block_size"),
        *members(INT64, "num_query_heads", "num_kv_heads", "head_size", "value_size", "window"),
        *members(INT64, "kv_format", "rounds", "bidirectional"),
        *members(POINTER, "starts", "lengths", "table", "slots", "ends"),
    ]


@dataclass(frozen=True, slots=True)
class NativeAttentionPlan:
    """A step, as the library reads it. `keeps` are the tensors that `geometry` points into.

    The geometry is the planner's: its address is the same at every step."""

    geometry: AttentionGeometry
    kv_shape: KVShape
    address: int
    keeps: tuple[torch.Tensor, ...]
    record: bytes
    """A record of the geometry, which the planner's next plan changes."""


class NativeAttentionPlanner(AttentionPlanner):
    """See `AttentionPlanner`. The library cuts the work, from the lengths alone.
    `spec`: for float32 over a cache of a dtype that `format_of` knows. `rounds`: over one of
    bfloat16 a matrix unit may round queries and weights to it. Raises ValueError: counts that do
    not fit each other, or another dtype."""

    def __init__(self, spec: AttentionSpec, *, rounds: bool = False) -> None:
        kv_format = format_of(spec.kv_dtype)
        if spec.dtype is not torch.float32 or kv_format is None:
            raise ValueError(f"attention in {spec.dtype} over {spec.kv_dtype} is not native")
        if spec.num_kv_heads < 1 or spec.num_query_heads % spec.num_kv_heads:
            raise ValueError(
                f"{spec.num_query_heads} query heads over {spec.num_kv_heads} key/value heads: "
                "the first must be a multiple of the second"
            )
        if spec.sliding_window is not None and spec.sliding_window < 1:
            raise ValueError(
                f"sliding_window is {spec.sliding_window}, it must be 1 or above; give None for "
                "full attention"
            )
        size, value_size = spec.head_size, spec.value_size
        if value_size is not None and not 0 < value_size < size:
            raise ValueError(f"a value of {value_size} elements in a key of {size}: it is a part")
        super().__init__(spec)
        self._geometry = AttentionGeometry(
            block_size=spec.block_size,
            num_query_heads=spec.num_query_heads,
            num_kv_heads=spec.num_kv_heads,
            head_size=size,
            value_size=value_size or size,
            window=spec.sliding_window or 0,
            kv_format=kv_format,
            rounds=rounds,
            bidirectional=spec.bidirectional,
        )
        self._address = ctypes.addressof(self._geometry)
        sizes = spec.num_kv_heads, size, value_size or size
        self._kv_shape = KVShape(
            spec.block_size, *sizes, spec.kv_dtype, values_in_keys=value_size is not None
        )

    def _plan_work(
        self, step: AttentionMetadata, num_decodes: int, num_decode_tokens: int
    ) -> NativeAttentionPlan:
        query_start_loc_R1, seq_lens_R = step.query_start_loc_R1, step.seq_lens_R
        block_table_RM, slot_mapping_T = step.block_table_RM, step.slot_mapping_T
        num_requests = seq_lens_R.shape[0]
        if query_start_loc_R1.shape != (num_requests + 1,) or block_table_RM.shape[:-1] != (
            num_requests,
        ):
            raise ValueError(
                f"query_start_loc {tuple(query_start_loc_R1.shape)} and block table "
                f"{tuple(block_table_RM.shape)} for {num_requests} requests; they must be [R + 1] "
                "and [R, M]"
            )
        if slot_mapping_T.dim() != 1 or slot_mapping_T.dtype is not torch.int64:
            raise ValueError(
                f"slot_mapping is {slot_mapping_T.dtype} {tuple(slot_mapping_T.shape)}; it must be "
                "int64 of [T]"
            )
        keeps: tuple[torch.Tensor, ...] = (
            _as_int32(query_start_loc_R1),
            _as_int32(seq_lens_R),
            _as_int32(block_table_RM),
            slot_mapping_T.contiguous(),
        )
        geometry = self._geometry
        geometry.num_requests = num_requests
        geometry.num_tokens = slot_mapping_T.shape[0]
        geometry.table_width = block_table_RM.shape[1]
        geometry.starts = keeps[0].data_ptr()
        geometry.lengths = keeps[1].data_ptr()
        geometry.table = keeps[2].data_ptr()
        geometry.slots = keeps[3].data_ptr()
        geometry.ends = None
        if step.ends_T is not None:
            check_tensor("ends", step.ends_T, slot_mapping_T.shape, torch.int32)
            geometry.ends = step.ends_T.data_ptr()
            keeps = (*keeps, step.ends_T)
        return NativeAttentionPlan(geometry, self._kv_shape, self._address, keeps, bytes(geometry))

    def plan_again(self, step: AttentionMetadata) -> None:
        assert isinstance(step.plan, NativeAttentionPlan)
        ctypes.memmove(self._address, step.plan.record, ctypes.sizeof(AttentionGeometry))


def _as_int32(x: torch.Tensor) -> torch.Tensor:
    """Contiguous. Mostly it is: `to` alone takes a microsecond."""
    if x.dtype is torch.int32 and x.is_contiguous():
        return x
    return x.to(torch.int32).contiguous()


def block_stride(keys: torch.Tensor, values: torch.Tensor, shape: KVShape) -> int:
    """Bytes from a block of keys, and of values, to the next.
    Raises ValueError: tensors of another shape or format."""
    stored = torch.uint8 if shape.dtype is torch.int8 else shape.dtype
    own = block_shapes(shape)
    caches = (keys, keys if shape.values_in_keys else values)
    strides = {each.stride(0) * each.itemsize for each in caches}
    if (
        (keys.shape[1:], values.shape[1:]) != own
        or (shape.values_in_keys and values[..., -1:].data_ptr() != keys[..., -1:].data_ptr())
        or len(keys) != len(values)
        or not (keys.dtype == values.dtype == stored)
        or len(strides) != 1
        or not all(each[:1].is_contiguous() for each in caches)
    ):
        raise ValueError(
            f"keys {keys.dtype} {tuple(keys.shape)} and values {values.dtype} "
            f"{tuple(values.shape)}: a cache of {shape} has contiguous blocks of {list(own[0])} "
            f"and {list(own[1])}, equally far apart"
        )
    return strides.pop()


class AttentionOperands(ctypes.Structure):
    """Mirrors `AttentionOperands` of src/graph.h."""

    _fields_ = [
        *members(POINTER, "k", "v", "sinks", "slopes", "distance_biases"),
        *members(INT64, "num_blocks", "block_stride", "reach"),
        *members(FLOAT, "scale", "softcap"),
        *members(POINTER, "query_positions", "key_positions", "buckets"),
        ("num_buckets", INT64),
        ("chosen", POINTER),
        ("top_k", INT64),
    ]
    kept: tuple[object, ...] = ()
    """Objects that pointers lead into."""


class KeyChoice(ctypes.Structure):
    """Mirrors `KeyChoice` of src/graph.h."""

    _fields_ = [
        *members(POINTER, "keys", "weights"),
        *members(INT64, "weights_stride", "num_blocks", "block_stride"),
        *members(INT64, "num_heads", "head_size", "top_k"),
    ]


def key_choice(index: KVCache, num_heads: int, plan: NativeAttentionPlan, top_k: int) -> KeyChoice:
    """Of a layer's choice, without the weights. Raises ValueError: an index of another format."""
    shape = index.shape
    if format_of(shape.dtype) != plan.geometry.kv_format:
        raise ValueError(f"an index of {shape.dtype}, the plan is for {plan.kv_shape.dtype}")
    return KeyChoice(
        keys=index.keys.data_ptr(),
        num_blocks=len(index.keys),
        block_stride=block_stride(*index.parts, shape),
        num_heads=num_heads,
        head_size=shape.key_size,
        top_k=top_k,
    )


def attention_operands(
    plan: NativeAttentionPlan,
    keys: torch.Tensor,
    values: torch.Tensor,
    params: AttentionParams,
    positions: PositionScores | None = None,
    address_of: Callable[[torch.Tensor], int] | None = None,
) -> AttentionOperands:
    """Of a layer. `address_of`: of a head's scores of positions, if they are no tensors.
    Raises ValueError: caches, weights or scores of another shape or format."""
    num_heads, reach = plan.geometry.num_query_heads, params.reach
    biases_HN = params.distance_bias_HN
    if biases_HN is not None:
        check_tensor("distance_bias", biases_HN, (num_heads, 2 * reach + 1))
    operands = AttentionOperands(
        k=keys.data_ptr(),
        v=values.data_ptr(),
        sinks=optional_address("sinks", params.sinks_H, num_heads),
        slopes=optional_address("slopes", params.alibi_slopes_H, num_heads),
        distance_biases=None if biases_HN is None else biases_HN.data_ptr(),
        reach=reach,
        num_blocks=len(keys),
        block_stride=block_stride(keys, values, plan.kv_shape),
        scale=params.scale,
        softcap=params.softcap or 0.0,
    )
    if positions is not None:
        operands.reach, operands.num_buckets = positions.reach, positions.num_buckets
        check_tensor("buckets", positions.buckets_N, (2 * positions.reach + 1,), torch.int32)
        operands.buckets = positions.buckets_N.data_ptr()
        shape = int(plan.geometry.num_tokens), positions.num_buckets
        find = address_of or partial(_address_of_scores, shape)
        kept = [(POINTER * num_heads)(*map(find, each)) for each in positions.of_heads(num_heads)]
        operands.query_positions, operands.key_positions = map(ctypes.addressof, kept)
        operands.kept = (*kept, positions)
    return operands


def _address_of_scores(shape: tuple[int, int], scores_TB: torch.Tensor) -> int:
    check_tensor("scores of positions", scores_TB, shape)
    return scores_TB.data_ptr()


class Rotary(ctypes.Structure):
    """Mirrors `Rotary` of src/rope.h."""

    _fields_ = [
        *members(POINTER, "qkv", "cos_sin", "positions", "slots", "k_cache", "v_cache"),
        *members(POINTER, "q_weight", "k_weight", "v_weight"),
        *members(INT64, "num_tokens", "qkv_stride", "num_positions", "num_slots"),
        *members(INT64, "num_query_heads", "num_kv_heads", "head_size", "half", "kv_format"),
        *members(INT64, "block_size", "block_stride"),
        ("eps", FLOAT),
    ]


def fill_rotary(call: Rotary, kv_cache: KVCache | None, params: RotaryParams) -> int:
    """The fields of `call` that are a layer's; those of a step are left. Returns the columns of its
    qkv. Raises ValueError: a weight or a cache of another shape, dtype or layout."""
    head_size, cos_sin_PD = params.head_size, params.cos_sin_PD
    call.cos_sin = cos_sin_PD.data_ptr()
    call.q_weight = optional_address("q_norm_weight", params.q_norm_weight_D, head_size)
    call.k_weight = optional_address("k_norm_weight", params.k_norm_weight_D, head_size)
    call.v_weight = optional_address("v_norm_weight", params.v_norm_weight_D, head_size)
    call.num_positions = cos_sin_PD.shape[0]
    call.num_query_heads, call.num_kv_heads = params.num_query_heads, 0
    call.head_size = head_size
    call.half = cos_sin_PD.shape[1] // 2
    call.eps = params.norm_eps
    if kv_cache is not None:
        shape = kv_cache.shape
        if shape.key_size != head_size:
            raise ValueError(f"heads of {head_size}, and a cache of {shape}")
        call.k_cache = kv_cache.keys.data_ptr()
        call.v_cache = None if shape.values_in_keys else kv_cache.values.data_ptr()
        call.num_kv_heads = shape.num_kv_heads
        call.num_slots = len(kv_cache.keys) * shape.block_size
        call.kv_format = format_of(shape.dtype)
        call.block_size = shape.block_size
        call.block_stride = block_stride(*kv_cache.parts, shape)
    kinds = 1 if kv_cache is not None and kv_cache.shape.values_in_keys else 2
    num_heads: int = call.num_query_heads + kinds * call.num_kv_heads
    return num_heads * head_size
