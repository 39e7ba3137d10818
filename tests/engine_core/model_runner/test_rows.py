"""Which sequence has which row: plans by hand."""

from types import SimpleNamespace

import pytest
from plans import Plans

from engine_core.distributed.collectives import SINGLE_RANK
from engine_core.model_runner.rows import RunnerRows
from kernels.torch.operations import TorchOperations
from protocol.sampling import SamplingParams

PARAMS = SamplingParams(max_tokens=9)


def make():
    plans = Plans(num_groups=1)
    rows = RunnerRows(
        SimpleNamespace(
            max_num_seqs=8,
            eos_token_ids=(7,),
            vocab_size=131,
            collectives=SINGLE_RANK,
            ops=TorchOperations(),
        )
    )
    plans.add("a", [1, 2, 3], PARAMS)
    placed = rows.place(plans.plan({"a": 3}))
    assert [(each.row, each.token_ids) for each in placed] == [(plans.lines["a"].row, [1, 2, 3])]
    return plans, rows, placed[0]


def test_a_preempted_sequence_comes_back_with_what_it_asked_for():
    plans, rows, first = make()
    plans.preempt("a")
    assert rows.free(plans.plan({})) == [first.row]
    rows.check()
    plans.resume("a", [1, 2, 3, 4])
    (again,) = rows.place(plans.plan({"a": 4}))
    assert again.request is first.request
    assert again.request.sampling.params.seed is not None
    plans.finish("a")
    assert rows.free(plans.plan({})) == [again.row]
    rows.check()


def test_a_plan_that_gives_a_row_twice_or_moves_a_sequence_is_noticed():
    plans, rows, first = make()
    plans.free_rows.append(first.row)
    plans.add("thief", [1], PARAMS)
    with pytest.raises(AssertionError, match="two sequences in one row"):
        rows.place(plans.plan({"thief": 1}))
    plans.lines["a"].row = (first.row + 1) % 8
    plans.resume("a", [1])
    with pytest.raises(AssertionError, match="one sequence in two rows"):
        rows.place(plans.plan({"a": 1}))
