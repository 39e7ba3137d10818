"""How long a step takes: by arithmetic (Roofline), or fitted to recorded steps (FittedModel)."""

import dataclasses
import itertools
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from engine_core.scheduler.plan import SchedulerOutput
from frontend.simulator import SimulationError

Float64Array = npt.NDArray[np.float64]
FEATURES = ("step", "tokens", "sequences", "context tokens", "attention pairs", "copied blocks")
_QUANTILES = (0.01, 0.05, 0.25, 0.5, 0.75, 0.95, 0.99)
_MIN_STEPS = 8
_NUM_FITS = 20
_NUM_NEIGHBOURS = 64
"""Recorded steps among which the deviation of a simulated one is drawn."""


class StepWork(NamedTuple):
    """What a step computes, in the numbers that its time depends on."""

    num_tokens: int
    num_sequences: int
    num_context_tokens: int
    """Keys and values read: of each sequence, its tokens up to the last one of this step."""
    num_attention_pairs: int
    """Query-key pairs, each query with itself and all tokens before it."""
    num_copied_blocks: int
    """Blocks copied between device and host memory."""
    num_sampled: int
    """Sequences that get a new token: all their tokens are computed after this step."""

    @property
    def features(self) -> tuple[float, ...]:
        """The numbers in the order of FEATURES."""
        return (1.0, *self[:5])


def work_of(plan: SchedulerOutput, num_sampled: int) -> StepWork:
    batch, num_tokens = plan.batch, plan.total_num_scheduled_tokens
    num_sequences = len(batch.rows)
    context = int(np.add.reduce(batch.num_computed_tokens, dtype=np.int64)) + num_tokens
    pairs = context
    if num_tokens != num_sequences:  # not all of them compute one token
        pairs = attention_pairs(batch.num_computed_tokens, batch.num_scheduled_tokens)
    copies = plan.copies
    return StepWork(
        num_tokens=num_tokens,
        num_sequences=num_sequences,
        num_context_tokens=context,
        num_attention_pairs=pairs,
        num_copied_blocks=len(copies.swap_in) + len(copies.swap_out),
        num_sampled=num_sampled,
    )


def attention_pairs(num_computed: npt.ArrayLike, num_scheduled: npt.ArrayLike) -> int:
    """s * c + s (s + 1) / 2, summed over the sequences."""
    computed, scheduled = np.asarray(num_computed, np.int64), np.asarray(num_scheduled, np.int64)
    return int((scheduled * computed + scheduled * (scheduled + 1) // 2).sum())


class StepTimeModel(Protocol):
    """An engine calls it once a step, in order, so that it may draw random numbers."""

    def duration_s(self, work: StepWork) -> float: ...

    def describe(self) -> dict[str, object]:
        """Plain values, for the document."""


# ---------------------------------------------------------------------- roofline


@dataclasses.dataclass(frozen=True, slots=True)
class Hardware:
    name: str
    flops: float
    """Operations of a dense product a second."""
    memory_bandwidth: float
    """Bytes a second."""
    memory_bytes: float
    host_bandwidth: float
    """Bytes a second between device and host memory."""
    overhead_s: float = 0.0
    """Added to each step."""
    link_bandwidth: float = 0.0
    """Bytes a second from one device to another, each way; 0: there are no others."""
    link_latency_s: float = 10e-6
    """Seconds of an exchange of few bytes between devices: an assumption."""


@dataclasses.dataclass(frozen=True, slots=True)
class ModelShape:
    name: str
    num_layers: int
    hidden: int
    num_query_heads: int
    num_kv_heads: int
    head_dim: int
    feed_forward: int
    vocabulary: int
    bytes_per_weight: float = 2
    bytes_per_cache_element: float = 2

    @property
    def num_layer_weights(self) -> int:
        """Weights of all layers, without norms."""
        attention = 2 * self.hidden * self.head_dim * (self.num_query_heads + self.num_kv_heads)
        return self.num_layers * (attention + 3 * self.hidden * self.feed_forward)

    @property
    def num_output_weights(self) -> int:
        return self.hidden * self.vocabulary

    @property
    def cache_bytes_per_token(self) -> float:
        elements = 2 * self.num_layers * self.num_kv_heads * self.head_dim
        return elements * self.bytes_per_cache_element


HARDWARE = {
    hardware.name: hardware
    for hardware in (
        # NVLink 4: 900 GB/s a GPU, both ways together (NVIDIA's data sheet of the H200)
        Hardware("h200", 790e12, 4.3e12, 139 * 2**30, 50e9, link_bandwidth=450e9),
        Hardware("cpu-2", 123e9, 17e9, 4 * 2**30, 7.5e9),
    )
}
SHAPES = {
    shape.name: shape
    for shape in (
        ModelShape("llama-3.1-8b", 32, 4096, 32, 8, 128, 14336, 128256),
        ModelShape("llama-3.1-70b", 80, 8192, 64, 8, 128, 28672, 128256),
        ModelShape("qwen3-8b", 36, 4096, 32, 8, 128, 12288, 151936),
        ModelShape("qwen3-0.6b", 28, 1024, 16, 8, 128, 3072, 151936),
        ModelShape("smollm2-135m", 30, 576, 9, 3, 64, 1536, 49152, 4, 4),
    )
}


class Roofline:
    """What the hardware can do at best, from the model's shapes:

        time = overhead + max(weights read, dense products) + max(cache read, attention)
                        + blocks copied to or from host memory

    The output layer counts for sampled tokens only; embeddings are looked up, not read. A dense
    product costs two operations a weight and a token, attention four an element of a query head and
    a pair.

    With T ranks a layer each has a T-th of all that, and sums the hidden states of a step behind
    attention, feed-forward and embedding: 2 (T - 1) / T of their bytes cross each link. Between P
    stages the residual stream and its last summand do. A step passes one stage after the other: its
    time is their sum.

    Args:
        block_size: of the cache, in tokens.

    Raises:
        SimulationError: the hardware has no links.
    """

    def __init__(
        self,
        hardware: Hardware,
        shape: ModelShape,
        block_size: int,
        *,
        tensor_parallel_size: int = 1,
        pipeline_parallel_size: int = 1,
    ) -> None:
        self._num_ranks, self._num_stages = tensor_parallel_size, pipeline_parallel_size
        if self._num_ranks * self._num_stages > 1 and not hardware.link_bandwidth:
            raise SimulationError(
                f"{hardware.name} is one device; omit --tensor-parallel-size and "
                "--pipeline-parallel-size, or choose --hardware h200"
            )
        # beyond as many ranks as there are heads of keys and values, they have copies
        num_copies = max(1.0, self._num_ranks / shape.num_kv_heads)
        hardware = dataclasses.replace(
            hardware,
            flops=hardware.flops * self._num_ranks,
            memory_bandwidth=hardware.memory_bandwidth * self._num_ranks,
            host_bandwidth=hardware.host_bandwidth * self._num_ranks,
            memory_bytes=hardware.memory_bytes * self._num_ranks * self._num_stages,
        )
        self._hardware = hardware
        self._shape = shape
        self._block_bytes = shape.cache_bytes_per_token * block_size * num_copies
        weights = shape.num_layer_weights + shape.num_output_weights
        pair_operations = 4 * shape.num_layers * shape.num_query_heads * shape.head_dim
        self._read_s = weights * shape.bytes_per_weight / hardware.memory_bandwidth
        self._token_s = 2 * shape.num_layer_weights / hardware.flops
        self._sample_s = 2 * shape.num_output_weights / hardware.flops
        self._context_s = self._block_bytes / block_size / hardware.memory_bandwidth
        num_sums = 2 * shape.num_layers + 1 if self._num_ranks > 1 else 0
        num_passes = self._num_stages - 1
        self._links_s = (num_sums + num_passes) * hardware.link_latency_s
        self._linked_token_s = 0.0
        if num_sums or num_passes:
            share = 2 * (self._num_ranks - 1) / self._num_ranks
            num_states = num_sums * share + 2 * num_passes
            state_s = shape.hidden * shape.bytes_per_weight / hardware.link_bandwidth
            self._linked_token_s = num_states * state_s
        self._pair_s = pair_operations / hardware.flops
        self._copy_s = self._block_bytes / hardware.host_bandwidth

    def duration_s(self, work: StepWork) -> float:
        copies_s = self._hardware.overhead_s + work.num_copied_blocks * self._copy_s
        if not work.num_tokens:
            return copies_s
        dense_s = work.num_tokens * self._token_s + work.num_sampled * self._sample_s
        cache_s = work.num_context_tokens * self._context_s
        attention_s = work.num_attention_pairs * self._pair_s
        links_s = self._links_s + work.num_tokens * self._linked_token_s
        return copies_s + max(self._read_s, dense_s) + max(cache_s, attention_s) + links_s

    def num_blocks(self, memory_share: float = 0.9) -> int:
        """Blocks that fit beside weights and embeddings into this share of the memory."""
        shape = self._shape
        num_weights = shape.num_layer_weights + 2 * shape.num_output_weights
        free = self._hardware.memory_bytes * memory_share - num_weights * shape.bytes_per_weight
        if free < self._block_bytes:
            raise SimulationError(
                f"{shape.name} leaves {free / 1e9:.1f} GB of {self._hardware.name}'s memory, a "
                f"block needs {self._block_bytes / 1e9:.4f}; choose a smaller model"
            )
        return int(free // self._block_bytes)

    def describe(self) -> dict[str, object]:
        return {
            "model": "roofline",
            "hardware": dataclasses.asdict(self._hardware),
            "shape": dataclasses.asdict(self._shape),
            "tensor_parallel_size": self._num_ranks,
            "pipeline_parallel_size": self._num_stages,
        }


# ---------------------------------------------------------------------- fitted


@dataclasses.dataclass(frozen=True, slots=True)
class FittedModel:
    """A linear model without negative coefficients. No step is predicted shorter than the shortest
    that was seen."""

    coefficients: tuple[float, ...]
    """Seconds, in the order of FEATURES."""
    shortest_s: float
    num_steps: int
    mean_relative_error: float
    predicted_s: Float64Array
    """Predictions of the recorded steps, sorted."""
    relative_residuals: Float64Array
    """Measured / predicted, in the order of `predicted_s`."""

    @classmethod
    def from_rows(cls, features: Float64Array, durations_s: Float64Array) -> "FittedModel":
        """A fit to features [N, len(FEATURES)] and durations [N]."""
        if len(durations_s) < _MIN_STEPS:
            raise SimulationError(
                f"{len(durations_s)} steps were recorded, at least {_MIN_STEPS} are needed; record "
                "a longer run"
            )
        if not (durations_s > 0).all():
            raise SimulationError(
                f"a step of {durations_s.min()} s was recorded, durations must be above 0"
            )
        # The variance of a duration is taken to grow with its mean (Poisson quasi-likelihood,
        # Wedderburn 1974), so that the predictions add up to the recorded time: a queue waits for
        # mean times. Errors relative to what was measured would fit the shortest times instead.
        shortest_s = float(durations_s.min())
        predicted = np.full(len(durations_s), durations_s.mean())
        for _ in range(_NUM_FITS):
            weights = 1 / np.sqrt(predicted)
            coefficients = nonnegative_least_squares(
                features * weights[:, None], durations_s * weights
            )
            predicted = np.maximum(features @ coefficients, shortest_s)
        order = np.argsort(predicted, kind="stable")
        residuals = (durations_s / predicted)[order]
        return cls(
            coefficients=tuple(coefficients.tolist()),
            shortest_s=shortest_s,
            num_steps=len(durations_s),
            mean_relative_error=float(np.abs(residuals - 1).mean()),
            predicted_s=predicted[order],
            relative_residuals=residuals,
        )

    def duration_s(self, work: StepWork) -> float:
        seconds = 0.0
        for coefficient, feature in zip(self.coefficients, work.features, strict=True):
            seconds += coefficient * feature
        return max(seconds, self.shortest_s)

    def describe(self) -> dict[str, object]:
        quantiles = np.quantile(self.relative_residuals, _QUANTILES)
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
    """A fitted model whose every step is multiplied by the residual of a recorded step, drawn from
    those whose predictions are nearest, and divided by their mean: long steps deviate otherwise
    than short ones, and the mean is the fit's."""

    def __init__(self, model: FittedModel, seed: int) -> None:
        self._model = model
        self._seed = seed
        self._random = np.random.default_rng(seed)

    def duration_s(self, work: StepWork) -> float:
        model, predicted_s = self._model, self._model.duration_s(work)
        num_neighbours = min(_NUM_NEIGHBOURS, model.num_steps)
        nearest = int(np.searchsorted(model.predicted_s, predicted_s))
        start = min(max(0, nearest - num_neighbours // 2), model.num_steps - num_neighbours)
        nearby = model.relative_residuals[start : start + num_neighbours]
        drawn = nearby[self._random.integers(num_neighbours)]
        return predicted_s * float(drawn / nearby.mean())

    def describe(self) -> dict[str, object]:
        return self._model.describe() | {"noise_seed": self._seed}


def nonnegative_least_squares(matrix: Float64Array, target: Float64Array) -> Float64Array:
    """x >= 0 with the least |matrix x - target|: the best of all choices of columns whose free
    solution is not negative. Exact, without iteration; the number of choices is 2 ** columns."""
    num_columns = matrix.shape[1]
    scale = np.linalg.norm(matrix, axis=0)
    scale[scale == 0] = 1.0
    scaled = matrix / scale
    gram, moment = scaled.T @ scaled, scaled.T @ target
    best, best_loss = np.zeros(num_columns), 0.0
    for size in range(1, num_columns + 1):
        for columns in itertools.combinations(range(num_columns), size):
            chosen = list(columns)
            gram_chosen = gram[np.ix_(chosen, chosen)]
            part = np.linalg.lstsq(gram_chosen, moment[chosen], rcond=1e-12)[0]
            if (part < 0).any():
                continue
            loss = part @ gram_chosen @ part - 2 * part @ moment[chosen]  # |Ax - b|^2 - |b|^2
            if loss < best_loss:
                best_loss = float(loss)
                best = np.zeros(num_columns)
                best[chosen] = part
    solution: Float64Array = best / scale
    return solution
