"""Products in float8 (e4m3): scales of weights by output or by 128 inputs of each; activations are
rounded by token, by 128 inputs of a token, or by a scale that the model's files give.

A token's rounding depends on the token alone. Up to 64 rows, for blocks unless
`BLOCKS_BY_LIBRARY`, and with `batch_invariant` for all, the product is our kernel's; of few rows in
splits along E that follow from the weight's shape alone."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
import triton
import triton.language as tl

from kernels.triton.bound_launch import BoundLaunches, Launch
from kernels.triton.device_limits import dependent_launch
from kernels.triton.fp8_rounding import GROUP, SCALE_STRIDES, quantise_rows, whole_columns
from kernels.triton.linear.dense import ROW_TILES, row_tiles_side_by_side
from kernels.triton.linear.quantised import add_parts, choose_splits
from kernels.triton.tensor_checks import FLOATS, check_tensor

BLOCK_K = 128
BLOCKS_BY_LIBRARY = False
"""Whether blocks of 128 x 128 weights go to torch's product where it has one, above 64 rows.
False is what has run."""

_MULTIPLE = 16
_FEW_ROWS = 64
_CUDA_WITH_BLOCKS = (12, 9)
_SCALES_A_READ = 4
_ROWS_A_LAUNCH = 1024
"""Of a product in splits: bounds the memory of the parts that are still to be added."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Float8Weight:
    """`weight * scales`. Satisfies `kernels.interface.operations.LinearWeight`.

    Attributes:
        weight_NE: float8_e4m3fn, contiguous.
        scales_NG: float32: one a row, and so one for each token; or one for each 128 inputs (a
            multiple of which E is), and so for each 128 of a token. Of these, [N / 128, G] where
            128 outputs share theirs.
        input_scale: float32 [1], of all activations; None: it follows from them.
        has_product: the device's library multiplies float8 by rows; resolved once, at load.
        library_scales_GN: float32 [G rounded up to 4, N / 128], a block of outputs' side by side
            in memory: the scales where the library multiplies blocks; resolved once, at load.
    """

    weight_NE: torch.Tensor
    scales_NG: torch.Tensor
    input_scale: torch.Tensor | None = None
    has_product: bool = False
    library_scales_GN: torch.Tensor | None = None

    @property
    def num_inputs(self) -> int:
        return self.weight_NE.shape[1]

    @property
    def num_outputs(self) -> int:
        return self.weight_NE.shape[0]

    @property
    def is_grouped(self) -> bool:
        return self.scales_NG.shape[1] > 1

    @property
    def rows_a_scale(self) -> int:
        return self.num_outputs // self.scales_NG.shape[0]

    @property
    def rounding(self) -> dict[str, Any]:
        """Options of `quantise_rows` for activations."""
        in_columns = self.library_scales_GN is not None
        return {"grouped": self.is_grouped, "given": self.input_scale, "in_columns": in_columns}


def library_multiplies_blocks(device: torch.device) -> bool:
    """Whether torch's product takes scales of 1 x 128 by 128 x 128: on Hopper, since CUDA 12.9."""
    if device.type != "cuda" or torch.cuda.get_device_capability(device)[0] != 9:
        return False
    return tuple(map(int, (torch.version.cuda or "0").split(".")[:2])) >= _CUDA_WITH_BLOCKS


def prepare_float8(
    weight_NE: torch.Tensor,
    scales_NG: torch.Tensor,
    input_scale: torch.Tensor | None = None,
    *,
    blocks_by_library: bool | None = None,
) -> Float8Weight:
    """Take a weight over, at load time. Raises ValueError: scales that do not fit.

    Args:
        blocks_by_library: scales of blocks are brought into the library's layout, too. None: as
            `BLOCKS_BY_LIBRARY` says, on a device where it takes them.
    """
    num_outputs, num_inputs = weight_NE.shape
    # one block of 128 inputs is one scale a row, but then its activations have that, too
    if scales_NG.shape not in ((num_outputs, 1), (num_outputs, num_inputs / GROUP)):
        raise ValueError(
            f"scales {list(scales_NG.shape)} for a float8 weight {list(weight_NE.shape)}; give one "
            f"a row, or one for each {GROUP} inputs"
        )
    device = weight_NE.device
    if scales_NG.shape[1] > 1 and num_outputs % GROUP == 0:
        blocks = scales_NG.unflatten(0, (-1, GROUP))
        if bool((blocks == blocks[:, :1]).all()):
            scales_NG = blocks[:, 0]
    if blocks_by_library is None:
        blocks_by_library = BLOCKS_BY_LIBRARY and library_multiplies_blocks(device)
    scales_NG = scales_NG.float().contiguous()
    is_by_library = blocks_by_library and len(scales_NG) < num_outputs
    return Float8Weight(
        weight_NE=weight_NE.contiguous(),
        scales_NG=scales_NG,
        input_scale=input_scale,
        library_scales_GN=library_scales(scales_NG) if is_by_library else None,
        has_product=device.type == "cuda"
        and scales_NG.shape[1] == 1
        and num_outputs % _MULTIPLE == num_inputs % _MULTIPLE == 0,
    )


def library_scales(scales_NG: torch.Tensor) -> torch.Tensor:
    """`Float8Weight.library_scales_GN` of [N / 128, G]; what is behind G is 0.

    cuBLAS finds the scale of outputs n and inputs k at n // 128 * G' + k // 128, G' being G rounded
    up to 4. torch.nn.functional.scaled_mm refuses other strides; torch._scaled_mm of some versions
    takes G, and then what cuBLAS reads is wrong unless G is a multiple of 4."""
    padded = F.pad(scales_NG, (0, -scales_NG.shape[1] % _SCALES_A_READ))
    return padded.t()


def join_float8(weights: Sequence[Float8Weight]) -> Float8Weight:
    """The outputs of one after those of another; of several scales of activations the largest
    serves all, as in vLLM."""
    given = [each.input_scale for each in weights if each.input_scale is not None]
    codes = torch.cat([each.weight_NE.view(torch.uint8) for each in weights])
    return replace(
        prepare_float8(
            codes.view(torch.float8_e4m3fn), torch.cat([scales_of_rows(each) for each in weights])
        ),
        input_scale=torch.cat(given).max().reshape(1) if given else None,
    )


def scales_of_rows(weight: Float8Weight) -> torch.Tensor:
    """[N, G], one for each output."""
    return weight.scales_NG.repeat_interleave(weight.rows_a_scale, dim=0)


def reference_float8_linear(
    q_TE: torch.Tensor,
    scale_TG: torch.Tensor,
    weight: Float8Weight,
    bias_N: torch.Tensor | None = None,
) -> torch.Tensor:
    """`(q * scale) @ (w * scales).T + bias` in float32."""

    def widened(codes: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
        wide: torch.Tensor = codes.float().unflatten(1, (scales.shape[1], -1))
        return (wide * scales[..., None]).flatten(1)

    out_TN = widened(q_TE, scale_TG) @ widened(weight.weight_NE, scales_of_rows(weight)).T
    return out_TN if bias_N is None else out_TN + bias_N.float()


@triton.jit
def add_float8(
    acc_NM,
    q_KM,
    scale_M,  # of the tokens' groups at k_start; unused unless GROUPED
    w_ptr,  # float8_e4m3fn [N, K]
    w_scale_ptr,  # float32 [N / SCALE_ROWS, G]
    n_N,  # int64 [BLOCK_N]: n_start and those behind it
    n_start,
    k_start,
    N: tl.constexpr,
    K: tl.constexpr,
    GROUPED: tl.constexpr,
    SCALE_ROWS: tl.constexpr,
    ONE_SCALE: tl.constexpr,  # all of n_N share theirs
    IN_BOUNDS: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """`acc + w q` over BLOCK_K inputs, scaled if scales are by group.

    A fresh sum: of longer ones Hopper's tensor cores keep 14 bits."""
    k_K = k_start + tl.arange(0, BLOCK_K)
    at_NK = w_ptr + n_N[:, None] * K + k_K[None, :]
    if IN_BOUNDS:
        w_NK = tl.load(at_NK)
    else:
        w_NK = tl.load(at_NK, mask=(n_N < N)[:, None] & (k_K < K)[None, :], other=0.0)
    part_NM = tl.dot(w_NK, q_KM)
    if GROUPED:
        # steps past the end add zeros, by a scale that is there
        group = tl.minimum(k_start, K - 1) // BLOCK_K
        if ONE_SCALE:
            row = tl.minimum(n_start, N - 1) // SCALE_ROWS
            scale_M = scale_M * tl.load(w_scale_ptr + row * (K // BLOCK_K) + group)
        else:
            at_N = w_scale_ptr + n_N // SCALE_ROWS * (K // BLOCK_K) + group
            part_NM = part_NM * tl.load(at_N, mask=n_N < N, other=0.0)[:, None]
        part_NM = part_NM * scale_M[None, :]
    return acc_NM + part_NM


@triton.jit(do_not_specialize=["num_rows"], do_not_specialize_on_alignment=SCALE_STRIDES)
def float8_kernel(
    q_ptr,  # float8_e4m3fn [T, K]
    scale_ptr,  # float32 [T, G]
    w_ptr,  # float8_e4m3fn [N, K]
    w_scale_ptr,  # float32 [N / SCALE_ROWS, G]
    bias_ptr,  # [N]; unused without HAS_BIAS
    out_ptr,  # [T, N]; with SPLITS > 1, float32 [SPLITS, T, N]
    num_rows,
    scale_stride_t,
    scale_stride_g,
    N: tl.constexpr,
    K: tl.constexpr,
    GROUPED: tl.constexpr,
    SCALE_ROWS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    ROW_TILES: tl.constexpr,
    SPLITS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    STEPS: tl.constexpr = (K + BLOCK_K - 1) // BLOCK_K
    SPLIT_STEPS: tl.constexpr = (STEPS + SPLITS - 1) // SPLITS
    IN_BOUNDS: tl.constexpr = N % BLOCK_N == 0 and K % BLOCK_K == 0 and STEPS % SPLITS == 0
    split = tl.program_id(1)
    row_tile, n_tile = row_tiles_side_by_side(
        tl.program_id(0), num_rows, N, BLOCK_M, BLOCK_N, ROW_TILES
    )
    m_M = row_tile.to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    valid_M = m_M < num_rows
    n_start = n_tile.to(tl.int64) * BLOCK_N
    n_N = n_start + tl.arange(0, BLOCK_N)
    acc_NM = tl.zeros((BLOCK_N, BLOCK_M), dtype=tl.float32)
    scale_M = tl.zeros((BLOCK_M,), dtype=tl.float32)
    for step in range(SPLIT_STEPS):
        # a split's steps past the end have masks that are empty, and add zeros
        k_start = (split * SPLIT_STEPS + step) * BLOCK_K
        k_K = k_start + tl.arange(0, BLOCK_K)
        valid_KM = (k_K < K)[:, None] & valid_M[None, :]
        q_KM = tl.load(q_ptr + m_M[None, :] * K + k_K[:, None], mask=valid_KM, other=0.0)
        if GROUPED:
            group = tl.minimum(k_start, K - 1) // BLOCK_K
            at_M = scale_ptr + m_M * scale_stride_t + group * scale_stride_g
            scale_M = tl.load(at_M, mask=valid_M, other=0.0)
        acc_NM = add_float8(
            acc_NM, q_KM, scale_M, w_ptr, w_scale_ptr, n_N, n_start, k_start, N, K, GROUPED,
            SCALE_ROWS, SCALE_ROWS > 1, IN_BOUNDS, BLOCK_K,
        )  # fmt: skip
    if not GROUPED:
        scale_N = tl.load(w_scale_ptr + n_N, mask=n_N < N, other=0.0)
        acc_NM *= scale_N[:, None] * tl.load(scale_ptr + m_M, mask=valid_M, other=0.0)[None, :]
    if HAS_BIAS and SPLITS == 1:
        acc_NM += tl.load(bias_ptr + n_N, mask=n_N < N, other=0.0).to(tl.float32)[:, None]
    out_NM = out_ptr + (split.to(tl.int64) * num_rows + m_M)[None, :] * N + n_N[:, None]
    keep_NM = (n_N < N)[:, None] & valid_M[None, :]
    tl.store(out_NM, acc_NM.to(out_ptr.dtype.element_ty), mask=keep_NM)


_launches = BoundLaunches(float8_kernel)


def float8_linear(
    x_TE: torch.Tensor,
    weight: Float8Weight,
    bias_N: torch.Tensor | None = None,
    *,
    batch_invariant: bool = False,
) -> torch.Tensor:
    """`x @ W.T + bias` -> [T, N] in the dtype of x, x rounded to float8 as the weight says.

    Sums are float32 without the tensor cores' shortened accumulation. Two to three launches, safe
    in a CUDA graph. (Micikevicius et al., FP8 formats for deep learning, 2022; groups:
    DeepSeek-AI, 2024, section 3.3.)

    Args:
        x_TE: as in `quantise_rows`.
        bias_N: the dtype of x.
        batch_invariant: one kernel in one tile for every number of rows.
    """
    (num_rows, _), num_outputs, device = x_TE.shape, weight.num_outputs, x_TE.device
    shape = (num_rows, weight.num_inputs)
    check_tensor("x_TE", x_TE, shape, FLOATS, device, contiguous_dims=1)
    if bias_N is not None:
        check_tensor("bias_N", bias_N, (num_outputs,), x_TE.dtype, device)
    q_TE, scale_TG = quantise_rows(x_TE, **weight.rounding)
    return multiply_rounded(
        q_TE, scale_TG, weight, bias_N, x_TE.dtype, batch_invariant=batch_invariant
    )


def multiply_rounded(
    q_TE: torch.Tensor,
    scale_TG: torch.Tensor,
    weight: Float8Weight,
    bias_N: torch.Tensor | None,
    dtype: torch.dtype,
    *,
    batch_invariant: bool = False,
) -> torch.Tensor:
    """`float8_linear` of what `quantise_rows` has made of a tensor of `dtype`."""
    (num_rows, _), num_outputs = q_TE.shape, weight.num_outputs
    is_few = num_rows <= _FEW_ROWS or batch_invariant
    if not is_few and dtype == torch.bfloat16:
        if weight.has_product:
            return scaled_product(q_TE, scale_TG, weight, dtype, bias_N)
        # whether cuBLAS adds a bias beside scales of blocks is not said
        if weight.library_scales_GN is not None and bias_N is None:
            return block_product(q_TE, scale_TG, weight, dtype)
    out_TN = torch.empty(num_rows, num_outputs, dtype=dtype, device=q_TE.device)
    constants, launch = product_configuration(
        weight, choose_tile_rows(num_rows, batch_invariant=batch_invariant), in_splits=is_few
    )
    rows_a_launch = _ROWS_A_LAUNCH if constants["SPLITS"] > 1 else max(1, num_rows)
    for start in range(0, num_rows, rows_a_launch):
        rows = slice(start, start + rows_a_launch)
        _multiply(q_TE[rows], scale_TG[rows], weight, bias_N, out_TN[rows], constants, launch)
    return out_TN


def _multiply(
    q_TE: torch.Tensor,
    scale_TG: torch.Tensor,
    weight: Float8Weight,
    bias_N: torch.Tensor | None,
    out_TN: torch.Tensor,
    constants: dict[str, Any],
    launch: dict[str, int],
) -> None:
    (num_rows, num_outputs), splits = out_TN.shape, constants["SPLITS"]
    parts = out_TN
    if splits > 1:
        parts = torch.empty(splits, num_rows, num_outputs, dtype=torch.float32, device=q_TE.device)
    num_tiles = triton.cdiv(num_outputs, constants["BLOCK_N"])
    grid = (num_tiles * triton.cdiv(num_rows, constants["BLOCK_M"]), splits)
    _launches(
        (q_TE, scale_TG, weight.weight_NE, weight.scales_NG, bias_N, parts),
        (constants["BLOCK_M"], splits),
        lambda: Launch(
            grid,
            (num_rows, *scale_TG.stride()),
            {
                "HAS_BIAS": bias_N is not None,
                **constants,
                **launch,
                **dependent_launch(q_TE.device),
            },
        ),
    )
    if splits > 1:
        add_parts(parts, bias_N, out_TN)


def scaled_product(
    q_TE: torch.Tensor,
    scale_T1: torch.Tensor,
    weight: Float8Weight,
    dtype: torch.dtype,
    bias_N: torch.Tensor | None = None,
) -> torch.Tensor:
    """`reference_float8_linear` by the library's own product, in `dtype`."""
    out_TN: torch.Tensor = torch._scaled_mm(
        q_TE,
        weight.weight_NE.t(),
        scale_a=scale_T1,
        scale_b=weight.scales_NG.t(),
        bias=bias_N,
        out_dtype=dtype,
        use_fast_accum=False,
    )
    return out_TN


def block_product(
    q_TE: torch.Tensor, scale_TG: torch.Tensor, weight: Float8Weight, dtype: torch.dtype
) -> torch.Tensor:
    """`reference_float8_linear` of blocks by the library, in `dtype`; the first two as
    `quantise_rows` gives them `in_columns`. Sums of 128 inputs are scaled in float32.

    Layouts: `_scaled_block1x128_block128x128` of torch's aten/src/ATen/native/cuda/ScaledBlas.cpp.
    Scales of tokens are [T, G] with strides (1, T), and T is a multiple of 4."""
    assert weight.library_scales_GN is not None, "prepared for our kernel"
    padded_TE, padded_TG = whole_columns(q_TE, scale_TG)
    out_TN: torch.Tensor = F.scaled_mm(
        padded_TE,
        weight.weight_NE.t(),
        padded_TG,
        F.ScalingType.BlockWise1x128,
        weight.library_scales_GN,
        F.ScalingType.BlockWise128x128,
        output_dtype=dtype,
    )
    return out_TN[: len(q_TE)]


def choose_tile_rows(num_rows: int, *, batch_invariant: bool = False) -> int:
    """Rows of the kernel's tile: a power of two from 16 to 128."""
    if batch_invariant:
        return _FEW_ROWS
    return max(16, min(128, int(triton.next_power_of_2(num_rows))))


def product_configuration(
    weight: Float8Weight, tile_rows: int, *, in_splits: bool
) -> tuple[dict[str, Any], dict[str, int]]:
    """(constants, launch options)."""
    num_outputs, num_inputs = weight.weight_NE.shape
    is_wide = tile_rows > _FEW_ROWS
    constants = {
        "N": num_outputs,
        "K": num_inputs,
        "GROUPED": weight.is_grouped,
        "SCALE_ROWS": weight.rows_a_scale,
        "ROW_TILES": ROW_TILES,
        "SPLITS": choose_splits(num_outputs, num_inputs) if in_splits else 1,
        "BLOCK_M": tile_rows,
        "BLOCK_N": 128 if is_wide else 64,
        "BLOCK_K": BLOCK_K,
    }
    return constants, {"num_warps": 8 if is_wide else 4, "num_stages": 3 if is_wide else 4}
