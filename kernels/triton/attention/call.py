"""A call of paged attention: its checks, and what its launches for decodes and prefills share."""

from collections.abc import Hashable
from typing import NamedTuple

import torch

from kernels.interface.operations import AttentionParams
from kernels.triton.attention.work import AttentionWork
from kernels.triton.bound_launch import Launch
from kernels.triton.device_limits import LARGEST_HEAD, dependent_launch
from kernels.triton.tensor_checks import check_tensor

_LOG2_E = 1.4426950408889634
_STRIDES = ("BLOCK_STRIDE", "HEAD_STRIDE", "SLOT_STRIDE")
"""Constants of both kernels, as a product with one is a single instruction."""
_KV_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float8_e4m3fn)


class AttentionCall(NamedTuple):
    """See `paged_attention` for every argument; `work` is the plan of the step."""

    q_THD: torch.Tensor
    k_cache_BKSD: torch.Tensor
    v_cache_BKSD: torch.Tensor
    block_table_RM: torch.Tensor
    work: AttentionWork
    params: AttentionParams
    out_THD: torch.Tensor

    @property
    def options(self) -> Hashable:
        """All that a launch follows from, beside its tensors."""
        params = self.params
        has = (params.sinks_H is None, params.alibi_slopes_H is None)
        own = (params.scale, params.softcap, params.sliding_window)
        return own, has, self.work.host_numbers

    def tensors(self, entries_W8: torch.Tensor, arrivals: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Of a launch on these entries of the plan, in the kernels' order."""
        q_THD, work, params = self.q_THD, self.work, self.params
        return (
            q_THD,
            self.k_cache_BKSD,
            self.v_cache_BKSD,
            self.block_table_RM,
            entries_W8,
            work.counts_3,
            q_THD if params.alibi_slopes_H is None else params.alibi_slopes_H,
            q_THD if params.sinks_H is None else params.sinks_H,
            work.partial_out,
            work.partial_lse,
            arrivals,
            self.out_THD,
        )

    def launch(self, grid: tuple[int, ...], options: dict[str, int], *numbers: int) -> Launch:
        """What both kernels take behind `tensors`; `numbers`: what one takes behind that."""
        work, params, caches = self.work, self.params, self.k_cache_BKSD
        return Launch(
            grid,
            (
                self.block_table_RM.stride(0),
                *self.q_THD.stride()[:2],
                *self.out_THD.stride()[:2],
                *_score_numbers(params),
                work.sliding_window or 0,
                *numbers,
            ),
            {
                "K": caches.shape[1],
                "S": caches.shape[2],
                **dict(zip(_STRIDES, caches.stride()[:3], strict=True)),
                "HAS_WINDOW": work.sliding_window is not None,
                "HAS_SOFTCAP": params.softcap is not None,
                "HAS_ALIBI": params.alibi_slopes_H is not None,
                "HAS_SINKS": params.sinks_H is not None,
                "BY_BITS": work.variant.float8_by_bits and caches.dtype == _KV_DTYPES[3],
                **options,
                **dependent_launch(self.q_THD.device),
            },
        )

    def check(self) -> None:
        """Raises ValueError or TypeError: tensors that do not fit each other or the plan."""
        q_THD, k_cache, v_cache, work = self.q_THD, self.k_cache_BKSD, self.v_cache_BKSD, self.work
        sliding_window, softcap = self.params.sliding_window, self.params.softcap
        if q_THD.dim() != 3 or k_cache.dim() != 4 or k_cache.shape != v_cache.shape:
            raise ValueError(
                f"q is {tuple(q_THD.shape)}, caches {tuple(k_cache.shape)} and"
                f" {tuple(v_cache.shape)}; give [T, H, D] and two [B, K, S, D]"
            )
        num_kv_heads, block_size, head_size = k_cache.shape[1:]
        if (work.num_query_heads, work.num_kv_heads) != (q_THD.shape[1], num_kv_heads):
            raise ValueError(
                f"{q_THD.shape[1]} query and {num_kv_heads} key/value heads, but the plan was made"
                f" for {work.num_query_heads} and {work.num_kv_heads}; use the workspace of this"
                " layer"
            )
        if q_THD.shape[2] != head_size or head_size > LARGEST_HEAD:
            raise ValueError(
                f"head size {q_THD.shape[2]} of q, {head_size} of the cache; they must be equal and"
                f" at most {LARGEST_HEAD}"
            )
        if block_size & (block_size - 1):
            raise ValueError(
                f"block size {block_size} is not a power of two; allocate 16 to 128 slots"
            )
        if q_THD.stride(2) != 1 or k_cache.stride(3) != 1:
            raise ValueError("the elements of a head are not contiguous; give q and caches so")
        if k_cache.stride() != v_cache.stride():
            raise ValueError(
                f"strides {k_cache.stride()} of keys, {v_cache.stride()} of values; give both of"
                " one cache"
            )
        if k_cache.dtype != v_cache.dtype or k_cache.dtype not in _KV_DTYPES:
            raise TypeError(f"caches are {k_cache.dtype} and {v_cache.dtype}")
        if q_THD.dtype not in _KV_DTYPES[:3] or k_cache.dtype not in (q_THD.dtype, _KV_DTYPES[3]):
            raise TypeError(
                f"q is {q_THD.dtype}, the cache {k_cache.dtype}; give one of float16, bfloat16,"
                " float32, and a cache of that dtype or float8_e4m3fn"
            )
        if sliding_window != work.sliding_window:
            raise ValueError(
                f"sliding window {sliding_window}, but the plan was made for {work.sliding_window};"
                " use the workspace of this layer"
            )
        if not self.params.scale > 0 or (softcap is not None and not softcap > 0):
            raise ValueError(f"scale {self.params.scale} and softcap {softcap} must be above 0")
        if q_THD.device != k_cache.device or work.splits_W8.device != q_THD.device:
            raise ValueError(
                f"q is on {q_THD.device}, the cache on {k_cache.device}, the plan on"
                f" {work.splits_W8.device}; give one device"
            )
        numbers = work.num_scratch_rows * head_size
        if work.partial_out.numel() < numbers:
            raise ValueError(
                f"scratch of {work.partial_out.numel()} numbers, {numbers} are needed; make"
                f" the workspace for head size {head_size}"
            )
        self._check_others()

    def _check_others(self) -> None:
        """Raises ValueError: sinks, slopes, a table or results of another shape or dtype."""
        device, H = self.q_THD.device, self.q_THD.shape[1]
        if self.params.distance_bias_HN is not None:
            raise ValueError("distance_bias_HN is for a CPU; give --device cpu")
        for name in ("sinks_H", "alibi_slopes_H"):
            if (numbers_H := getattr(self.params, name)) is not None:
                check_tensor(name, numbers_H, (H,), torch.float32, device)
        table_RM = self.block_table_RM[: self.work.num_requests]  # it may have more rows
        shape = (self.work.num_requests, table_RM.shape[-1])
        check_tensor("block_table_RM", table_RM, shape, torch.int32, device, contiguous_dims=1)
        q_THD, out_THD = self.q_THD, self.out_THD
        if (ends_T := self.work.ends_T) is not None:
            check_tensor("ends_T", ends_T, q_THD.shape[:1], torch.int32, device)
        check_tensor("out", out_THD, q_THD.shape, q_THD.dtype, device, contiguous_dims=1)


def _score_numbers(params: AttentionParams) -> tuple[float, float]:
    """(score_scale, multiplier) of `attend_tile`, which works in units of log2."""
    scale = params.scale
    if params.softcap is not None:
        return scale / params.softcap, params.softcap * _LOG2_E
    return scale * _LOG2_E, scale * _LOG2_E
