"""Random weights of a model's shape, for measuring speed where its files are not at hand.

Owns the numbers. Must not know architectures or files.
"""

from __future__ import annotations

import zlib

import torch

_STANDARD_DEVIATION = 0.02
"""As models are initialised: activations stay far from any dtype's limits in every layer."""


class DummyWeights:
    """Draws tensors where they will be used: nothing passes through the host or through float32.

    Args:
        dtype: of the tensors.
        device: on which they are made.
        seed: equal seeds, equal weights on a kind of device, in whatever order they are drawn.
    """

    def __init__(self, *, dtype: torch.dtype, device: torch.device, seed: int) -> None:
        self._dtype = dtype
        self._device = device
        self._seed = seed
        self._generator = torch.Generator(device)

    def draw(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        """The tensor of a checkpoint name: ones for a norm, else normal around zero."""
        tensor = torch.empty(shape, dtype=self._dtype, device=self._device)
        if len(shape) == 1 and "norm" in name:
            return tensor.fill_(1.0)
        # 32 bits, because a CPU's generator reads no more
        self._generator.manual_seed(zlib.crc32(f"{self._seed} {name}".encode()))
        return tensor.normal_(0.0, _STANDARD_DEVIATION, generator=self._generator)
