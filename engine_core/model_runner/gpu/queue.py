"""The order in which a device works: launches, waits, pinned memory, captured graphs. All that
depends on streams, events or graphs of CUDA is behind the protocol `DeviceQueue`."""

import contextlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Protocol

import torch

Work = Callable[[], None]


class DeviceQueue(Protocol):
    """Carries out work in the order in which it was launched."""

    @property
    def device(self) -> torch.device: ...

    def host_tensor(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """Host memory that the device copies from and to by itself. Slow to make."""

    def in_order(self) -> AbstractContextManager[None]:
        """What torch computes within stands behind all that was launched before."""

    def launch(self, work: Work) -> Work:
        """Start `work`, which must wait for nothing. Host memory that it reads or writes belongs to
        the device until what this returns has been called: it waits for `work` and all that was
        launched before it, and raises whatever the work raises late."""

    def capture(self, work: Work) -> Work:
        """Capture `work`, without carrying it out; called inside launched work.

        Returns what replays it, with the same tensors at the same addresses. `work` must have been
        carried out once before (so that nothing is compiled during capture)."""

    def synchronize(self) -> None:
        """Wait for everything on the device, on every stream."""


class CudaQueue:
    """One stream, an event a launch, graphs in one memory pool. `device`: with its number."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        # Graphs never run at the same time, so they share the memory of their intermediate tensors.
        self._pool = torch.cuda.graph_pool_handle()

    def host_tensor(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        return torch.zeros(shape, dtype=dtype, pin_memory=True)

    @contextlib.contextmanager
    def in_order(self) -> Iterator[None]:
        with torch.cuda.device(self.device), torch.cuda.stream(self._stream):
            yield

    def launch(self, work: Work) -> Work:
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        with self.in_order():
            work()
            event.record(self._stream)
        return event.synchronize

    def capture(self, work: Work) -> Work:
        # Not torch.cuda.graph, which gives cached memory back first: what the next prompt takes
        # would be allocated again, and a capture's memory could not be measured beside a step's.
        graph = torch.cuda.CUDAGraph()
        graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
        try:
            work()
        except BaseException:
            with contextlib.suppress(RuntimeError):  # that the capture is not whole
                graph.capture_end()
            raise
        graph.capture_end()
        return graph.replay

    def synchronize(self) -> None:
        torch.cuda.synchronize(self.device)
