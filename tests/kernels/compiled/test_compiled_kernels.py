"""Every kernel compiles for the GPU without spilling, and no worse than the committed table says.

Needs no GPU: triton is fetched once. After a kernel was changed on purpose:
`python -m pytest tests/kernels/compiled --write-kernel-table [--every-gpu]`
"""

from pathlib import Path

import pytest

from tests.kernels.compiled import cases
from tests.kernels.compiled.cases import SHARED_BYTES
from tests.kernels.compiled.compilation import CAPABILITY, VERSION, compile_all, ptxas_version
from tests.kernels.compiled.table import (
    compare,
    find_faults,
    read_table,
    write_other_gpus,
    write_table,
)

WIDEST = ("prefill bf16 G=2 D=256 S=16", "decode bf16 G=2 D=256 S=16")
WIDEST += ("prefill bf16 G=8 D=512 S=16", "decode bf16 G=8 D=512 S=16")
TABLE = Path(__file__).parents[3] / "docs" / "benchmarks" / "kernels_sm90.json"
OTHER_GPUS = TABLE.with_name("kernels_other_gpus.json")


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("every", [False, pytest.param(True, marks=pytest.mark.extended)])
def test_every_kernel_compiles_for_sm90_as_well_as_the_table_says(request, every):
    """In all its variants, or in the one that takes most registers."""
    variants = cases.variants()
    if request.config.getoption("--write-kernel-table", default=False):
        if not every:
            pytest.skip("the table is written as a whole")
        outcomes, table = compile_all(cases.__name__, variants), {}
        target, ptxas = f"sm_{CAPABILITY}", ptxas_version()
        write_table(TABLE, outcomes, target=target, triton_version=VERSION, ptxas=ptxas)
    else:
        table = read_table(TABLE, VERSION)
        assert sorted(table) == sorted((each.module, each.name) for each in variants)
        if not every:
            variants.sort(key=lambda each: table[each.module, each.name].registers)
            variants = list({each.kernel: each for each in variants}.values())
        outcomes = compile_all(cases.__name__, variants)
        table = {outcome.key: table[outcome.key] for outcome in outcomes}
    problems = [problem for outcome in outcomes for problem in find_faults(outcome)]
    problems += compare(outcomes, table) if table else []
    assert not problems, "\n".join(problems)


@pytest.mark.timeout(7200)
def test_kernels_compile_for_other_gpus_within_their_shared_memory(request):
    """Of sm_86 the widest heads; of all, all kernels, with --every-gpu."""
    is_whole = request.config.getoption("--every-gpu", default=False)
    capabilities = [each for each in SHARED_BYTES if each != CAPABILITY] if is_whole else [86]
    outcomes, problems = {}, []
    for capability in capabilities:
        listed = cases.variants(SHARED_BYTES[capability], has_fp8=capability >= 89)
        listed = [each for each in listed if not each.is_for_hopper]
        wanted = [each for each in listed if is_whole or each.name in WIDEST]
        outcomes[capability] = compile_all(cases.__name__, wanted, capability)
        assert len(outcomes[capability]) == len(wanted) > 1
        for outcome in outcomes[capability]:
            problems += [f"sm_{capability}: {each}" for each in find_faults(outcome, capability)]
    if is_whole and request.config.getoption("--write-kernel-table", default=False):
        write_other_gpus(OTHER_GPUS, outcomes, triton_version=VERSION)
    assert not problems, "\n".join(problems)


def test_every_file_with_a_kernel_has_a_variant():
    root = Path(__file__).parents[3]
    listed = {variant.module for variant in cases.variants()}
    inlined = {
        "attention.reduce",
        "attention.tile",
        "linear.packed_reads",
        "recurrence.block",
        "recurrence.requests",
        "sampling.philox",
        "sampling.truncation_measure",
    }
    with_kernels = {
        ".".join(path.relative_to(root).with_suffix("").parts)
        for path in (root / "kernels" / "triton").rglob("*.py")
        if any(mark in path.read_text() for mark in ("@triton.jit", "@gluon.jit"))
    }
    assert with_kernels - {f"kernels.triton.{name}" for name in inlined} == listed
