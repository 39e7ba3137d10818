"""llama.cpp's samplers, against what llama.cpp's own code gave and plain loops."""

import json
import random
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine_core.model_runner.cpu.sampler import CPUSampler
from engine_core.model_runner.sampler_chain import RowChain, repeat_lengths
from engine_core.model_runner.sampling_params import resolve_sampling
from kernels.torch.operations import TorchOperations
from protocol.sampling import DEFAULT_SAMPLERS, SamplerChain, SamplingParams

RECORDED = json.loads((Path(__file__).parent / "llama_samplers.json").read_text())
"""By llama-cpp-python 0.3.36: `llama_sampler_apply` of each sampler on a token data array."""


def resolved(params, *, num_prompt_tokens, vocab_size):
    return resolve_sampling(
        params,
        num_prompt_tokens=num_prompt_tokens,
        eos_token_ids=(),
        vocab_size=vocab_size,
        draw_seed=lambda: 1,
    )


def chain_row(
    logits, history=(), *, num_prompt_tokens=0, position=None, breakers=(), seed=1, **given
):
    """The row that the samplers make of these logits, behind these tokens."""
    own = {name: given.pop(name) for name in SamplerChain.__struct_fields__ if name in given}
    chain = SamplerChain(dry_breakers=breakers, **own)
    params = SamplingParams(max_tokens=1, seed=seed, chain=chain, **given)
    size = len(logits)
    sampling = resolved(params, num_prompt_tokens=num_prompt_tokens, vocab_size=size)
    row = RowChain.of(sampling, [slice(0, num_prompt_tokens)], torch.device("cpu"))
    tokens = torch.tensor([*history, 0, 0], dtype=torch.int32)
    position = len(history) if position is None else position
    return row.apply(torch.tensor(logits), tokens, position)


def kept(row_V):
    """Probabilities of the tokens that are left."""
    shares = row_V.double().softmax(0).tolist()
    return {at: share for at, share in enumerate(shares) if row_V[at] > -torch.inf}


@pytest.mark.parametrize("index", range(0, len(RECORDED), 8))
def test_the_tokens_that_are_left_and_their_probabilities_are_llama_cpps(index):
    for case in RECORDED[index : index + 8]:
        seed, size = case["logits"]
        draw, history = random.Random(seed), case["history"]
        logits = [round(draw.gauss(0, 3), 4) for _ in range(size)]
        breakers = tuple(((head,), tuple(tail)) for head, *tail in case["breakers"])
        found = kept(
            chain_row(
                logits,
                history,
                num_prompt_tokens=len(history) // 2,
                samplers=tuple(case["samplers"]),
                breakers=breakers,
                **case["params"],
            )
        )
        expected = {int(token_id): share for token_id, share in case["expected"].items()}
        assert found == pytest.approx(expected, abs=1e-5), case


def test_the_recorded_cases_use_every_sampler():
    used = {name for case in RECORDED for name in case["params"]}
    assert used >= {
        "typical_p", "top_n_sigma", "xtc_probability", "dry_multiplier", "dynatemp_range",
        "repeat_last_n", "top_k", "top_p", "min_p", "temperature", "repetition_penalty",
    }  # fmt: skip
    assert any(tuple(case["samplers"]) != DEFAULT_SAMPLERS for case in RECORDED)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(0, 2), min_size=1, max_size=40))
def test_repetitions_are_as_long_as_a_loop_finds_them(tokens):
    number = len(tokens)
    expected = []
    for start in range(1, number):
        length = 0
        while start + length < number and tokens[length] == tokens[start + length]:
            length += 1
        expected.append(length)
    assert repeat_lengths(torch.tensor(tokens)).tolist() == expected


def test_equal_logits_are_kept_by_rising_id_on_either_way_to_sort():
    logits = [0.0, 1.0, 1.0, 1.0, 0.0, 1.0]
    assert [*kept(chain_row(logits, top_k=3))] == [1, 2, 3]
    assert [*kept(chain_row(logits, top_p=0.5, samplers=("top_p",)))] == [1, 2, 3]


def test_a_typical_token_is_found_among_impossible_ones():
    """Where llama.cpp compares with NaN."""
    logits = [2.0, 1.0, 0.0, -torch.inf, -torch.inf]
    alone = kept(chain_row(logits[:3], typical_p=0.6))
    assert kept(chain_row(logits, typical_p=0.6)) == pytest.approx(alone)
    assert kept(chain_row([-torch.inf] * 4, typical_p=0.6, temperature=0.5)) == {}


def test_penalties_without_a_window_are_vllms():
    """The prompt counts for repetition alone."""
    found = chain_row(
        [2.0, 2.0, -2.0, 0.0],
        [0, 2, 1, 1],
        num_prompt_tokens=2,
        repetition_penalty=2.0,
        presence_penalty=0.5,
        frequency_penalty=0.25,
    )
    assert found.tolist() == [1.0, 1.0 - 0.5 - 0.5, -4.0, 0.0]
    off = chain_row([2.0, 2.0], [0, 1], repetition_penalty=2.0, repeat_last_n=0)
    assert off.tolist() == [2.0, 2.0]


def test_a_forced_token_stays_whatever_dry_thinks_of_it():
    history = [3, 4] * 90
    logits = [-torch.inf] * 3 + [1.0] + [-torch.inf] * 2
    assert kept(chain_row(logits, history, dry_multiplier=5.0, dry_penalty_last_n=-1)) == {3: 1.0}


def test_xtcs_coin_is_of_seed_and_position():
    def drops(position, seed=5):
        row_V = chain_row(
            [1.0, 1.0, 0.0], [0] * 200, position=position, seed=seed, xtc_probability=0.25
        )
        return 0 not in kept(row_V)

    dropped = [drops(position) for position in range(200)]
    assert 30 < sum(dropped) < 70
    assert dropped == [drops(position) for position in range(200)]
    assert dropped != [drops(position, seed=6) for position in range(200)]


def test_nothing_waits_for_a_device():
    """Tensors without values refuse to be looked at."""
    params = SamplingParams(
        max_tokens=1, seed=1, top_k=9, top_p=0.9, min_p=0.1, temperature=0.7,
        repetition_penalty=1.5, presence_penalty=0.5,
        chain=SamplerChain(
            samplers=(*DEFAULT_SAMPLERS, *DEFAULT_SAMPLERS), typical_p=0.9, top_n_sigma=1.0,
            xtc_probability=1.0, dry_multiplier=1.0, dry_breakers=(((1,), (2, 3)), ((4, 5), ())),
            dynatemp_range=0.5, repeat_last_n=5,
        ),
    )  # fmt: skip
    device = torch.device("meta")
    sampling = resolved(params, num_prompt_tokens=4, vocab_size=50)
    row = RowChain.of(sampling, [slice(0, 4)], device)
    tokens = torch.empty(30, dtype=torch.int32, device=device)
    assert row.apply(torch.empty(50, device=device), tokens, 20).shape == (50,)


CHAINED = [
    {"chain": SamplerChain(dry_multiplier=2.0, dry_allowed_length=1)},
    {"chain": SamplerChain(xtc_probability=0.5, xtc_threshold=0.01), "top_k": 20},
    {"chain": SamplerChain(dynatemp_range=0.5, typical_p=0.7)},
    {"chain": SamplerChain(repeat_last_n=3), "repetition_penalty": 2.0, "temperature": 0.0},
    {"temperature": 0.7, "top_p": 0.9},
]


def test_a_row_gets_the_same_token_alone_and_in_any_batch():
    size, draw = 300, random.Random(0)
    tokens = np.array([[draw.randrange(4) for _ in range(9)] for _ in CHAINED], np.int32)
    sampler = CPUSampler(
        TorchOperations(), max_num_rows=len(CHAINED), vocab_size=size, token_ids=tokens
    )
    for row, given_ in enumerate(CHAINED):
        params = SamplingParams(max_tokens=9, seed=row, **given_)
        sampling = resolved(params, num_prompt_tokens=2, vocab_size=size)
        sampler.write_row(row, sampling, tokens[row, :6].tolist())
    logits_RV = torch.randn(5, size, generator=torch.Generator().manual_seed(0)) * 3

    def sample(rows):
        rows_R = np.array(rows)
        return sampler.sample(logits_RV[rows].clone(), rows_R, np.full(len(rows), 9), {}).token_ids

    together = sample([0, 1, 2, 3, 4])
    assert sample([3, 1, 4, 0, 2]).tolist() == together[[3, 1, 4, 0, 2]].tolist()
    for row in range(5):
        assert sample([row]).tolist() == [together[row]]
    assert (
        together[3]
        == logits_RV[3]
        .where(
            ~torch.isin(torch.arange(size), torch.from_numpy(tokens[3, 6:9])),
            torch.where(logits_RV[3] > 0, logits_RV[3] / 2, logits_RV[3] * 2),
        )
        .argmax()
    )
