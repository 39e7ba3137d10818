"""What the compiler says of one compiled kernel, and how that is read out of its tools' output.

Owns the figures and their form in JSON. Must not know triton, kernels or limits.
"""

from __future__ import annotations

import dataclasses
import re
from typing import Any

_RESOURCES = re.compile(r"REG:(\d+) STACK:(\d+)")
_SPILLS = re.compile(r"(\d+) bytes spill stores, (\d+) bytes spill loads")
_WGMMA = re.compile(r"\bwgmma\.mma_async\.")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    """Of one variant.

    Attributes:
        registers: a thread.
        stack_bytes, spill_store_bytes, spill_load_bytes: a thread; spilled values live on the
            stack, which is device memory.
        shared_bytes: a thread block.
        num_wgmma: instructions for Hopper's tensor cores in the PTX.
        wgmma_serialized: ptxas could not let them run asynchronously: much slower.
        compile_s: seconds when it was compiled; later runs read all this from triton's cache.
    """

    registers: int
    stack_bytes: int
    spill_store_bytes: int
    spill_load_bytes: int
    shared_bytes: int
    num_wgmma: int
    wgmma_serialized: bool
    ptx_bytes: int
    compile_s: float

    @classmethod
    def from_json(cls, row: dict[str, Any]) -> Figures:
        """
        Raises:
            ValueError: a field is missing.
        """
        names = [field.name for field in dataclasses.fields(cls)]
        missing = [name for name in names if name not in row]
        if missing:
            raise ValueError(f"a row has no {', '.join(missing)}; write the table anew with --json")
        return cls(**{name: row[name] for name in names})


def read_figures(
    *, ptx: str, ptxas_report: str, resource_usage: str, shared_bytes: int, compile_s: float
) -> Figures:
    """Figures out of the compiler's output.

    Args:
        ptxas_report: what `ptxas -v` says of that PTX on stderr.
        resource_usage: what `cuobjdump -res-usage` says of the cubin.

    Raises:
        ValueError: the tools say nothing of the kernel.
    """
    resources = [(int(reg), int(stack)) for reg, stack in _RESOURCES.findall(resource_usage)]
    spills = [(int(stores), int(loads)) for stores, loads in _SPILLS.findall(ptxas_report)]
    if not resources or not spills:
        raise ValueError(
            "ptxas -v or cuobjdump -res-usage names no kernel; do they belong to this triton?"
        )
    # a kernel that calls functions which were not inlined has a line for each of them
    return Figures(
        registers=max(reg for reg, _ in resources),
        stack_bytes=max(stack for _, stack in resources),
        spill_store_bytes=sum(stores for stores, _ in spills),
        spill_load_bytes=sum(loads for _, loads in spills),
        shared_bytes=shared_bytes,
        num_wgmma=len(_WGMMA.findall(ptx)),
        wgmma_serialized="wgmma.mma_async instructions are serialized" in ptxas_report,
        ptx_bytes=len(ptx),
        compile_s=round(compile_s, 2),
    )
