"""The queue of a CUDA device: one stream, an event a launch, graphs in one memory pool.

Owns every call of torch.cuda that the runner makes. Must not know steps.
"""

from __future__ import annotations

import torch

from engine_core.model_runner.gpu.queue import Launched, Work


class _Recorded:
    def __init__(self, event: torch.cuda.Event) -> None:
        self._event = event

    def wait(self) -> None:
        """See `Launched.wait`."""
        self._event.synchronize()


class CudaQueue:
    """See `engine_core.model_runner.gpu.queue.DeviceQueue`.

    Args:
        device: with its number.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        # Graphs never run at the same time, so that they can share what they write on their way.
        self._pool = torch.cuda.graph_pool_handle()

    def host_tensor(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """See `DeviceQueue.host_tensor`."""
        return torch.zeros(shape, dtype=dtype, pin_memory=True)

    def launch(self, work: Work) -> Launched:
        """See `DeviceQueue.launch`."""
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        with torch.cuda.device(self.device), torch.cuda.stream(self._stream):
            work()
            event.record(self._stream)
        return _Recorded(event)

    def capture(self, work: Work) -> Work:
        """See `DeviceQueue.capture`."""
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(
            graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"
        ):
            work()
        return graph.replay

    def synchronize(self) -> None:
        """See `DeviceQueue.synchronize`."""
        torch.cuda.synchronize(self.device)
