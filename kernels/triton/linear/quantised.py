"""Products with weight-only float8, int8 and int4: y = x W^T + bias.

For few rows (`most_packed_rows`) the kernel widens the packed weight in registers, in splits along
E that follow from the weight's shape alone. Above, cuBLAS takes the widened weight, except with
`batch_invariant`."""

from typing import Any

import torch
import torch.nn.functional as F
import triton
import triton.language as tl

from kernels.triton.bound_launch import BoundLaunches, Launch
from kernels.triton.device_limits import SHORT_SHARED_BYTES, dependent_launch, shared_memory
from kernels.triton.linear.packed_reads import add_packed, load_scaled
from kernels.triton.linear.quantised_weights import QuantisedWeight, dequantise
from kernels.triton.tensor_checks import FLOATS, check_tensor

BLOCK_N = 64
BLOCK_J = 64
"""Outputs, and bytes of each, that are read at a time."""


@triton.jit
def dequantise_kernel(
    packed_ptr,  # uint8 or int8 [N, J]
    scales_ptr,  # [N, G]
    offsets_ptr,  # [N, G]; unused without HAS_OFFSETS
    supers_ptr,  # as in load_scaled
    out_ptr,  # [N, K]
    N: tl.constexpr,
    K: tl.constexpr,
    BITS: tl.constexpr,
    GROUP: tl.constexpr,
    HAS_OFFSETS: tl.constexpr,
    ZEROS: tl.constexpr,
    LEVELS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_J: tl.constexpr,
):
    J: tl.constexpr = K * BITS // 8
    n_N = tl.program_id(0).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    j_start = tl.program_id(1) * BLOCK_J
    low_NJ, high_NJ = load_scaled(
        packed_ptr, scales_ptr, offsets_ptr, supers_ptr, n_N, j_start, N, J, BITS,
        GROUP * BITS // 8, HAS_OFFSETS, ZEROS, LEVELS, N % BLOCK_N == 0 and J % BLOCK_J == 0,
        BLOCK_N, BLOCK_J,
    )  # fmt: skip
    j_J = j_start + tl.arange(0, BLOCK_J)
    k_J = j_J if BITS == 8 else j_J // 16 * 32 + j_J % 16
    out_NJ = out_ptr + n_N[:, None] * K + k_J[None, :]
    keep_NJ = (n_N < N)[:, None] & (j_J < J)[None, :]
    tl.store(out_NJ, low_NJ.to(out_ptr.dtype.element_ty), mask=keep_NJ)
    if BITS == 4:
        tl.store(out_NJ + 16, high_NJ.to(out_ptr.dtype.element_ty), mask=keep_NJ)


def dequantise_to(weight: QuantisedWeight, dtype: torch.dtype) -> torch.Tensor:
    """The weight widened on its device, [N, E] in `dtype`: `dequantise`, rounded."""
    if dtype not in FLOATS:
        raise TypeError(f"cannot widen to {dtype}; give one of {FLOATS}")
    packed_NJ = weight.packed_NJ
    w_NE = torch.empty(weight.num_outputs, weight.num_inputs, dtype=dtype, device=packed_NJ.device)
    blocks_n = triton.cdiv(weight.num_outputs, BLOCK_N)
    dequantise_kernel[(blocks_n, triton.cdiv(packed_NJ.shape[1], BLOCK_J))](
        packed_NJ,
        weight.scales_NG,
        weight.offsets_NG,
        weight.supers_NSC,
        w_NE,
        **weight_constants(weight),
        num_warps=4,
    )
    if weight.input_order_E is None:
        return w_NE
    in_order_NE = torch.empty_like(w_NE)
    return in_order_NE.index_copy_(1, weight.input_order_E, w_NE)


def weight_constants(weight: QuantisedWeight) -> dict[str, Any]:
    """Constants that every kernel that reads a weight is compiled for."""
    block_j = BLOCK_J
    # one group a row may be of any length; then its one scale serves every block
    group_size = weight.group_size
    group_j = group_size * weight.num_bits // 8
    assert group_j % block_j == 0 or block_j % group_j == 0 or group_size == weight.num_inputs
    return {
        "N": weight.num_outputs,
        "K": weight.num_inputs,
        "BITS": weight.num_bits,
        "GROUP": group_size,
        "HAS_OFFSETS": weight.offsets_NG is not None,
        "ZEROS": weight.has_zero_points,
        "LEVELS": weight.levels,
        "BLOCK_N": BLOCK_N,
        "BLOCK_J": block_j,
    }


MOST_FEW_ROWS = 64
"""The most rows of a tile of 64 outputs, and of a float32 product with a packed weight."""
MOST_PACKED_ROWS = {"in pairs": 256, "one by one": 128}
"""Rows up to which weights are widened in registers, by how they are: for more, to memory. 64 for
both is what was measured."""

_PROGRAMS_WANTED = 264
"""Two for each of the 132 multiprocessors of an H200; a constant, because results depend on it."""
_LEAST_STEPS_A_SPLIT = 4
REDUCED_AT_ONCE = 512
_ROWS_A_LAUNCH = 1024
"""Bounds the memory of the parts that are still to be added."""


def reference_quantised_linear(
    x_TE: torch.Tensor, weight: QuantisedWeight, bias_N: torch.Tensor | None = None
) -> torch.Tensor:
    """The specification, in float32. Kernels round weights to the dtype of x, but for int4 in
    groups of 128 and more; of Q4_1 and Q4_K as `packed_reads.load_codes` says."""
    return F.linear(x_TE.float(), dequantise(weight), None if bias_N is None else bias_N.float())


def choose_splits(num_outputs: int, num_bytes_a_row: int) -> int:
    """Parts that E is cut into: a power of two that fills the device, at most 16."""
    steps = triton.cdiv(num_bytes_a_row, BLOCK_J)
    programs = triton.cdiv(num_outputs, BLOCK_N)
    splits = 1
    while (
        splits < 16
        and programs * splits * 2 <= _PROGRAMS_WANTED
        and steps >= splits * 2 * _LEAST_STEPS_A_SPLIT
    ):
        splits *= 2
    return splits


def most_packed_rows(weight: QuantisedWeight, dtype: torch.dtype) -> int:
    """Of activations of `dtype`. Two tiles of rows widen a weight twice."""
    if dtype == torch.float32:
        return MOST_FEW_ROWS
    is_plain = weight.num_bits == 4 and not weight.is_e2m1 and not weight.levels
    has_minima = weight.offsets_NG is not None and not weight.has_zero_points
    in_groups = weight.group_size in (32, 64)
    has_pairs = is_plain and (in_groups if has_minima else weight.supers_NSC is None)
    return MOST_PACKED_ROWS["in pairs" if has_pairs else "one by one"]


def choose_tile_rows(
    num_rows: int, dtype: torch.dtype, most_rows: int, *, batch_invariant: bool
) -> int | None:
    """Rows of the kernel's tile; None: above `most_rows` the weight is widened."""
    if num_rows > most_rows and not batch_invariant:
        return None
    if dtype == torch.float32:  # it has no tensor cores: more would only fill the registers
        return 16
    return MOST_FEW_ROWS if batch_invariant else max(16, min(128, triton.next_power_of_2(num_rows)))


def tile_outputs(tile_rows: int) -> int:
    """Two groups of warps have 64 outputs each: none widens what another does."""
    return 2 * BLOCK_N if tile_rows > MOST_FEW_ROWS else BLOCK_N


def launch_options(tile_rows: int, shared_bytes: int) -> dict[str, int]:
    """Of `few_rows_kernel`. A step of 128 rows and outputs takes 40 KiB."""
    if tile_rows <= MOST_FEW_ROWS:
        return {"num_warps": 4, "num_stages": 4}
    return {"num_warps": 8, "num_stages": 3 if shared_bytes >= SHORT_SHARED_BYTES else 2}


@triton.jit(do_not_specialize=["num_rows"])
def few_rows_kernel(
    x_ptr,  # [T, K], rows `x_stride` apart
    packed_ptr,  # uint8 or int8 [N, J]
    scales_ptr,  # [N, G]
    offsets_ptr,  # [N, G]; unused without HAS_OFFSETS
    supers_ptr,  # as in load_scaled
    bias_ptr,  # [N]; unused without HAS_BIAS
    out_ptr,  # [T, N] in the dtype of x; with SPLITS > 1, float32 [SPLITS, T, N]
    num_rows,
    x_stride,
    N: tl.constexpr,
    K: tl.constexpr,
    BITS: tl.constexpr,
    GROUP: tl.constexpr,
    HAS_OFFSETS: tl.constexpr,
    ZEROS: tl.constexpr,
    LEVELS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    SPLITS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_J: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    J: tl.constexpr = K * BITS // 8
    STEPS: tl.constexpr = (J + BLOCK_J - 1) // BLOCK_J
    SPLIT_STEPS: tl.constexpr = (STEPS + SPLITS - 1) // SPLITS
    IN_BOUNDS: tl.constexpr = N % BLOCK_N == 0 and J % BLOCK_J == 0 and STEPS % SPLITS == 0
    split = tl.program_id(1)
    m_M = tl.program_id(2) * BLOCK_M + tl.arange(0, BLOCK_M)
    valid_M = m_M < num_rows
    n_N = tl.program_id(0).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    x_M = x_ptr + m_M.to(tl.int64) * x_stride
    acc_NM = tl.zeros((BLOCK_N, BLOCK_M), dtype=tl.float32)
    for step in range(SPLIT_STEPS):
        # a split's steps past the end have masks that are empty, and add zeros
        j_start = (split * SPLIT_STEPS + step) * BLOCK_J
        j_J = j_start + tl.arange(0, BLOCK_J)
        valid_JM = (j_J < J)[:, None] & valid_M[None, :]
        k_J = j_J if BITS == 8 else j_J // 16 * 32 + j_J % 16
        x_low_JM = tl.load(x_M[None, :] + k_J[:, None], mask=valid_JM, other=0.0)
        x_high_JM = x_low_JM
        if BITS == 4:
            x_high_JM = tl.load(x_M[None, :] + k_J[:, None] + 16, mask=valid_JM, other=0.0)
        acc_NM = add_packed(
            acc_NM, x_low_JM, x_high_JM, packed_ptr, scales_ptr, offsets_ptr, supers_ptr, n_N,
            j_start, N, J, BITS, GROUP * BITS // 8, HAS_OFFSETS, ZEROS, LEVELS, IN_BOUNDS,
            BLOCK_N, BLOCK_J,
        )  # fmt: skip
    if HAS_BIAS and SPLITS == 1:
        acc_NM += tl.load(bias_ptr + n_N, mask=n_N < N, other=0.0).to(tl.float32)[:, None]
    row_M = split.to(tl.int64) * num_rows + m_M
    out_NM = out_ptr + row_M[None, :] * N + n_N[:, None]
    keep_NM = (n_N < N)[:, None] & valid_M[None, :]
    tl.store(out_NM, acc_NM.to(out_ptr.dtype.element_ty), mask=keep_NM)


@triton.jit(do_not_specialize=["num_rows"])
def add_parts_kernel(
    parts_ptr,  # float32 [SPLITS, T, N]
    bias_ptr,  # [N]; unused without HAS_BIAS
    out_ptr,  # [T, N]
    num_rows,
    N: tl.constexpr,
    SPLITS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    row = tl.program_id(0).to(tl.int64)
    n_N = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    sum_N = tl.zeros((BLOCK_N,), dtype=tl.float32)
    for split in tl.static_range(SPLITS):
        sum_N += tl.load(parts_ptr + (split * num_rows + row) * N + n_N, mask=n_N < N, other=0.0)
    if HAS_BIAS:
        sum_N += tl.load(bias_ptr + n_N, mask=n_N < N, other=0.0).to(tl.float32)
    tl.store(out_ptr + row * N + n_N, sum_N.to(out_ptr.dtype.element_ty), mask=n_N < N)


_few_rows_launches = BoundLaunches(few_rows_kernel)
_add_parts_launches = BoundLaunches(add_parts_kernel)


def quantised_linear(
    x_TE: torch.Tensor,
    weight: QuantisedWeight,
    bias_N: torch.Tensor | None = None,
    *,
    batch_invariant: bool = False,
) -> torch.Tensor:
    """`x @ W.T + bias` -> [T, N] in the dtype of x, sums in float32; W as the reference says.

    One or two launches for few rows; above, the whole weight is widened first. Both are safe in a
    CUDA graph. See the module's docstring for what does not depend on the batch.

    Args:
        x_TE: float32, float16 or bfloat16; the last dimension contiguous.
        bias_N: contiguous; the dtype of x.
        batch_invariant: one kernel in one tile for every number of rows, slower for few and many.
    """
    num_outputs, device = weight.num_outputs, x_TE.device
    shape = (x_TE.shape[0], weight.num_inputs)
    check_tensor("x_TE", x_TE, shape, FLOATS, device, contiguous_dims=1)
    if bias_N is not None:
        check_tensor("bias_N", bias_N, (num_outputs,), x_TE.dtype, device)
    num_rows = x_TE.shape[0]
    most_rows = most_packed_rows(weight, x_TE.dtype)
    block_m = choose_tile_rows(num_rows, x_TE.dtype, most_rows, batch_invariant=batch_invariant)
    if block_m is None:
        return F.linear(x_TE, dequantise_to(weight, x_TE.dtype), bias_N)
    out_TN = torch.empty(num_rows, num_outputs, dtype=x_TE.dtype, device=x_TE.device)
    if weight.input_order_E is not None and num_rows:
        x_TE = x_TE.index_select(1, weight.input_order_E)
    for start in range(0, num_rows, _ROWS_A_LAUNCH):
        rows = slice(start, start + _ROWS_A_LAUNCH)
        _multiply(x_TE[rows], weight, bias_N, out_TN[rows], block_m)
    return out_TN


def _multiply(
    x_TE: torch.Tensor,
    weight: QuantisedWeight,
    bias_N: torch.Tensor | None,
    out_TN: torch.Tensor,
    block_m: int,
) -> None:
    """The product by the kernel, in tiles of `block_m` rows; writes `out_TN`."""
    num_rows, num_outputs = out_TN.shape
    splits = choose_splits(num_outputs, weight.packed_NJ.shape[1])
    parts = out_TN
    if splits > 1:
        parts = torch.empty(splits, num_rows, num_outputs, dtype=torch.float32, device=x_TE.device)
    block_n = tile_outputs(block_m)
    grid = triton.cdiv(num_outputs, block_n), splits, triton.cdiv(num_rows, block_m)

    def prepare() -> Launch:
        constants = weight_constants(weight) | launch_options(block_m, shared_memory(x_TE.device))
        constants |= {"HAS_BIAS": bias_N is not None, "SPLITS": splits}
        constants |= {"BLOCK_M": block_m, "BLOCK_N": block_n, **dependent_launch(x_TE.device)}
        return Launch(grid, (num_rows, x_TE.stride(0)), constants)

    arrays = weight.packed_NJ, weight.scales_NG, weight.offsets_NG, weight.supers_NSC
    options = weight.num_bits, weight.group_size, weight.has_zero_points, weight.levels, block_m
    _few_rows_launches((x_TE, *arrays, bias_N, parts), options, prepare)
    if splits > 1:
        add_parts(parts, bias_N, out_TN)


def add_parts(parts: torch.Tensor, bias_N: torch.Tensor | None, out_TN: torch.Tensor) -> None:
    """`out = sum of parts + bias`, in the parts' order: float32 [SPLITS, T, N], contiguous."""
    splits, num_rows, num_outputs = parts.shape

    def prepare() -> Launch:
        constants = {"N": num_outputs, "SPLITS": splits, "HAS_BIAS": bias_N is not None}
        constants |= {"BLOCK_N": REDUCED_AT_ONCE, "num_warps": 4, **dependent_launch(parts.device)}
        return Launch((num_rows, triton.cdiv(num_outputs, REDUCED_AT_ONCE)), (num_rows,), constants)

    _add_parts_launches((parts, bias_N, out_TN), None, prepare)
