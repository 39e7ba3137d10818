"""llama.cpp's samplers over one row of logits, in torch on any device, which nothing here waits
for: what is cut becomes -inf, and no shape depends on values.

A chain has no state: it is a function of the logits, the tokens before, seed and position. So
drafts, chunks, preemption and other rows change nothing. The formulas are those of llama.cpp's
`src/llama-sampler.cpp` (in llama-cpp-python 0.3.36), with probabilities in float64."""

import dataclasses
import math
from collections.abc import Sequence

import numpy as np
import torch

from engine_core.model_runner.sampling_params import ResolvedSampling
from kernels.torch.sampling import STREAM, random_words
from protocol.sampling import GREEDY_TEMPERATURE, SamplerChain, SamplingParams

_XTC_STREAM = STREAM + 1
_IMPOSSIBLE = -1e38
"""Logit of a token that is impossible and still a candidate: llama.cpp counts such tokens."""
_LARGEST_PENALTY = 1e37
_LOG_OF_LARGEST = 88.7228391
"""The logarithm of the largest float32: llama.cpp bounds DRY's exponent by it."""
_HASH_BASE = 0x5851F42D4C957F2D
"""Odd: of Knuth's MMIX generator."""


@dataclasses.dataclass(frozen=True, slots=True)
class RowChain:
    """The samplers of a row.

    Attributes:
        params: as the request gave them; it has a chain.
        prompt_ranges: positions of the prompt that are tokens.
        breakers: see `protocol.sampling.SamplerChain`, first tokens rising and on the device.
    """

    params: SamplingParams
    chain: SamplerChain
    num_prompt_tokens: int
    prompt_ranges: Sequence[slice]
    breakers: tuple[tuple[torch.Tensor, tuple[int, ...]], ...]

    @classmethod
    def of(
        cls, sampling: ResolvedSampling, prompt_ranges: Sequence[slice], device: torch.device
    ) -> "RowChain | None":
        """None: the row has none."""
        params = sampling.chained
        if params is None or params.chain is None:
            return None
        breakers = tuple(
            (torch.tensor(sorted(heads), device=device), tail)
            for heads, tail in params.chain.dry_breakers
            if heads
        )
        return cls(params, params.chain, sampling.num_prompt_tokens, prompt_ranges, breakers)

    def apply(
        self, logits_V: torch.Tensor, token_ids_L: torch.Tensor, position: int
    ) -> torch.Tensor:
        """float32 [V], whose softmax is what the token is drawn from.

        Args:
            logits_V: float32; not changed.
            token_ids_L: int32, the sequence's tokens, then drafts, up to `position`.
            position: index in the sequence of the token being chosen.
        """
        params, chain = self.params, self.chain
        left = _Candidates(logits_V)
        for sampler in chain.samplers:
            match sampler:
                case "penalties":
                    if params.has_penalties:
                        self._penalise(left, token_ids_L, position)
                case "dry":
                    if chain.dry_multiplier > 0.0:
                        self._dry(left, self._before(token_ids_L, position))
                case "top_n_sigma":
                    if chain.top_n_sigma > 0.0:
                        left.top_n_sigma(chain.top_n_sigma)
                case "top_k":
                    if 0 < params.top_k < len(logits_V):
                        left.top_k(params.top_k)
                case "typ_p":
                    if chain.typical_p < 1.0:
                        left.typical_p(chain.typical_p)
                case "top_p":
                    if params.top_p < 1.0:
                        left.top_p(params.top_p)
                case "min_p":
                    if params.min_p > 0.0:
                        left.min_p(params.min_p)
                case "xtc":
                    if self._coin(position) <= chain.xtc_probability:
                        left.xtc(chain.xtc_threshold)
                case "temperature":
                    left.temperature(params)
        return left.row()

    def _before(self, token_ids_L: torch.Tensor, position: int) -> torch.Tensor:
        """The tokens before the position, int64."""
        parts = [token_ids_L[part] for part in self.prompt_ranges]
        return torch.cat([*parts, token_ids_L[self.num_prompt_tokens : position]]).long()

    def _coin(self, position: int) -> float:
        """XTC's, in [0, 1)."""
        if self.chain.xtc_probability == 0.0 or self.chain.xtc_threshold > 0.5:
            return 2.0
        seed = np.uint64(self.params.seed or 0)
        words = random_words(np.uint64(0), seed, np.uint64(position), _XTC_STREAM)
        return (int(words[0]) >> 8) * 2.0**-24

    def _penalise(self, left: "_Candidates", token_ids_L: torch.Tensor, position: int) -> None:
        params, last_n = self.params, self.chain.repeat_last_n
        before_N = self._before(token_ids_L, position)
        counted_N = before_N
        if last_n is None:  # vLLM's: the prompt counts for repetition alone
            counted_N = token_ids_L[self.num_prompt_tokens : position].long()
        elif last_n >= 0:
            before_N = counted_N = before_N[max(0, len(before_N) - last_n) :]
        values_C, penalty = left.values_C, params.repetition_penalty
        if penalty != 1.0:
            repeated_C = left.counts(before_N) > 0
            scaled_C = torch.where(values_C > 0, values_C / penalty, values_C * penalty)
            values_C = torch.where(repeated_C, scaled_C, values_C)
        if params.frequency_penalty or params.presence_penalty:
            counts_C = left.counts(counted_N)
            values_C = values_C - params.frequency_penalty * counts_C
            values_C = values_C - params.presence_penalty * (counts_C > 0)
        left.replace(values_C)

    def _dry(self, left: "_Candidates", before_N: torch.Tensor) -> None:
        """DRY: https://github.com/oobabooga/text-generation-webui/pull/5677."""
        chain, number, allowed = self.chain, len(before_N), self.chain.dry_allowed_length
        if chain.dry_penalty_last_n >= 0:
            number = min(number, chain.dry_penalty_last_n)
        if number <= max(allowed, 1):
            return
        recent_N = before_N[len(before_N) - number :].flip(0)  # the last token first
        breaks_N, most = self._breaks(recent_N)
        lengths_M = torch.minimum(repeat_lengths(recent_N), most)
        next_M = recent_N[:-1]  # what followed each repetition
        is_long_M = (lengths_M >= allowed) & (most >= allowed) & ~breaks_N[:-1]
        exponent_M = lengths_M - allowed
        if chain.dry_base > 1.000001:
            exponent_M = exponent_M.clamp(max=int(_LOG_OF_LARGEST / math.log(chain.dry_base)))
        penalty_M = chain.dry_multiplier * torch.pow(chain.dry_base, exponent_M.double())
        penalty_M = penalty_M.clamp(max=_LARGEST_PENALTY).float() * is_long_M
        penalty_V = torch.zeros(left.vocab_size, device=before_N.device)
        penalty_V.scatter_reduce_(0, next_M, penalty_M, "amax")  # the longest repetition counts
        left.replace(left.values_C - left.of_tokens(penalty_V))

    def _breaks(self, recent_N: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Which tokens break alone, bool [N]; and how many lie behind the last breaker, int64."""
        number = len(recent_N)
        place_N = torch.arange(number, device=recent_N.device)
        breaks_N = torch.zeros_like(recent_N, dtype=torch.bool)
        tail_N = torch.full_like(recent_N, -1)  # tokens behind the first one of a breaker
        for heads, tail in self.breakers:
            at_N = torch.searchsorted(heads, recent_N).clamp(max=len(heads) - 1)
            is_breaker_N = (heads[at_N] == recent_N) & (place_N >= len(tail))
            for offset, token_id in enumerate(tail[:number], 1):
                is_breaker_N &= recent_N.roll(offset) == token_id
            tail_N = torch.where(is_breaker_N, tail_N.clamp(min=len(tail)), tail_N)
            if not tail:
                breaks_N = is_breaker_N
        last = torch.where(tail_N >= 0, place_N, number).amin()
        behind = torch.where(place_N == last, place_N - tail_N, 0).sum()
        return breaks_N, torch.where(last == number, number, behind)


def repeat_lengths(recent_N: torch.Tensor) -> torch.Tensor:
    """Of each k in [1, N) how many tokens of `recent[k:]` are those of `recent`, from the first one
    on. int64 [N - 1].

    By bisection over hashes: sums of token * base ** index modulo 2**64, that of a part being the
    difference of two."""
    number = len(recent_N)
    steps_N = torch.full_like(recent_N, _HASH_BASE)
    steps_N[0] = 1
    powers_N = steps_N.cumprod(0)
    sums_N1 = torch.cat([recent_N.new_zeros(1), ((recent_N + 1) * powers_N).cumsum(0)])
    start_M = torch.arange(1, number, device=recent_N.device)
    lengths_M = torch.zeros_like(start_M)
    for bit in reversed(range(number.bit_length())):
        longer_M = lengths_M + (1 << bit)
        stop_M = start_M + longer_M
        is_inside_M = stop_M <= number
        part_M = sums_N1[stop_M.clamp(max=number)] - sums_N1[start_M]
        first_M = sums_N1[longer_M.clamp(max=number)] * powers_N[start_M]
        lengths_M = torch.where(is_inside_M & (part_M == first_M), longer_M, lengths_M)
    return lengths_M


class _Candidates:
    """The C tokens of a row that may be left. They are sorted at most once, the likeliest first
    and equals by rising id; then what is cut stays where it is, as -inf.

    Attributes:
        values_C: float32; -inf is cut.
        ids_C: int64; None: every token, by id.
        is_impossible_C: not cut, but never drawn.
    """

    def __init__(self, logits_V: torch.Tensor) -> None:
        self.vocab_size = len(logits_V)
        self.is_impossible_C = logits_V == -torch.inf
        self.values_C = logits_V.masked_fill(self.is_impossible_C, _IMPOSSIBLE)
        self.ids_C: torch.Tensor | None = None
        self._is_sorted = False

    def row(self) -> torch.Tensor:
        """All tokens' logits, float32 [V]."""
        values_C = self.values_C.masked_fill(self.is_impossible_C, -torch.inf)
        if self.ids_C is None:
            return values_C
        values_V = values_C.new_full((self.vocab_size,), -torch.inf)
        return values_V.index_copy_(0, self.ids_C, values_C)

    def of_tokens(self, values_V: torch.Tensor) -> torch.Tensor:
        """The candidates' own."""
        return values_V if self.ids_C is None else values_V[self.ids_C]

    def counts(self, token_ids_N: torch.Tensor) -> torch.Tensor:
        """How often each candidate is among these tokens, float32."""
        counts_V = torch.zeros(self.vocab_size, device=token_ids_N.device)
        ones_N = torch.ones(len(token_ids_N), device=token_ids_N.device)
        return self.of_tokens(counts_V.index_add_(0, token_ids_N, ones_N))

    def replace(self, values_C: torch.Tensor) -> None:
        """Logits in another order, perhaps."""
        self.values_C = values_C
        self._is_sorted = False

    def top_n_sigma(self, number: float) -> None:
        """arXiv:2411.07641."""
        values_C = self.values_C.double()
        is_real_C = ~self.is_impossible_C & (self.values_C > -torch.inf)
        count = is_real_C.sum()
        mean = torch.where(is_real_C, values_C, 0.0).sum() / count
        variance = torch.where(is_real_C, (values_C - mean) ** 2, 0.0).sum() / count
        self._forbid(values_C < values_C.amax() - number * variance.sqrt())

    def top_k(self, number: int) -> None:
        if not self._is_sorted:
            self._sort(min(number, len(self.values_C)))
        else:
            self._cut((self.values_C > -torch.inf).cumsum(0) > number)

    def typical_p(self, limit: float) -> None:
        share_C = self._probabilities()
        distance_C = (-share_C.log() - torch.special.entr(share_C).sum()).abs()
        order_C = distance_C.argsort(stable=True)
        share_C = share_C[order_C]
        is_cut_C = torch.empty_like(self.is_impossible_C)
        is_cut_C[order_C] = share_C.cumsum(0) - share_C > limit
        self._cut(is_cut_C)

    def top_p(self, limit: float) -> None:
        self._sort()
        share_C = self._probabilities()
        before_C = share_C.cumsum(0) - share_C
        self._cut((before_C >= limit) & (before_C > 0))

    def min_p(self, share: float) -> None:
        self._cut(self.values_C < self.values_C.amax() + math.log(share))

    def xtc(self, threshold: float) -> None:
        """https://github.com/oobabooga/text-generation-webui/pull/6335."""
        is_above_C = self._probabilities() >= threshold
        least = torch.where(is_above_C, self.values_C, torch.inf).amin()
        ids_C = self._ids()
        last = torch.where(is_above_C & (self.values_C == least), ids_C, -1).amax()
        self._cut(is_above_C & (ids_C != last))

    def temperature(self, params: SamplingParams) -> None:
        """arXiv:2403.14541 has its form that depends on the entropy."""
        chain = params.chain
        assert chain is not None
        divisor: torch.Tensor | float = params.temperature
        if (width := chain.dynatemp_range) > 0.0:
            low, high = max(0.0, params.temperature - width), params.temperature + width
            share = torch.special.entr(self._probabilities()).sum()
            share = (share / (self.values_C > -torch.inf).sum().log()).nan_to_num(0.0)
            warmth = low + (high - low) * share**chain.dynatemp_exponent
            divisor = warmth.clamp(min=GREEDY_TEMPERATURE).float()
        elif params.temperature < GREEDY_TEMPERATURE:
            self._forbid(self.values_C < self.values_C.amax())
            return
        self.values_C = torch.where(self.is_impossible_C, self.values_C, self.values_C / divisor)

    def _probabilities(self) -> torch.Tensor:
        """float64, 0 where it is cut."""
        return self.values_C.double().softmax(0)

    def _cut(self, is_cut_C: torch.Tensor) -> None:
        self.values_C = self.values_C.masked_fill(is_cut_C, -torch.inf)

    def _forbid(self, is_out_C: torch.Tensor) -> None:
        is_out_C = is_out_C & (self.values_C > -torch.inf)
        self.is_impossible_C = self.is_impossible_C | is_out_C
        self.values_C = self.values_C.masked_fill(is_out_C, _IMPOSSIBLE)

    def _ids(self) -> torch.Tensor:
        if self.ids_C is None:
            return torch.arange(self.vocab_size, device=self.values_C.device)
        return self.ids_C

    def _sort(self, most: int | None = None) -> None:
        """`most`: so many alone stay."""
        if self._is_sorted:
            return
        if most is not None and self.values_C.is_cpu:  # it may be looked at: fewer to compare
            least = self.values_C.topk(most).values[-1]
            self._keep((self.values_C >= least).nonzero()[:, 0])
        # floats as whole numbers of the same order; equals are told apart by their ids
        bits_C = self.values_C.view(torch.int32)
        order_C = torch.where(bits_C < 0, bits_C ^ 0x7FFFFFFF, bits_C).long() << 32
        order_C -= self._ids()
        by_order = order_C.sort(descending=True) if most is None else order_C.topk(most)
        self._keep(by_order.indices)
        self._is_sorted = True

    def _keep(self, places_N: torch.Tensor) -> None:
        self.values_C, self.ids_C = self.values_C[places_N], self._ids()[places_N]
        self.is_impossible_C = self.is_impossible_C[places_N]
