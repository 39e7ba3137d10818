"""Tokens chosen by ranks that have the logits of some tokens each, against one that has all."""

import random

import numpy as np
import pytest
import torch

from engine_core.distributed.collectives import Collectives, SingleRank
from engine_core.layers.vocabulary import token_ranges
from engine_core.model_runner.cpu.sampler import CPUSampler, SampledRows
from engine_core.model_runner.logit_masks import RowMasks
from engine_core.model_runner.sampling_params import resolve_sampling
from engine_core.model_runner.vocabulary_rows import vocabulary_rows
from protocol.sampling import SamplingParams
from tests.engine_core.distributed.rank_models import rank_operations
from tests.engine_core.distributed.rank_processes import RankProcesses
from tests.engine_core.model_runner.same_answers import draw_params

SIZES = {131: "fewer than a word a rank, or odd", 1000: "more tokens than candidates"}


def _sampled(
    collectives: Collectives,
    ops_name: str,
    vocab_size: int,
    params: list[SamplingParams],
    logits_RV: torch.Tensor,
    masks: RowMasks | None,
) -> SampledRows:
    mine = collectives.parallel
    vocabulary, ops = vocabulary_rows(rank_operations(ops_name), collectives, vocab_size)
    prompt = [3, 1, 2, 128]
    sampler = CPUSampler(
        ops,
        max_num_rows=len(params),
        vocab_size=vocab_size,
        vocabulary=vocabulary,
        token_ids=np.tile(np.array([*prompt, 5, 5, 128, 5, 128], np.int32), (len(params), 1)),
    )
    for row, each in enumerate(params):
        sampling = resolve_sampling(
            each,
            num_prompt_tokens=len(prompt),
            eos_token_ids=(7,),
            vocab_size=vocab_size,
            draw_seed=lambda: 1,
        )
        sampler.write_row(row, sampling, prompt)
    tokens = token_ranges(vocab_size, mine.tp_size)[mine.tp_rank]
    rows = np.arange(len(params))
    own_RV = logits_RV[:, tokens.start : tokens.stop].clone()
    return sampler.sample(own_RV, rows, np.full(len(params), 9), {2: [5, 128]}, masks)


def _params(vocab_size: int) -> list[SamplingParams]:
    draw = random.Random(vocab_size)
    drawn = [draw_params(draw) for _ in range(40)]
    top = {"max_tokens": 9, "seed": 3}
    return [
        *drawn,
        SamplingParams(**top, temperature=5.0, top_p=0.95),  # wider than the candidates
        SamplingParams(**top, temperature=9.0, top_k=vocab_size - 1),
        SamplingParams(**top, temperature=0.0, logprobs=-1),
        SamplingParams(**top, logprob_token_ids=(0, 130, 64, 63)),
        SamplingParams(**top, logit_bias={130: 40.0, 0: 39.0}, logprobs=3),
        SamplingParams(**top, frequency_penalty=2.0, repetition_penalty=1.9),
        SamplingParams(**top),  # a row of NaN
        SamplingParams(**top, temperature=0.0),  # equals in two shards
    ]


@pytest.mark.parametrize(("ops_name", "size"), [("native", 2), ("native", 4), ("torch", 3)])
@pytest.mark.parametrize("vocab_size", SIZES)
def test_tokens_and_reports_are_those_of_one_rank(
    ranks: RankProcesses, ops_name: str, size: int, vocab_size: int
) -> None:
    params = _params(vocab_size)
    generator = torch.Generator().manual_seed(4)
    logits_RV = torch.randn(len(params), vocab_size, generator=generator) * 3
    logits_RV[-2, 100] = torch.nan
    logits_RV[-1, [5, 120]] = 99.0
    for masks in (None, _masks(len(params), vocab_size)):
        arguments = (ops_name, vocab_size, params, logits_RV, masks)
        expected = _sampled(SingleRank(), *arguments)
        assert len(params) - 2 in expected.failures
        assert masks is not None or expected.token_ids[-1] == 5
        for found in ranks.run(_sampled, *arguments, tp_size=size):
            _assert_same(found, expected)


def _masks(num_rows: int, vocab_size: int) -> RowMasks:
    """Of every second row."""
    words = np.random.default_rng(1).integers(0, 2**32, (num_rows // 2, -(-vocab_size // 32)))
    return RowMasks(np.arange(0, num_rows, 2), words.astype(np.uint32).view(np.int32))


def _assert_same(found: SampledRows, expected: SampledRows) -> None:
    assert found.failures == expected.failures
    for row, (mine, theirs) in enumerate(zip(found.token_ids, expected.token_ids, strict=True)):
        assert row in expected.failures or mine == theirs, row
    assert found.logprobs.keys() == expected.logprobs.keys()
    for row, report in found.logprobs.items():
        other = expected.logprobs[row]
        assert report.ranks == other.ranks
        assert report.token_ids == other.token_ids
        values = [np.frombuffer(each.logprobs, "<f4") for each in (report, other)]
        np.testing.assert_allclose(*values, rtol=1e-5, atol=1e-5)
