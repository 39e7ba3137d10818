"""The model runner of a GPU: rows, sampling and graphs on the device, two steps in flight.

plan --> input_batch (what changed) --> step (order, bucket, mode) --> packing (one buffer)
     --> queue: copy; replay of a graph, or a launch piece by piece --> results
"""

from engine_core.model_runner.gpu.drafting_runner import DraftingGPURunner
from engine_core.model_runner.gpu.queue import CudaQueue, DeviceQueue
from engine_core.model_runner.gpu.runner import GPUModelRunner

__all__ = ["CudaQueue", "DeviceQueue", "DraftingGPURunner", "GPUModelRunner"]
