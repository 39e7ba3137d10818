"""The same bits for a request whatever else runs: alone, in crowds, chunked, cached, preempted.

The engine is made batch-invariant, one request is watched, and its tokens and the log-probabilities
of the whole vocabulary are compared with what it was given alone, without graphs, its prompt in one
step. All exact.
"""

import dataclasses

import pytest
import torch

from tests.gpu.device import on_gpu
from tests.gpu.engine_run import EngineRun, RequestSpec, Sizes, triton_operations
from tests.gpu.tiny_models import VOCAB_SIZE, ours_of, random_reference, tiny_config

CROWDS = (2, 3, 16, 63, 128, 256)
"""Sequences that run at once, the watched one included."""
MOST_SEQS = 256
PROMPT, NUM_OUTPUT = 75, 20


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ServingCase:
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
    case: ServingCase,
    *,
    lengths: Lengths = Lengths(),
    max_num_seqs: int = MOST_SEQS,
    num_layers: int | None = None,
    device: str,
) -> float:
    """How many tokens and log-probabilities of the watched request differ. Infinite if the case did
    not come about."""
    config = tiny_config(name, num_layers=num_layers)
    ops = triton_operations(device, batch_invariant=True)
    model = ours_of(random_reference(config, dtype=dtype, device=device), ops, dtype=dtype)

    def engine(case: ServingCase) -> EngineRun:
        a_sequence = -(-(lengths.prompt + lengths.output) // 16)
        # a table of its own for every kind of layer
        num_blocks = 3 * a_sequence * max_num_seqs
        if case.is_preempted:
            num_blocks = case.crowd * a_sequence - 1
        sizes = Sizes(
            max_num_seqs=max_num_seqs,
            max_model_len=lengths.prompt + lengths.output,
            max_num_batched_tokens=max(lengths.prompt, max_num_seqs),
            num_blocks=num_blocks,
            budget=case.budget,
        )
        return EngineRun(model, ops, sizes, dtype=dtype, use_graphs=case.use_graphs)

    watched = _spec("watched", lengths.prompt, lengths.output, VOCAB_SIZE)
    expected = engine(ServingCase(use_graphs=False)).generate([watched])["watched"]
    crowded = engine(case)
    if case.is_cached:
        crowded.generate([dataclasses.replace(watched, name="before")])
    answers = crowded.generate(_crowd(watched, case, lengths))
    request = crowded.requests["watched"]
    if (case.is_preempted and not request.account.num_preemptions) or (
        case.is_cached and not answers["watched"].num_cached
    ):
        return float("inf")
    found = answers["watched"]
    different = sum(a != b for a, b in zip(found.tokens, expected.tokens, strict=True))
    tables = [each.logprobs_of_all(VOCAB_SIZE).view(torch.int32) for each in (found, expected)]
    return float(different + int((tables[0] != tables[1]).sum()))


def _crowd(watched: RequestSpec, case: ServingCase, lengths: Lengths) -> list[RequestSpec]:
    """In order of arrival, the watched request among them."""
    if case.is_preempted:
        others = [
            _spec(f"other {at}", lengths.prompt, lengths.output, None)
            for at in range(case.crowd - 1)
        ]
        return [*others, watched]
    others = [
        _spec(
            f"other {at}",
            int(torch.randint(1, lengths.prompt + 1, ())),
            # every second one is beside it until its end
            int(torch.randint(1, lengths.output + 1, ())) if at % 2 else lengths.output,
            (None, 0, 5)[at % 3],
        )
        for at in range(case.crowd - 1)
    ]
    return [*others[: case.crowd // 2], watched, *others[case.crowd // 2 :]]


def _spec(name: str, num_prompt: int, num_output: int, num_logprobs: int | None) -> RequestSpec:
    return RequestSpec(
        name,
        torch.randint(VOCAB_SIZE, (num_prompt,)).tolist(),
        num_output,
        temperature=0.8,
        seed=int(torch.randint(2**31, ())),
        num_logprobs=num_logprobs,
    )


CHUNKED = ServingCase(crowd=64, budget=70)
CHUNKED_AND_CACHED = dataclasses.replace(CHUNKED, is_cached=True)
SERVING_CASES = {
    "alone with graphs": ServingCase(),
    "alone in chunks of 13": ServingCase(budget=13),
    "alone and cached": ServingCase(is_cached=True),
    **{f"in a crowd of {number}": ServingCase(crowd=number) for number in CROWDS},
    "in a crowd of 64, chunked": CHUNKED,
    "in a crowd of 64, without graphs": ServingCase(crowd=64, use_graphs=False),
    "in a crowd of 64, cached": ServingCase(crowd=64, is_cached=True),
    "behind another, preempted": ServingCase(crowd=2, is_preempted=True),
}
BF16, FP32 = torch.bfloat16, torch.float32


@pytest.mark.parametrize(
    ("model", "dtype", "case"),
    [
        *(on_gpu("llama", BF16, case, id=f"llama {name}") for name, case in SERVING_CASES.items()),
        on_gpu("gemma3", BF16, CHUNKED, id="gemma3, chunked"),
        on_gpu("mixtral", BF16, CHUNKED, id="mixtral, chunked"),
        on_gpu("qwen3", BF16, CHUNKED_AND_CACHED, id="qwen3, chunked and cached"),
        on_gpu("qwen3-moe", BF16, CHUNKED_AND_CACHED, id="qwen3-moe, chunked and cached"),
        on_gpu("llama", FP32, CHUNKED_AND_CACHED, id="llama float32, chunked and cached"),
    ],
)
def test_a_request_has_the_same_bits_whatever_runs_beside_it(model, dtype, case, device):
    assert num_different_from_alone(model, dtype, case, device=device) == 0


@pytest.mark.parametrize(
    ("case", "lengths"),
    [
        (ServingCase(crowd=3, budget=12, is_cached=True), Lengths(prompt=18, output=3)),
        (ServingCase(crowd=2, is_preempted=True), Lengths(prompt=30, output=6)),
    ],
    ids=["in a crowd, chunked and cached", "preempted"],
)
def test_a_small_model_has_the_same_bits(case, lengths, device):
    differing = num_different_from_alone(
        "llama", FP32, case, lengths=lengths, max_num_seqs=3, num_layers=1, device=device
    )
    assert differing == 0
