"""Which backend serves a device.

Owns the choice only; a backend is imported when it is chosen, and no device is asked before.
"""

from __future__ import annotations

import importlib.util

import torch

from kernels.device_steps import DeviceStepOperations
from kernels.interface import Operations

_LOWEST_CAPABILITY = (8, 0)
"""Ampere: the first with bfloat16 in its tensor cores and asynchronous copies to shared memory."""


class UnsupportedDevice(Exception):
    """No backend serves the device, or not in the way that was asked for."""


def select_operations(device: torch.device | str, *, batch_invariant: bool = False) -> Operations:
    """The operations for `device`.

    Args:
        device: "cpu", or a CUDA device: "cuda" (the current one) or "cuda:1".
        batch_invariant: a request gets the same bits whatever else runs. CUDA only.

    Raises:
        UnsupportedDevice: this build cannot run on the device, or not batch-invariant.
    """
    chosen = torch.device(device)
    if chosen.type == "cpu":
        if batch_invariant:
            raise UnsupportedDevice(
                "--batch-invariant on a CPU is not supported: the sums of its dense products are "
                "ordered by the number of rows, so that last bits depend on the batch (sampling "
                "there is a function of seed and position already); leave the option out, or run "
                "with --device cuda"
            )
        from kernels.torch_ops.operations import TorchOperations

        return TorchOperations()
    if chosen.type != "cuda":
        raise UnsupportedDevice(
            f'device "{device}" is not supported; supported: "cpu" and "cuda". Run with '
            "--device cpu or --device cuda"
        )
    numbered = _check_cuda(chosen)
    from kernels.triton_ops.operations import TritonOperations

    return TritonOperations(numbered, batch_invariant=batch_invariant)


def device_step_operations(device: torch.device) -> DeviceStepOperations:
    """What a device runner asks of `device`, one that `select_operations` has accepted.

    On a CPU it is the specification: right, and slow.
    """
    if device.type == "cpu":
        from kernels.torch_ops.device_steps import TorchDeviceSteps

        return TorchDeviceSteps()
    from kernels.triton_ops.device_steps import TritonDeviceSteps

    return TritonDeviceSteps(device)


def _check_cuda(device: torch.device) -> torch.device:
    """The device with its number, once it is known that Triton's kernels run on it."""
    if not torch.cuda.is_available():
        raise UnsupportedDevice(
            f'device "{device}": torch {torch.__version__} sees no CUDA device; install a torch '
            "with CUDA and a driver, look what nvidia-smi shows, or run with --device cpu"
        )
    index = torch.cuda.current_device() if device.index is None else device.index
    if index >= torch.cuda.device_count():
        raise UnsupportedDevice(
            f'device "{device}": there are {torch.cuda.device_count()} CUDA devices, numbered from '
            "0; choose one of them"
        )
    numbered = torch.device("cuda", index)
    capability = torch.cuda.get_device_capability(numbered)
    if capability < _LOWEST_CAPABILITY:
        raise UnsupportedDevice(
            f'device "{device}" ({torch.cuda.get_device_name(numbered)}) has compute capability '
            f"{capability[0]}.{capability[1]}, the kernels need {_LOWEST_CAPABILITY[0]}."
            f"{_LOWEST_CAPABILITY[1]} (Ampere) or above; run with --device cpu"
        )
    if importlib.util.find_spec("triton") is None:
        raise UnsupportedDevice(
            f'device "{device}" needs triton, which is not installed; install it '
            "(pip install triton), or run with --device cpu"
        )
    return numbered
