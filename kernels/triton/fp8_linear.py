"""Products in float8 (e4m3): a scale for each token and one for each output.

A token's rounding depends on the token alone; the product's last bits may depend on the batch,
because the library chooses its tiles by the number of rows."""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from kernels.triton.tensor_checks import FLOATS, check_tensor

LARGEST = 448.0
"""The largest e4m3 number."""

_MOST_AT_ONCE = 4096
_MULTIPLE = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Float8Weight:
    """`weight_NE * scale_N[:, None]`. Satisfies `kernels.interface.operations.LinearWeight`.

    Attributes:
        weight_NE: float8_e4m3fn, contiguous.
        scale_N: float32.
        has_product: the device multiplies float8 itself; resolved once, at load.
    """

    num_inputs: int
    num_outputs: int
    weight_NE: torch.Tensor
    scale_N: torch.Tensor
    has_product: bool


def reference_quantise_rows(x_TE: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """What `quantise_rows` computes: (float8_e4m3fn [T, E], float32 [T])."""
    x_TE = x_TE.float()
    scale_T = x_TE.abs().amax(dim=1) / LARGEST
    scale_T = torch.where(scale_T == 0, 1.0, scale_T)
    q_TE = (x_TE / scale_T[:, None]).clamp(-LARGEST, LARGEST).to(torch.float8_e4m3fn)
    return q_TE, scale_T


def reference_float8_linear(
    q_TE: torch.Tensor,
    scale_T: torch.Tensor,
    weight: Float8Weight,
    bias_N: torch.Tensor | None = None,
) -> torch.Tensor:
    """`(q * scale_T) @ (w * scale_N).T + bias` in float32."""
    out_TN = q_TE.float() @ weight.weight_NE.float().T * scale_T[:, None] * weight.scale_N
    return out_TN if bias_N is None else out_TN + bias_N.float()


@triton.jit
def _quantise_rows_kernel(
    x_ptr,  # [T, E], rows `x_stride` apart
    q_ptr,  # float8_e4m3fn [T, E]
    scale_ptr,  # float32 [T]
    x_stride,
    E: tl.constexpr,
    LARGEST: tl.constexpr,
    BLOCK_E: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    x_row = x_ptr + token * x_stride
    e_E = tl.arange(0, BLOCK_E)
    peak_E = tl.zeros((BLOCK_E,), dtype=tl.float32)
    for start in range(0, E, BLOCK_E):
        x_E = tl.load(x_row + start + e_E, mask=e_E < E - start, other=0.0).to(tl.float32)
        peak_E = tl.maximum(peak_E, tl.abs(x_E))
    scale = tl.max(peak_E, axis=0) / LARGEST
    scale = tl.where(scale == 0.0, 1.0, scale)
    tl.store(scale_ptr + token, scale)
    for start in range(0, E, BLOCK_E):
        x_E = tl.load(x_row + start + e_E, mask=e_E < E - start, other=0.0).to(tl.float32)
        q_E = tl.minimum(tl.maximum(tl.div_rn(x_E, tl.zeros_like(x_E) + scale), -LARGEST), LARGEST)
        # Put on the grid of e4m3 here, ties to even, so that the cast is exact on every device: at
        # 1.5 * 2^20 times a number's power of two, float32 has 3 mantissa bits left for it. Below
        # 2^-6 the grid is even.
        power_E = (q_E.to(tl.int32, bitcast=True) & 0x7F800000).to(tl.float32, bitcast=True)
        coarse_E = tl.maximum(power_E, 0.015625) * 1572864.0
        q_E = (q_E + coarse_E) - coarse_E
        tl.store(q_ptr + token * E + start + e_E, q_E.to(tl.float8e4nv), mask=e_E < E - start)


def prepare_float8(weight_NE: torch.Tensor, scale_N: torch.Tensor | None = None) -> Float8Weight:
    """Take a weight over: rounded by output if it is not float8 yet. Called at load time only.
    Raises ValueError: N or E is no multiple of 16, or scales that do not fit.

    Args:
        weight_NE: [N, E] floating, or float8_e4m3fn with its scales.
        scale_N: float32 [N], or one number for all outputs.
    """
    num_outputs, num_inputs = weight_NE.shape
    if num_outputs % _MULTIPLE or num_inputs % _MULTIPLE:
        raise ValueError(
            f"float8 weight of {num_outputs} x {num_inputs}; both must be multiples of "
            f"{_MULTIPLE}: keep this layer in the model's dtype"
        )
    stored = weight_NE.dtype == torch.float8_e4m3fn
    if stored != (scale_N is not None):
        raise ValueError(f"weight is {weight_NE.dtype}; scales go with float8_e4m3fn and only it")
    if scale_N is None:
        weight_NE, scale_N = reference_quantise_rows(weight_NE)
    if scale_N.numel() not in (1, num_outputs):
        raise ValueError(f"{scale_N.numel()} scales for {num_outputs} outputs; give that many or 1")
    device = weight_NE.device
    return Float8Weight(
        num_inputs=num_inputs,
        num_outputs=num_outputs,
        weight_NE=weight_NE.contiguous(),
        scale_N=scale_N.float().reshape(-1).expand(num_outputs).contiguous(),
        has_product=device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 9),
    )


def quantise_rows(x_TE: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Each token rounded to float8 by its largest value: `x = q * scale`.

        scale[t] = max |x[t]| / 448 (1 for a row of zeros);  q = x / scale, to the nearest

    Args:
        x_TE: float32, float16 or bfloat16; the last dimension contiguous.

    Returns:
        (float8_e4m3fn [T, E], float32 [T]), new tensors.
    """
    shape = (x_TE.shape[0], x_TE.shape[-1])
    check_tensor("x_TE", x_TE, shape, FLOATS, x_TE.device, contiguous_dims=1)
    num_tokens, width = x_TE.shape
    q_TE = torch.empty(num_tokens, width, dtype=torch.float8_e4m3fn, device=x_TE.device)
    scale_T = torch.empty(num_tokens, dtype=torch.float32, device=x_TE.device)
    if num_tokens:
        _quantise_rows_kernel[(num_tokens,)](
            x_TE, q_TE, scale_T, x_TE.stride(0), **_constants(width), num_warps=4
        )
    return q_TE, scale_T


def float8_linear(
    x_TE: torch.Tensor, weight: Float8Weight, bias_N: torch.Tensor | None = None
) -> torch.Tensor:
    """`x @ W.T + bias` -> [T, N] in the dtype of x, x rounded to float8 by token.

    Sums are float32 without the tensor cores' shortened accumulation. Where the device has no
    float8 product the reference computes it. (Micikevicius et al., FP8 formats for deep learning,
    2022.)

    Args:
        x_TE: as in `quantise_rows`; bfloat16 where the device multiplies float8.
        bias_N: the dtype of x.
    """
    shape, device = (x_TE.shape[0], weight.num_inputs), x_TE.device
    check_tensor("x_TE", x_TE, shape, FLOATS, device, contiguous_dims=1)
    if weight.has_product and x_TE.dtype != torch.bfloat16:
        raise TypeError(f"x is {x_TE.dtype}; the float8 product by rows gives bfloat16 only")
    if bias_N is not None:
        check_tensor("bias_N", bias_N, (weight.num_outputs,), x_TE.dtype, device)
    if not x_TE.shape[0]:
        return x_TE.new_empty(0, weight.num_outputs)
    q_TE, scale_T = quantise_rows(x_TE)
    if not weight.has_product:
        return reference_float8_linear(q_TE, scale_T, weight, bias_N).to(x_TE.dtype)
    return scaled_product(q_TE, scale_T, weight, x_TE.dtype, bias_N)


def scaled_product(
    q_TE: torch.Tensor,
    scale_T: torch.Tensor,
    weight: Float8Weight,
    dtype: torch.dtype,
    bias_N: torch.Tensor | None = None,
) -> torch.Tensor:
    """`reference_float8_linear` by the device's own product, in `dtype`."""
    out_TN: torch.Tensor = torch._scaled_mm(
        q_TE,
        weight.weight_NE.t(),
        scale_a=scale_T[:, None],
        scale_b=weight.scale_N[None, :],
        bias=bias_N,
        out_dtype=dtype,
        use_fast_accum=False,
    )
    return out_TN


def _constants(width: int) -> dict[str, int | float]:
    return {
        "E": width,
        "LARGEST": LARGEST,
        "BLOCK_E": min(triton.next_power_of_2(width), _MOST_AT_ONCE),
    }
