"""Our own dense products, for `--batch-invariant`: right, the same bits a row in every batch, and
what that costs beside cuBLAS."""

import torch

from kernels.interface.kv_cache import KVShape
from kernels.interface.operations import AttentionParams, AttentionSpec, allocate_kv_cache
from kernels.triton.linear.dense import dense_linear
from kernels.triton.operations import TritonOperations
from tests.gpu.checks.errors import (
    INVARIANT_ROWS,
    num_different,
    num_different_in_batches,
    row_error,
)

ROUNDING = 1e-2


def check(rows: int, inputs: int, outputs: int, dtype: torch.dtype, *, device: str) -> float:
    x_TE, weight_NE, bias_N = _inputs(rows, inputs, outputs, dtype, device)
    expected_TN = x_TE.double() @ weight_NE.double().T + bias_N.double()
    return row_error(dense_linear(x_TE, weight_NE, bias_N), expected_TN)


def check_same_bits(
    inputs: int,
    outputs: int,
    dtype: torch.dtype,
    *,
    rows: tuple[int, ...] = INVARIANT_ROWS,
    device: str,
) -> float:
    """See `num_different_in_batches`."""
    x_TE, weight_NE, bias_N = _inputs(max(rows), inputs, outputs, dtype, device)
    return num_different_in_batches(lambda some: dense_linear(x_TE[some], weight_NE, bias_N), rows)


def check_attention_in_chunks(
    length: int,
    *,
    dtype: torch.dtype = torch.bfloat16,
    kv_dtype: torch.dtype | None = None,
    heads: int = 8,
    head_size: int = 64,
    device: str,
) -> float:
    """Elements of a sequence's attention that differ between one prefill and token by token, as
    batch-invariant operations plan them."""
    kv_heads, block_size, kv_dtype = heads // 4, 16, kv_dtype or dtype
    place = torch.device(device)
    ops = TritonOperations(place, batch_invariant=True)
    num_blocks = -(-length // block_size)
    shape = KVShape(block_size, kv_heads, head_size, head_size, kv_dtype)
    cache = allocate_kv_cache(ops, num_blocks, shape)
    for view in cache.parts:
        view.copy_(torch.randn(view.shape, device=device))
    spec = AttentionSpec(
        num_query_heads=heads,
        num_kv_heads=kv_heads,
        head_size=head_size,
        block_size=block_size,
        sliding_window=None,
        max_num_seqs=1,
        max_num_batched_tokens=length,
        max_model_len=length,
        dtype=dtype,
        kv_dtype=kv_dtype,
    )
    planner = ops.make_attention_planner(spec)
    q_THD = torch.randn(length, heads, head_size, device=device).to(dtype)

    def attend(start: int, stop: int) -> torch.Tensor:
        metadata = planner.plan(
            query_start_loc_R1=torch.tensor([0, stop - start], dtype=torch.int32, device=device),
            seq_lens_R=torch.tensor([stop], dtype=torch.int32, device=device),
            block_table_RM=torch.arange(num_blocks, dtype=torch.int32, device=device)[None],
            slot_mapping_T=torch.zeros(stop - start, dtype=torch.int64, device=device),
            num_decodes=int(stop - start == 1),
            num_decode_tokens=int(stop - start == 1),
        )
        return ops.paged_attention(
            q_THD[start:stop], *cache.parts, metadata, AttentionParams(scale=0.125)
        )

    one_by_one = torch.cat([attend(token, token + 1) for token in range(length)])
    return num_different(one_by_one, attend(0, length))


def _inputs(
    rows: int, inputs: int, outputs: int, dtype: torch.dtype, device: str
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    x_TE = torch.randn(rows, inputs, device=device).to(dtype)
    weight_NE = torch.randn(outputs, inputs, device=device).mul_(inputs**-0.5).to(dtype)
    return x_TE, weight_NE, torch.randn(outputs, device=device).to(dtype)
