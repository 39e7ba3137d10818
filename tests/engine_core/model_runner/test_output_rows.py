"""The last layer computes the rows that are sampled, and the same tokens come out."""

import itertools

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from plans import Drive
from runners import load_reference, runner_config, spoiled

from engine_core.model_runner.cpu.input_batch import StepInputs
from engine_core.model_runner.cpu.runner import CPUModelRunner
from protocol.sampling import SamplingParams

ASKED = SamplingParams(max_tokens=99, temperature=0.0, logprobs=3)


def prompt_of(length):
    return torch.randint(131, (length,), generator=torch.Generator().manual_seed(length)).tolist()


class Watched:
    """A model; keeps how many tokens a pass had and how many hidden states came out."""

    def __init__(self, model):
        self._model = model
        self.passes = []

    def __getattr__(self, name):
        return getattr(self._model, name)

    def forward(self, token_ids_T, positions_T, context):
        hidden = self._model.forward(token_ids_T, positions_T, context)
        self.passes.append((len(token_ids_T), len(hidden)))
        return hidden


@pytest.fixture
def model(reference, ops):
    return load_reference(reference, ops)


@pytest.fixture
def make_drive(model, ops):
    def make():
        watched = Watched(model)
        return watched, Drive(spoiled(CPUModelRunner(runner_config(watched, ops))))

    return make


def in_steps(drive, lengths, cuts, drafts_of):
    """Run prompts in chunks, decodes and drafts beside them."""
    for number, length in enumerate(lengths):
        drive.add(str(number), prompt_of(length), ASKED)
    left = dict(zip(map(str, range(len(lengths))), lengths, strict=True))
    outputs = []
    for step, cut in enumerate(cuts):
        counts, drafts = {}, {}
        for number, (name, rest) in enumerate(left.items()):
            if rest:
                counts[name] = min(rest, 1 + (cut + number) % 7)
                left[name] = rest - counts[name]
            elif (step + number) % 3:
                drafts[name] = [5] * (drafts_of % 3)
                counts[name] = 1 + len(drafts[name])
        drafts = {name: given for name, given in drafts.items() if given}
        output = drive.runner.execute(drive.plans.plan(counts, drafts=drafts))
        for name in drafts:  # none is accepted: the next step writes over it
            drive.plans.lines[name].num_computed -= len(drafts[name])
            row = drive.plans.lines[name].row
            drive.runner.batch.num_tokens[row] = drive.plans.lines[name].num_computed + 1
        outputs.append(output)
    return outputs


def told(outputs):
    """What the scheduler would read, as bytes."""
    return [
        (
            np.asarray(output.sampled_token_ids).tolist(),
            output.verified_token_ids,
            {
                name: (bytes(report.token_ids), bytes(report.logprobs), list(report.ranks))
                for name, report in (output.logprobs or {}).items()
            },
        )
        for output in outputs
    ]


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(
    lengths=st.lists(st.integers(1, 23), min_size=1, max_size=4),
    cuts=st.lists(st.integers(0, 6), min_size=4, max_size=9),
    drafts_of=st.integers(0, 2),
)
def test_a_step_tells_the_same_whether_all_rows_are_put_out_or_those_that_are_sampled(
    ops, make_drive, lengths, cuts, drafts_of
):
    """To the bit, natively; torch's products round by the number of rows."""
    watched, drive = make_drive()
    ours = in_steps(drive, lengths, cuts, drafts_of)
    everything, other = make_drive()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(StepInputs, "output_rows", lambda *_: None)
        expected = in_steps(other, lengths, cuts, drafts_of)
    if ops.name.startswith("native"):
        assert told(ours) == told(expected)
    else:
        assert [step[:2] for step in told(ours)] == [step[:2] for step in told(expected)]
    assert [tokens for tokens, _ in watched.passes] == [rows for _, rows in everything.passes]
    assert all(1 <= rows <= tokens for tokens, rows in watched.passes)


def test_hidden_states_come_of_the_sampled_rows_alone(make_drive):
    watched, drive = make_drive()
    for name, length in {"a": 9, "b": 20, "c": 3}.items():
        drive.add(name, prompt_of(length), ASKED)
    drive.step({"a": 9})
    drive.step({"a": 1, "b": 12, "c": 3})
    drive.step({"b": 3})
    drive.step({"c": 1, "b": 5, "a": 1})
    drive.decode("a", "b", "c")
    assert watched.passes == [(9, 1), (16, 2), (3, 1), (7, 3), (3, 3)]


def test_a_report_of_a_prompt_has_all_hidden_states(make_drive):
    watched, drive = make_drive()
    drive.add("a", prompt_of(9), SamplingParams(max_tokens=9, prompt_logprobs=1))
    drive.add("b", prompt_of(6), ASKED)
    drive.step({"a": 9})
    drive.step({"a": 1, "b": 6})
    assert watched.passes == [(9, 9), (7, 2)]


def test_states_that_are_kept_are_those_of_all_tokens(model, make_drive):
    model.keep_states([1, model.spec.num_layers])
    watched, drive = make_drive()
    drive.add("a", prompt_of(9), ASKED)
    drive.step({"a": 9})
    assert watched.passes == [(9, 9)]
    assert [len(states) for states in model.states] == [9, 9]


def test_counts_are_laid_out_request_by_request(make_drive):
    """Rows rise, and the plan's starts are those of the rows."""
    _, drive = make_drive()
    seen = []
    forward = drive.runner.model.forward
    drive.runner.model.forward = lambda *step: seen.append(step[2].output) or forward(*step)
    for name, length in {"a": 9, "b": 20, "c": 3}.items():
        drive.add(name, prompt_of(length), ASKED)
    drive.step({"a": 9, "b": 12, "c": 3})
    (output,) = seen
    assert output.rows_N.tolist() == [8, 23]
    assert output.metadata.query_start_loc_R1.tolist() == [0, 1, 2]
    assert output.metadata.seq_lens_R.tolist() == [9, 3]
    assert all(a < b for a, b in itertools.pairwise(output.rows_N.tolist()))
