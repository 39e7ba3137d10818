"""Operations on an NVIDIA GPU, as Triton kernels.

A file holds, in reading order: the torch reference, which is the specification; the kernel; the
checked wrapper; and `variants()`, what a proof on a machine without a GPU compiles. Nothing runs at
import.
"""
