"""What a request asked of sampling, resolved once for its whole life: both runners read this."""

import dataclasses
import random
import secrets
from collections.abc import Callable, Iterable

import msgspec
import torch

from engine_core.distributed.collectives import Collectives
from protocol.sampling import SamplingParams


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ResolvedSampling:
    """
    Attributes:
        params: as sent, with a seed unless the request is greedy.
        top_k: 0 for no limit.
        is_truncated: top_k, top_p or min_p leave something out.
        num_logprobs: -1 for none; at most the vocabulary.
        logprob_ids: tokens that are reported in place of the likeliest.
        min_tokens_ids: tokens that are impossible until min_tokens are there, rising.
        min_length: tokens of the sequence from which they are possible; 0 if there are none.
        chained: None, or as sent with a chain; then `params` are neutral in what its samplers do.
    """

    params: SamplingParams
    num_prompt_tokens: int
    top_k: int
    is_truncated: bool
    num_logprobs: int
    logprob_ids: tuple[int, ...]
    min_tokens_ids: tuple[int, ...]
    min_length: int
    chained: SamplingParams | None


class Seeds:
    """Seeds for requests that come without: the same on every rank of a stage, which place the
    same requests in the same order."""

    def __init__(self, collectives: Collectives, device: torch.device) -> None:
        self._collectives = collectives
        self._device = device
        self._random: random.Random | None = None

    def draw(self) -> int:
        """64 bits."""
        if self._random is None:
            drawn = torch.tensor([secrets.randbits(63)], device=self._device)
            self._random = random.Random(int(self._collectives.all_gather(drawn)[0, 0]))
        return self._random.getrandbits(64)


def resolve_sampling(
    params: SamplingParams,
    *,
    num_prompt_tokens: int,
    eos_token_ids: Iterable[int],
    vocab_size: int,
    draw_seed: Callable[[], int],
) -> ResolvedSampling:
    """A request without a seed gets one here: once, so that a preemption changes no token."""
    if params.seed is None and not (params.is_greedy and params.chain is None):
        params = msgspec.structs.replace(params, seed=draw_seed())
    chained = None
    if params.chain is not None:
        chained = params
        params = msgspec.structs.replace(
            params,
            temperature=0.0 if params.is_greedy else 1.0,
            top_k=0,
            top_p=1.0,
            min_p=0.0,
            repetition_penalty=1.0,
            presence_penalty=0.0,
            frequency_penalty=0.0,
            chain=None,
        )
    top_k = params.top_k if params.top_k < vocab_size else 0
    min_tokens_ids = {*eos_token_ids, *params.stop_token_ids} if params.min_tokens else ()
    num_logprobs = -1 if params.logprobs is None else params.logprobs
    if params.logprobs is not None and not 0 <= params.logprobs <= vocab_size:
        num_logprobs = vocab_size
    if params.logprob_token_ids:
        num_logprobs = len(params.logprob_token_ids)
    return ResolvedSampling(
        params=params,
        num_prompt_tokens=num_prompt_tokens,
        top_k=top_k,
        is_truncated=top_k > 0 or params.top_p < 1 or params.min_p > 0,
        num_logprobs=num_logprobs,
        logprob_ids=params.logprob_token_ids,
        min_tokens_ids=tuple(sorted(min_tokens_ids)),
        min_length=num_prompt_tokens + params.min_tokens if min_tokens_ids else 0,
        chained=chained,
    )
