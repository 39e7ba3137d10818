"""How long a step will take: a line with bends, fitted to the last steps."""

import math
from typing import Any

import numpy as np
import numpy.typing as npt

from engine_core.scheduler.token_budget.base import StepLoad

_BENDS = (64, 128, 256, 512)
"""Numbers of a step's tokens at which the line may bend."""
_NUM_FEATURES = 5 + len(_BENDS)
_WINDOW = 96
"""Steps of either kind that are looked at."""
_EVERY_STEP_UNTIL = 16
_REFIT_INTERVAL = 8
_RIDGE = 1e-4
_HUBER = 2.0
"""Largest error of full weight, in standard deviations of the relative error (by its median)."""
_LEAST_DEVIATION = 0.02
_MOST_TOKENS = 2**31 - 1

Floats = npt.NDArray[np.floating[Any]]


class CostModel:
    """Predicts a step's seconds as

        base + per_chunk_token * (tokens - sequences) + per_sequence * sequences
        + per_context_token * context + per_pair * (attention pairs - context)
        + sum over bends b: per_token_beyond_b * max(0, tokens - b)

    A step of decodes only has no chunk tokens and no pairs beyond its context, so the cost of
    decoding and that of prefilling are determined by different steps. The bends are for a device
    that reads its weights in the time in which it could compute a few hundred tokens: there the
    first chunk tokens are nearly free. All coefficients are >= 0, so the line bends upwards only.

    The fit looks at the last steps of either kind, with and without chunks, so a long time without
    prompts does not erase what prompts cost. It minimises the relative error, with Huber's weights:
    a first step that compiles, or a pause, counts little. Coefficients that the observed steps do
    not determine stay as they were (ridge towards the last fit). O(1) a step: one row written;
    every few steps one fit to the window."""

    def __init__(self) -> None:
        self._loads = np.zeros((2 * _WINDOW, _NUM_FEATURES))
        self._durations = np.ones(2 * _WINDOW)
        """Rows of zeros say nothing: they are given no weight."""
        self._is_seen = np.zeros(2 * _WINDOW)
        self._num_seen = [0, 0]
        """Numbers of steps observed, without and with chunks."""
        self.most_chunk_tokens = 0
        """Most chunk tokens of any step observed; beyond them the line is a guess."""
        self._scale = np.zeros(_NUM_FEATURES)
        self._fitted = np.zeros(_NUM_FEATURES)
        self._coefficients = [0.0] * _NUM_FEATURES

    @property
    def num_observed(self) -> int:
        return self._num_seen[0] + self._num_seen[1]

    @property
    def num_observed_with_chunks(self) -> int:
        """Steps that computed more than one token of some sequence."""
        return self._num_seen[1]

    def predict(self, load: StepLoad) -> float:
        """Seconds; 0 before anything was observed."""
        base, chunk, sequence, context, pair, *bent = self._coefficients
        num_sequences, num_context = load.num_sequences, load.num_context_tokens
        return (
            base
            + chunk * (load.num_tokens - num_sequences)
            + sequence * num_sequences
            + context * num_context
            + pair * max(0, load.num_attention_pairs - num_context)
            + _beyond(bent, load.num_tokens)
        )

    def predict_chunks(
        self, decodes: StepLoad, num_chunk_tokens: Floats, num_computed_tokens: float
    ) -> Floats:
        """Seconds of a step of those decodes and one chunk, for each length of a chunk.

        Args:
            decodes: a step of decodes only.
            num_chunk_tokens: [C].
            num_computed_tokens: of the chunk's prompt, before it.
        """
        _, chunk, sequence, context, pair, *bent = self._coefficients
        seen = num_computed_tokens + num_chunk_tokens
        seconds: Floats = (num_chunk_tokens - 1) * (chunk + pair * seen) + context * seen
        for bend, coefficient in zip(_BENDS, bent, strict=True):
            seconds += coefficient * np.maximum(0.0, num_chunk_tokens + decodes.num_tokens - bend)
        return seconds + (self.predict(decodes) + sequence - _beyond(bent, decodes.num_tokens))

    def num_chunk_tokens(
        self, num_seconds: float, num_computed_tokens: int, num_decode_tokens: int = 0
    ) -> int:
        """The longest chunk that adds at most that many seconds to a step of decodes, of a prompt
        of which that much is computed. Each token looks at all before it: between two bends that
        is the root of a quadratic."""
        _, chunk, sequence, context, pair, *bent = self._coefficients
        seconds = num_seconds - sequence - context * num_computed_tokens
        if seconds <= 0:
            return 0
        linear = chunk + context + pair * num_computed_tokens
        seconds += _beyond(bent, num_decode_tokens)
        longest = 0.0
        for bend, coefficient in zip((0, *_BENDS, _MOST_TOKENS), (0.0, *bent, 0.0), strict=True):
            # up to this bend the ones before it count
            root = linear + math.sqrt(linear * linear + 4 * pair * max(0.0, seconds))
            longest = 2 * seconds / root if root > 0 else _MOST_TOKENS
            if longest + num_decode_tokens <= bend:
                break
            linear += coefficient
            seconds += coefficient * (bend - num_decode_tokens)
        return int(min(max(0.0, longest), _MOST_TOKENS))

    def observe(self, load: StepLoad, duration_s: float) -> None:
        """A step took that long. Times that are no times are passed over."""
        if not (duration_s > 0 and math.isfinite(duration_s)) or load.num_tokens < 1:
            return
        num_chunk_tokens = load.num_tokens - load.num_sequences
        kind = int(num_chunk_tokens > 0)
        self.most_chunk_tokens = max(self.most_chunk_tokens, num_chunk_tokens)
        row = kind * _WINDOW + self._num_seen[kind] % _WINDOW
        self._loads[row] = (
            1.0,
            num_chunk_tokens,
            load.num_sequences,
            load.num_context_tokens,
            max(0, load.num_attention_pairs - load.num_context_tokens),
            *(max(0, load.num_tokens - bend) for bend in _BENDS),
        )
        self._durations[row] = duration_s
        self._is_seen[row] = 1.0
        self._num_seen[kind] += 1
        if self._num_seen[kind] <= _EVERY_STEP_UNTIL or self.num_observed % _REFIT_INTERVAL == 0:
            self._fit()

    def _fit(self) -> None:
        relative = self._loads / self._durations[:, None]
        """Loads over durations, so that the target is 1 in every row."""
        errors = np.abs(relative @ self._fitted - 1.0) * self._is_seen
        num_rows = self._is_seen.sum()
        median = float(np.partition(errors, int(-(num_rows // 2) - 1))[int(-(num_rows // 2) - 1)])
        allowed = _HUBER * max(_LEAST_DEVIATION, 1.4826 * median)
        weights = self._is_seen * np.minimum(1.0, allowed / np.maximum(errors, 1e-12))
        weighted = relative * weights[:, None]
        gram = weighted.T @ relative
        np.maximum(self._scale, gram.diagonal() / num_rows, out=self._scale)
        scale = np.sqrt(self._scale) + 1e-30
        ridge = _RIDGE * num_rows
        scaled = gram / np.outer(scale, scale)
        scaled.flat[:: _NUM_FEATURES + 1] += ridge
        moment = weighted.sum(axis=0) / scale + ridge * self._fitted * scale
        self._fitted = _least_non_negative(scaled, moment) / scale
        self._coefficients = self._fitted.tolist()


def _beyond(bent: list[float], num_tokens: int) -> float:
    """Seconds that tokens beyond the bends add."""
    return sum(
        coefficient * (num_tokens - bend)
        for bend, coefficient in zip(_BENDS, bent, strict=True)
        if num_tokens > bend
    )


def _least_non_negative(gram: Floats, moment: Floats) -> Floats:
    """argmin of x' gram x / 2 - moment' x over x >= 0, gram positive definite: drop what comes out
    negative, solve again, take back what the gradient asks for."""
    is_free = np.ones(len(moment), dtype=bool)
    solution = np.linalg.solve(gram, moment)
    for _ in range(2 * len(moment)):
        if (solution >= 0).all():
            wanted = (moment - gram @ solution > 1e-9) & ~is_free
            if not wanted.any():
                return solution
            is_free |= wanted
        else:
            is_free &= solution > 0
        solution = np.zeros(len(moment))
        solution[is_free] = np.linalg.solve(gram[np.ix_(is_free, is_free)], moment[is_free])
    return solution.clip(min=0.0)
