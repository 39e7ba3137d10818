"""CUDA graphs of decode steps: captured when first used, or all at start; then replayed.

sequences   1  2  4  8  16  24  32  48  64  96  128  192  256  384  512 ... max_num_seqs
(a step takes the smallest bucket that holds it; the rest of the bucket is padding)
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence

from engine_core.model_runner.gpu.queue import DeviceQueue, Work
from kernels.interface.device_steps import SamplingMode


def decode_buckets(max_num_seqs: int) -> tuple[int, ...]:
    """Rising sizes from 1 to exactly `max_num_seqs`: powers of two, from 16 on also their halves
    between, so that padding is less than half of a bucket and from 16 on at most a third.

    Raises:
        ValueError: fewer than one sequence.
    """
    if max_num_seqs < 1:
        raise ValueError(f"max_num_seqs is {max_num_seqs}, it must be at least 1; raise it")
    sizes, power = [], 1
    while power < max_num_seqs:
        sizes.append(power)
        if power >= 16:
            sizes.append(power + power // 2)
        power *= 2
    return (*[size for size in sizes if size < max_num_seqs], max_num_seqs)


def choose_bucket(buckets: Sequence[int], num_sequences: int) -> int | None:
    """The smallest that holds `num_sequences`; None if none does, or for 0."""
    if num_sequences < 1:
        return None
    index = bisect_left(buckets, num_sequences)
    return buckets[index] if index < len(buckets) else None


class StepGraphs:
    """
    Args:
        queue: captures.
        compute: (bucket, mode) launches everything that a decode step does between its copy to the
            device and its copy back, on tensors that are the same each time.
        send_empty: puts a step of no sequences where `compute` reads it.
    """

    def __init__(
        self,
        queue: DeviceQueue,
        *,
        compute: Callable[[int, SamplingMode], None],
        send_empty: Work,
    ) -> None:
        self._queue = queue
        self._compute = compute
        self._send_empty = send_empty
        self._graphs: dict[tuple[int, SamplingMode], Work] = {}

    def __len__(self) -> int:
        return len(self._graphs)

    def get(self, bucket: int, mode: SamplingMode) -> Work:
        """What replays a decode step of the bucket; called inside launched work, before the step's
        own words are sent."""
        graph = self._graphs.get((bucket, mode))
        if graph is None:

            def compute() -> None:
                self._compute(bucket, mode)

            self._send_empty()
            compute()  # once as it is, so that nothing is compiled or set up during capture
            graph = self._graphs[bucket, mode] = self._queue.capture(compute)
        return graph
