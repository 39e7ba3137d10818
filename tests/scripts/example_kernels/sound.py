"""Kernels with nothing wrong: a copy, and a matrix product for Hopper's tensor cores."""

import torch
import triton
import triton.language as tl

from kernels.triton.variants import KernelVariant


@triton.jit
def copy_kernel(x_ptr, out_ptr, num_elements, BLOCK: tl.constexpr):
    offsets = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = offsets < num_elements
    tl.store(out_ptr + offsets, tl.load(x_ptr + offsets, mask=mask), mask=mask)


@triton.jit
def product_kernel(a_ptr, b_ptr, out_ptr, SIZE: tl.constexpr, BLOCK_M: tl.constexpr):
    rows = tl.arange(0, BLOCK_M)
    columns = tl.arange(0, SIZE)
    a = tl.load(a_ptr + rows[:, None] * SIZE + columns[None, :])
    b = tl.load(b_ptr + columns[:, None] * SIZE + columns[None, :])
    out = tl.dot(a, b, input_precision="ieee")
    tl.store(out_ptr + rows[:, None] * SIZE + columns[None, :], out)


def copy_variant(name="copy", block=256, **limits):
    x = torch.empty(1, device="meta")
    return KernelVariant(
        name=name,
        kernel=copy_kernel,
        arguments={"x_ptr": x, "out_ptr": x, "num_elements": 1000},
        constants={"BLOCK": block},
        **limits,
    )


def product_variant(name="product", block_m=64, **limits):
    a = torch.empty(1, device="meta", dtype=torch.bfloat16)
    return KernelVariant(
        name=name,
        kernel=product_kernel,
        arguments={"a_ptr": a, "b_ptr": a, "out_ptr": torch.empty(1, device="meta")},
        constants={"SIZE": 64, "BLOCK_M": block_m},
        needs_wgmma=True,
        **limits,
    )


def variants():
    return [copy_variant(), product_variant()]
