"""Every kernel compiles for the GPU without spilling, and no worse than the committed table says.

Needs no GPU: triton is fetched once. After a kernel was changed on purpose:
`python -m pytest tests/kernels/compiled --write-kernel-table`
"""

from pathlib import Path

import pytest

from tests.kernels.compiled import cases
from tests.kernels.compiled.compilation import CAPABILITY, VERSION, compile_all, ptxas_version
from tests.kernels.compiled.table import compare, find_faults, read_table, write_table

TABLE = Path(__file__).parents[3] / "docs" / "benchmarks" / "kernels_sm90.json"


@pytest.mark.timeout(1800)  # a minute or two where triton's cache is empty
def test_every_kernel_compiles_for_sm90_as_well_as_the_table_says(request):
    outcomes = compile_all(cases.__name__, cases.variants())
    problems = [problem for outcome in outcomes for problem in find_faults(outcome)]
    if request.config.getoption("--write-kernel-table", default=False):
        target, ptxas = f"sm_{CAPABILITY}", ptxas_version()
        write_table(TABLE, outcomes, target=target, triton_version=VERSION, ptxas=ptxas)
    else:
        problems += compare(outcomes, read_table(TABLE, VERSION))
    assert not problems, "\n".join(problems)


def test_no_variant_is_listed_twice():
    keys = [(variant.module, variant.name) for variant in cases.variants()]
    assert len(set(keys)) == len(keys)


def test_every_file_with_a_kernel_has_a_variant():
    folder = Path(__file__).parents[3].joinpath(*cases.activation.__package__.split("."))
    listed = {variant.module.rpartition(".")[2] for variant in cases.variants()}
    inlined = {"attention_reduce", "attention_tile", "philox", "quantised", "truncation_measure"}
    with_kernels = {path.stem for path in folder.glob("*.py") if "@triton.jit" in path.read_text()}
    assert with_kernels - inlined == listed
