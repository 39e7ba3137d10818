"""What is wrong with compiled kernels: by their own limits, and against the table of last time.

Owns the limits and the wording. Pure functions; must not know triton.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from scripts.kernel_proof.compilation import Outcome, VariantId
from scripts.kernel_proof.figures import Figures

MAX_SHARED_BYTES = 227 * 1024
"""Of one thread block on sm_90."""
REGISTERS_OF_SLACK = 8
"""Registers are allotted in eights; a compiler that moves one about changes no occupancy."""


def judge(outcome: Outcome) -> list[str]:
    """What is wrong with a variant by itself, one sentence each."""
    variant, figures = outcome.variant, outcome.figures
    if figures is None:
        return [f"{variant} does not compile: {outcome.error}"]
    problems = []
    spilled = figures.spill_store_bytes + figures.spill_load_bytes
    if variant.max_spill_bytes and not variant.spill_reason:
        problems.append(f"{variant} may spill, but says not why; give a spill_reason")
    if spilled > variant.max_spill_bytes:
        problems.append(
            f"{variant} spills {figures.spill_store_bytes} bytes of stores and "
            f"{figures.spill_load_bytes} of loads; use smaller tiles or more warps"
        )
    if figures.registers > variant.max_registers:
        problems.append(
            f"{variant} takes {figures.registers} registers, its limit is {variant.max_registers}"
        )
    if variant.needs_wgmma and not figures.num_wgmma:
        problems.append(
            f"{variant} needs wgmma and has none; it takes BLOCK_M >= 64 and at least 4 warps"
        )
    if variant.needs_wgmma and figures.wgmma_serialized:
        problems.append(f"{variant}: ptxas serialised its wgmma instructions")
    if figures.shared_bytes > MAX_SHARED_BYTES:
        problems.append(
            f"{variant} uses {figures.shared_bytes} bytes of shared memory, the limit is "
            f"{MAX_SHARED_BYTES}; use smaller tiles or fewer stages"
        )
    return problems


def compare(
    outcomes: Iterable[Outcome],
    committed: Mapping[tuple[str, str], Figures],
    expected: Iterable[tuple[str, str]],
) -> list[str]:
    """What got worse since the table was written.

    Args:
        committed: the table, by module and name of variant.
        expected: rows of the table that should be among the outcomes; fewer than all when only
            some variants were compiled.
    """
    problems = []
    seen = set()
    for outcome in outcomes:
        key = (outcome.variant.module, outcome.variant.name)
        seen.add(key)
        before = committed.get(key)
        if before is None:
            problems.append(f"{outcome.variant} is not in the table; write it anew: --json")
        elif outcome.figures is not None:
            problems += _worse(outcome.variant, before, outcome.figures)
    for module, name in expected:
        if (module, name) not in seen:
            gone = VariantId(module, name, 0)
            problems.append(
                f"{gone} is in the table and not in the code; write it anew with --json"
            )
    return problems


def _worse(variant: VariantId, before: Figures, now: Figures) -> list[str]:
    problems = []
    if now.registers > before.registers + REGISTERS_OF_SLACK:
        problems.append(
            f"{variant} takes {now.registers} registers, {before.registers} in the table"
        )
    if before.num_wgmma and not now.num_wgmma:
        problems.append(f"{variant} has no wgmma any more, {before.num_wgmma} in the table")
    return problems
