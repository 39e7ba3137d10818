"""Random sizes and values for the fuzzing of the native library, all from one seed."""

from collections.abc import Callable

import torch

from kernels.cpu.weight_memory import WeightMemory

# edges of panels, groups, chains and vectors, and numbers beside them
_EDGES = (1, 2, 3, 4, 7, 8, 15, 16, 17, 31, 32, 33, 63, 64, 65, 95, 96, 97, 255, 256, 257)
_ODD_VALUES = (float("inf"), float("-inf"), float("nan"), 1e-40, -3e38, 0.0)


class NotRefused(AssertionError):
    """A wrong call that returned."""


def must_refuse(what: str, call: Callable[[], object]) -> None:
    """Raise NotRefused unless `call` raises ValueError."""
    try:
        call()
    except ValueError:
        return
    raise NotRefused(what)


class ExactMemory(WeightMemory):
    """Each weight in an allocation of its own, so that a read past its end is seen."""

    def reserve(self, num_bytes: int) -> torch.Tensor:
        return torch.empty(num_bytes, dtype=torch.uint8)


class RandomCase:
    """Draws from torch's own generator, which it seeds: whatever else draws repeats too."""

    def __init__(self, seed: int) -> None:
        torch.manual_seed(seed)

    def below(self, limit: int) -> int:
        """A whole number in [0, limit)."""
        return int(torch.randint(limit, ()))

    def between(self, low: int, high: int) -> int:
        """A whole number in [low, high]."""
        return low + self.below(high - low + 1)

    def one_in(self, times: int) -> bool:
        return self.below(times) == 0

    def size(self, most: int) -> int:
        """In [1, most], often at an edge."""
        edge = _EDGES[self.below(len(_EDGES))]
        return edge if edge <= most and self.below(3) else self.between(1, most)

    def index(self, size: int) -> int:
        """One that is out of range for `size` items."""
        return (-1, size, size + 1, -(2**31), 2**31 - 1)[self.below(5)]

    def integers(self, shape: tuple[int, ...], limit: int, dtype: torch.dtype) -> torch.Tensor:
        """In [0, limit)."""
        return torch.randint(limit, shape).to(dtype)

    def numbers(self, *shape: int) -> torch.Tensor:
        """Normal float32; one tensor in eight holds a value that is no ordinary number."""
        made = torch.randn(shape)
        if made.numel() and self.one_in(8):
            odd = _ODD_VALUES[self.below(len(_ODD_VALUES))]
            made.view(-1)[self.below(made.numel())] = odd
        return made

    def strided(self, num_rows: int, size: int) -> torch.Tensor:
        """Rows of `numbers`, now and then with a gap after each."""
        gap = self.below(3) * self.below(20)
        if not gap or not num_rows:
            return self.numbers(num_rows, size)
        flat = self.numbers((num_rows - 1) * (size + gap) + size)  # ends with the last row
        return flat.as_strided((num_rows, size), (size + gap, 1))
