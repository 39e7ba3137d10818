"""Plans by hand, each launched before the one before it is collected, on a device that is late."""

import numpy as np
import pytest
import torch
from fake_device import make_queue
from msgspec.structs import force_setattr
from plans import Drive, Plans

from protocol.sampling import SamplerChain, SamplingParams
from tests.covering import covering_pairs

V = 131
KINDS = {
    "greedy": SamplingParams(max_tokens=99, temperature=0.0),
    "random": SamplingParams(max_tokens=99, seed=5),
    "truncated": SamplingParams(max_tokens=99, seed=6, top_k=12, top_p=0.9),
    "penalised": SamplingParams(
        max_tokens=99, seed=7, repetition_penalty=1.3, frequency_penalty=0.4, logprobs=3
    ),
    "min tokens": SamplingParams(
        max_tokens=99, temperature=0.0, min_tokens=4, stop_token_ids=tuple(range(0, V, 2))
    ),
    "reported by the host": SamplingParams(max_tokens=99, seed=8, logprobs=-1),
    "chained": SamplingParams(
        max_tokens=99, seed=9, top_k=30, repetition_penalty=1.5, temperature=0.7,
        chain=SamplerChain(
            dry_multiplier=1.5, dry_allowed_length=1, xtc_probability=0.5, xtc_threshold=0.02,
            typical_p=0.9, top_n_sigma=3.0, dynatemp_range=0.5, repeat_last_n=6,
        ),
    ),
}  # fmt: skip
PROMPTS = {
    name: torch.randint(V, (4 + at % 6 * 3,), generator=torch.Generator().manual_seed(at)).tolist()
    for at, name in enumerate(KINDS)
}
SHORT = [name for name in KINDS if name != "reported by the host"]


def one_at_a_time(runner, names, num_decodes):
    """Tokens of these sequences, each step collected before the next is planned."""
    drive = Drive(runner)
    for name in names:
        drive.add(name, PROMPTS[name], KINDS[name])
    drive.step({name: len(PROMPTS[name]) for name in names})
    drive.decode(*names, steps=num_decodes)
    return drive


def in_flight(runner, names, num_decodes):
    """The same plans, each launched before the one before it is collected."""
    plans = Plans(num_groups=runner.config.num_groups)
    for name in names:
        plans.add(name, PROMPTS[name], KINDS[name])
    answers = []
    runner.submit(plans.plan({name: len(PROMPTS[name]) for name in names}))
    for _ in range(num_decodes):
        runner.submit(plans.plan(dict.fromkeys(names, 1)))
        answers.append(runner.collect())
    answers.append(runner.collect())
    tokens = {name: list(PROMPTS[name]) for name in names}
    for answer in answers:
        for name, token_id in zip(answer.req_ids, answer.sampled_token_ids, strict=True):
            tokens[name].append(int(token_id))
    return tokens, answers


@pytest.mark.parametrize("names", [list(KINDS), SHORT, ["greedy", "random"], ["truncated"]])
def test_a_step_launched_before_the_last_is_known_reads_the_tokens_that_it_chose(
    make_device_runner, make_runner, names
):
    expected = one_at_a_time(make_runner(), names, 9)
    tokens, answers = in_flight(make_device_runner(), names, 9)
    assert tokens == expected.tokens
    for name, reports in expected.logprobs.items():
        for answer, report in zip(answers, reports, strict=True):
            found = answer.logprobs[name]
            assert found.ranks == report.ranks
            values = [np.frombuffer(each.logprobs, "<f4") for each in (found, report)]
            np.testing.assert_allclose(*values, rtol=1e-4, atol=1e-4)


def test_a_prompt_of_one_token_is_due_in_a_replayed_graph(make_device_runner, make_runner):
    queue = make_queue()
    params = {"a": KINDS["penalised"], "b": KINDS["min tokens"]}
    drives = [Drive(make_device_runner(queue=queue)), Drive(make_runner())]
    for drive in drives:
        for at, (name, each) in enumerate(params.items()):
            drive.add(name, [at + 3], each)
        drive.decode("a", "b", steps=6)
    assert queue.num_replayed == 6
    assert drives[0].tokens == drives[1].tokens


def test_decodes_stand_before_prefills_whatever_the_order_of_the_plan(
    make_device_runner, make_runner
):
    """The padded planner asserts the order; tokens say that answers are in the plan's."""
    drives = [Drive(make_device_runner()), Drive(make_runner())]
    for drive in drives:
        for name in ("greedy", "random", "truncated"):
            drive.add(name, PROMPTS[name], KINDS[name])
        drive.step({"greedy": 4, "random": 3})
        drive.step({"random": 4, "greedy": 1})
        drive.step({"truncated": 2, "random": 1, "greedy": 1})
        drive.step({"random": 1, "truncated": 8, "greedy": 1})
    assert drives[0].tokens == drives[1].tokens


def test_a_graph_is_recorded_once_for_a_bucket_and_a_mode_and_reads_the_same_memory(
    make_device_runner,
):
    queue = make_queue()
    runner = make_device_runner(queue=queue)
    model, seen = runner.model, {}

    class Watching:
        spec = model.spec
        compute_logits = staticmethod(model.compute_logits)

        @staticmethod
        def forward(token_ids_T, positions_T, context):
            place = (token_ids_T.data_ptr(), positions_T.data_ptr())
            seen.setdefault(tuple(token_ids_T.shape), set()).add(place)
            return model.forward(token_ids_T, positions_T, context)

    runner.model = Watching()
    names = ["greedy", "random", "min tokens"]
    in_flight(runner, names, 7)
    # three sequences in a bucket of four: min_tokens needs FULL, and later nothing does
    assert queue.num_captured == len(runner.graphs) == 2
    assert queue.num_replayed == 7
    assert all(len(places) == 1 for places in seen.values())


def test_all_graphs_can_be_recorded_before_the_first_request(make_device_runner, make_runner):
    queue = make_queue()
    runner = make_device_runner(queue=queue)
    runner.warm_up(capture_at_start=True)
    num_captured = queue.num_captured
    # decodes in buckets of 1, 2, 4, 8; mixed steps of 16 to 96 tokens
    assert num_captured == len(runner.graphs) == 4 * 4 + 2 * 6
    tokens, _ = in_flight(runner, SHORT, 5)
    assert queue.num_captured == num_captured
    assert tokens == one_at_a_time(make_runner(), SHORT, 5).tokens


def test_warming_up_leaves_nothing_behind(make_device_runner, make_runner):
    runner = make_device_runner()
    runner.warm_up()
    tokens, _ = in_flight(runner, SHORT, 4)
    assert tokens == one_at_a_time(make_runner(), SHORT, 4).tokens


def test_prompts_that_do_not_fit_into_one_copy_go_before_the_step(make_device_runner, make_runner):
    runner = make_device_runner()
    words = runner._buffer
    small = words.layout.num_words() + 40
    words._hosts = [host[:small] for host in words._hosts]
    tokens, _ = in_flight(runner, SHORT, 5)
    assert tokens == one_at_a_time(make_runner(), SHORT, 5).tokens


def test_a_third_step_and_a_collection_of_nothing_are_refused(make_device_runner):
    runner = make_device_runner()
    plans = Plans(num_groups=runner.config.num_groups)
    plans.add("greedy", PROMPTS["greedy"], KINDS["greedy"])
    with pytest.raises(RuntimeError, match="no step is in flight"):
        runner.collect()
    runner.submit(plans.plan({"greedy": 4}))
    runner.submit(plans.plan({"greedy": 1}))
    with pytest.raises(RuntimeError, match="2 steps are in flight"):
        runner.submit(plans.plan({"greedy": 1}))


def test_a_step_of_more_tokens_than_the_runner_was_made_for_is_refused(make_device_runner):
    runner = make_device_runner(max_num_batched_tokens=6)
    plans = Plans(num_groups=runner.config.num_groups)
    plans.add("random", PROMPTS["random"], KINDS["random"])
    with pytest.raises(ValueError, match="a step of 7 tokens, the runner was made for 6"):
        runner.submit(plans.plan({"random": 7}))


def test_biases_beyond_what_the_device_holds_end_their_own_request_only(make_device_runner):
    runner = make_device_runner()
    stops = tuple(range(2000))
    drive = Drive(runner)
    drive.add(
        "wide",
        [3, 4],
        SamplingParams(max_tokens=9, temperature=0.0, min_tokens=3, stop_token_ids=stops),
    )
    drive.add("greedy", PROMPTS["greedy"], KINDS["greedy"])
    answer = drive.step({"wide": 2, "greedy": 4})
    assert list(answer.failures) == [*answer.refused] == ["wide"]
    assert "names 2001 tokens" in answer.failures["wide"] or "names 2000" in answer.failures["wide"]
    assert answer.sampled_token_ids[1] != 0


class Spoiled:
    """A model with other logits in one row of a step."""

    def __init__(self, model, bad_row, spoil):
        self.spec = model.spec
        self.forward = model.forward
        self._model, self._bad_row, self._spoil = model, bad_row, spoil

    def compute_logits(self, hidden_RE):
        logits_RV = self._model.compute_logits(hidden_RE)
        self._spoil(logits_RV[self._bad_row])
        return logits_RV


SPOILS = {
    "one nan": lambda logits_V: logits_V[3].fill_(torch.nan),
    "one inf": lambda logits_V: logits_V[3].fill_(torch.inf),
    "only -inf": lambda logits_V: logits_V.fill_(-torch.inf),
}


@covering_pairs(
    spoil=SPOILS,
    bad_row=[0, 1, 2, 3, 4],
    names=[
        list(KINDS)[:5],
        ["greedy", "random", "reported by the host", "penalised", "truncated"],
        ["greedy", "random"],
    ],
)
def test_a_sequence_whose_logits_are_no_numbers_fails_alone(
    make_device_runner, names, bad_row, spoil
):
    bad_row %= len(names)
    expected, _ = in_flight(make_device_runner(), names, 0)
    runner = make_device_runner()
    runner.model = Spoiled(runner.model, bad_row, SPOILS[spoil])
    tokens, (answer,) = in_flight(runner, names, 0)
    assert answer.failures == {names[bad_row]: "the model's logits are not finite numbers"}
    assert names[bad_row] not in (answer.logprobs or {})
    for name in set(names) - {names[bad_row]}:
        assert tokens[name] == expected[name]


def test_parameters_that_make_logits_infinite_fail_alone(make_device_runner, make_runner):
    tiny = SamplingParams(max_tokens=99, seed=7, repetition_penalty=0.5)
    force_setattr(tiny, "repetition_penalty", 1e-44)  # which no request may have
    for runner in (make_device_runner(), make_runner()):
        drive = Drive(runner)
        drive.add("tiny", list(range(60)), tiny)  # penalises each of them
        drive.add("greedy", PROMPTS["greedy"], KINDS["greedy"])
        answer = drive.step({"tiny": 60, "greedy": len(PROMPTS["greedy"])})
        assert list(answer.failures) == [*answer.refused] == ["tiny"]
        assert "infinite; set them nearer to 1" in answer.failures["tiny"]
        assert len(drive.tokens["greedy"]) == len(PROMPTS["greedy"]) + 1


def test_an_exception_of_the_model_reaches_the_one_who_collects(make_device_runner):
    runner = make_device_runner()
    model = runner.model
    drive = Drive(runner)
    drive.add("greedy", PROMPTS["greedy"], KINDS["greedy"])
    drive.step({"greedy": 4})

    class Broken:
        spec = model.spec

        @staticmethod
        def forward(*arguments):
            raise ZeroDivisionError("the model broke")

    runner.model = Broken()
    with pytest.raises(ZeroDivisionError):
        runner.execute(drive.plans.plan({"greedy": 1}))
    runner.model = model
    drive.plans.finish("greedy")
    drive.add("random", PROMPTS["random"], KINDS["random"])
    drive.step({"random": 7})
    assert len(drive.tokens["random"]) == 8
