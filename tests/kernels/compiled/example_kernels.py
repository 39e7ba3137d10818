"""A copy and a matrix product for Hopper's tensor cores: right, and with one thing wrong each."""

import torch
import triton
import triton.language as tl

from tests.kernels.compiled.cases import KernelVariant


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


def variants(shared_bytes=0):
    return [
        _copy("copy"),
        _product("product"),
        # 256 values a thread of one warp, and all live at once
        _copy("spills", block=8192, num_warps=1),
        _product("has no wgmma", block_m=16),
        _copy("takes too many registers", max_registers=4),
        _copy("does not compile", block=100),
    ]


def _copy(name, block=256, **limits):
    return KernelVariant(
        name=name,
        kernel=copy_kernel,
        arguments={"x_ptr": torch.float32, "out_ptr": torch.float32, "num_elements": 1000},
        constants={"BLOCK": block},
        **limits,
    )


def _product(name, block_m=64):
    return KernelVariant(
        name=name,
        kernel=product_kernel,
        arguments={"a_ptr": torch.bfloat16, "b_ptr": torch.bfloat16, "out_ptr": torch.float32},
        constants={"SIZE": 64, "BLOCK_M": block_m},
        needs_wgmma=True,
    )
