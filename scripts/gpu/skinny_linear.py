"""An experiment: products of 1 to 16 rows by a split-K kernel of our own, beside cuBLAS. What wins
where K is at least N decides whether a layer's narrow products leave cuBLAS."""

# ruff: noqa: ANN001, ANN202 - Triton reads the types of a kernel's arguments from the call
import torch
import triton
import triton.language as tl

from kernels.triton.attention.reduce import all_arrived

_BLOCK_N, _BLOCK_K, _BLOCK_M = 64, 128, 16
_PROGRAMS_WANTED = 264
"""Two for each multiprocessor."""


@triton.jit(do_not_specialize=["num_rows"])
def _skinny_kernel(
    x_ptr,  # [T, K], T at most BLOCK_M
    weight_ptr,  # [N, K]
    parts_ptr,  # float32 [SPLITS, T, N]
    arrivals_ptr,  # int32 [N / BLOCK_N], all 0 before and after
    out_ptr,  # [T, N]
    num_rows,
    N: tl.constexpr,
    K: tl.constexpr,
    SPLITS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_M: tl.constexpr,
):
    block = tl.program_id(0)
    split = tl.program_id(1)
    n_N = block * BLOCK_N + tl.arange(0, BLOCK_N)
    m_M = tl.arange(0, BLOCK_M)
    acc_NM = tl.zeros((BLOCK_N, BLOCK_M), dtype=tl.float32)
    for start in range(split * (K // SPLITS), (split + 1) * (K // SPLITS), BLOCK_K):
        k_K = start + tl.arange(0, BLOCK_K)
        w_NK = tl.load(weight_ptr + n_N.to(tl.int64)[:, None] * K + k_K[None, :])
        x_KM = tl.load(
            x_ptr + m_M[None, :] * K + k_K[:, None], mask=(m_M < num_rows)[None, :], other=0.0
        )
        acc_NM = tl.dot(w_NK, x_KM, acc_NM, input_precision="ieee")
    at_NM = m_M[None, :] * N + n_N[:, None]
    is_row_NM = (m_M[None, :] < num_rows) & (n_N[:, None] < N)
    if SPLITS > 1:
        tl.store(parts_ptr + split * num_rows * N + at_NM, acc_NM, mask=is_row_NM)
        if all_arrived(arrivals_ptr + block, SPLITS):
            acc_NM = tl.zeros((BLOCK_N, BLOCK_M), dtype=tl.float32)
            for part in tl.static_range(SPLITS):
                acc_NM += tl.load(
                    parts_ptr + part * num_rows * N + at_NM,
                    mask=is_row_NM, other=0.0, cache_modifier=".cg",
                )  # fmt: skip
            tl.store(out_ptr + at_NM, acc_NM.to(out_ptr.dtype.element_ty), mask=is_row_NM)
    else:
        tl.store(out_ptr + at_NM, acc_NM.to(out_ptr.dtype.element_ty), mask=is_row_NM)


class SkinnyLinear:
    """A weight [N, K] and what its product needs; N a multiple of 64, K of 128."""

    def __init__(self, weight_NK: torch.Tensor) -> None:
        self._weight_NK = weight_NK
        num_outputs, num_inputs = weight_NK.shape
        splits, blocks = 1, num_outputs // _BLOCK_N
        while (
            splits < 16
            and blocks * splits < _PROGRAMS_WANTED
            and num_inputs % (2 * splits * _BLOCK_K) == 0
        ):
            splits *= 2
        self._splits = splits
        self._arrivals = weight_NK.new_zeros(blocks, dtype=torch.int32)
        self._parts = weight_NK.new_empty(splits * _BLOCK_M * num_outputs, dtype=torch.float32)

    def multiply(self, x_TK: torch.Tensor) -> torch.Tensor:
        """`x W^T` for at most 16 rows."""
        num_outputs, num_inputs = self._weight_NK.shape
        out_TN = x_TK.new_empty(x_TK.shape[0], num_outputs)
        _skinny_kernel[(num_outputs // _BLOCK_N, self._splits)](
            x_TK,
            self._weight_NK,
            self._parts,
            self._arrivals,
            out_TN,
            x_TK.shape[0],
            N=num_outputs,
            K=num_inputs,
            SPLITS=self._splits,
            BLOCK_N=_BLOCK_N,
            BLOCK_K=_BLOCK_K,
            BLOCK_M=_BLOCK_M,
            num_warps=4,
            num_stages=4,
        )
        return out_TN


def check(rows: int, inputs: int, outputs: int, dtype: torch.dtype, device: str) -> float:
    """Largest difference to float64's result, as a share of the largest number."""
    x_TK = torch.randn(rows, inputs, device=device).to(dtype)
    linear = SkinnyLinear(torch.randn(outputs, inputs, device=device).to(dtype))
    expected = x_TK.double() @ linear._weight_NK.double().T
    for _ in range(2):  # the second finds the counters as the first left them
        found = linear.multiply(x_TK).double()
    return float((found - expected).abs().max() / expected.abs().max())
