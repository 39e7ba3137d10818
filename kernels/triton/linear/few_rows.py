"""Dense products of up to 16 rows, which the bytes of the weight bound, with the norm before them
and the gated activation behind them in the same kernel if wanted. **Prepared, not run on a GPU.**

E is cut into splits by the weight's shape alone; the program that ends a tile's last one joins them
in their order. So a row's bits depend on that row and the weight alone."""

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from kernels.interface.operations import Activation
from kernels.triton.activation import gate_times_up
from kernels.triton.attention.reduce import all_arrived
from kernels.triton.bound_launch import BoundLaunches, Launch
from kernels.triton.device_limits import dependent_launch
from kernels.triton.tensor_checks import check_tensor

MOST_ROWS = 16
BLOCK_N, BLOCK_E = 64, 128
STEP_BYTES = BLOCK_N * BLOCK_E * 2
MOST_NORMED_INPUTS = 8192
"""Each program has a whole row in registers when it norms it."""
_PROGRAMS_WANTED = 264
"""Two for each of the 132 multiprocessors of an H200; a constant, because results depend on it."""
_LEAST_STEPS_A_SPLIT = 2
_DTYPES = (torch.float16, torch.bfloat16)


@triton.jit
def lines_of_step(w_N, first, E: tl.constexpr, BLOCK_E: tl.constexpr):
    """Pointers [BLOCK_N, lines] to the lines (of the L2 cache, 128 bytes) of inputs `first` to
    `first + BLOCK_E` in rows that begin at w_N."""
    e_L = first + tl.arange(0, BLOCK_E // 64) * 64
    return w_N[:, None] + tl.minimum(e_L, E - 1)[None, :]


@triton.jit
def _prefetch(pointers):
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.u32 $0, 0;", "=r,l", [pointers.to(tl.int64)],
        dtype=tl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@triton.jit
def _weights(w_N, e_E, E: tl.constexpr, IN_BOUNDS: tl.constexpr):
    if IN_BOUNDS:
        return tl.load(w_N[:, None] + e_E[None, :])
    return tl.load(w_N[:, None] + e_E[None, :], mask=(e_E < E)[None, :], other=0.0)


@triton.jit
def _finish(
    acc_NT, up_NT, bias_ptr, out_ptr, n_N, t_T, keep_NT,
    N: tl.constexpr, HAS_BIAS: tl.constexpr, GATED: tl.constexpr, IS_GELU: tl.constexpr,
):  # fmt: skip
    dtype: tl.constexpr = out_ptr.dtype.element_ty
    if HAS_BIAS:
        acc_NT += tl.load(bias_ptr + n_N, mask=n_N < N, other=0.0).to(tl.float32)[:, None]
    out_NT = acc_NT.to(dtype)
    if GATED:  # rounded as the product is that the activation's kernel reads
        up_NT = up_NT.to(dtype).to(tl.float32)
        out_NT = gate_times_up(out_NT.to(tl.float32), up_NT, dtype, IS_GELU)
    tl.store(out_ptr + t_T[None, :] * N + n_N[:, None], out_NT, mask=keep_NT)


@triton.jit(do_not_specialize=["num_rows", "prefetch_steps"])
def few_rows_linear_kernel(
    x_ptr,  # [T, E], T at most BLOCK_T
    weight_ptr,  # [N, E]; if GATED [2N, E], gate and up
    bias_ptr,  # [N], if HAS_BIAS
    residual_ptr,  # [T, E], if NORMS
    norm_ptr,  # [E], if NORMS
    sums_ptr,  # [T, E], if NORMS: written with residual + x
    parts_ptr,  # float32 [SPLITS, 1 or 2, BLOCK_T, N], if SPLITS > 1
    arrivals_ptr,  # int32 [output tiles], all 0 before and after
    out_ptr,  # [T, N], written
    num_rows,
    x_stride_t,
    residual_stride_t,
    weight_stride_n,
    prefetch_steps,
    eps,
    N: tl.constexpr,
    E: tl.constexpr,
    SPLITS: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_ROW: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    NORMS: tl.constexpr,
    GATED: tl.constexpr,
    IS_GELU: tl.constexpr,
    PDL: tl.constexpr,
):
    dtype: tl.constexpr = out_ptr.dtype.element_ty
    HALVES: tl.constexpr = 2 if GATED else 1
    STEPS: tl.constexpr = (E + BLOCK_E - 1) // BLOCK_E
    SPLIT_STEPS: tl.constexpr = (STEPS + SPLITS - 1) // SPLITS
    IN_BOUNDS: tl.constexpr = E % BLOCK_E == 0 and STEPS % SPLITS == 0
    tile = tl.program_id(0)
    split = tl.program_id(1)
    n_N = tile * BLOCK_N + tl.arange(0, BLOCK_N)
    # rows behind the last one are the last one: their sums are not stored
    w_N = weight_ptr + tl.minimum(n_N, N - 1).to(tl.int64) * weight_stride_n
    up_N = w_N + tl.cast(N, tl.int64) * weight_stride_n
    if PDL:
        # the next kernel's programs may ask for their weights, too; they wait for all of this one
        tl.extra.cuda.gdc_launch_dependents()
        # no launch writes weights: memory is busy while the kernel before this one ends
        for step in range(prefetch_steps):
            first = (split * SPLIT_STEPS + step) * BLOCK_E
            _prefetch(lines_of_step(w_N, first, E, BLOCK_E))
            if GATED:
                _prefetch(lines_of_step(up_N, first, E, BLOCK_E))
        tl.extra.cuda.gdc_wait()
    t_T = tl.arange(0, BLOCK_T)
    is_row_T = t_T < num_rows
    x_T = x_ptr + t_T.to(tl.int64) * x_stride_t
    if NORMS:
        residual_T = residual_ptr + t_T.to(tl.int64) * residual_stride_t
        middle: tl.constexpr = norm_ptr.dtype.element_ty
        inverse_T = tl.zeros([BLOCK_T], dtype=tl.float32)
        e_R = tl.arange(0, BLOCK_ROW)
        # the first program writes the sums, to another place: all others still read the residual
        num_written = tl.where(tile + split == 0, E, 0)
        for row in range(num_rows):
            at = tl.cast(row, tl.int64)
            x_R = tl.load(x_ptr + at * x_stride_t + e_R, mask=e_R < E, other=0.0)
            residual_at = residual_ptr + at * residual_stride_t + e_R
            residual_R = tl.load(residual_at, mask=e_R < E, other=0.0)
            summed_R = (residual_R.to(tl.float32) + x_R.to(tl.float32)).to(dtype)
            tl.store(sums_ptr + at * E + e_R, summed_R, mask=e_R < num_written)
            summed_R = summed_R.to(tl.float32)
            inverse = tl.rsqrt(tl.sum(summed_R * summed_R, axis=0) / E + eps)
            inverse_T = tl.where(t_T == row, inverse, inverse_T)

    acc_NT = tl.zeros([BLOCK_N, BLOCK_T], dtype=tl.float32)
    up_NT = tl.zeros([BLOCK_N, BLOCK_T], dtype=tl.float32)
    for step in range(SPLIT_STEPS):
        # a split's steps past the end have masks that are empty, and add zeros
        e_E = (split * SPLIT_STEPS + step) * BLOCK_E + tl.arange(0, BLOCK_E)
        is_x_ET = is_row_T[None, :] if IN_BOUNDS else is_row_T[None, :] & (e_E < E)[:, None]
        x_ET = tl.load(x_T[None, :] + e_E[:, None], mask=is_x_ET, other=0.0)
        if NORMS:
            residual_ET = tl.load(residual_T[None, :] + e_E[:, None], mask=is_x_ET, other=0.0)
            norm_E = tl.load(norm_ptr + e_E, mask=e_E < E, other=0.0).to(tl.float32)
            summed_ET = (residual_ET.to(tl.float32) + x_ET.to(tl.float32)).to(dtype)
            normed_ET = (summed_ET.to(tl.float32) * inverse_T[None, :]).to(middle).to(tl.float32)
            x_ET = (normed_ET * norm_E[:, None]).to(middle).to(tl.float32).to(dtype)
        acc_NT = tl.dot(_weights(w_N, e_E, E, IN_BOUNDS), x_ET, acc_NT)
        if GATED:
            up_NT = tl.dot(_weights(up_N, e_E, E, IN_BOUNDS), x_ET, up_NT)

    keep_NT = (n_N < N)[:, None] & is_row_T[None, :]
    if SPLITS == 1:
        _finish(acc_NT, up_NT, bias_ptr, out_ptr, n_N, t_T, keep_NT, N, HAS_BIAS, GATED, IS_GELU)
    else:
        at_NT = parts_ptr + t_T[None, :] * N + n_N[:, None]
        own_NT = at_NT + split * (HALVES * BLOCK_T * N)
        tl.store(own_NT, acc_NT, mask=keep_NT)
        if GATED:
            tl.store(own_NT + BLOCK_T * N, up_NT, mask=keep_NT)
        if all_arrived(arrivals_ptr + tile, SPLITS):
            acc_NT = tl.zeros([BLOCK_N, BLOCK_T], dtype=tl.float32)
            up_NT = tl.zeros([BLOCK_N, BLOCK_T], dtype=tl.float32)
            for part in tl.static_range(SPLITS):
                # past the L1 cache: other programs wrote it while this one ran
                part_NT = at_NT + part * HALVES * BLOCK_T * N
                acc_NT += tl.load(part_NT, mask=keep_NT, other=0.0, cache_modifier=".cg")
                if GATED:
                    part_NT += BLOCK_T * N
                    up_NT += tl.load(part_NT, mask=keep_NT, other=0.0, cache_modifier=".cg")
            _finish(
                acc_NT, up_NT, bias_ptr, out_ptr, n_N, t_T, keep_NT, N, HAS_BIAS, GATED, IS_GELU
            )


_launches = BoundLaunches(few_rows_linear_kernel)


class ResidualNorm(NamedTuple):
    """`add_rms_norm` before a product: x and residual_TE [T, E] are added into sums_TE, another
    tensor, contiguous. weight_E: of x's dtype or float32."""

    residual_TE: torch.Tensor
    weight_E: torch.Tensor
    eps: float
    sums_TE: torch.Tensor


class FewRowsProducts:
    """Products of up to 16 rows, of one stream.

    Args:
        dependent: their launches are dependent ones, from Hopper on.
        prefetch_bytes: of its weights, the most that a program of a dependent launch asks for
            before it waits for the kernel before it.
    """

    def __init__(
        self, device: torch.device, *, dependent: bool = True, prefetch_bytes: int = 0
    ) -> None:
        self._pdl = dependent_launch(device) if dependent else {"PDL": False}
        self._prefetch_bytes = prefetch_bytes
        # products follow each other, and each leaves zeros: they share it
        self._arrivals = torch.zeros(_PROGRAMS_WANTED, dtype=torch.int32, device=device)

    @staticmethod
    def takes(x_TE: torch.Tensor, weight_NE: torch.Tensor) -> bool:
        """Whether `linear` does. A weight's rows begin at multiples of 16 bytes."""
        is_few = 0 < x_TE.shape[0] <= MOST_ROWS
        return is_few and x_TE.dtype in _DTYPES and weight_NE.stride(0) % 8 == 0

    def linear(
        self,
        x_TE: torch.Tensor,
        weight_NE: torch.Tensor,
        bias_N: torch.Tensor | None = None,
        *,
        norm: ResidualNorm | None = None,
        activation: Activation | None = None,
    ) -> torch.Tensor:
        """`x @ weight.T + bias`, summed in float32 and rounded once -> [T, N], or [T, N / 2] of an
        activation. One launch.

        The activation's bits are those of its own kernel. The norm rounds where its kernel does,
        but a row's squares may be added in another order: its factor may differ in the last bits.

        Args:
            x_TE: 1 to 16 rows, float16 or bfloat16, the last dimension contiguous.
            weight_NE: of x's dtype, rows contiguous.
            bias_N: of x's dtype, contiguous; without an activation.
            norm: of `norm.residual_TE + x`, the product's input; E at most 8192.
            activation: "silu" or "gelu_tanh", of the first half of the outputs, which is multiplied
                with the second.

        Raises ValueError: what does not fit.
        """
        T, halves = x_TE.shape[0], 1 if activation is None else 2
        num_outputs = weight_NE.shape[0] // halves
        out_TN = torch.empty((T, num_outputs), dtype=x_TE.dtype, device=x_TE.device)
        splits, parts = choose_splits(num_outputs, weight_NE.shape[1]), None
        if splits > 1:
            shape = (splits, halves, MOST_ROWS, num_outputs)
            parts = torch.empty(shape, dtype=torch.float32, device=x_TE.device)
        residual_TE, norm_E, eps, sums_TE = norm or (None, None, 0.0, None)

        def prepare() -> Launch:
            _check(x_TE, weight_NE, bias_N, norm, activation)
            E, gated = weight_NE.shape[1], halves == 2
            constants = configuration(num_outputs, E, norms=norm is not None, gated=gated)
            steps = triton.cdiv(triton.cdiv(E, constants["BLOCK_E"]), splits)
            constants |= {"HAS_BIAS": bias_N is not None, "IS_GELU": activation == "gelu_tanh"}
            strides = (x_TE.stride(0), 0 if residual_TE is None else residual_TE.stride(0))
            ahead = min(steps, self._prefetch_bytes // STEP_BYTES)
            numbers = (T, *strides, weight_NE.stride(0), ahead, eps)
            grid = (triton.cdiv(num_outputs, BLOCK_N), splits)
            return Launch(grid, numbers, constants | self._pdl)

        tensors = (x_TE, weight_NE, bias_N, residual_TE, norm_E, sums_TE, parts)
        options = (activation, eps, self._pdl["PDL"], self._prefetch_bytes)
        _launches((*tensors, self._arrivals, out_TN), options, prepare)
        return out_TN


def _check(
    x_TE: torch.Tensor,
    weight_NE: torch.Tensor,
    bias_N: torch.Tensor | None,
    norm: ResidualNorm | None,
    activation: Activation | None,
) -> None:
    if x_TE.dim() != 2 or not 0 < x_TE.shape[0] <= MOST_ROWS:
        raise ValueError(f"x is {list(x_TE.shape)}; make it [T, E], T from 1 to {MOST_ROWS}")
    if activation not in (None, "silu", "gelu_tanh"):
        raise ValueError(f"no product has the activation {activation}; use silu or gelu_tanh")
    if activation and (weight_NE.shape[0] % 2 or bias_N is not None):
        raise ValueError("gate and up have as many outputs, and no bias; compute them apart")
    (_, E), device, own = x_TE.shape, x_TE.device, x_TE.dtype
    check_tensor("x_TE", x_TE, x_TE.shape, _DTYPES, device, contiguous_dims=1)
    check_tensor("weight_NE", weight_NE, (len(weight_NE), E), own, device, contiguous_dims=1)
    if bias_N is not None:
        check_tensor("bias_N", bias_N, (len(weight_NE),), own, device)
    if norm is not None:
        if E > MOST_NORMED_INPUTS:
            raise ValueError(f"{E} inputs are normed apart, at most {MOST_NORMED_INPUTS} here")
        residual_TE, norm_E, _, sums_TE = norm
        check_tensor("residual_TE", residual_TE, x_TE.shape, own, device, contiguous_dims=1)
        check_tensor("norm's weight_E", norm_E, (E,), (own, torch.float32), device)
        check_tensor("sums_TE", sums_TE, x_TE.shape, own, device)


def choose_splits(num_outputs: int, num_inputs: int) -> int:
    """Parts that E is cut into: a power of two that fills the device, at most 16."""
    steps, tiles, splits = triton.cdiv(num_inputs, BLOCK_E), triton.cdiv(num_outputs, BLOCK_N), 1
    most = min(16, _PROGRAMS_WANTED // max(tiles, 1), steps // _LEAST_STEPS_A_SPLIT)
    while splits * 2 <= most:
        splits *= 2
    return splits


def configuration(num_outputs: int, num_inputs: int, *, norms: bool, gated: bool) -> dict[str, Any]:
    """Constants and launch options. A stage has 16 KiB of weights, of gate and up together, too:
    with four, two programs fit on a multiprocessor of Hopper's, and one into 99 KiB."""
    return {
        "N": num_outputs,
        "E": num_inputs,
        "SPLITS": choose_splits(num_outputs, num_inputs),
        "BLOCK_T": MOST_ROWS,
        "BLOCK_N": BLOCK_N,
        "BLOCK_E": BLOCK_E // 2 if gated else BLOCK_E,
        "BLOCK_ROW": triton.next_power_of_2(num_inputs) if norms else 1,
        "NORMS": norms,
        "GATED": gated,
        "num_warps": 4,
        "num_stages": 4,
    }
