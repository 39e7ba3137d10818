"""What the compiler says of a kernel, the limits on it, and the table of last time."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from tests.kernels.compiled.cases import SHARED_BYTES, KernelVariant

REGISTERS_OF_SLACK = 8
"""Registers are allotted in eights; a compiler that moves one about changes no occupancy."""
Key = tuple[str, str]
"""Module and name of a variant."""

_RESOURCES = re.compile(r"REG:(\d+) STACK:(\d+)")
_SPILLS = re.compile(r"(\d+) bytes spill stores, (\d+) bytes spill loads")
_WGMMA = re.compile(r"\bwgmma\.mma_async\.")
_READS = re.compile(r"\b(?:ld\.global|cp\.async\.c[ag])\.")
_PREFETCHES = re.compile(r"\bprefetch\.global\.L2\b")
_WAITS = re.compile(r"\bcp\.async\.wait_group\s+(?:0x)?([0-9a-f]+)")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    """Of one variant.

    Attributes:
        registers: a thread.
        stack_bytes, spill_store_bytes, spill_load_bytes: a thread; spilled values live on the
            stack, which is device memory.
        shared_bytes: a thread block.
        copies_under_way: most groups of asynchronous copies that a wait leaves under way; 0: what a
            loop asks for it waits for at once.
        reads_before_wait: of device memory, before the kernel has waited for the one before it (if
            it does at all): what that one writes would not be there.
        prefetches_before_wait: instructions of such a kernel that ask for lines, and read none.
        num_wgmma: instructions for Hopper's tensor cores in the PTX.
        wgmma_serialized: ptxas could not let them run asynchronously: much slower.
        compile_s: seconds when it was compiled; later runs read all this from triton's cache.
    """

    registers: int
    stack_bytes: int
    spill_store_bytes: int
    spill_load_bytes: int
    shared_bytes: int
    copies_under_way: int
    reads_before_wait: int
    num_wgmma: int
    wgmma_serialized: bool
    ptx_bytes: int
    compile_s: float
    prefetches_before_wait: int = 0

    @classmethod
    def from_json(cls, row: Mapping[str, Any]) -> Figures:
        """
        Raises:
            KeyError, TypeError: a field without a default is missing.
        """
        names = [field.name for field in dataclasses.fields(cls) if field.name in row]
        return cls(**{name: row[name] for name in names})


@dataclasses.dataclass(frozen=True, slots=True)
class Outcome:
    """Of compiling a variant: figures, or what went wrong."""

    variant: KernelVariant
    figures: Figures | None = None
    error: str | None = None

    def __str__(self) -> str:
        return _label(self.key)

    @property
    def key(self) -> Key:
        return self.variant.module, self.variant.name


def _label(key: Key) -> str:
    return f'{key[0].rpartition(".")[2]} "{key[1]}"'


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
    before, wait, _ = ptx.partition("griddepcontrol.wait")
    # a kernel that calls functions which were not inlined has a line for each of them
    return Figures(
        registers=max(reg for reg, _ in resources),
        stack_bytes=max(stack for _, stack in resources),
        spill_store_bytes=sum(stores for stores, _ in spills),
        spill_load_bytes=sum(loads for _, loads in spills),
        shared_bytes=shared_bytes,
        copies_under_way=max((int(wait, 16) for wait in _WAITS.findall(ptx)), default=0),
        reads_before_wait=len(_READS.findall(before)) if wait else 0,
        num_wgmma=len(_WGMMA.findall(ptx)),
        wgmma_serialized="wgmma.mma_async instructions are serialized" in ptxas_report,
        ptx_bytes=len(ptx),
        compile_s=round(compile_s, 2),
        prefetches_before_wait=len(_PREFETCHES.findall(before)) if wait else 0,
    )


def find_faults(outcome: Outcome, capability: int = 90) -> list[str]:
    """What is wrong with a variant by itself, one sentence each. Other GPUs than the table's need
    no wgmma, and spill what their fewer registers and bytes of shared memory leave no room for."""
    variant, figures = outcome.variant, outcome.figures
    if figures is None:
        return [f"{outcome} does not compile: {outcome.error}"]
    problems, most_shared = [], SHARED_BYTES[capability]
    if figures.shared_bytes > most_shared:
        problems.append(
            f"{outcome} uses {figures.shared_bytes} bytes of shared memory, the limit is "
            f"{most_shared}; use smaller tiles or fewer stages"
        )
    if capability != 90:
        return problems
    spilled = figures.spill_store_bytes + figures.spill_load_bytes
    if variant.max_spill_bytes and not variant.spill_reason:
        problems.append(f"{outcome} may spill without a reason; give a spill_reason")
    if spilled > variant.max_spill_bytes:
        problems.append(
            f"{outcome} spills {figures.spill_store_bytes} bytes of stores and "
            f"{figures.spill_load_bytes} of loads; use smaller tiles or more warps"
        )
    if figures.registers > variant.max_registers:
        problems.append(
            f"{outcome} takes {figures.registers} registers, its limit is {variant.max_registers}"
        )
    if variant.needs_wgmma and not figures.num_wgmma:
        problems.append(
            f"{outcome} needs wgmma and has none; it takes BLOCK_M >= 64 and at least 4 warps"
        )
    if variant.needs_wgmma and figures.wgmma_serialized:
        problems.append(f"{outcome}: ptxas serialised its wgmma instructions")
    if variant.needs_prefetch and not figures.copies_under_way:
        problems.append(f"{outcome} waits for each tile at once; it takes more num_stages")
    if variant.asks_ahead and not figures.prefetches_before_wait:
        problems.append(f"{outcome} asks for nothing before it waits for the kernel before it")
    if figures.reads_before_wait:
        problems.append(f"{outcome} reads before it waits for the kernel before it")
    return problems


def compare(outcomes: Iterable[Outcome], committed: Mapping[Key, Figures]) -> list[str]:
    """What got worse since the table was written."""
    problems, seen = [], set()
    for outcome in outcomes:
        seen.add(outcome.key)
        before, now = committed.get(outcome.key), outcome.figures
        if before is None:
            problems.append(f"{outcome} is not in the table")
        elif now is not None:
            if now.registers > before.registers + REGISTERS_OF_SLACK:
                problems.append(
                    f"{outcome} takes {now.registers} registers, {before.registers} in the table"
                )
            if before.num_wgmma and not now.num_wgmma:
                problems.append(f"{outcome} has no wgmma any more, {before.num_wgmma} in the table")
            if before.copies_under_way and not now.copies_under_way:
                problems.append(
                    f"{outcome} waits for each copy at once, with {before.copies_under_way} under "
                    "way in the table"
                )
    gone = [key for key in committed if key not in seen]
    return problems + [f"{_label(key)} is in the table and not in the cases" for key in gone]


def read_table(path: Path, triton_version: str) -> dict[Key, Figures]:
    """
    Raises:
        ValueError: another compiler's.
    """
    document = json.loads(path.read_text())
    made_by = document["compiler"]["triton"]
    if made_by != triton_version:
        raise ValueError(f"{path.name} was made with triton {made_by}, this is {triton_version}")
    return {(row["module"], row["variant"]): Figures.from_json(row) for row in document["variants"]}


def write_table(
    path: Path, outcomes: Iterable[Outcome], *, target: str, triton_version: str, ptxas: str
) -> None:
    """A row a variant that compiles."""
    rows = []
    for outcome in outcomes:
        if outcome.figures is None:
            continue
        row = {"module": outcome.key[0], "variant": outcome.key[1]}
        row |= dataclasses.asdict(outcome.figures)
        if outcome.variant.max_spill_bytes:
            row["max_spill_bytes"] = outcome.variant.max_spill_bytes
            row["spill_reason"] = outcome.variant.spill_reason
        rows.append(row)
    compiler = {"triton": triton_version, "ptxas": ptxas}
    document = {"target": target, "compiler": compiler, "variants": rows}
    path.write_text(json.dumps(document, indent=1) + "\n")


def write_other_gpus(
    path: Path, outcomes: Mapping[int, Iterable[Outcome]], *, triton_version: str
) -> None:
    """A row a variant, by compute capability: registers, bytes spilled, bytes of shared memory."""
    rows: dict[Key, dict[str, list[int]]] = {}
    for capability, of_one in outcomes.items():
        for outcome in of_one:
            if (figures := outcome.figures) is not None:
                spilled = figures.spill_store_bytes + figures.spill_load_bytes
                row = rows.setdefault(outcome.key, {})
                row[f"sm_{capability}"] = [figures.registers, spilled, figures.shared_bytes]
    variants = [{"module": key[0], "variant": key[1], **row} for key, row in rows.items()]
    columns = ["registers", "spilled_bytes", "shared_bytes"]
    document = {"triton": triton_version, "columns": columns, "variants": variants}
    lines = [json.dumps(row) for row in variants]
    head = json.dumps(document | {"variants": []}, indent=1).removesuffix("[]\n}")
    path.write_text(head + "[\n  " + ",\n  ".join(lines) + "\n ]\n}\n")
