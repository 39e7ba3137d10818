"""What of each kernel the runner can launch, so that all of it can be compiled without a GPU.

Owns the form of that list only.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelVariant:
    """One specialisation of one kernel.

    Attributes:
        name: of the variant, unique in its file: "decode bf16 G=3 D=64 S=16".
        kernel: the `@triton.jit` function.
        arguments: by parameter name: tensors on device "meta" for pointers (their dtype counts),
            Python numbers for scalars.
        constants: the `tl.constexpr` parameters.
        num_warps, num_stages: as launched.
        needs_wgmma: the compiled code is required to use Hopper's tensor-core instructions.
        max_registers: most registers a thread that the variant may take; 255 is the machine's
            limit.
        max_spill_bytes: most bytes of spilled registers, stores and loads together; above 0 only
            with a `spill_reason`.
        spill_reason: why these are not mended; stands in the table.
    """

    name: str
    kernel: Any
    arguments: Mapping[str, Any]
    constants: Mapping[str, Any] = field(default_factory=dict)
    num_warps: int = 4
    num_stages: int = 3
    needs_wgmma: bool = False
    max_registers: int = 255
    max_spill_bytes: int = 0
    spill_reason: str = ""
