"""The compile proof: what it catches, in its own words, on kernels that are wrong on purpose."""

import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.kernels.compiled import example_kernels
from tests.kernels.compiled.compilation import (
    VERSION,
    CompilerNotFetched,
    compile_all,
    fetch_compiler,
    run_in_workers,
)
from tests.kernels.compiled.table import (
    Figures,
    Outcome,
    compare,
    find_faults,
    read_figures,
    read_table,
    write_table,
)

FIGURES = Figures(
    registers=100,
    stack_bytes=0,
    spill_store_bytes=0,
    spill_load_bytes=0,
    shared_bytes=1024,
    copies_under_way=3,
    reads_before_wait=0,
    num_wgmma=4,
    wgmma_serialized=False,
    ptx_bytes=5000,
    compile_s=1.5,
)
PTXAS = (
    "ptxas info    : Compiling entry function 'k' for 'sm_90a'\n"
    "    {} bytes stack frame, {} bytes spill stores, {} bytes spill loads\n"
    "ptxas info    : Used 40 registers, used 1 barriers\n"
)
USAGE = "Resource usage:\n Function k:\n  REG:40 STACK:{} SHARED:0 LOCAL:0 CONSTANT[0]:592\n"
MODULE = example_kernels.__name__


def outcome(
    name="a",
    *,
    needs_wgmma=False,
    needs_prefetch=False,
    max_registers=255,
    spill=(0, ""),
    **changes,
):
    variant = dataclasses.replace(
        example_kernels.variants()[0],
        name=name,
        needs_wgmma=needs_wgmma,
        needs_prefetch=needs_prefetch,
        max_registers=max_registers,
        max_spill_bytes=spill[0],
        spill_reason=spill[1],
    )
    return Outcome(variant, dataclasses.replace(FIGURES, **changes))


def table(*names):
    return {(MODULE, name): FIGURES for name in names}


def test_figures_are_read_out_of_the_tools_reports():
    figures = read_figures(
        ptx="wgmma.mma_async.sync.aligned.m64n64k16.f32\nwgmma.wait_group\n" * 2,
        ptxas_report=PTXAS.format(16, 8, 12) + "instructions are fine",
        resource_usage=USAGE.format(16),
        shared_bytes=2048,
        compile_s=1.234,
    )
    assert (figures.registers, figures.stack_bytes, figures.num_wgmma) == (40, 16, 2)
    assert (figures.spill_store_bytes, figures.spill_load_bytes) == (8, 12)
    assert not figures.wgmma_serialized


def test_a_function_that_was_not_inlined_counts_with_its_kernel():
    figures = read_figures(
        ptx="",
        ptxas_report=PTXAS.format(0, 0, 0) + PTXAS.format(8, 8, 4),
        resource_usage=USAGE.format(0) + USAGE.format(8).replace("REG:40", "REG:90"),
        shared_bytes=0,
        compile_s=0,
    )
    assert (figures.registers, figures.stack_bytes, figures.spill_load_bytes) == (90, 8, 4)


def test_a_tool_that_says_nothing_is_an_error_and_not_a_kernel_without_spills():
    with pytest.raises(ValueError, match="names no kernel"):
        read_figures(ptx="", ptxas_report="", resource_usage="", shared_bytes=0, compile_s=0)


@pytest.mark.parametrize(
    ("found", "words"),
    [
        (outcome(spill_store_bytes=8, spill_load_bytes=4), "spills 8 bytes of stores and 4 of"),
        (outcome(spill_load_bytes=4), "spills 0 bytes"),
        (outcome(spill=(12, "why"), spill_store_bytes=8, spill_load_bytes=5), "spills 8 bytes"),
        (outcome(spill=(12, "")), "may spill without a reason"),
        (outcome(max_registers=99), "takes 100 registers, its limit is 99"),
        (outcome(needs_wgmma=True, num_wgmma=0), "needs wgmma and has none"),
        (outcome(reads_before_wait=1), "reads before it waits for the kernel before it"),
        (outcome(needs_prefetch=True, copies_under_way=0), "waits for each tile at once"),
        (outcome(needs_wgmma=True, wgmma_serialized=True), "serialised"),
        (outcome(shared_bytes=232449), "232449 bytes of shared memory, the limit is 232448"),
        (Outcome(outcome().variant, error="CompileError: no"), "does not compile: CompileError"),
    ],
)
def test_what_is_wrong_with_a_variant_is_said(found, words):
    (problem,) = find_faults(found)
    assert problem.startswith('example_kernels "a"')
    assert words in problem


@pytest.mark.parametrize(
    "found",
    [
        outcome(max_registers=100, shared_bytes=232448),
        outcome(needs_wgmma=True),
        outcome(spill=(12, "why"), spill_store_bytes=8, spill_load_bytes=4),
        outcome(num_wgmma=0),
    ],
)
def test_a_variant_within_its_limits_is_sound(found):
    assert find_faults(found) == []


def test_what_fits_hopper_may_not_fit_a_gpu_of_less_shared_memory():
    found = outcome(shared_bytes=106624, needs_wgmma=True, num_wgmma=0, spill_store_bytes=8)
    (problem,) = find_faults(found, 86)
    assert "106624 bytes of shared memory, the limit is 101376" in problem
    assert not find_faults(found, 80)
    assert len(find_faults(found)) == 2


def test_missing_and_new_variants_are_named():
    problems = compare([outcome("a"), outcome("new")], table("a", "gone"))
    assert problems == [
        'example_kernels "new" is not in the table',
        'example_kernels "gone" is in the table and not in the cases',
    ]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"registers": 108}, None),
        ({"registers": 109}, "takes 109 registers, 100 in the table"),
        ({"registers": 50, "num_wgmma": 1}, None),
        ({"num_wgmma": 0}, "no wgmma any more, 4 in the table"),
        ({"copies_under_way": 0}, "waits for each copy at once, with 3 under way in the table"),
    ],
)
def test_figures_that_got_worse_are_named(changes, words):
    problems = compare([outcome(**changes)], table("a"))
    assert [words in problem for problem in problems] == ([] if words is None else [True])


def test_a_table_is_read_as_it_was_written_and_another_compilers_is_refused(tmp_path):
    path = tmp_path / "table.json"
    found = outcome(spill=(12, "why"))
    write_table(path, [found], target="sm_90", triton_version="3.5.0", ptxas="12")
    assert read_table(path, "3.5.0") == {(MODULE, "a"): FIGURES}
    (row,) = json.loads(path.read_text())["variants"]
    assert (row["max_spill_bytes"], row["spill_reason"]) == (12, "why")
    with pytest.raises(ValueError, match=r"made with triton 3\.5\.0, this is 3\.6\.0"):
        read_table(path, "3.6.0")


def test_a_work_item_that_ends_its_process_is_named_and_the_others_are_done():
    dying = "import os; os._exit(134)"
    results = run_in_workers(exec, ["", dying, ""], lambda item: f"{item} died")
    assert results == [None, f"{dying} died", None]


def test_a_fetch_that_fails_says_how_to_do_it_and_leaves_nothing(tmp_path, monkeypatch):
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    with pytest.raises(CompilerNotFetched, match=r"triton 3\.6\.0 cannot be fetched: .*--no-deps"):
        fetch_compiler(tmp_path / "triton")
    assert list(tmp_path.iterdir()) == []


def test_a_compiler_is_fetched_once_and_whole(tmp_path, monkeypatch):
    calls = []

    def pip(command, **_):
        calls.append(command)
        target = Path(command[command.index("--target") + 1])
        files = ["triton-3.6.0.dist-info/METADATA", "triton/backends/nvidia/bin/ptxas"]
        for name in (*files, "triton/backends/nvidia/bin/cuobjdump"):
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            (target / name).touch()
        return subprocess.CompletedProcess(command, 0, "", "")

    monkeypatch.setattr(subprocess, "run", pip)
    folder = tmp_path / "cache" / "triton-3.6.0"
    (folder / "triton").mkdir(parents=True)  # what an interrupted fetch would leave
    assert fetch_compiler(folder) == fetch_compiler(folder) == folder
    assert len(calls) == 1
    assert calls[0][-1] == "triton==3.6.0"
    assert calls[0][0] == sys.executable
    assert list(folder.parent.iterdir()) == [folder]


@pytest.mark.timeout(600)
def test_kernels_that_are_wrong_on_purpose_are_named_and_the_others_are_not():
    variants = example_kernels.variants()
    outcomes = {each.variant.name: each for each in compile_all(MODULE, variants)}
    problems = [problem for each in outcomes.values() for problem in find_faults(each)]
    wrong = (
        'example_kernels "spills" spills ',
        'example_kernels "has no wgmma" needs wgmma and has none',
        'example_kernels "takes too many registers" takes 12 registers, its limit is 4',
        'example_kernels "does not compile" does not compile: ValueError: arange',
    )
    assert len(problems) == len(wrong)
    for problem, words in zip(problems, wrong, strict=True):
        assert words in problem
    assert outcomes["product"].figures.num_wgmma > 0
    assert outcomes["copy"].figures.num_wgmma == 0
    assert 0 < outcomes["copy"].figures.registers < 64


def test_this_process_goes_on_interpreting():
    before = list(sys.path)
    compile_all(MODULE, [])
    assert (os.environ["TRITON_INTERPRET"], sys.path) == ("1", before)
    assert VERSION not in str(sys.modules["triton"].__file__)
