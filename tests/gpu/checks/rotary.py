"""Norm, rotation and cache write in one launch."""

from dataclasses import dataclass

import torch

from kernels.interface.kv_cache import KVCache, KVShape
from kernels.interface.operations import RotaryParams
from kernels.torch.kv_cache import rotary_and_cache as torch_rotary_and_cache
from kernels.triton.attention.rotary_cache import rotary_and_cache
from kernels.triton.fp8_rounding import quantise_reference
from tests.gpu.checks.errors import row_error, worst

EPS = 1e-6
ROUNDING = 1.5e-2
"""Up to four roundings to bf16: norm, weight, the product with the cosine, the difference."""
FP8_ROUNDING = 0.08
"""float8_e4m3fn keeps 3 bits after the leading one: 2^-4 of a value at most, and bf16 before."""
MAX_POSITION = 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """Of a model's attention layer."""

    num_query_heads: int
    num_kv_heads: int
    head_size: int
    rotary_size: int
    with_norm: bool = False
    block_size: int = 16


LLAMA = Shape(num_query_heads=32, num_kv_heads=8, head_size=128, rotary_size=128)
QWEN3 = Shape(num_query_heads=16, num_kv_heads=8, head_size=128, rotary_size=128, with_norm=True)
QWEN25 = Shape(num_query_heads=14, num_kv_heads=2, head_size=64, rotary_size=64, block_size=64)
PHI4 = Shape(num_query_heads=24, num_kv_heads=8, head_size=128, rotary_size=96)
PHI2 = Shape(num_query_heads=32, num_kv_heads=32, head_size=80, rotary_size=32)
GEMMA = Shape(num_query_heads=8, num_kv_heads=4, head_size=256, rotary_size=256, with_norm=True)


SHAPES = {
    "Llama-3.1-8B": LLAMA,
    "Qwen3-0.6B": QWEN3,
    "Qwen2.5 S=64": QWEN25,
    "Phi-4-mini": PHI4,
    "Phi-2": PHI2,
    "Gemma-3": GEMMA,
}


class Inputs:
    """Random tensors of a step; every seventh token is padding."""

    def __init__(self, shape: Shape, num_tokens: int, kv_dtype: torch.dtype, device: str) -> None:
        num_blocks = -(-num_tokens // shape.block_size) + 3
        heads = shape.num_query_heads + 2 * shape.num_kv_heads

        def randn(*size: int) -> torch.Tensor:
            return torch.randn(size, dtype=torch.bfloat16, device=device)

        self.shape = shape
        self.qkv_TN = randn(num_tokens, heads * shape.head_size)
        slots_T = torch.randperm(num_blocks * shape.block_size, device=device)[:num_tokens]
        slots_T[6::7] = -1
        self.slots_T = slots_T
        self.positions_T = torch.randint(MAX_POSITION, (num_tokens,), device=device)
        angle_PD = torch.rand(MAX_POSITION, shape.rotary_size // 2, device=device) * 6.3
        self.cos_sin_PD = torch.cat([angle_PD.cos(), angle_PD.sin()], dim=1).bfloat16()
        self.q_weight_D = randn(shape.head_size) if shape.with_norm else None
        self.k_weight_D = randn(shape.head_size) if shape.with_norm else None
        size = (num_blocks, 2, shape.num_kv_heads, shape.block_size, shape.head_size)
        # written through the interface of the kernels' cache: one tensor a layer
        self.kv_B2KSD = torch.full(size, 7.0, device=device).to(kv_dtype)

    def call(self) -> torch.Tensor:
        """The kernel; overwrites queries in place."""
        return rotary_and_cache(
            self.qkv_TN,
            self.positions_T,
            self.slots_T,
            self.cache_of(self.kv_B2KSD),
            self.params(torch.bfloat16),
        )

    def cache_of(self, kv_B2KSD: torch.Tensor) -> KVCache:
        shape = self.shape
        sizes = shape.block_size, shape.num_kv_heads, shape.head_size, shape.head_size
        return KVCache(kv_B2KSD[:, 0], kv_B2KSD[:, 1], KVShape(*sizes, kv_B2KSD.dtype))

    def params(self, dtype: torch.dtype) -> RotaryParams:
        q_weight_D, k_weight_D = self.q_weight_D, self.k_weight_D
        return RotaryParams(
            num_query_heads=self.shape.num_query_heads,
            head_size=self.shape.head_size,
            cos_sin_PD=self.cos_sin_PD.to(dtype),
            q_norm_weight_D=None if q_weight_D is None else q_weight_D.to(dtype),
            k_norm_weight_D=None if k_weight_D is None else k_weight_D.to(dtype),
            norm_eps=EPS,
        )


def rotary_and_cache_reference(
    qkv_TN: torch.Tensor,
    positions_T: torch.Tensor,
    slot_mapping_T: torch.Tensor,
    kv_cache: KVCache,
    params: RotaryParams,
) -> torch.Tensor:
    """`kernels.torch.kv_cache` on the real tokens, then rounded; changes the caches only: q_THD."""
    num_tokens, K, S = qkv_TN.shape[0], kv_cache.shape.num_kv_heads, kv_cache.shape.block_size
    real_T = slot_mapping_T >= 0
    slots_N = slot_mapping_T[real_T]
    num_real = slots_N.numel()
    k_N1KD, v_N1KD = qkv_TN.new_empty(2, num_real, 1, K, params.head_size)
    places_N = torch.arange(num_real, device=qkv_TN.device)
    real = (qkv_TN[real_T], positions_T[real_T], places_N)
    shape = KVShape(1, K, params.head_size, params.head_size, qkv_TN.dtype)
    q_NHD = torch_rotary_and_cache(*real, KVCache(k_N1KD, v_N1KD, shape), params)
    blocks_N, offsets_N = slots_N // S, slots_N % S
    for part_N1KD, cache_BKSD in zip((k_N1KD, v_N1KD), kv_cache.parts, strict=True):
        written_NKD = part_N1KD[:, 0]
        if cache_BKSD.dtype == torch.float8_e4m3fn:
            written_NKD = quantise_reference(written_NKD).view(torch.uint8)
            cache_BKSD = cache_BKSD.view(torch.uint8)
        cache_BKSD[blocks_N, :, offsets_N] = written_NKD
    q_THD = qkv_TN.clone().view(num_tokens, -1, params.head_size)[:, : params.num_query_heads]
    q_THD[real_T] = q_NHD
    return q_THD


def check(shape: Shape, num_tokens: int, kv_dtype: torch.dtype, *, device: str) -> float:
    """Queries and both caches, what stays as it was included, against float32 arithmetic."""
    inputs = Inputs(shape, num_tokens, kv_dtype, device)
    expected_B2KSD = inputs.kv_B2KSD.float()
    expected_q = rotary_and_cache_reference(
        inputs.qkv_TN.float(),
        inputs.positions_T,
        inputs.slots_T,
        inputs.cache_of(expected_B2KSD),
        inputs.params(torch.float32),
    )
    q_THD = inputs.call()
    return worst(row_error(q_THD, expected_q), row_error(inputs.kv_B2KSD.float(), expected_B2KSD))
