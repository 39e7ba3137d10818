"""The model runner of a GPU: rows, sampling and graphs on the device, two steps in flight.

plan --> rows.py (what changed) --> step.py (order, bucket, mode) --> words.py (one buffer)
     --> queue.py: copy; graphs.py: replay, or the step launched piece by piece --> results.py
"""

from engine_core.model_runner.gpu.queue import DeviceQueue, SynchronousQueue
from engine_core.model_runner.gpu.runner import GPUModelRunner

__all__ = ["DeviceQueue", "GPUModelRunner", "SynchronousQueue"]
