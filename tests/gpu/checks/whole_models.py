"""Whole models against transformers: small ones with the same random weights, through the real
scheduler and the device's runner, prompts in chunks, with graphs and without.

Teacher-forced: transformers is given the tokens that our engine chose, and both say how likely each
token of the vocabulary was at each place.
"""

from collections.abc import Mapping
from typing import Any

import torch
import transformers

from kernels.interface.weights import QuantisedTensor
from kernels.triton.linear.few_rows import FewRowsProducts
from tests.gpu.checks.errors import worst
from tests.gpu.engine_run import EngineRun, GeneratedOutput, RequestSpec, Sizes, triton_operations
from tests.gpu.tiny_models import (
    HYBRIDS,
    MORE_HYBRIDS,
    VOCAB_SIZE,
    ours_of,
    random_reference,
    reference_logprobs,
    tiny_config,
)
from tests.kernels.gguf_parts import rounded_part

MODELS = ("llama", "qwen3", "gemma3", "mixtral", "qwen3-moe", *HYBRIDS, *MORE_HYBRIDS)
SPARSE = ("mixtral", "qwen3-moe")
FLOAT32_ERROR = 1e-3
"""Of a natural logarithm; sums of float32 in another order."""
HALF_RATIO = 1.5
"""Our mean distance to float32 over that of transformers in the same 16-bit dtype: each rounds
after every operation, in places that differ."""
EXPERTS_RATIO = 2.0
"""There rounding also sends a token to another expert now and then."""
PROMPT_LENGTHS = (1, 15, 16, 17, 33, 45, 64, 70)
BUDGET = 40
"""Tokens of a step: most prompts come in chunks, beside decodes."""


TYPES = frozenset({"Q8_0", "Q4_0"})


def quantise_reference(reference: Any) -> dict[str, QuantisedTensor]:
    """Every matrix by its name in blocks, on the host: feed-forwards in Q4_0, all else in Q8_0.
    The reference, transformers' model, then has the blocks' numbers, rounded to its dtype."""
    parts = {}
    for name, parameter in reference.named_parameters():
        if parameter.ndim == 2:
            type_name = "Q4_0" if ".mlp." in name else "Q8_0"
            part = rounded_part(parameter.data.float().cpu(), type_name)
            parameter.data.copy_(part.dequantise())
            parts[name] = part
    return parts


def check(
    name: str,
    dtype: torch.dtype,
    *,
    use_graphs: bool,
    prompt_lengths: tuple[int, ...] = PROMPT_LENGTHS,
    num_output: int = 12,
    budget: int = BUDGET,
    num_layers: int | None = None,
    is_quantised: bool = False,
    few_rows: FewRowsProducts | None = None,
    device: str,
) -> float:
    """See `compare`, on a tiny model."""
    return compare(
        tiny_config(name, num_layers=num_layers),
        dtype,
        use_graphs=use_graphs,
        prompt_lengths=prompt_lengths,
        num_output=num_output,
        budget=budget,
        is_quantised=is_quantised,
        few_rows=few_rows,
        device=device,
    )


def compare(
    config: Any,
    dtype: torch.dtype,
    *,
    use_graphs: bool,
    prompt_lengths: tuple[int, ...],
    num_output: int,
    budget: int,
    is_quantised: bool = False,
    few_rows: FewRowsProducts | None = None,
    device: str,
) -> float:
    """In float32 the largest difference of a log-probability; in 16 bits the mean distance to the
    same weights in float32, over transformers' own. Infinite if a greedy token was not the
    likeliest by what was reported with it.

    Every other request is sampled.

    Args:
        config: of transformers, with a vocabulary that is reported as a whole.
        is_quantised: both have weights of 8 and 4 bits, ours as blocks.
        few_rows: see `TritonOperations`.
    """
    assert config.vocab_size == VOCAB_SIZE
    reference = random_reference(config, dtype=dtype, device=device)
    if is_quantised:
        ops = triton_operations(device, quantised_types=TYPES)
        model = ours_of(reference, ops, dtype=dtype, parts=quantise_reference(reference))
    else:
        ops = triton_operations(device, few_rows=few_rows)
        model = ours_of(reference, ops, dtype=dtype)
    number = len(prompt_lengths)
    engine = EngineRun(
        model,
        ops,
        Sizes(
            max_num_seqs=number,
            max_model_len=max(prompt_lengths) + num_output,
            max_num_batched_tokens=max(prompt_lengths),
            # layers with windows and those without have tables of their own
            num_blocks=3 * number * -(-(max(prompt_lengths) + num_output) // 16),
            budget=budget,
        ),
        dtype=dtype,
        use_graphs=use_graphs,
    )
    requests = [
        RequestSpec(
            f"r{at}",
            torch.randint(VOCAB_SIZE, (length,)).tolist(),
            num_output,
            temperature=float(at % 2),
            seed=int(torch.randint(2**31, ())),
            num_logprobs=VOCAB_SIZE,
        )
        for at, length in enumerate(prompt_lengths)
    ]
    answers = engine.generate(requests)
    assert bool(len(engine.runner.graphs)) == use_graphs, "graphs were not used as asked"
    ours = {request.name: answers[request.name].logprobs_of_all(VOCAB_SIZE) for request in requests}
    for request in requests:
        table_NV, tokens = ours[request.name], torch.tensor(answers[request.name].tokens)
        chosen_N = table_NV.gather(1, tokens[:, None])[:, 0]
        if request.temperature == 0 and not bool((chosen_N == table_NV.amax(1)).all()):
            return float("inf")
    theirs = _references(reference, requests, answers, device)
    if dtype is torch.float32:
        return worst(*(float((ours[n] - theirs[n]).abs().max()) for n in ours))
    exact = _references(reference.float(), requests, answers, device)
    return _mean_distance(ours, exact) / _mean_distance(theirs, exact)


def check_published(
    shape: Mapping[str, Any],
    *,
    dtype: torch.dtype = torch.bfloat16,
    prompt_lengths: tuple[int, ...] = (1, 16, 100, 129, 300, 513),
    num_output: int = 6,
    device: str,
) -> float:
    """See `compare`, on two layers of a published model's width, one of each kind where there are
    two, with a small vocabulary."""
    kinds = sorted(set(shape.get("layer_types") or ())) or None
    few = dict(shape) | {"num_hidden_layers": 2, "vocab_size": VOCAB_SIZE, "layer_types": kinds}
    return compare(
        transformers.AutoConfig.for_model(**few),
        dtype,
        use_graphs=True,
        prompt_lengths=prompt_lengths,
        num_output=num_output,
        budget=max(prompt_lengths) * 3 // 5,
        device=device,
    )


def _references(
    reference: Any, requests: list[RequestSpec], answers: dict[str, GeneratedOutput], device: str
) -> dict[str, torch.Tensor]:
    return {
        request.name: reference_logprobs(
            reference, request.prompt, answers[request.name].tokens, device=device
        )
        for request in requests
    }


def _mean_distance(some: dict[str, torch.Tensor], others: dict[str, torch.Tensor]) -> float:
    return float(torch.cat([(some[name] - others[name]).abs().mean(1) for name in some]).mean())
