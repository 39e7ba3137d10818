"""The GPU suite's processes and its measure of errors; needs no GPU."""

import json
import math
import subprocess
import sys

import pytest
import torch

from scripts.gpu.comparison import num_different, poison, row_error, scaled_error, worst
from scripts.gpu.suite import run_process
from scripts.gpu.worker import Instruction


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_real_process_that_fails_leaves_its_last_line():
    rows, why = run_process(Instruction(phase="ceilings", seconds=60))
    assert rows == []
    assert why is not None
    assert "its process ended with 1" in why


def test_a_process_that_hangs_is_killed(monkeypatch):
    start = subprocess.Popen
    sleeper = [sys.executable, "-c", "import time; time.sleep(60)"]
    monkeypatch.setattr(
        "scripts.gpu.suite.subprocess.Popen", lambda _, **options: start(sleeper, **options)
    )
    rows, why = run_process(Instruction(phase="checks", group="g", seconds=-9.5))
    assert (rows, why) == ([], "its process was killed after 0 s")


def test_instructions_survive_their_way_to_the_worker():
    instruction = Instruction(phase="timings", states={"a": "passed"}, ceilings={"copy": 1.0})
    fields = {name: getattr(instruction, name) for name in instruction.__dataclass_fields__}
    assert Instruction(**json.loads(json.dumps(fields))) == instruction


def test_errors_are_scaled_by_the_reference_and_see_nan_everywhere():
    reference = torch.tensor([0.0, -4.0, 2.0])
    assert scaled_error(reference.clone(), reference) == 0
    assert scaled_error(torch.tensor([0.0, -4.0, 3.0]), reference) == 0.25
    assert math.isnan(scaled_error(poison(torch.empty(3)), reference))
    assert math.isnan(worst(0.0, math.nan, 1.0))
    minus_infinity = torch.tensor([-math.inf, 1.0])
    assert scaled_error(minus_infinity.clone(), minus_infinity) == 0
    assert scaled_error(torch.tensor([0.0, 1.0]), minus_infinity) == math.inf
    with pytest.raises(ValueError, match=r"shape \(3,\)"):
        scaled_error(reference, reference[:2])


def test_whole_numbers_must_be_the_same():
    reference = torch.tensor([1, 2, 3])
    assert num_different(torch.tensor([1, 0, 3]), reference) == 1
    assert num_different(poison(torch.empty(3, dtype=torch.int64)), reference) == 3
    with pytest.raises(ValueError, match="int32"):
        num_different(reference.int(), reference)


def test_a_row_with_small_results_is_judged_like_the_others():
    reference = torch.tensor([[100.0, 50.0], [0.1, 0.0], [0.0, 0.0]])
    assert row_error(reference.clone(), reference) == 0
    assert row_error(reference + torch.tensor([[0.0], [0.01], [0.0]]), reference) == pytest.approx(
        0.1
    )
    assert math.isnan(row_error(poison(torch.empty(3, 2)), reference))
    assert row_error(torch.empty(0, 2), torch.empty(0, 2)) == 0
    with pytest.raises(ValueError, match="the reference has"):
        row_error(reference, reference.T)
