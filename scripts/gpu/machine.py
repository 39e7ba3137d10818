"""What the JSON document says of the device and its software.

Owns that description. Must not know checks or timings.
"""

from __future__ import annotations

import subprocess
from typing import Any

import torch
import triton

from scripts.load.report import describe_run


def describe_machine() -> dict[str, Any]:
    """Date, commit, machine and versions; the GPU and its driver."""
    run = describe_run()
    properties = torch.cuda.get_device_properties(0)
    run["versions"] |= {
        "torch": torch.__version__,
        "triton": triton.__version__,
        "cuda": torch.version.cuda,
    }
    return run | {
        "device": {
            "name": properties.name,
            "capability": list(torch.cuda.get_device_capability(0)),
            "multiprocessors": properties.multi_processor_count,
            "memory_bytes": properties.total_memory,
            "l2_bytes": getattr(properties, "L2_cache_size", None),
            "driver": _driver(),
        }
    }


def _driver() -> str | None:
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=20)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip().splitlines()[0] if done.stdout.strip() else None
