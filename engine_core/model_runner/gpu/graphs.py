"""CUDA graphs of decode steps: recorded when first used, or all at start; then replayed.

Owns which graphs there are. Must not know what a step does, nor how a device records it.
"""

from __future__ import annotations

from collections.abc import Callable

from engine_core.model_runner.gpu.queue import DeviceQueue, Work
from kernels.interface.device_steps import SamplingMode


class StepGraphs:
    """
    Args:
        queue: records.
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
            compute()  # once as it is, so that nothing is compiled or set up while recording
            graph = self._graphs[bucket, mode] = self._queue.capture(compute)
        return graph
