"""The same bits for a request whatever else runs: alone, in crowds, chunked, cached, preempted.

The engine is made batch-invariant, one request is watched, and its tokens and the log-probabilities
of the whole vocabulary are compared with what it was given alone, without graphs, its prompt in one
step. All exact.
"""

from __future__ import annotations

import dataclasses

import pytest
import torch

from tests.gpu.device import on_gpu
from tests.gpu.engine_run import Asked, EngineRun, Sizes, triton_operations
from tests.gpu.tiny_models import VOCAB_SIZE, ours_of, random_reference, tiny_config

CROWDS = (2, 3, 16, 63, 128, 256)
"""Sequences that run at once, the watched one included."""
MOST_SEQS = 256
PROMPT, NUM_OUTPUT = 75, 20


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Way:
    """How the watched request is served the second time.

    Attributes:
        crowd: sequences, itself included.
        budget: tokens of a step; None: all that the runner was made for.
        is_preempted: it comes behind another of its lengths, with one block too few for both.
        is_cached: its prompt has been computed before.
    """

    crowd: int = 1
    budget: int | None = None
    is_preempted: bool = False
    is_cached: bool = False
    use_graphs: bool = True


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Lengths:
    """Of the watched request; the others' are random up to these."""

    prompt: int = PROMPT
    output: int = NUM_OUTPUT


def num_different_from_alone(
    name: str,
    dtype: torch.dtype,
    way: Way,
    *,
    lengths: Lengths = Lengths(),
    max_num_seqs: int = MOST_SEQS,
    num_layers: int | None = None,
    device: str,
) -> float:
    """How many tokens and log-probabilities of the watched request differ. Infinite if what the way
    is about did not happen."""
    config = tiny_config(name, num_layers=num_layers)
    ops = triton_operations(device, batch_invariant=True)
    model = ours_of(random_reference(config, dtype=dtype, device=device), ops, dtype=dtype)

    def engine(way: Way) -> EngineRun:
        a_sequence = -(-(lengths.prompt + lengths.output) // 16)
        # a table of its own for every kind of layer
        num_blocks = 3 * a_sequence * max_num_seqs
        if way.is_preempted:
            num_blocks = way.crowd * a_sequence - 1
        sizes = Sizes(
            max_num_seqs=max_num_seqs,
            max_model_len=lengths.prompt + lengths.output,
            max_num_batched_tokens=max(lengths.prompt, max_num_seqs),
            num_blocks=num_blocks,
            budget=way.budget,
        )
        return EngineRun(model, ops, sizes, dtype=dtype, use_graphs=way.use_graphs)

    watched = _ask("watched", lengths.prompt, lengths.output, VOCAB_SIZE)
    expected = engine(Way(use_graphs=False)).answer([watched])["watched"]
    crowded = engine(way)
    if way.is_cached:
        crowded.answer([dataclasses.replace(watched, name="before")])
    answers = crowded.answer(_crowd(watched, way, lengths))
    request = crowded.requests["watched"]
    if (way.is_preempted and not request.num_preemptions) or (
        way.is_cached and not answers["watched"].num_cached
    ):
        return float("inf")
    found = answers["watched"]
    different = sum(a != b for a, b in zip(found.tokens, expected.tokens, strict=True))
    tables = [each.logprobs_of_all(VOCAB_SIZE).view(torch.int32) for each in (found, expected)]
    return float(different + int((tables[0] != tables[1]).sum()))


def _crowd(watched: Asked, way: Way, lengths: Lengths) -> list[Asked]:
    """In order of arrival, the watched request among them."""
    if way.is_preempted:
        others = [
            _ask(f"other {at}", lengths.prompt, lengths.output, None) for at in range(way.crowd - 1)
        ]
        return [*others, watched]
    others = [
        _ask(
            f"other {at}",
            int(torch.randint(1, lengths.prompt + 1, ())),
            # every second one is beside it until its end
            int(torch.randint(1, lengths.output + 1, ())) if at % 2 else lengths.output,
            (None, 0, 5)[at % 3],
        )
        for at in range(way.crowd - 1)
    ]
    return [*others[: way.crowd // 2], watched, *others[way.crowd // 2 :]]


def _ask(name: str, num_prompt: int, num_output: int, num_logprobs: int | None) -> Asked:
    return Asked(
        name,
        torch.randint(VOCAB_SIZE, (num_prompt,)).tolist(),
        num_output,
        temperature=0.8,
        seed=int(torch.randint(2**31, ())),
        num_logprobs=num_logprobs,
    )


CHUNKED = Way(crowd=64, budget=70)
CHUNKED_AND_CACHED = dataclasses.replace(CHUNKED, is_cached=True)
WAYS = {
    "alone with graphs": Way(),
    "alone in chunks of 13": Way(budget=13),
    "alone and cached": Way(is_cached=True),
    **{f"in a crowd of {number}": Way(crowd=number) for number in CROWDS},
    "in a crowd of 64, chunked": CHUNKED,
    "in a crowd of 64, without graphs": Way(crowd=64, use_graphs=False),
    "in a crowd of 64, cached": Way(crowd=64, is_cached=True),
    "behind another, preempted": Way(crowd=2, is_preempted=True),
}
BF16, FP32 = torch.bfloat16, torch.float32


@pytest.mark.parametrize(
    ("model", "dtype", "way"),
    [
        *(on_gpu("llama", BF16, way, id=f"llama {name}") for name, way in WAYS.items()),
        on_gpu("gemma3", BF16, CHUNKED, id="gemma3, chunked"),
        on_gpu("mixtral", BF16, CHUNKED, id="mixtral, chunked"),
        on_gpu("qwen3", BF16, CHUNKED_AND_CACHED, id="qwen3, chunked and cached"),
        on_gpu("qwen3-moe", BF16, CHUNKED_AND_CACHED, id="qwen3-moe, chunked and cached"),
        on_gpu("llama", FP32, CHUNKED_AND_CACHED, id="llama float32, chunked and cached"),
    ],
)
def test_a_request_has_the_same_bits_whatever_runs_beside_it(model, dtype, way, device):
    assert num_different_from_alone(model, dtype, way, device=device) == 0


@pytest.mark.parametrize(
    ("way", "lengths"),
    [
        (Way(crowd=3, budget=12, is_cached=True), Lengths(prompt=18, output=3)),
        (Way(crowd=2, is_preempted=True), Lengths(prompt=30, output=6)),
    ],
    ids=["in a crowd, chunked and cached", "preempted"],
)
def test_a_small_model_has_the_same_bits(way, lengths, device):
    differing = num_different_from_alone(
        "llama", FP32, way, lengths=lengths, max_num_seqs=3, num_layers=1, device=device
    )
    assert differing == 0
