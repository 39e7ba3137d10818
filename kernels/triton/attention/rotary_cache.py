"""Norm of heads, rotation of queries and keys, and the write to the KV cache, in one launch.

Sources: rotary positions arXiv:2104.09864 (halves paired as in GPT-NeoX); norm of queries and keys
arXiv:2302.05442, RMSNorm arXiv:1910.07467."""

from collections.abc import Callable, Sequence

import torch
import triton
import triton.language as tl

from kernels.interface.kv_cache import KVCache
from kernels.interface.operations import RotaryParams
from kernels.triton.bound_launch import BoundLaunches, Launch
from kernels.triton.device_limits import dependent_launch
from kernels.triton.fp8_rounding import quantise
from kernels.triton.tensor_checks import check_tensor

_BLOCK_H = 8
"""Heads a program. Constant, so that a row's bits never depend on the size of the batch."""


@triton.jit
def _normed_part(x_HD, inverse_H, weight_ptr, offsets_D, is_inside_HD):
    """Round after each factor, as `rms_norm` does: x's dtype in and out, weight's in between."""
    dtype: tl.constexpr = x_HD.dtype
    middle: tl.constexpr = weight_ptr.dtype.element_ty
    # a tile of equal rows: it comes in the layout of x, 16 bytes a thread
    weight_HD = tl.broadcast_to(weight_ptr + offsets_D[None, :], x_HD.shape)
    weight_HD = tl.load(weight_HD, mask=is_inside_HD, other=0.0).to(tl.float32)
    normed_HD = (x_HD.to(tl.float32) * inverse_H[:, None]).to(middle).to(tl.float32)
    return (normed_HD * weight_HD).to(middle).to(tl.float32).to(dtype)


@triton.jit
def _turn_heads(
    src_H,  # pointers [BLOCK_H] to the heads of one token
    dst_H,  # pointers [BLOCK_H]; may be src_H
    is_head_H,
    weight_ptr,  # [D], if HAS_NORM
    norm_eps,
    angles_ptr,  # [2 * HALF] of the token, if HAS_ROPE: cosines, sines
    D: tl.constexpr,
    HALF: tl.constexpr,
    HALF_PAD: tl.constexpr,
    REST_PAD: tl.constexpr,  # 0: all of a head turns
    HAS_NORM: tl.constexpr,
    HAS_ROPE: tl.constexpr,
):
    # |<-- HALF -->|<-- HALF -->|<- the rest ->|  D elements as three tiles: both elements of a pair
    #    left          right       never turns    lie in one thread, which overwrites what it read
    stored: tl.constexpr = dst_H.dtype.element_ty
    half_D = tl.arange(0, HALF_PAD)
    in_half_HD = is_head_H[:, None] & (half_D < HALF)[None, :]
    left_HD = tl.load(src_H[:, None] + half_D[None, :], mask=in_half_HD, other=0.0)
    right_HD = tl.load(src_H[:, None] + (HALF + half_D)[None, :], mask=in_half_HD, other=0.0)
    if REST_PAD > 0:
        rest_D = 2 * HALF + tl.arange(0, REST_PAD)
        in_rest_HD = is_head_H[:, None] & (rest_D < D)[None, :]
        rest_HD = tl.load(src_H[:, None] + rest_D[None, :], mask=in_rest_HD, other=0.0)
    if HAS_NORM:
        left = left_HD.to(tl.float32)
        right = right_HD.to(tl.float32)
        square_H = tl.sum(left * left + right * right, axis=1)
        if REST_PAD > 0:
            rest = rest_HD.to(tl.float32)
            square_H += tl.sum(rest * rest, axis=1)
        inverse_H = tl.rsqrt(square_H / D + norm_eps)
        left_HD = _normed_part(left_HD, inverse_H, weight_ptr, half_D, in_half_HD)
        right_HD = _normed_part(right_HD, inverse_H, weight_ptr, HALF + half_D, in_half_HD)
        if REST_PAD > 0:
            rest_HD = _normed_part(rest_HD, inverse_H, weight_ptr, rest_D, in_rest_HD)
    if HAS_ROPE:
        # torch rounds each product to the tensor's dtype, but not the one it subtracts
        dtype: tl.constexpr = left_HD.dtype
        table: tl.constexpr = angles_ptr.dtype.element_ty
        # a tile of equal rows, as for the weight
        cos_HD = tl.broadcast_to(angles_ptr + half_D[None, :], left_HD.shape)
        cos = tl.load(cos_HD, mask=in_half_HD, other=0.0).to(tl.float32)
        sin = tl.load(cos_HD + HALF, mask=in_half_HD, other=0.0).to(tl.float32)
        left = left_HD.to(tl.float32)
        right = right_HD.to(tl.float32)
        left_sin = left * sin
        if table == dtype:
            left_sin = left_sin.to(dtype).to(tl.float32)
        left_HD = ((left * cos).to(dtype).to(tl.float32) - right * sin).to(dtype)
        right_HD = ((right * cos).to(dtype).to(tl.float32) + left_sin).to(dtype)
    if HAS_NORM and REST_PAD > 0:
        # a small rest is read by several warps, and dst may be src: none may write before all read
        tl.debug_barrier()
    left_HD = quantise(left_HD, 1.0, stored)
    right_HD = quantise(right_HD, 1.0, stored)
    tl.store(dst_H[:, None] + half_D[None, :], left_HD, mask=in_half_HD)
    tl.store(dst_H[:, None] + (HALF + half_D)[None, :], right_HD, mask=in_half_HD)
    if REST_PAD > 0:
        rest_HD = quantise(rest_HD, 1.0, stored)
        tl.store(dst_H[:, None] + rest_D[None, :], rest_HD, mask=in_rest_HD)


@triton.jit(do_not_specialize_on_alignment=["slots_ptr", "positions_ptr"])
def rotary_cache_kernel(
    q_ptr,  # [T, H, D], overwritten
    k_ptr,  # [T, K, D]
    v_ptr,  # [T, K, D]
    k_cache_ptr,  # [B, K, S, D]
    v_cache_ptr,  # [B, K, S, D]
    slots_ptr,  # int64 [T]
    positions_ptr,  # int64 [T]
    angles_ptr,  # [P, 2 * HALF]
    q_weight_ptr,  # [D]
    k_weight_ptr,  # [D]
    v_weight_ptr,  # [D]
    norm_eps,
    q_stride_t,
    k_stride_t,
    v_stride_t,
    k_stride_b,
    k_stride_h,
    k_stride_s,
    v_stride_b,
    v_stride_h,
    v_stride_s,
    H: tl.constexpr,  # 0: queries stay as they are
    K: tl.constexpr,
    D: tl.constexpr,
    S: tl.constexpr,
    HALF: tl.constexpr,
    HALF_PAD: tl.constexpr,
    REST_PAD: tl.constexpr,
    BLOCK_H: tl.constexpr,
    HAS_ROPE: tl.constexpr,
    HAS_Q_NORM: tl.constexpr,
    HAS_K_NORM: tl.constexpr,
    HAS_V_NORM: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    #  |<- ceil(H / BLOCK_H) ->|<- ceil(K / BLOCK_H) ->|<- ceil(K / BLOCK_H) ->|  programs a token
    #             q                       k                       v
    Q_PROGRAMS: tl.constexpr = (H + BLOCK_H - 1) // BLOCK_H
    K_PROGRAMS: tl.constexpr = (K + BLOCK_H - 1) // BLOCK_H
    token = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    slot = tl.load(slots_ptr + token).to(tl.int64)
    if slot >= 0:
        angles_at = angles_ptr
        if HAS_ROPE:
            angles_at = angles_ptr + tl.load(positions_ptr + token).to(tl.int64) * (2 * HALF)
        block = slot // S
        offset = slot % S
        lane_H = tl.arange(0, BLOCK_H)
        if part < Q_PROGRAMS:
            head_H = part * BLOCK_H + lane_H
            q_at = q_ptr + token * q_stride_t + head_H * D
            _turn_heads(
                q_at, q_at, head_H < H, q_weight_ptr, norm_eps, angles_at,
                D, HALF, HALF_PAD, REST_PAD, HAS_Q_NORM, HAS_ROPE,
            )  # fmt: skip
        elif part < Q_PROGRAMS + K_PROGRAMS:
            head_H = (part - Q_PROGRAMS) * BLOCK_H + lane_H
            k_at = k_cache_ptr + block * k_stride_b + offset * k_stride_s
            _turn_heads(
                k_ptr + token * k_stride_t + head_H * D,
                k_at + head_H.to(tl.int64) * k_stride_h,
                head_H < K, k_weight_ptr, norm_eps, angles_at,
                D, HALF, HALF_PAD, REST_PAD, HAS_K_NORM, HAS_ROPE,
            )  # fmt: skip
        else:
            head_H = (part - Q_PROGRAMS - K_PROGRAMS) * BLOCK_H + lane_H
            v_at = v_cache_ptr + block * v_stride_b + offset * v_stride_s
            _turn_heads(
                v_ptr + token * v_stride_t + head_H * D,
                v_at + head_H.to(tl.int64) * v_stride_h,
                head_H < K, v_weight_ptr, norm_eps, angles_at,
                D, HALF, HALF_PAD, REST_PAD, HAS_V_NORM, False,
            )  # fmt: skip


def rotary_and_cache(
    qkv_TN: torch.Tensor,
    positions_T: torch.Tensor,
    slot_mapping_T: torch.Tensor,
    kv_cache: KVCache | None,
    params: RotaryParams,
) -> torch.Tensor:
    """Norm q, k and v, rotate q and k, write k and v to the cache; one launch.

        x' = x / sqrt(mean(x^2) + eps) * weight                     if a weight is given
        left, right = left * cos - right * sin, right * cos + left * sin
        cache[slot // S, head, slot % S] = x', or fp8(clamp(x', -448, 448))

    Rounds where `kernels.torch.kv_cache` rounds. A token whose slot is negative is padding: nothing
    of it is read or written. Returns q_THD, a view of `qkv_TN`.

    Args:
        qkv_TN: [T, (H + 2K) * D], heads of q, then k, then v, rows contiguous; (H + K) * D where
            values are in the keys. Its queries are overwritten.
        positions_T: int64, each below P.
        slot_mapping_T: int64.
        kv_cache: [B, K, S, D] of the model's dtype or float8_e4m3fn, last dimension contiguous.
            None: `qkv_TN` is q alone, and nothing is written.
        params: the table [P, rotary_size] and the weights of norms in the model's dtype or
            float32; rotary_size <= D.
    """
    H, D = params.num_query_heads, params.head_size
    K = 0 if kv_cache is None else kv_cache.shape.num_kv_heads
    V = 0 if kv_cache is not None and kv_cache.shape.values_in_keys else K
    width = (H + K + V) * D

    def check() -> None:
        _check("qkv_TN", qkv_TN, (qkv_TN.shape[0], width), qkv_TN, contiguous_dims=1)
        _check("positions_T", positions_T, qkv_TN.shape[:1], qkv_TN, (torch.int64,))
        cos_sin_PD, dtypes = params.cos_sin_PD, (qkv_TN.dtype, torch.float32)
        shape = (cos_sin_PD.shape[0], min(cos_sin_PD.shape[-1] // 2 * 2, D))
        if cos_sin_PD.shape[-1]:
            _check("cos_sin_PD", cos_sin_PD, shape, qkv_TN, dtypes)
        for name in ("q_norm_weight_D", "k_norm_weight_D", "v_norm_weight_D"):
            if (weight_D := getattr(params, name)) is not None:
                _check(name, weight_D, (D,), qkv_TN, dtypes)

    if qkv_TN.dim() != 2 or qkv_TN.shape[1] != width:
        check()
    heads_THD = qkv_TN.view(qkv_TN.shape[0], -1, D)
    q_THD: torch.Tensor
    q_THD, k_TKD, v_TKD = heads_THD.split((H, K, V), dim=1)
    _launch((q_THD, k_TKD, v_TKD), kv_cache, slot_mapping_T, check, positions_T, params)
    return q_THD


def write_kv_cache(
    k_TKD: torch.Tensor,
    v_TKD: torch.Tensor,
    slot_mapping_T: torch.Tensor,
    kv_cache: KVCache,
) -> None:
    """Write keys and values as they are: `cache[slot // S, head, slot % S] = x`.

    Args: see `rotary_and_cache`. k_TKD, v_TKD: [T, K, D], the heads of a token contiguous.
    """

    def check() -> None:
        _check("k_TKD", k_TKD, k_TKD.shape, k_TKD, contiguous_dims=2)
        _check("v_TKD", v_TKD, k_TKD.shape, k_TKD, contiguous_dims=2)

    _launch((k_TKD[:, :0], k_TKD, v_TKD), kv_cache, slot_mapping_T, check)


def _launch(
    heads: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    kv_cache: KVCache | None,
    slot_mapping_T: torch.Tensor,
    check: Callable[[], None],
    positions_T: torch.Tensor | None = None,
    params: RotaryParams | None = None,
) -> None:
    """Without positions and parameters keys and values are written as they are. `check`: of what
    the caller was given."""
    table = q_weight = k_weight = v_weight = None
    norm_eps = 0.0
    if params is not None:
        norm_eps = params.norm_eps
        table = params.cos_sin_PD if params.cos_sin_PD.shape[1] else None  # nothing turns
        q_weight, k_weight = params.q_norm_weight_D, params.k_norm_weight_D
        v_weight = params.v_norm_weight_D
    unused = slot_mapping_T
    none_BKSD = heads[1][:, :, None]  # of no head, so that it is never written
    caches = (none_BKSD, none_BKSD) if kv_cache is None else kv_cache.parts
    tensors = (
        *heads,
        *caches,
        slot_mapping_T,
        unused if positions_T is None else positions_T,
        unused if table is None else table,
        unused if q_weight is None else q_weight,
        unused if k_weight is None else k_weight,
        unused if v_weight is None else v_weight,
    )

    def prepare() -> Launch:
        check()
        q_THD, k_TKD = heads[:2]
        num_tokens, K, D = k_TKD.shape
        k_cache, v_cache = caches
        B, S = k_cache.shape[0], k_cache.shape[2]
        dtypes = (k_TKD.dtype, torch.float8_e4m3fn)
        _check("slot_mapping_T", slot_mapping_T, (num_tokens,), k_TKD, (torch.int64,))
        _check("k_cache_BKSD", k_cache, (B, K, S, D), k_TKD, dtypes, contiguous_dims=1)
        V = heads[2].shape[1]  # 0: values are in the keys, and nothing is written of them
        v_shape = (B, K, S, D if V == K else v_cache.shape[3])
        _check("v_cache_BKSD", v_cache, v_shape, k_TKD, (k_cache.dtype,), contiguous_dims=1)
        H = q_THD.shape[1]
        # an odd head ends with an element of no pair
        rotary_size = D // 2 * 2 if table is None else table.shape[1]
        return Launch(
            (num_tokens, -(-H // _BLOCK_H) + -(-K // _BLOCK_H) + -(-V // _BLOCK_H)),
            (
                norm_eps,
                *(each.stride(0) for each in heads),
                *k_cache.stride()[:3],
                *v_cache.stride()[:3],
            ),
            {
                "S": S,
                "HAS_ROPE": table is not None,
                "HAS_Q_NORM": q_weight is not None,
                "HAS_K_NORM": k_weight is not None,
                "HAS_V_NORM": v_weight is not None,
                **constants_of(H, K, D, rotary_size),
                **dependent_launch(k_TKD.device),
                "num_warps": num_warps_of(rotary_size),
            },
        )

    if not slot_mapping_T.numel():
        prepare()
        return
    has = (table is None, q_weight is None, k_weight is None, v_weight is None)
    _launches(tensors, (norm_eps, has), prepare)


_launches = BoundLaunches(rotary_cache_kernel)


def _check(
    name: str,
    tensor: torch.Tensor,
    shape: Sequence[int],
    like: torch.Tensor,
    dtypes: tuple[torch.dtype, ...] = (),
    contiguous_dims: int | None = None,
) -> None:
    dtypes = dtypes or (like.dtype,)
    check_tensor(name, tensor, shape, dtypes, like.device, contiguous_dims=contiguous_dims)


def constants_of(H: int, K: int, D: int, rotary_size: int) -> dict[str, int]:
    rest = D - rotary_size
    return {
        "H": H,
        "K": K,
        "D": D,
        "HALF": rotary_size // 2,
        "HALF_PAD": triton.next_power_of_2(rotary_size // 2),
        "REST_PAD": triton.next_power_of_2(rest) if rest else 0,
        "BLOCK_H": _BLOCK_H,
    }


def num_warps_of(rotary_size: int) -> int:
    """The warps that read 16 bytes a thread of each half."""
    return max(1, _BLOCK_H * int(triton.next_power_of_2(rotary_size // 2)) // 256)
