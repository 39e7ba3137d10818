"""Which backend serves a device.

Owns the choice only; a backend is imported when it is chosen.
"""

from __future__ import annotations

import torch

from kernels.interface import Operations


class UnsupportedDevice(Exception):
    """No backend serves the device that was asked for."""


def select_operations(device: torch.device | str) -> Operations:
    """The operations for `device`.

    Raises:
        UnsupportedDevice: the device is none that this build can run on.
    """
    chosen = torch.device(device)
    if chosen.type != "cpu":
        raise UnsupportedDevice(
            f'device "{device}" is not supported; supported: "cpu". Run with --device cpu'
        )
    from kernels.torch_ops.operations import TorchOperations

    return TorchOperations()
