"""Limits of a device that launches must know: asked for once."""

import functools

import torch

LARGEST_HEAD = 512
"""Elements of a head of keys: tiles of more would fit neither in registers nor in shared memory."""
HOPPER_SHARED_BYTES = 227 * 1024
SHORT_SHARED_BYTES = 160 * 1024
"""Devices below it (sm_86, 89, 120) give a thread block 99 KiB; sm_80 gives 163, the others 227."""

FLOAT8_CAPABILITY = (8, 9)
"""Ada: the first that converts and multiplies e4m3."""


@functools.cache
def shared_memory(device: torch.device) -> int:
    """Most bytes of shared memory of a thread block; the interpreter's are Hopper's."""
    if device.type != "cuda":
        return HOPPER_SHARED_BYTES
    properties = torch.cuda.get_device_properties(device)
    return int(properties.shared_memory_per_block_optin)  # type: ignore[attr-defined]


@functools.cache
def dependent_launch(device: torch.device) -> dict[str, bool]:
    """Launch options of a kernel that begins with `if PDL: gdc_wait()`: from Hopper on its blocks
    are on their way while the kernel before it ends (programmatic dependent launch)."""
    has_it = device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0)
    return {"PDL": True, "launch_pdl": True} if has_it else {"PDL": False}


@functools.cache
def is_hopper(device: torch.device) -> bool:
    """Whether the device has wgmma, which no later one has."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) == (9, 0)


@functools.cache
def multiplies_float8(device: torch.device) -> bool:
    """Whether tensor cores do. The interpreter does."""
    return device.type != "cuda" or torch.cuda.get_device_capability(device) >= FLOAT8_CAPABILITY


_FAST_FLOAT64 = ((8, 0), (9, 0), (10, 0))
"""A100, H100, B200 compute float64 at half the rate of float32; other GPUs at 1/64 or so."""


@functools.cache
def has_fast_float64(device: torch.device) -> bool:
    """Whether kernels may compute in float64; the interpreter's do."""
    return device.type != "cuda" or torch.cuda.get_device_capability(device) in _FAST_FLOAT64
