"""A step that is launched kernel by kernel puts out the last rows of its entries, unless more are
read, and the same answers come out."""

import random
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from engine_loop import EngineLoop, few_blocks
from fake_device import make_operations, make_queue, make_steps
from made_up_grammar import MadeUpGrammar
from plans import Drive
from same_answers import V
from test_constrained_rows import without_limits
from test_device_adapters import ADAPTERS, GREEDY, config_with_adapters
from test_device_adapters import PROMPTS as ADAPTED
from test_drafts import lives, run, scheduler_for
from test_output_rows import ASKED, Watched, in_steps, prompt_of
from test_pooling import EMBED, PoolingType, add, make_loop, make_pooler

from engine_core.model_runner.gpu import GPUModelRunner
from protocol.sampling import SamplingParams

WARM = {(2, 2), (2, 1), (16, 16), (16, 1), (17, 17), (17, 1), (18, 18), (18, 2)}
"""Tokens and rows of passes that warming up runs."""


@pytest.fixture
def make_watched(make_device_runner):
    """A device runner whose model tells of its passes; no graphs unless they are asked for."""

    def make(**options):
        runner = make_device_runner(**{"use_graphs": False} | options)
        runner.model = Watched(runner.model)
        return runner

    return make


def assert_told_the_same(found, expected):
    """Tokens to the last, log-probabilities as torch rounds them."""
    for mine, theirs in zip(found, expected, strict=True):
        assert list(mine.req_ids) == list(theirs.req_ids)
        reported = mine.logprobs or {}
        assert reported.keys() == (theirs.logprobs or {}).keys()
        for name, report in reported.items():  # of what is sampled, and of nothing else
            other = theirs.logprobs[name]
            assert bytes(report.token_ids)[:4] == bytes(other.token_ids)[:4]
            assert report.num_positions == other.num_positions
            values = [np.frombuffer(each.logprobs, "<f4") for each in (report, other)]
            np.testing.assert_allclose(*values, rtol=1e-4, atol=1e-4)
        assert mine.verified_token_ids == theirs.verified_token_ids


def test_an_entry_has_one_row_whether_it_is_sampled_or_not(make_watched, make_runner):
    runner = make_watched()
    drives = [Drive(runner), Drive(make_runner())]
    answers = []
    for drive in drives:
        for name, length in {"a": 9, "b": 20, "c": 3}.items():
            drive.add(name, prompt_of(length), ASKED)
        steps = [{"a": 9}, {"a": 1, "b": 12, "c": 3}, {"b": 3}, {"c": 1, "b": 5, "a": 1}]
        answers.append([drive.step(counts) for counts in [*steps, dict.fromkeys("abc", 1)]])
    assert runner.model.passes == [(9, 1), (16, 3), (3, 1), (7, 3), (3, 3)]
    assert drives[0].tokens == drives[1].tokens
    assert_told_the_same(*answers)


@pytest.mark.parametrize("seed", range(4))
def test_chunks_decodes_and_drafts_beside_one_another_give_the_answers_of_the_cpu(
    make_watched, make_runner, seed
):
    draw = random.Random(seed)
    steps = (
        [draw.randint(1, 23) for _ in range(4)],
        [draw.randint(0, 6) for _ in range(9)],
        1 + seed % 2,
    )
    runner = make_watched(max_num_drafts=8)
    found = in_steps(Drive(runner), *steps)
    assert_told_the_same(found, in_steps(Drive(make_runner()), *steps))
    assert any(1 < rows < tokens for tokens, rows in runner.model.passes)


@pytest.mark.parametrize("reference", ["one group"], indirect=True)
def test_a_graph_of_a_mixed_step_puts_out_all_rows(make_watched):
    drive = Drive(make_watched(use_graphs=True))
    drive.add("a", prompt_of(9), GREEDY)
    drive.step({"a": 9})
    assert set(drive.runner.model.passes) == {(16, 16)}


@pytest.mark.parametrize("reference", ["one group"], indirect=True)
def test_a_report_of_a_prompt_has_all_rows(make_watched):
    drive = Drive(make_watched())
    drive.add("a", prompt_of(9), SamplingParams(max_tokens=9, prompt_logprobs=1))
    drive.add("b", prompt_of(6), ASKED)
    drive.step({"a": 9})
    drive.step({"a": 1, "b": 6})
    assert drive.runner.model.passes == [(9, 9), (7, 2)]


@pytest.mark.parametrize("reference", ["one group"], indirect=True)
def test_what_is_pooled_is_of_all_rows(make_watched, reference):
    pooler = make_pooler(PoolingType.MEAN)
    loop = make_loop(reference, (make_watched, 1), pooler, num_blocks=80)
    loop.add("text", prompt_of(8), GREEDY)
    loop.finish()
    add(loop, pooler, "pooled", prompt_of(9), EMBED)
    loop.finish()
    passes = loop.runner.model.passes
    assert (passes[0], passes[-1]) == ((8, 1), (9, 9))


@pytest.mark.parametrize("reference", ["one group"], indirect=True)
def test_steps_with_adapters_have_all_rows_and_warm_up_runs_both(reference):
    runner = GPUModelRunner(
        config_with_adapters(reference, make_operations()),
        steps=make_steps(),
        queue=make_queue(),
        use_graphs=False,
    )
    watched = runner.model = Watched(runner.model)
    adapters, without = runner.config.adapters.rows, []
    begin = adapters.begin_step
    adapters.begin_step = lambda slots_T: without.append(slots_T is None) or begin(slots_T)
    runner.warm_up()
    assert set(watched.passes) >= WARM
    assert without == [rows < tokens for tokens, rows in watched.passes]
    watched.passes.clear()
    drive = Drive(runner)
    drive.plans.adapters = {name: key for name, key in ADAPTERS.items() if key is not None}
    for name, prompt in ADAPTED.items():
        drive.add(name, prompt, GREEDY)
    drive.step({"a": 4, "b": 9})
    drive.step({"b": 1, "e": 9})
    assert watched.passes == [(13, 13), (10, 2)]


@pytest.mark.parametrize("reference", ["one group"], indirect=True)
def test_warm_up_runs_prefills_with_all_rows_and_with_the_last(make_watched):
    runner = make_watched()
    runner.warm_up()
    assert set(runner.model.passes) >= WARM


def test_a_model_that_puts_out_all_rows_gives_the_same_answers(make_watched, make_runner):
    """As one whose hidden states are kept does."""
    runner = make_watched()
    runner.model._model.keep_states([1])
    lengths, cuts = [9, 20, 3], [3, 5, 2, 6, 1, 4]
    found = in_steps(Drive(runner), lengths, cuts, 0)
    assert all(tokens == rows for tokens, rows in runner.model.passes)
    assert_told_the_same(found, in_steps(Drive(make_runner()), lengths, cuts, 0))


@pytest.mark.parametrize(("reference", "ops"), [("one group", "native")], indirect=True)
def test_masks_meet_the_rows_of_their_sequences(make_watched, make_runner, reference):
    requests, blocks = without_limits(lives(random.Random(0), 8)), few_blocks(reference)
    found = []
    for runner in (make_runner(**blocks), make_watched(**blocks)):
        scheduler = MadeUpGrammar(V).lead(scheduler_for(runner, blocks))
        found.append(run(EngineLoop(scheduler, runner, depth=1), requests, seed=1))
    assert found[0].tokens == found[1].tokens
    assert any(1 < rows < tokens for tokens, rows in runner.model.passes)


def test_the_last_layer_sees_decodes_in_their_own_group(make_watched):
    runner, seen = make_watched(), []
    forward = runner.model.forward

    def watching(token_ids_T, positions_T, context):
        seen.append(SimpleNamespace(last=context.metadata[-1], output=context.output))
        return forward(token_ids_T, positions_T, context)

    runner.model.forward = watching
    drive = Drive(runner)
    for name, length in {"a": 9, "b": 20}.items():
        drive.add(name, prompt_of(length), ASKED)
    drive.step({"a": 9, "b": 12})
    (step,) = seen
    rows, metadata = step.output.rows_N, step.output.metadata
    assert (rows.dtype, rows.tolist()) == (torch.int64, [8, 20])
    assert metadata.query_start_loc_R1.tolist() == [0, 1, 2]
    assert metadata.sliding_window == step.last.sliding_window
    for name in ("seq_lens_R", "block_table_RM"):
        assert torch.equal(getattr(metadata, name), getattr(step.last, name))
