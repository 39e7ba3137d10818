"""Operations on an NVIDIA GPU, as Triton kernels. Nothing runs at import.

A file holds, in reading order: the torch reference, which is the specification, unless
`kernels.torch` has it; the kernel; and its wrapper, which raises ValueError or TypeError for
tensors of wrong shapes, dtypes, layouts or devices."""
