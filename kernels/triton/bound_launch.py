"""Launches that are equal but for their tensors' addresses: arguments are checked and bound once,
then the compiled kernel is called. Triton by itself binds them in every call: most of its time."""

from collections.abc import Callable, Hashable
from typing import Any, NamedTuple

import torch


class Launch(NamedTuple):
    """Of a kernel whose parameters are tensors, then numbers, then constants."""

    grid: tuple[int, ...]
    numbers: tuple[int | float, ...]
    constants: dict[str, Any]


class BoundLaunches:
    """The launches of one kernel.

    Args:
        kernel: as Triton decorates it.
        most: what is kept; above, all are bound anew.
    """

    def __init__(self, kernel: Any, *, most: int = 1024) -> None:
        self._kernel = kernel
        self._most = most
        self._known: dict[Hashable, tuple[Callable[..., None], tuple[Any, ...]]] = {}

    def __call__(
        self,
        tensors: tuple[torch.Tensor | None, ...],
        options: Hashable,
        prepare: Callable[[], Launch],
    ) -> None:
        """Launch on these tensors; None stands for one that the kernel does without.

        Args:
            options: all that the launch follows from, beside the tensors' shapes, strides and
                dtypes.
            prepare: checks, and makes the launch; called once for equal layouts and options.
        """
        addresses = 0
        layouts: list[Hashable] = []
        for tensor in tensors:
            if tensor is None:
                layouts.append(None)
                continue
            addresses |= tensor.data_ptr()
            layouts.append((tensor.shape, tensor.stride(), tensor.dtype))
        if addresses & 15:  # Triton compiles another kernel for an address that is not a multiple
            layouts.append(tuple(each is not None and each.data_ptr() & 15 for each in tensors))
        key = (options, *layouts)
        known = self._known.get(key)
        if known is not None:
            run, others = known
            run(*tensors, *others)
            return
        grid, numbers, constants = prepare()
        compiled = self._kernel[grid](*tensors, *numbers, **constants)
        if compiled is None:  # interpreted
            return
        if len(self._known) >= self._most:
            self._known.clear()
        names = self._kernel.arg_names[len(tensors) + len(numbers) :]
        whole_grid = (*grid, *(1,) * (3 - len(grid)))
        others = (*numbers, *(constants[name] for name in names))
        self._known[key] = compiled[whole_grid], others
