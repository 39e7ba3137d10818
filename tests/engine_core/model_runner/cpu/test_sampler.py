"""Each request's parameters, in a batch of others."""

import numpy as np
import pytest
import torch
from msgspec.structs import force_setattr

from engine_core.model_runner.cpu.sampler import CPUSampler
from engine_core.model_runner.sampling_params import resolve_sampling
from kernels.backends import select_operations
from kernels.torch.operations import TorchOperations
from protocol.sampling import SamplingParams

V = 300
EOS = 7


def write(sampler, row, params, prompt=(1, 2), output=(), eos=(EOS,)):
    sampling = resolve_sampling(
        params, num_prompt_tokens=len(prompt), eos_token_ids=eos, vocab_size=V, draw_seed=lambda: 1
    )
    sampler.write_row(row, sampling, [*prompt, *output])


def make(*params, outputs=None):
    ops = select_operations(torch.device("cpu"))
    sampler = CPUSampler(ops, max_num_rows=len(params), vocab_size=V)
    for row, each in enumerate(params):
        write(sampler, row, each, output=outputs[row] if outputs else ())
    return sampler


def logits_of(num_rows, seed=0):
    return torch.randn(num_rows, V, generator=torch.Generator().manual_seed(seed)) * 3


def sample(sampler, logits, rows=None, positions=None, drafts_before=None):
    rows = np.arange(len(logits)) if rows is None else np.array(rows)
    positions = np.full(len(rows), 2) if positions is None else np.array(positions)
    return sampler.sample(logits.clone(), rows, positions, drafts_before or {})


MIXED = [
    SamplingParams(max_tokens=9, temperature=0.0),
    SamplingParams(max_tokens=9, seed=1),
    SamplingParams(max_tokens=9, seed=1, top_k=5),
    SamplingParams(max_tokens=9, seed=2, top_p=0.6, temperature=0.7),
    SamplingParams(max_tokens=9, seed=2**64 - 1, min_p=0.2, logprobs=3),
    SamplingParams(max_tokens=9, seed=4, repetition_penalty=1.5, presence_penalty=1.0),
    SamplingParams(max_tokens=9, seed=5, logit_bias={3: 100.0}),
    SamplingParams(max_tokens=9, seed=6, allowed_token_ids=(11, 12), logprobs=0),
]


def test_a_row_gets_the_same_token_alone_and_in_any_batch_in_any_order():
    sampler = make(*MIXED)
    logits = logits_of(len(MIXED))
    together = sample(sampler, logits).token_ids
    order = [5, 2, 7, 0, 3, 6, 1, 4]
    shuffled = sample(sampler, logits[order], rows=order).token_ids
    assert shuffled.tolist() == together[order].tolist()
    for row in range(len(MIXED)):
        alone = sample(sampler, logits[row : row + 1], rows=[row])
        assert alone.token_ids.tolist() == [together[row]]


def test_another_position_or_seed_gives_other_tokens():
    sampler = make(SamplingParams(max_tokens=9, seed=1), SamplingParams(max_tokens=9, seed=2))
    logits = torch.zeros(1, V)
    by_position = [int(sample(sampler, logits, [0], [p]).token_ids[0]) for p in range(50)]
    other_seed = [int(sample(sampler, logits, [1], [p]).token_ids[0]) for p in range(50)]
    assert len(set(by_position)) > 35
    assert sum(a == b for a, b in zip(by_position, other_seed, strict=True)) < 5


@pytest.mark.parametrize("alone", [{"top_k": 2}, {"top_p": 0.2}, {"min_p": 0.5}])
def test_each_truncation_works_without_the_others(alone):
    """Two tokens of 0.13 each; the others have 0.73 together."""
    sampler = make(SamplingParams(max_tokens=9, seed=1, **alone), SamplingParams(max_tokens=9))
    logits = torch.full((1, V), -4.0)
    logits[0, [20, 30]] = 0.0
    drawn = [
        {int(sample(sampler, logits, [row], [position]).token_ids[0]) for position in range(60)}
        for row in (0, 1)
    ]
    assert drawn[0] == {20, 30}
    assert len(drawn[1]) > 20


def test_greedy_takes_the_best_and_the_lowest_id_on_ties():
    sampler = make(*[SamplingParams(max_tokens=9, temperature=0.0)] * 2)
    logits = logits_of(2)
    logits[1] = 0.0
    assert sample(sampler, logits).token_ids.tolist() == [int(logits[0].argmax()), 0]


def test_greedy_follows_bias_and_allowed_tokens_and_penalties():
    sampler = make(
        SamplingParams(max_tokens=9, temperature=0.0, logit_bias={42: 100.0}),
        SamplingParams(max_tokens=9, temperature=0.0, allowed_token_ids=(5, 6)),
        SamplingParams(max_tokens=9, temperature=0.0, frequency_penalty=2.0),
        outputs=[[], [], [9, 9, 9]],
    )
    logits = logits_of(3)
    logits[2] = 0.0
    logits[2, 9] = 5.0
    logits[2, 10] = 1.0
    chosen = sample(sampler, logits).token_ids.tolist()
    assert chosen[0] == 42
    assert chosen[1] == (5 if logits[1, 5] > logits[1, 6] else 6)
    assert chosen[2] == 10


def test_stop_tokens_are_impossible_until_min_tokens_are_there():
    params = SamplingParams(max_tokens=9, temperature=0.0, min_tokens=2, stop_token_ids=(8,))
    sampler = make(params)
    logits = torch.zeros(1, V)
    logits[0, EOS], logits[0, 8], logits[0, 20] = 9.0, 8.0, 7.0
    for position, expected in ((2, 20), (3, 20), (4, EOS)):
        assert sample(sampler, logits, positions=[position]).token_ids.tolist() == [expected]


def test_penalties_count_what_was_appended():
    sampler = make(SamplingParams(max_tokens=9, temperature=0.0, presence_penalty=2.0))
    logits = torch.zeros(1, V)
    logits[0, 4], logits[0, 5] = 1.5, 1.0
    first = int(sample(sampler, logits).token_ids[0])
    sampler.append_tokens(np.array([0]), np.array([first]))
    assert [first, int(sample(sampler, logits).token_ids[0])] == [4, 5]


def test_logprobs_are_of_the_raw_logits_with_the_sampled_token_first():
    sampler = make(
        SamplingParams(max_tokens=9, seed=3, temperature=2.0, logprobs=4, logit_bias={50: 100.0}),
        SamplingParams(max_tokens=9, temperature=0.0, logprobs=-1),
        SamplingParams(max_tokens=9, temperature=0.0),
    )
    logits = logits_of(3)
    result = sample(sampler, logits)
    expected = logits.log_softmax(1)
    assert sorted(result.logprobs) == [0, 1]
    first, everything = result.logprobs[0], result.logprobs[1]
    ids = np.frombuffer(first.token_ids, "<i4")
    values = np.frombuffer(first.logprobs, "<f4")
    assert (first.num_positions, first.width) == (1, 5)
    assert ids[0] == result.token_ids[0] == 50
    assert ids[1:].tolist() == expected[0].topk(4).indices.tolist()
    np.testing.assert_allclose(values, expected[0][ids.tolist()], rtol=1e-5)
    assert first.ranks == [1 + int((expected[0] > expected[0, 50]).sum())]
    assert everything.width == V + 1
    assert everything.ranks == [1]


SPOILS = {
    "one nan": lambda logits: logits[17].fill_(torch.nan),
    "all nan": lambda logits: logits.fill_(torch.nan),
    "one inf": lambda logits: logits[17].fill_(torch.inf),
    "nan and inf": lambda logits: logits[17:19].copy_(torch.tensor([torch.nan, torch.inf])),
    "only -inf": lambda logits: logits.fill_(-torch.inf),
}


@pytest.mark.parametrize("spoil", SPOILS)
@pytest.mark.parametrize("kinds", ["mixed", "greedy"])
@pytest.mark.parametrize("backend", ["native", "torch"])
def test_a_row_without_numbers_fails_alone(backend, kinds, spoil, monkeypatch):
    """Whatever the row asks for; also allowed tokens that the spoiled logit is not among."""
    if backend == "torch":
        monkeypatch.setattr(f"{__name__}.select_operations", lambda device: TorchOperations())
    params = MIXED if kinds == "mixed" else [MIXED[0]] * 3
    sampler = make(*params)
    logits = logits_of(len(params))
    expected = sample(sampler, logits)
    assert expected.failures == {}
    for bad in range(len(params)):
        spoiled = logits.clone()
        SPOILS[spoil](spoiled[bad])
        result = sample(sampler, spoiled)
        assert result.failures == {bad: "the model's logits are not finite numbers"}
        others = np.delete(np.arange(len(params)), bad)
        assert result.token_ids[others].tolist() == expected.token_ids[others].tolist()
        assert result.logprobs.keys() == expected.logprobs.keys() - {bad}


@pytest.mark.parametrize("backend", ["native", "torch"])
@pytest.mark.parametrize(
    ("penalty", "kind"),
    [
        (1e-44, {"temperature": 0.0}),
        (1e-44, {"seed": 1}),
        (1e-44, {"seed": 1, "top_k": 3}),
        (1e-35, {"seed": 1, "temperature": 1e-5, "logit_bias": {5: 100.0}}),
    ],
)
def test_parameters_that_make_logits_infinite_fail_alone(backend, penalty, kind, monkeypatch):
    if backend == "torch":
        monkeypatch.setattr(f"{__name__}.select_operations", lambda device: TorchOperations())
    params = SamplingParams(max_tokens=9, **kind)
    force_setattr(params, "repetition_penalty", penalty)  # which no request may have
    sampler = make(params, *MIXED)
    logits = logits_of(1 + len(MIXED))
    logits[0, 1:3] = torch.tensor([5.0, 4.0])  # tokens of the prompt
    result = sample(sampler, logits)
    assert list(result.failures) == [0]
    assert "infinite" in result.failures[0]
    alone = sample(make(*MIXED), logits[1:])
    assert result.token_ids[1:].tolist() == alone.token_ids.tolist()


@pytest.mark.parametrize("kind", [{"temperature": 0.0}, {"seed": 1}, {"seed": 1, "top_k": 3}])
def test_parameters_that_leave_no_token_fail_with_a_reason(kind):
    sampler = make(SamplingParams(max_tokens=9, min_tokens=3, allowed_token_ids=(EOS,), **kind))
    assert "no token is possible" in sample(sampler, logits_of(1)).failures[0]


@pytest.mark.parametrize("backend", ["native", "torch"])
def test_top_p_0_chooses_what_temperature_0_does(backend, monkeypatch):
    """The first of equal ones, too; and that p is so small that float32 has 0 for it."""
    if backend == "torch":
        monkeypatch.setattr(f"{__name__}.select_operations", lambda device: TorchOperations())
    kinds = [
        {}, {"seed": 7}, {"top_k": 5}, {"min_p": 0.2}, {"temperature": 9.0, "seed": 3},
        {"repetition_penalty": 1.5, "presence_penalty": 1.0}, {"logit_bias": {3: 100.0}},
        {"allowed_token_ids": (11, 12)},
    ]  # fmt: skip
    logits = logits_of(len(kinds))
    logits[0, [5, 9]] = 50.0
    greedy = [SamplingParams(max_tokens=9, **kind | {"temperature": 0.0}) for kind in kinds]
    expected = sample(make(*greedy), logits).token_ids.tolist()
    for top_p in (0.0, 1e-60):
        others = [SamplingParams(max_tokens=9, **{"seed": 1} | k, top_p=top_p) for k in kinds]
        assert sample(make(*others), logits).token_ids.tolist() == expected


def test_a_row_that_changes_hands_keeps_nothing():
    sampler = make(MIXED[7])
    sampler.free_row(0)
    write(sampler, 0, MIXED[0], eos=())
    logits = logits_of(1)
    result = sample(sampler, logits)
    assert result.token_ids[0] == int(logits.argmax())
    assert result.logprobs == {}


def test_many_rows_report_what_each_would_report_alone_with_one_topk(monkeypatch):
    beams = [SamplingParams(max_tokens=9, temperature=0.0, logprobs=8)] * 64
    sampler = make(*beams, SamplingParams(max_tokens=9, temperature=0.0))
    logits = logits_of(65)
    calls = []
    topk = torch.Tensor.topk
    monkeypatch.setattr(torch.Tensor, "topk", lambda *a, **k: calls.append(a) or topk(*a, **k))
    together = sample(sampler, logits).logprobs
    assert len(calls) == 1
    assert sorted(together) == list(range(64))
    for row in range(64):
        assert together[row] == sample(sampler, logits[row : row + 1], rows=[row]).logprobs[0]
        expected = logits[row].log_softmax(0)
        values = np.frombuffer(together[row].logprobs, "<f4")
        assert values[1:].tolist() == topk(expected, 8).values.tolist()
        assert together[row].ranks == [1]


def test_more_logprobs_than_tokens_are_all_tokens():
    sampler = make(SamplingParams(max_tokens=9, temperature=0.0, logprobs=V + 5))
    assert sample(sampler, logits_of(1)).logprobs[0].width == V + 1
