"""Kernels with one thing wrong each, on purpose."""

from example_kernels.sound import copy_variant, product_variant


def variants():
    return [
        # 256 values a thread of one warp, and all live at once
        copy_variant("spills", block=8192, num_warps=1),
        product_variant("has no wgmma", block_m=16),
        copy_variant("takes too many registers", max_registers=4),
        copy_variant("does not compile", block=100),
    ]
