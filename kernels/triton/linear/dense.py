"""`x @ weight.T + bias` whose rows do not depend on how many rows there are.

The tile depends on the weight alone and E is summed from first to last, unlike in a library, which
chooses its kernel by the rows ("Defeating Nondeterminism in LLM Inference", He et al. 2025)."""

import torch
import triton
import triton.language as tl

from kernels.triton.tensor_checks import FLOATS, check_tensor

ROW_TILES = 8
"""Row tiles that run side by side: so many read a weight's tile out of the L2 cache."""
_MANY_OUTPUTS = 8192
"""From here on wide tiles fill a GPU of 132 multiprocessors about half even with few rows; narrower
weights get narrower tiles."""


def linear_reference(
    x_TE: torch.Tensor, weight_NE: torch.Tensor, bias_N: torch.Tensor | None
) -> torch.Tensor:
    """The specification, in float64, rounded once."""
    out_TN = x_TE.double() @ weight_NE.double().T
    if bias_N is not None:
        out_TN += bias_N.double()
    return out_TN.to(x_TE.dtype)


@triton.jit
def row_tiles_side_by_side(
    program, num_rows, N: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_N: tl.constexpr,
    ROW_TILES: tl.constexpr,
):  # fmt: skip
    """(row tile, output tile) of a program: ROW_TILES of one output tile, then of the next."""
    N_TILES: tl.constexpr = (N + BLOCK_N - 1) // BLOCK_N
    row_tiles = (num_rows + BLOCK_T - 1) // BLOCK_T
    first_tile = program // (ROW_TILES * N_TILES) * ROW_TILES
    side_by_side = tl.minimum(row_tiles - first_tile, ROW_TILES)
    within = program % (ROW_TILES * N_TILES)
    return first_tile + within % side_by_side, within // side_by_side


@triton.jit(do_not_specialize=["num_rows"])
def dense_linear_kernel(
    x_ptr,  # [T, E]
    weight_ptr,  # [N, E]
    bias_ptr,  # [N], if HAS_BIAS
    out_ptr,  # [T, N], written
    num_rows,  # T
    x_stride_t,
    weight_stride_n,
    out_stride_t,
    N: tl.constexpr,
    E: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_E: tl.constexpr,
    ROW_TILES: tl.constexpr,
    HAS_BIAS: tl.constexpr,
):
    row_tile, column_tile = row_tiles_side_by_side(
        tl.program_id(0), num_rows, N, BLOCK_T, BLOCK_N, ROW_TILES
    )
    row_T = row_tile * BLOCK_T + tl.arange(0, BLOCK_T)
    column_N = column_tile * BLOCK_N + tl.arange(0, BLOCK_N)
    is_row_T = row_T < num_rows
    is_column_N = column_N < N
    inner_E = tl.arange(0, BLOCK_E)
    x_TE = x_ptr + row_T.to(tl.int64)[:, None] * x_stride_t + inner_E[None, :]
    weight_EN = weight_ptr + column_N.to(tl.int64)[None, :] * weight_stride_n + inner_E[:, None]
    acc_TN = tl.zeros([BLOCK_T, BLOCK_N], dtype=tl.float32)
    for start in range(0, E, BLOCK_E):
        if E % BLOCK_E == 0:
            x = tl.load(x_TE + start, mask=is_row_T[:, None], other=0.0)
            weight = tl.load(weight_EN + start, mask=is_column_N[None, :], other=0.0)
        else:
            is_inner_E = inner_E < E - start
            x = tl.load(x_TE + start, mask=is_row_T[:, None] & is_inner_E[None, :], other=0.0)
            weight = tl.load(
                weight_EN + start, mask=is_column_N[None, :] & is_inner_E[:, None], other=0.0
            )
        acc_TN = tl.dot(x, weight, acc=acc_TN, input_precision="ieee")
    if HAS_BIAS:
        bias_N = tl.load(bias_ptr + column_N, mask=is_column_N, other=0.0).to(tl.float32)
        acc_TN += bias_N[None, :]
    out_TN = out_ptr + row_T.to(tl.int64)[:, None] * out_stride_t + column_N[None, :]
    tl.store(
        out_TN, acc_TN.to(out_ptr.dtype.element_ty), mask=is_row_T[:, None] & is_column_N[None, :]
    )


def dense_linear(
    x_TE: torch.Tensor, weight_NE: torch.Tensor, bias_N: torch.Tensor | None = None
) -> torch.Tensor:
    """`x @ weight.T + bias`, summed in float32 and rounded once.

    A row of the result depends on that row of x and the weight alone, bit for bit.
    Returns a new tensor [T, N] of x's dtype.

    Args:
        x_TE: float32, float16 or bfloat16, rows contiguous.
        weight_NE: of x's dtype, rows contiguous.
        bias_N: of x's dtype, contiguous.
    """
    if x_TE.dim() != 2 or weight_NE.dim() != 2:
        raise ValueError(
            f"x has {x_TE.dim()} dimensions and the weight {weight_NE.dim()}; make them [T, E] and "
            "[N, E]"
        )
    (T, E), N = x_TE.shape, weight_NE.shape[0]
    device, own = x_TE.device, x_TE.dtype
    check_tensor("x_TE", x_TE, (T, E), FLOATS, device, contiguous_dims=1)
    check_tensor("weight_NE", weight_NE, (N, E), own, device, contiguous_dims=1)
    if bias_N is not None:
        check_tensor("bias_N", bias_N, (N,), own, device)
    out_TN = torch.empty((T, N), dtype=x_TE.dtype, device=device)
    if not T or not N:
        return out_TN
    constants, launch = configuration(N, E, x_TE.dtype)
    num_programs = triton.cdiv(T, constants["BLOCK_T"]) * triton.cdiv(N, constants["BLOCK_N"])
    dense_linear_kernel[(num_programs,)](
        x_TE,
        weight_NE,
        weight_NE if bias_N is None else bias_N,
        out_TN,
        T,
        x_TE.stride(0),
        weight_NE.stride(0),
        out_TN.stride(0),
        HAS_BIAS=bias_N is not None,
        **constants,
        **launch,
    )
    return out_TN


def configuration(N: int, E: int, dtype: torch.dtype) -> tuple[dict[str, int], dict[str, int]]:
    """(constants, launch options): functions of the weight, never of the number of rows."""
    if dtype == torch.float32:  # exact products need the plain units, and twice the memory
        blocks, launch = (64, 64, 32), {"num_warps": 4, "num_stages": 3}
    elif N >= _MANY_OUTPUTS:
        blocks, launch = (128, 128, 64), {"num_warps": 8, "num_stages": 4}
    else:
        blocks, launch = (128, 64, 64), {"num_warps": 8, "num_stages": 4}
    constants = {"N": N, "E": E, "ROW_TILES": ROW_TILES}
    return constants | dict(zip(("BLOCK_T", "BLOCK_N", "BLOCK_E"), blocks, strict=True)), launch
