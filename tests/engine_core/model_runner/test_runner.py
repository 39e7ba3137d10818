"""Plans carried out on tiny models: rows, tables, tokens. transformers says which tokens."""

import numpy as np
import pytest
import torch
from plans import Drive

from protocol.sampling import SamplingParams

GREEDY = SamplingParams(max_tokens=99, temperature=0.0)
RANDOM = SamplingParams(max_tokens=99)


def prompt_of(length, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(131, (length,), generator=generator).tolist()


def greedy(reference, prompt, number):
    tokens = list(prompt)
    with torch.inference_mode():
        for _ in range(number):
            tokens.append(int(reference(torch.tensor([tokens])).logits[0, -1].argmax()))
    return tokens


def test_chunks_and_decodes_in_one_batch_give_the_tokens_of_transformers(make_runner, reference):
    drive = Drive(make_runner())
    prompts = {"a": prompt_of(9), "b": prompt_of(1, 1), "c": prompt_of(17, 2)}
    drive.add("a", prompts["a"], GREEDY)
    drive.step({"a": 9})
    drive.add("b", prompts["b"], GREEDY)
    drive.add("c", prompts["c"], GREEDY)
    drive.step({"a": 1, "c": 5, "b": 1})
    drive.step({"b": 1, "c": 12, "a": 1})
    drive.decode("c", "a", "b", steps=10)
    for name, prompt in prompts.items():
        number = len(drive.tokens[name]) - len(prompt)
        assert drive.tokens[name] == greedy(reference, prompt, number)


def test_a_step_answers_with_one_array_in_the_order_of_the_batch(make_runner):
    drive = Drive(make_runner())
    drive.add("a", prompt_of(5), GREEDY)
    drive.add("b", prompt_of(9, 1), GREEDY)
    plan = drive.plans.plan({"b": 3, "a": 5})
    output = drive.runner.execute(plan)
    assert output.req_ids is plan.batch.req_ids
    assert output.sampled_token_ids.dtype == np.int32
    assert output.sampled_token_ids.shape == (2,)
    assert (output.logprobs, output.failures) == (None, {})


def with_drafts(runner):
    """A decode without drafts, one with two, and a prompt that goes on."""
    drive = Drive(runner)
    for name, length in {"a": 5, "b": 9, "c": 6}.items():
        drive.add(name, prompt_of(length), GREEDY)
    drive.step({"a": 5, "b": 9})
    plan = drive.plans.plan({"a": 1, "b": 3, "c": 3}, drafts={"b": [1, 1]})
    return runner.execute(plan)


def test_sequences_with_drafts_are_told_apart_and_the_others_stay_a_column(make_runner):
    drive = Drive(make_runner())
    for name, length in {"a": 5, "b": 9}.items():
        drive.add(name, prompt_of(length), GREEDY)
    drive.step({"a": 5, "b": 9})
    expected = drive.step({"a": 1, "b": 1}).sampled_token_ids.tolist()
    answer = with_drafts(make_runner())
    assert answer.sampled_token_ids.shape == (3,)
    assert answer.sampled_token_ids[0] == expected[0]
    assert [*answer.verified_token_ids] == ["b"]
    assert answer.verified_token_ids["b"][0] == expected[1]


def test_a_plan_of_no_tokens_still_drops_rows(make_runner):
    drive = Drive(make_runner())
    drive.add("a", prompt_of(5), GREEDY)
    drive.step({"a": 5})
    drive.plans.finish("a")
    output = drive.step({})
    assert (output.req_ids, list(output.sampled_token_ids)) == ([], [])
    assert drive.runner.rows.row_of == {}
    assert drive.runner.rows.requests == {}


def test_an_id_that_ends_and_comes_back_in_one_plan_is_a_new_sequence(make_runner):
    drive = Drive(make_runner())
    drive.add("a", prompt_of(5), SamplingParams(max_tokens=9, temperature=0.0, min_tokens=9))
    drive.step({"a": 5})
    drive.plans.finish("a")
    drive.add("a", prompt_of(6, 3), SamplingParams(max_tokens=9, seed=3))
    drive.step({"a": 6})
    drive.decode("a", steps=3)
    assert drive.runner.rows.row_of == {"a": drive.plans.lines["a"].row}
    alone = Drive(make_runner())
    alone.add("x", prompt_of(6, 3), SamplingParams(max_tokens=9, seed=3))
    alone.step({"x": 6})
    alone.decode("x", steps=3)
    assert drive.tokens["a"] == alone.tokens["x"]


def test_tables_are_replaced_from_the_middle_on(make_runner, reference):
    drive = Drive(make_runner())
    drive.add("a", prompt_of(10), GREEDY)
    drive.step({"a": 10})
    line = drive.plans.lines["a"]
    moved = [drive.plans.take_blocks(2) for _ in line.tables]
    drive.plans.copy = [
        pair
        for table, ids in zip(line.tables, moved, strict=True)
        for pair in zip(table[1:], ids, strict=True)
    ]
    old = [block for table in line.tables for block in table[1:]]
    drive.plans.update("a", 1, moved)
    drive.decode("a")
    drive.runner.storage.pools[0].device_blocks[old] = 77
    drive.decode("a", steps=4)
    assert drive.tokens["a"] == greedy(reference, prompt_of(10), 6)


def test_blocks_behind_the_longest_sequence_are_taken_and_not_kept(make_runner):
    drive = Drive(make_runner(max_model_len=10))
    drive.add("a", prompt_of(5), GREEDY)
    drive.step({"a": 5})
    ids = [drive.plans.take_blocks(3) for _ in drive.plans.lines["a"].tables]
    drive.plans.update("a", 2, ids)
    drive.decode("a")
    row = drive.plans.lines["a"].row
    for table, more in zip(drive.runner.batch.block_tables, ids, strict=True):
        assert table.shape[1] == 3
        assert table[row, 2] == more[0]


@pytest.mark.parametrize("params", [SamplingParams(max_tokens=99, seed=5), GREEDY])
def test_a_preempted_sequence_goes_on_with_the_tokens_it_would_have_had(make_runner, params):
    """Recompute from prompt and output, with the same random numbers."""
    drive, undisturbed = Drive(make_runner()), Drive(make_runner())
    for each in (drive, undisturbed):
        each.add("a", prompt_of(6), params)
        each.step({"a": 6})
        each.decode("a", steps=2)
    drive.plans.preempt("a")
    drive.step({})
    assert drive.runner.rows.row_of == {}
    drive.plans.resume("a", drive.tokens["a"])
    drive.step({"a": 5})
    drive.step({"a": 4})
    undisturbed.decode("a")
    for each in (drive, undisturbed):
        each.decode("a", steps=5)
    assert drive.tokens == undisturbed.tokens


def test_the_seed_of_a_sequence_that_brought_none_is_drawn_once(make_runner):
    drive = Drive(make_runner())
    drive.add("a", prompt_of(6), RANDOM)
    drive.step({"a": 6})
    seed = drive.runner.rows.requests["a"].sampling.params.seed
    assert seed is not None
    drive.plans.preempt("a")
    drive.step({})
    drive.plans.resume("a", drive.tokens["a"])
    drive.step({"a": 7})
    assert drive.runner.rows.requests["a"].sampling.params.seed == seed


def test_a_beam_that_goes_on_from_another_has_that_ones_tokens_in_its_own_row(
    make_runner, reference
):
    penalised = SamplingParams(max_tokens=99, temperature=0.0, repetition_penalty=1.3, logprobs=4)
    drive = Drive(make_runner())
    prompt = prompt_of(8)
    drive.add("a", prompt, penalised)
    drive.step({"a": 8})
    shared = [list(table) for table in drive.plans.lines["a"].tables]
    drive.add("a#1", prompt, penalised, output=[50], tables=shared, computed=8)
    drive.decode("a", "a#1", steps=3)
    # the second beam loses and goes on from the first, with another last token
    rows = {name: line.row for name, line in drive.plans.lines.items()}
    branched = [*drive.tokens["a"][:-1], 60]
    tables = [list(table) for table in drive.plans.lines["a"].tables]
    copied = [drive.plans.take_blocks(1) for _ in tables]
    drive.plans.copy = [(t[-1], new[0]) for t, new in zip(tables, copied, strict=True)]
    tables = [[*t[:-1], *new] for t, new in zip(tables, copied, strict=True)]
    drive.plans.resume("a#1", branched, tables=tables, computed=len(branched) - 1)
    drive.tokens["a#1"] = list(branched)
    drive.decode("a", "a#1", steps=4)
    assert {name: line.row for name, line in drive.plans.lines.items()} == rows

    alone = Drive(make_runner())
    alone.add("x", prompt, penalised, output=branched[8:])
    alone.step({"x": len(branched)})
    alone.decode("x", steps=3)
    assert drive.tokens["a#1"] == alone.tokens["x"]
    undisturbed = Drive(make_runner())
    undisturbed.add("x", prompt, penalised)
    undisturbed.step({"x": 8})
    undisturbed.decode("x", steps=7)
    assert drive.tokens["a"] == undisturbed.tokens["x"]


def test_penalties_count_the_output_of_new_resumed_and_replaced_sequences(make_runner):
    """Biases that drown the model, 2 apart: each output of a token costs it one place."""
    bias = {20: 96.0, 21: 94.0, 22: 92.0, 23: 90.0}
    params = SamplingParams(
        max_tokens=99, temperature=0.0, logit_bias=bias, presence_penalty=2.0, frequency_penalty=1.0
    )

    def expected(output, number):
        for _ in range(number):
            cost = {t: 2.0 * (t in output) + output.count(t) for t in bias}
            output = [*output, max(bias, key=lambda t: bias[t] - cost[t])]
        return output

    prompt = [20, 20, 20, 5]
    drive = Drive(make_runner())
    model = drive.runner.model

    class Flat:
        spec = model.spec
        forward = staticmethod(model.forward)

        @staticmethod
        def compute_logits(hidden_RE):
            return torch.zeros_like(model.compute_logits(hidden_RE))

    drive.runner.model = Flat()
    drive.add("new", prompt, params, output=[20, 21])
    drive.add("resumed", prompt, params)
    drive.add("replaced", prompt, params)
    drive.step({"new": 6, "resumed": 4, "replaced": 4})
    drive.decode("new", "resumed", "replaced", steps=2)
    drive.plans.preempt("resumed")
    drive.plans.resume("replaced", [*prompt, 22, 22, 20])
    drive.tokens["replaced"] = [*prompt, 22, 22, 20]
    drive.step({"replaced": 7})
    drive.plans.resume("resumed", drive.tokens["resumed"])
    drive.step({"resumed": 7})
    drive.decode("new", "resumed", "replaced", steps=3)
    assert drive.tokens["new"][4:] == expected([20, 21], 6)
    assert drive.tokens["resumed"][4:] == expected([], 7)
    assert drive.tokens["replaced"][4:] == expected([22, 22, 20], 4)


@pytest.mark.parametrize("bad_row", [0, 1, 2])
def test_a_sequence_whose_logits_are_no_numbers_fails_alone(make_runner, reference, bad_row):
    drive = Drive(make_runner())
    for index in range(3):
        drive.add(f"r{index}", prompt_of(5, index), GREEDY)
    model = drive.runner.model

    class Spoiled:
        spec = model.spec
        forward = staticmethod(model.forward)

        @staticmethod
        def compute_logits(hidden_RE):
            logits_RV = model.compute_logits(hidden_RE)
            logits_RV[bad_row, 3] = torch.nan
            return logits_RV

    drive.runner.model = Spoiled()
    output = drive.step({f"r{index}": 5 for index in range(3)})
    assert list(output.failures) == [f"r{bad_row}"]
    assert drive.runner.batch.num_tokens[drive.plans.lines[f"r{bad_row}"].row] == 5
    for index in {0, 1, 2} - {bad_row}:
        assert drive.tokens[f"r{index}"] == greedy(reference, prompt_of(5, index), 1)
