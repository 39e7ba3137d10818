"""Step times learned from measured steps: a linear model without negative coefficients.

Knows rows of numbers, not where they come from. A step is never predicted shorter than the shortest
one that was seen.
"""

import dataclasses
import itertools

import numpy as np
import numpy.typing as npt

from scripts.simulator.errors import SimulationError
from scripts.simulator.step_work import FEATURES, StepWork

Float64Array = npt.NDArray[np.float64]
_QUANTILES = (0.01, 0.05, 0.25, 0.5, 0.75, 0.95, 0.99)
_MIN_STEPS = 8
_NUM_RESIDUALS = 4096


@dataclasses.dataclass(frozen=True, slots=True)
class FittedModel:
    coefficients: tuple[float, ...]
    """Seconds, in the order of FEATURES."""
    shortest_s: float
    num_steps: int
    mean_relative_error: float
    relative_residuals: tuple[float, ...]
    """Measured / predicted, sorted; at most some thousand of them, evenly taken."""

    @classmethod
    def from_rows(cls, features: Float64Array, durations_s: Float64Array) -> "FittedModel":
        """
        Args:
            features: [N, len(FEATURES)].
            durations_s: [N].

        Raises:
            SimulationError: too few steps, or durations that are not above 0.
        """
        if len(durations_s) < _MIN_STEPS:
            raise SimulationError(
                f"{len(durations_s)} steps were recorded, at least {_MIN_STEPS} are needed; record "
                "a longer run"
            )
        if not (durations_s > 0).all():
            raise SimulationError(
                f"a step of {durations_s.min()} s was recorded, durations must be above 0"
            )
        # relative errors count: else a few long prefills would outweigh all decode steps
        coefficients = nonnegative_least_squares(
            features / durations_s[:, None], np.ones(len(durations_s))
        )
        shortest_s = float(durations_s.min())
        predicted = np.maximum(features @ coefficients, shortest_s)
        residuals = np.sort(durations_s / predicted)
        places = np.linspace(0, len(residuals) - 1, min(len(residuals), _NUM_RESIDUALS))
        # what the noise draws from must leave the total time as it is
        sample = residuals[places.astype(np.int64)]
        sample /= (sample.mean() * predicted.sum() / durations_s.sum()) or 1.0
        return cls(
            coefficients=tuple(float(value) for value in coefficients),
            shortest_s=shortest_s,
            num_steps=len(durations_s),
            mean_relative_error=float(np.abs(residuals - 1).mean()),
            relative_residuals=tuple(float(value) for value in sample),
        )

    def duration_s(self, work: StepWork) -> float:
        seconds = 0.0
        for coefficient, feature in zip(self.coefficients, work.features, strict=True):
            seconds += coefficient * feature
        return max(seconds, self.shortest_s)

    def describe(self) -> dict[str, object]:
        quantiles = np.quantile(np.array(self.relative_residuals), _QUANTILES)
        return {
            "model": "fitted",
            "coefficients_s": dict(zip(FEATURES, self.coefficients, strict=True)),
            "shortest_s": self.shortest_s,
            "num_steps": self.num_steps,
            "mean_relative_error": self.mean_relative_error,
            "measured_to_predicted": {
                f"p{round(quantile * 100)}": float(value)
                for quantile, value in zip(_QUANTILES, quantiles, strict=True)
            },
        }


class NoisyModel:
    """A fitted model whose every step is multiplied by a residual drawn from those of its fit."""

    def __init__(self, model: FittedModel, seed: int) -> None:
        self._model = model
        self._seed = seed
        self._random = np.random.default_rng(seed)
        self._factors: list[float] = []

    def duration_s(self, work: StepWork) -> float:
        if not self._factors:
            drawn = self._random.choice(np.array(self._model.relative_residuals), 1024)
            self._factors = drawn.tolist()
        return self._model.duration_s(work) * self._factors.pop()

    def describe(self) -> dict[str, object]:
        return self._model.describe() | {"noise_seed": self._seed}


def nonnegative_least_squares(matrix: Float64Array, target: Float64Array) -> Float64Array:
    """x >= 0 with the least |matrix x - target|: of all choices of columns whose free solution is
    not negative, the best one. For a handful of columns; exact, no iteration.

    Raises:
        SimulationError: more than 12 columns.
    """
    num_columns = matrix.shape[1]
    if num_columns > 12:
        raise SimulationError(f"{num_columns} features were given, at most 12 can be fitted")
    scale = np.linalg.norm(matrix, axis=0)
    scale[scale == 0] = 1.0
    scaled = matrix / scale
    gram, moment = scaled.T @ scaled, scaled.T @ target
    best, best_loss = np.zeros(num_columns), 0.0
    for size in range(1, num_columns + 1):
        for columns in itertools.combinations(range(num_columns), size):
            chosen = list(columns)
            part = np.linalg.lstsq(gram[np.ix_(chosen, chosen)], moment[chosen], rcond=1e-12)[0]
            if (part < 0).any():
                continue
            # |Ax - b|^2 less |b|^2
            loss = part @ gram[np.ix_(chosen, chosen)] @ part - 2 * part @ moment[chosen]
            if loss < best_loss:
                best_loss = float(loss)
                best = np.zeros(num_columns)
                best[chosen] = part
    solution: Float64Array = best / scale
    return solution
