"""A file a group: the checks and timings of one module of kernels, in its `group()`.

`group()` only names them; it makes no tensors, so that the list can be shown without a GPU.
"""
