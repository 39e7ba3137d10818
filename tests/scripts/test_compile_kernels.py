"""The compile proof: what it catches, in its own words, on kernels that are wrong on purpose.

The kernels are in example_kernels/ and are compiled for real; triton's cache makes that cheap.
"""

import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from scripts.compile_kernels import ROOT, CompileProofError, find_modules, read_table
from scripts.fetch_compiler import CompilerNotFetched, compiler_environment, fetch_compiler
from scripts.kernel_proof.compilation import Compiler, Outcome, VariantId
from scripts.kernel_proof.figures import Figures, read_figures
from scripts.kernel_proof.judgement import compare, judge
from scripts.kernel_proof.workers import Workers

FIGURES = Figures(
    registers=100,
    stack_bytes=0,
    spill_store_bytes=0,
    spill_load_bytes=0,
    shared_bytes=1024,
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


def outcome(name="a", *, needs_wgmma=False, max_registers=255, spill=(0, ""), **changes):
    variant = VariantId("kernels.triton.norm", name, 0, needs_wgmma, max_registers, *spill)
    return Outcome(variant, dataclasses.replace(FIGURES, **changes))


def table(*names):
    return {("kernels.triton.norm", name): FIGURES for name in names}


def run(*arguments, **changes):
    """The script in a process of its own; exit code and stderr."""
    environment = compiler_environment(fetch_compiler()) | changes
    environment["PYTHONPATH"] += f"{os.pathsep}{Path(__file__).parent}"
    command = [sys.executable, ROOT / "scripts" / "compile_kernels.py", *map(str, arguments)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    return done.returncode, done.stderr


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
        (outcome(spill=(12, "")), "may spill, but says not why"),
        (outcome(max_registers=99), "takes 100 registers, its limit is 99"),
        (outcome(needs_wgmma=True, num_wgmma=0), "needs wgmma and has none"),
        (outcome(needs_wgmma=True, wgmma_serialized=True), "serialised"),
        (outcome(shared_bytes=232449), "232449 bytes of shared memory, the limit is 232448"),
        (Outcome(outcome().variant, error="CompileError: no"), "does not compile: CompileError"),
    ],
)
def test_what_is_wrong_with_a_variant_is_said(found, words):
    (problem,) = judge(found)
    assert problem.startswith('norm "a"')
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
    assert judge(found) == []


def test_missing_and_new_variants_are_named():
    problems = compare([outcome("a"), outcome("new")], table("a", "gone"), table("a", "gone"))
    assert len(problems) == 2
    assert problems[0].startswith('norm "new" is not in the table')
    assert problems[1].startswith('norm "gone" is in the table and not in the code')


def test_a_row_that_nobody_asked_for_is_not_missing():
    assert compare([outcome("a")], table("a", "b"), table("a")) == []


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"registers": 108}, None),
        ({"registers": 109}, "takes 109 registers, 100 in the table"),
        ({"registers": 50, "num_wgmma": 1}, None),
        ({"num_wgmma": 0}, "no wgmma any more, 4 in the table"),
    ],
)
def test_figures_that_got_worse_are_named(changes, words):
    problems = compare([outcome(**changes)], table("a"), table("a"))
    assert [words in problem for problem in problems] == ([] if words is None else [True])


def test_a_table_of_another_compiler_is_refused(tmp_path):
    path = tmp_path / "table.json"
    path.write_text(json.dumps({"compiler": {"triton": "3.5.0"}, "variants": []}))
    with pytest.raises(CompileProofError, match=r"made with triton 3\.5\.0, this is 3\.6\.0"):
        read_table(path, Compiler("3.6.0", "", ""))
    path.write_text("{}")
    with pytest.raises(CompileProofError, match="no table of compiled kernels"):
        read_table(path, Compiler("3.6.0", "", ""))
    with pytest.raises(CompileProofError, match="cannot read"):
        read_table(tmp_path / "none.json", Compiler("3.6.0", "", ""))


def test_every_kernel_file_is_asked():
    modules = find_modules()
    assert "kernels.triton.variants" in modules
    assert "kernels.triton" not in modules


def _end_process(number):
    if number == 1:
        os._exit(134)
    return number


def test_a_work_item_that_ends_its_process_is_named_and_the_others_are_done():
    with Workers(1) as workers:
        assert workers.run(_end_process, [0, 1, 2], lambda item: f"{item} died") == [
            0,
            "1 died",
            2,
        ]
        assert workers.run(_end_process, [3], str) == [3]


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

    monkeypatch.setattr("scripts.fetch_compiler.subprocess.run", pip)
    folder = tmp_path / "cache" / "triton-3.6.0"
    (folder / "triton").mkdir(parents=True)  # what an interrupted fetch would leave
    assert fetch_compiler(folder) == fetch_compiler(folder) == folder
    assert len(calls) == 1
    assert calls[0][-1] == "triton==3.6.0"
    assert calls[0][0] == sys.executable
    assert list(folder.parent.iterdir()) == [folder]


def test_sound_kernels_pass_against_their_own_table(tmp_path):
    path = tmp_path / "table.json"
    code, printed = run("--module", "example_kernels.sound", "--json", path)
    assert code == 0, printed
    rows = {row["variant"]: row for row in json.loads(path.read_text())["variants"]}
    assert set(rows) == {"copy", "product"}
    assert rows["product"]["num_wgmma"] > 0
    assert rows["copy"]["num_wgmma"] == 0
    assert 0 < rows["copy"]["registers"] < 64
    code, printed = run(
        "--module", "example_kernels.sound", "--only", "copy", "--check", path, TRITON_DEBUG="0"
    )
    assert code == 0, printed


def test_kernels_that_are_wrong_on_purpose_are_all_named(tmp_path):
    names = ("sound", "unsound", "nothing", "broken", "aborting")
    path = tmp_path / "table.json"
    row = {"module": "example_kernels.sound", "variant": "copied"} | dataclasses.asdict(FIGURES)
    path.write_text(json.dumps({"compiler": {"triton": "3.6.0"}, "variants": [row]}))
    modules = [part for name in names for part in ("--module", f"example_kernels.{name}")]
    code, printed = run(*modules, "--check", path)
    assert code == 1
    for words in (
        'example_kernels.unsound "spills" spills ',
        'example_kernels.unsound "has no wgmma" needs wgmma and has none',
        'example_kernels.unsound "takes too many registers" takes 12 registers, its limit is 4',
        'example_kernels.unsound "does not compile" does not compile: ValueError: arange',
        "example_kernels.broken: ImportError: no such thing",
        "example_kernels.aborting: importing it ends the process",
        'example_kernels.sound "copied" is in the table and not in the code',
        'example_kernels.sound "copy" is not in the table',
    ):
        assert words in printed
    assert 'sound "copy" spills' not in printed


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--module", "no_such_kernel"], "no module kernels.triton.no_such_kernel; there is"),
        (["--check", "no_such_file.json"], "cannot read no_such_file.json"),
        (["--only", "no such variant", "--module", "example_kernels.sound"], "leave no variant"),
    ],
)
def test_wrong_options_end_with_two(arguments, words):
    code, printed = run(*arguments)
    assert code == 2
    assert words in printed


def test_nothing_is_compiled_while_triton_interprets():
    code, printed = run(TRITON_INTERPRET="1")
    assert code == 2
    assert "TRITON_INTERPRET is set" in printed
