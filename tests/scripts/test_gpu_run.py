"""The run of a GPU machine, rehearsed without one: its rules, its processes, and what it times."""

import dataclasses
import json
import math
import subprocess
import sys
import weakref
from pathlib import Path

import pytest
import torch

from scripts import gpu_run
from scripts.gpu import (
    carry,
    daemon_timings,
    few_rows_timings,
    kernel_timings,
    prompt_timings,
    step_timings,
    worker,
    worker_process,
)
from scripts.gpu.runs import named_runs
from scripts.gpu.timing import (
    FAMILIES,
    Ceilings,
    Instruction,
    TimingGroup,
    Work,
    load_family,
    run_group,
)
from scripts.gpu_run import as_table
from tests.gpu.checks import moe, rotary
from tests.gpu.checks.paged_step import Heads
from tests.gpu.model_shapes import QWEN3_SMALL

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
CEILINGS = Ceilings(copy_bytes_s=4e12, matmul_flop_s=8e14)
TINY = QWEN3_SMALL | {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "vocab_size": 100,
}


def measure(call, *, in_graph):
    call()
    return {"median_us": 2.0, "graph_us": 1.0 if in_graph else None}


def work():
    return Work(call=lambda: None, num_bytes=4e6, num_flops=1.6e8)


def rows_of(group, *, only=(), now=0.0):
    rows = []
    run_group(
        group,
        only=only,
        ceilings=CEILINGS,
        measure=measure,
        clock=lambda: now,
        deadline_s=1.0,
        emit=rows.append,
    )
    return {row["name"]: row for row in rows}


def test_a_time_has_its_floor_and_rates():
    row = rows_of(TimingGroup("g", lambda: 0.0, 0, {"t": work}))["t"]
    assert (row["state"], row["floor_us"], row["of_floor"]) == ("timed", 1.0, 0.5)
    assert (row["gigabytes_s"], row["teraflop_s"]) == (2000.0, 80.0)


@pytest.mark.parametrize("error", [0.2, math.nan])
def test_nothing_is_timed_whose_check_did_not_pass(error):
    group = TimingGroup("g", lambda: error, 0.1, {"t": work}, {"f": dict})
    assert {row["state"] for row in rows_of(group).values()} == {"refused"}
    raising = TimingGroup("g", lambda: 1 / 0, 0.1, {"t": work})
    assert "ZeroDivisionError" in rows_of(raising)["t"]["why"]


def test_a_timing_that_raises_takes_no_other_along():
    group = TimingGroup("g", lambda: 0.0, 0, {"bad": lambda: 1 / 0, "t": work}, {"f": dict})
    rows = rows_of(group)
    assert [row["state"] for row in rows.values()] == ["error", "timed", "measured"]
    assert "test_gpu_run.py" in rows["bad"]["why"]


def test_nothing_of_a_timing_is_left_when_the_next_one_is_made():
    """Each may need all of the device's memory."""
    made = []

    def prepare():
        assert [alive() for alive in made] == [None] * len(made)
        tensor = torch.zeros(10)
        made.append(weakref.ref(tensor))
        return Work(call=lambda: tensor.sum(), num_bytes=4e6)

    timings = dict.fromkeys("abc", prepare)
    rows = rows_of(TimingGroup("g", lambda: 0.0, 0, timings))
    assert [row["state"] for row in rows.values()] == ["timed"] * 3


class FakeDevice:
    """Work is queued by a host that takes its time, and done in order. Microseconds."""

    def __init__(self, monkeypatch):
        self.host_us = self.device_us = 0.0
        monkeypatch.setattr(torch.cuda, "synchronize", self.wait)
        monkeypatch.setattr(torch.cuda, "Event", lambda enable_timing: FakeEvent(self))
        monkeypatch.setattr(torch, "ones", lambda number, **_: FakeBuffer(self, 4 * number))

    def launch(self, host_us, device_us):
        self.host_us += host_us
        self.device_us = max(self.device_us, self.host_us) + device_us

    def wait(self):
        self.host_us = self.device_us = max(self.host_us, self.device_us)


class FakeEvent:
    def __init__(self, device):
        self.device = device

    def record(self):
        self.device.launch(2, 0)
        self.at_us = self.device.device_us

    def elapsed_time(self, other):
        return (other.at_us - self.at_us) / 1e3


class FakeBuffer:
    def __init__(self, device, num_bytes):
        self.device, self.num_bytes = device, num_bytes

    def sum(self):
        self.device.launch(20, self.num_bytes / 4.8e6)  # at 4.8 TB/s


@pytest.mark.parametrize(("num_launches", "kernel_us"), [(1, 3.0), (6, 4.0), (12, 2.5)])
def test_a_cold_median_is_the_devices_time_however_slow_the_host(
    monkeypatch, num_launches, kernel_us
):
    device = FakeDevice(monkeypatch)

    def call():
        for _ in range(num_launches):
            device.launch(35, kernel_us)

    times = worker.CudaTimer().measure(call, in_graph=False)
    assert times["median_us"] == times["again_us"] == pytest.approx(num_launches * kernel_us, abs=3)


def test_time_limit_and_selection_leave_the_rest_alone():
    group = TimingGroup("g", lambda: 0.0, 0, {"a": work, "b": work})
    assert list(rows_of(group, only=["b"])) == ["b"]
    assert rows_of(group, now=2.0) == {}
    assert (
        rows_of(TimingGroup("g", lambda: pytest.fail("checked"), 0, {"a": work}), only=["x"]) == {}
    )


def test_every_name_of_a_timing_is_there_once():
    names = [n for family in FAMILIES for group in load_family(family) for n in group.names()]
    assert len(set(names)) == len(names) > 80


SMALL_HEADS = Heads(num_query_heads=3, num_kv_heads=1, head_size=32, dtype=torch.float32)
SMALL_ROTARY = rotary.Shape(num_query_heads=3, num_kv_heads=1, head_size=32, rotary_size=16)


@pytest.mark.parametrize(
    ("prepare", "arguments"),
    [
        (kernel_timings.time_norm, (2, 72)),
        (kernel_timings.time_activation, (2, 70)),
        (kernel_timings.time_rotary, (SMALL_ROTARY, 3)),
        (kernel_timings.time_linear, ("torch linear bf16", 2, 64, 32)),
        (kernel_timings.time_linear, ("fp8 blocks", 2, 128, 128)),
        (kernel_timings.time_linear, ("int4 groups of 128, widened", 2, 128, 32)),
        (kernel_timings.time_torch_attention, (9,)),
        (kernel_timings.time_attention, (SMALL_HEADS, [(100, 1)], [])),
        (prompt_timings.time_prompts, ("Gluon", SMALL_HEADS, [(9, 5)])),
        (kernel_timings.time_masks, (2, 1000)),
        (kernel_timings.time_penalties, (2, 1000)),
        (kernel_timings.time_sampling, (2, 1000, True)),
        (kernel_timings.time_logprobs, (2, 1000)),
        (kernel_timings.time_step_inputs, (3, 64)),
    ],
)
def test_what_is_timed_can_be_called(prepare, arguments):
    made = prepare(*arguments, device="cpu")
    made.call()
    assert made.num_bytes > 0


@pytest.mark.parametrize("variant", ["own", list(few_rows_timings.VARIANTS)[-1]])
def test_layers_of_few_rows_are_the_same_with_every_kind_of_product(variant):
    options = {"dtype": torch.float16, "device": "cpu"}  # the interpreter multiplies no bfloat16
    error = few_rows_timings.check_layers(TINY, variant, 2, 20, **options)
    assert error < few_rows_timings.ROUNDING


def test_products_that_the_interpreter_lacks_count_their_bytes():
    made = kernel_timings.time_linear("int4 linear", 2, 256, 48, device="cpu")
    assert made.num_bytes > 48 * 256 * 4 / 8
    assert kernel_timings.time_experts(2, (8, 2, 64, 32), device="cpu").num_flops > 0
    assert moe.QWEN3_MOE[0] == 128


TINY_HYBRID = TINY | {
    "architectures": ["Qwen3_5ForCausalLM"],
    "model_type": "qwen3_5_text",
    "num_hidden_layers": 2,
    "layer_types": ["linear_attention", "full_attention"],
    "linear_num_key_heads": 1,
    "linear_num_value_heads": 2,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "linear_conv_kernel_dim": 4,
}


def test_steps_of_a_ready_engine(request):
    sizes = {"most_seqs": 2, "most_context": 17, "most_prefill": 20, "dtype": torch.float32}
    sizes |= {"shape": TINY_HYBRID, "device": "cpu", "most_prefix": 30}
    tiny = request.node.name
    decode = step_timings.time_decode(tiny, 2, 17, **sizes)
    decode.call()
    decode.call()
    assert decode.num_bytes > 0
    assert not decode.fits_graph
    prefill = step_timings.time_prefill(tiny, 20, **sizes)
    prefill.call()
    prefill.call()
    assert prefill.num_flops > 0
    chunk = step_timings.time_chunk(tiny, 3, 30, **sizes)
    chunk.call()
    chunk.call()
    assert chunk.num_flops < prefill.num_flops
    figures = step_timings.measure_loop(tiny, 2, 17, 3, **sizes)
    assert figures["step_ms"] >= figures["host_ms"] > 0
    assert figures["output_tok_s"] > 0


def test_a_step_of_rounded_weights_reads_fewer_bytes(request):
    sizes = {"most_seqs": 1, "most_context": 3, "most_prefill": 4, "most_prefix": 0}
    shape = TINY | {"hidden_size": 64, "intermediate_size": 64, "vocab_size": 60}
    sizes |= {"shape": shape, "dtype": torch.float32, "device": "cpu"}
    step = step_timings.time_decode(request.node.name, 1, 3, weights="FP8", **sizes)
    step.call()
    plain = step_timings.step_work(shape, step.call, 1, 3, 1)
    assert plain.num_bytes - step.num_bytes == 2 * 64 * 16 * (2 + 1) + 3 * 64 * 64


def test_a_tiny_hybrid_is_right_and_a_wrong_one_is_seen(monkeypatch):
    sizes = {"prompt_lengths": (3,), "num_output": 1, "budget": 6, "num_layers": 2}
    options = {"use_graphs": False, "device": "cpu", **sizes}
    assert step_timings.measure_error("lfm2", torch.float32, **options)["error"] < 1e-4
    monkeypatch.setattr(step_timings, "check", lambda *_, **__: math.nan)
    with pytest.raises(ValueError, match=r"error is nan, the limit 0\.001"):
        step_timings.measure_error("lfm2", torch.float32, **options)


def test_a_daemon_is_measured_as_requests_arrive():
    options = ("--max-num-seqs", "8", "--max-model-len", "128", "--num-blocks", "64")
    figures = daemon_timings.measure_poisson(
        TINY, rates=(20,), seconds=1, prompt=(3, 20), output=(3, 9), options=options, device="cpu"
    )
    assert figures["20/s requests"] > 5
    assert 0 < figures["20/s ttft_median_ms"] <= figures["20/s ttft_p99_ms"]
    assert figures["20/s tpot_median_ms"] > 0
    assert sum(figures["20/s steps_up_to"].values()) == figures["20/s steps"] > 3


def test_the_daemon_is_measured():
    options = ("--max-num-seqs", "8", "--max-model-len", "128", "--num-blocks", "64")
    figures = daemon_timings.measure_daemon(
        TINY, number=6, shortest=3, longest=20, options=options, device="cpu"
    )
    assert figures["output_tok_s"] > 0
    assert figures["launch_to_ready_s"] >= figures["ready_s"] > 0
    assert figures["num_compilations_after_ready"] == 0


@pytest.mark.parametrize(
    ("seconds", "lost"),
    [(60, ("error", "KeyError: 'no family'")), (0, ("not run", "killed after 0 s"))],
)
def test_a_worker_that_fails_or_hangs_says_so(seconds, lost):
    instruction = Instruction("no family", "", seconds, 1, {})
    rows, ended = worker_process.run_worker(instruction)
    assert (rows, ended["state"]) == ([], lost[0])
    assert lost[1] in ended["why"]


MACHINE = {
    "device": {"name": "a GPU", "memory_bytes": 80 << 30},
    "ceilings": {"copy_bytes_s": 4e12, "matmul_flop_s": 8e14},
}
TIMED = {"state": "timed", "median_us": 2.0, "floor_us": 1.0, "of_floor": 0.5, "gigabytes_s": 2e3}


def execute(
    monkeypatch, worker, *, only=("sampl",), time_limit_s=100.0, named=None, clock=lambda: 0.0
):
    """The document of a run in which `worker` does what its process would do."""
    monkeypatch.setattr(
        gpu_run,
        "run_worker",
        lambda asked: ([MACHINE], None) if asked.ceilings is None else worker(asked),
    )
    saved = []
    limits = {"only": only, "time_limit_s": time_limit_s, "clock": clock, "named": named}
    save = lambda document: saved.append(json.dumps(document))  # noqa: E731
    document = gpu_run.GpuRun(seed=1, uses_gpu=True, save=save, **limits).execute()
    assert json.loads(saved[-1]) == document
    return document


def test_the_groups_behind_one_that_ends_its_process_go_on_in_another(monkeypatch):
    asked = []

    def worker_that_dies(instruction):
        asked.append(instruction.skip)
        if instruction.family != "kernels":
            return [], None
        names = {group.name: group.names(["sampl"]) for group in load_family("kernels")}
        names = {name: wanted for name, wanted in names.items() if wanted}
        if not instruction.skip:
            first = next(iter(names))
            return [TIMED | {"group": first, "name": names[first][0]}], {
                "state": "error",
                "why": "its process ended with -6",
            }
        left = [name for name in names if name not in instruction.skip]
        return [TIMED | {"name": n} for name in left for n in names[name]], None

    document = execute(monkeypatch, worker_that_dies)
    rows = {row["name"]: row for row in document["timings"] if "sampl" in row["name"]}
    states = [row["state"] for row in rows.values()]
    assert states == ["timed", "error", "error"] + ["timed"] * (len(rows) - 3)
    assert len(rows) == 6
    assert {row["device"] for row in rows.values()} == {"a GPU"}
    assert any("sampling free" in skip and "masks" in skip for skip in asked)
    table = as_table(document)
    assert "a GPU: copy 4.00 TB/s, bf16 product 800 TFLOP/s" in table
    assert f"  error: {list(rows)[1]}: its process ended with -6" in table
    assert any(
        line.split()[-7:] == ["2.0", "0.0", "-", "1.0", "50", "%", "2000"]
        for line in table.split("\n")
    )


def test_everything_ends_in_570_seconds_though_every_process_takes_all_it_may(monkeypatch):
    now_s = [0.0]

    def slow_worker(instruction):
        now_s[0] += instruction.seconds + 1
        return [], {"state": "not run", "why": "its process was killed"}

    limits = {"only": (), "time_limit_s": 560.0}  # the options' defaults
    document = execute(monkeypatch, slow_worker, clock=lambda: now_s[0], **limits)
    assert 540 < now_s[0] < 570
    named = {n for family in FAMILIES for group in load_family(family) for n in group.names()}
    assert {row["name"] for row in document["timings"]} == named


def test_the_commit_is_gits_or_what_was_written_into_a_copy_without_git(tmp_path):
    commit = carry.commit_of(ROOT)
    git = ["git", "-C", str(ROOT), "rev-parse", "HEAD"]
    head = subprocess.run(git, capture_output=True, text=True, check=True).stdout.strip()
    assert commit.removesuffix("+") == head
    assert carry.commit_of(tmp_path) is None
    written = tmp_path / carry.CARRIED.relative_to(ROOT) / "commit"
    written.parent.mkdir(parents=True)
    written.write_text(f"{head}\n")
    assert carry.commit_of(tmp_path) == head


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_the_command_writes_a_document_without_a_gpu(tmp_path):
    path = tmp_path / "run.json"
    command = [sys.executable, "scripts/gpu_run.py", "--json", str(path), "--only", "sampl"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 1, done.stderr
    assert "no ceilings: torch sees no GPU" in done.stdout
    assert {row["state"] for row in json.loads(path.read_text())["timings"]} == {"not run"}


def test_wrong_options_end_with_2_and_help_does_no_work():
    assert gpu_run.main(["--tiem-limit", "3"]) == 2
    assert gpu_run.main(["--run", "R8"]) == 2
    assert gpu_run.main(["--quick", "--run", "R3"]) == 2
    assert gpu_run.main(["--help"]) == 0


def test_a_named_runs_checks_come_first_and_its_predictions_stand_beside_its_rows(monkeypatch):
    summary = {"passed": 3, "skipped": 1, "failed": [{"name": "a::b", "why": "bad"}]}
    summary |= {"not_run": [], "why_not_run": None}
    monkeypatch.setattr(gpu_run, "run_checks", lambda paths, **_: summary)

    def timing_worker(asked):
        names = [n for group in load_family(asked.family) for n in group.names(asked.only)]
        return [TIMED | {"name": name, "sm_mhz": 1980.0} for name in names], None

    named = dataclasses.replace(named_runs()["R5"], only=("moe",))
    document = execute(monkeypatch, timing_worker, only=named.only, named=named)
    assert document["checks"] == summary
    table = as_table(document)
    assert "checks: 3 passed, 1 skipped, 1 failed, 0 not run\n  failed: a::b: bad" in table
    line = next(line for line in table.split("\n") if line.startswith("moe Qwen3-MoE 64 tokens"))
    assert line.split()[-2:] == ["570", "1980"]
