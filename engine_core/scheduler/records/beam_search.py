"""One beam-search request: which beams go on, which have finished, and when it is over. It decides
as transformers' `generate(num_beams=..., do_sample=False)` does, in the same float32 sums."""

import dataclasses
import math
from collections.abc import Iterable, Sequence

import msgspec
import numpy as np
import numpy.typing as npt

from protocol.outputs import FinishReason, Logprobs
from protocol.requests import EngineRequest
from protocol.sampling import BeamSearchParams, SamplingParams

_MAX_LOG_DIVISOR = 69.0
"""A score stays a finite float32 if length ** length_penalty stays within exp(-69) and exp(69)."""


@dataclasses.dataclass(frozen=True, slots=True)
class BeamCandidates:
    """For each running beam, in the order of the last step's survivors, its likeliest next tokens:
    columns of shape [num_beams, num_candidates]. In any order within a row."""

    token_ids: npt.NDArray[np.int32]
    logprobs: npt.NDArray[np.float32]

    @classmethod
    def from_logprobs(cls, beams: Sequence[Logprobs]) -> "BeamCandidates":
        """What the sampler reports of each beam, one position a beam: [sampled, likeliest ...]."""
        width = beams[0].width
        token_ids = np.frombuffer(b"".join(beam.token_ids for beam in beams), "<i4")
        logprobs = np.frombuffer(b"".join(beam.logprobs for beam in beams), "<f4")
        # the sampled token stands again among the likeliest
        return cls(token_ids.reshape(-1, width)[:, 1:], logprobs.reshape(-1, width)[:, 1:])


@dataclasses.dataclass(frozen=True, slots=True)
class BeamSurvivor:
    """A beam of the next step: the running beam `parent` of this one, and a token behind it."""

    parent: int
    token_id: int


@dataclasses.dataclass(frozen=True, slots=True)
class BeamHypothesis:
    """A finished beam."""

    token_ids: list[int]
    """Generated tokens; an end-of-sequence or stop token is the last of them."""
    cumulative_logprob: float
    score: float
    """cumulative_logprob / len(token_ids) ** length_penalty."""
    finish_reason: FinishReason
    """STOP or LENGTH."""
    stop_reason: int | None
    """The stop token that ended it; None for end-of-sequence and length."""


@dataclasses.dataclass(frozen=True, slots=True)
class _Token:
    """A generated token and all before it: beams share what they have in common."""

    token_id: int
    before: "_Token | None"

    def token_ids(self) -> list[int]:
        ids, token = [], self
        while True:
            ids.append(token.token_id)
            if token.before is None:
                return ids[::-1]
            token = token.before


@dataclasses.dataclass(frozen=True, slots=True)
class _Beam:
    last: _Token | None
    cumulative_logprob: np.float32


class BeamSearch:
    """Log-probabilities in, decisions out. A step, with width 3:

        running beams            candidates, best first          next running beams
        0: the cat      ->       the cat sat   (parent 0)   ->   0: the cat sat   (was 0)
        1: a dog                 a dog <eos>   (finishes)        1: a dog ran     (was 1)
        2: a cat                 the cat ran   (parent 0)        2: the cat ran   (was 0: replaced)
                                 a dog ran     (parent 1)

    Args:
        params: width, length penalty and early stopping.
        max_tokens: most generated tokens.
        eos_token_ids: end a beam; empty under ignore_eos.
        stop_token_ids: likewise, and are named as the stop reason.
        min_tokens: neither ends a beam before it has this many tokens.
    """

    def __init__(
        self,
        params: BeamSearchParams,
        *,
        max_tokens: int,
        eos_token_ids: Iterable[int] = (),
        stop_token_ids: Iterable[int] = (),
        min_tokens: int = 0,
    ) -> None:
        if max_tokens < 1:
            raise ValueError(f"max_tokens is {max_tokens}, it must be at least 1; raise it")
        self._width = params.beam_width
        self._length_penalty = params.length_penalty
        is_never = params.early_stopping == "never"
        # with one beam generate() is greedy search, which ends where the likeliest token is an end
        self._stops_when_full = params.beam_width == 1 or (not is_never and params.early_stopping)
        self._counts_future = is_never and params.length_penalty > 0.0
        self._max_tokens = max_tokens
        self._min_tokens = min_tokens
        self._eos_token_ids = frozenset(eos_token_ids)
        self._stop_token_ids = frozenset(stop_token_ids)
        self._length = 0
        """Generated tokens of each running beam: they are all equally long."""
        self._beams = [_Beam(None, np.float32(0.0))]
        self.results: list[BeamHypothesis] = []
        """The best `beam_width` finished beams so far, best first. When the search is over there
        are fewer only where the vocabulary has fewer continuations."""
        self.is_over = False

    @classmethod
    def of(cls, message: EngineRequest, eos_token_ids: Iterable[int]) -> "BeamSearch | None":
        """None if the request asks for none."""
        params, beam_search = message.sampling_params, message.beam_search
        if beam_search is None:
            return None
        return cls(
            beam_search,
            max_tokens=params.max_tokens,
            eos_token_ids=() if params.ignore_eos else eos_token_ids,
            stop_token_ids=params.stop_token_ids,
            min_tokens=params.min_tokens,
        )

    def sampling_params(self, params: SamplingParams) -> SamplingParams:
        """A beam's parameters: the request's, with the likeliest tokens reported."""
        return msgspec.structs.replace(
            params, temperature=0.0, logprobs=self.num_candidates, min_tokens=0
        )

    def limit_tokens(self, max_tokens: int) -> None:
        """A lower limit, before the first step."""
        self._max_tokens = min(self._max_tokens, max_tokens)

    @property
    def num_candidates(self) -> int:
        """How many of each beam's likeliest tokens `advance` needs, if the vocabulary has as many.

        Even if one beam supplies all of the next ones, that are `beam_width` tokens that do not end
        it, among which every ending token may stand."""
        return self._width + len(self._eos_token_ids | self._stop_token_ids)

    def advance(self, candidates: BeamCandidates) -> list[BeamSurvivor]:
        """One step, from the log-probabilities of every running beam. Returns the running beams
        from now on, none if the search is over; as many as possible stand at their parent's index.
        Raises ValueError: not one row of candidates for each running beam."""
        if len(candidates.token_ids) != len(self._beams) or self.is_over:
            raise ValueError(
                f"candidates of {len(candidates.token_ids)} beams, {len(self._beams)} are running; "
                "give one row for each, in the order of the last step's survivors"
            )
        ends = self._eos_token_ids | self._stop_token_ids
        may_end = self._length >= self._min_tokens
        self._length += 1
        is_last = self._length >= self._max_tokens
        going_on: list[tuple[int, _Beam]] = []
        finished: list[BeamHypothesis] = []
        place = 0  # among the candidates that may be chosen, best first
        for parent, token_id, total in self._best_first(candidates):
            is_end = token_id in ends
            if is_end and not may_end:
                continue
            if is_end or is_last:
                # an end that is not among the best `width` is too unlikely to be kept
                if place < self._width:
                    token = _Token(token_id, self._beams[parent].last)
                    finished.append(self._hypothesis(token, total, is_end=is_end))
            elif len(going_on) < self._width:
                going_on.append((parent, _Beam(_Token(token_id, self._beams[parent].last), total)))
            place += 1
            if place >= self._width and (is_last or len(going_on) == self._width):
                break
        ranked = sorted(self.results + finished, key=lambda found: -found.score)
        self.results = ranked[: self._width]
        self.is_over = not going_on or self._may_stop(going_on[0][1].cumulative_logprob)
        placed = [] if self.is_over else _in_parents_places(going_on)
        self._beams = [beam for _, beam in placed]
        return [
            BeamSurvivor(parent, beam.last.token_id)
            for parent, beam in placed
            if beam.last is not None
        ]

    def _best_first(self, candidates: BeamCandidates) -> Iterable[tuple[int, int, np.float32]]:
        """(parent, token, cumulative log-probability) of all candidates."""
        sums = np.array([beam.cumulative_logprob for beam in self._beams], dtype=np.float32)
        totals = sums[:, None] + candidates.logprobs.astype(np.float32, copy=False)
        num_columns = totals.shape[1]
        flat_totals, flat_tokens = totals.ravel(), candidates.token_ids.ravel()
        for position in np.argsort(-flat_totals, kind="stable").tolist():
            yield position // num_columns, int(flat_tokens[position]), flat_totals[position]

    def _hypothesis(self, token: _Token, total: np.float32, *, is_end: bool) -> BeamHypothesis:
        is_eos = token.token_id in self._eos_token_ids
        return BeamHypothesis(
            token_ids=token.token_ids(),
            cumulative_logprob=float(total),
            score=self._score(total, self._length),
            finish_reason=FinishReason.STOP if is_end else FinishReason.LENGTH,
            stop_reason=token.token_id if is_end and not is_eos else None,
        )

    def _score(self, cumulative_logprob: np.float32, length: int) -> float:
        log_divisor = self._length_penalty * math.log(length)
        if abs(log_divisor) <= _MAX_LOG_DIVISOR:
            divisor = float(length) ** self._length_penalty
        else:
            divisor = math.exp(math.copysign(_MAX_LOG_DIVISOR, log_divisor))
        return float(cumulative_logprob / np.float32(divisor))

    def _may_stop(self, best_running: np.float32) -> bool:
        """Whether the finished beams are enough, and none of the running ones may still be better
        than the worst of them."""
        if len(self.results) < self._width:
            return False
        if self._stops_when_full:
            return True
        length = self._max_tokens if self._counts_future else self._length
        return self._score(best_running, length) <= self.results[-1].score


def _in_parents_places(going_on: list[tuple[int, _Beam]]) -> list[tuple[int, _Beam]]:
    """The best child of each beam takes its parent's place, the others those that are left."""
    places: list[tuple[int, _Beam] | None] = [None] * len(going_on)
    others = []
    for parent, beam in going_on:
        if parent < len(places) and places[parent] is None:
            places[parent] = (parent, beam)
        else:
            others.append((parent, beam))
    rest = iter(others)
    return [place if place is not None else next(rest) for place in places]
