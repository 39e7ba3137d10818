"""Devices that are this CPU: one works at once, the other only when something waits for it.

Whatever the host does between a launch and its collection, with buffers or with its own rows, must
not change a token. Graphs are closures; recording one notes where its inputs lie.

`make_queue`, `make_operations` and `make_steps` give a GPU's in their place if `TEST_DEVICE=cuda`
names one.
"""

import collections
import contextlib

import torch

from engine_core.model_runner.gpu import CudaQueue
from kernels.torch.operations import TorchOperations
from kernels.triton.device_steps import TritonDeviceSteps
from kernels.triton.operations import TritonOperations
from tests.gpu.device import DEVICE
from tests.kernels.torch_device_steps import TorchDeviceSteps

TRITON_DEVICE = torch.device(DEVICE, 0 if DEVICE == "cuda" else None)
"""Where Triton's kernels run: interpreted on the CPU, or on a GPU."""


class SynchronousQueue:
    """A `DeviceQueue` on CPU tensors: work is done at once, a graph is the work."""

    device = torch.device("cpu")

    def host_tensor(self, shape, dtype):
        return torch.zeros(shape, dtype=dtype)

    def in_order(self):
        return contextlib.nullcontext()

    def launch(self, work):
        work()
        return lambda: None

    def capture(self, work):
        return work

    def synchronize(self):
        pass


class _Late:
    def __init__(self, queue, work):
        self.queue, self.work, self.error = queue, work, None

    def __call__(self):
        self.queue.run_until(self)
        if self.error is not None:
            raise self.error


class LateQueue(SynchronousQueue):
    """In order, as late as possible. `num_captured` counts graphs."""

    def __init__(self):
        self.waiting = collections.deque()
        self.num_captured = 0
        self.num_replayed = 0
        self.is_recording = False

    def launch(self, work):
        late = _Late(self, work)
        self.waiting.append(late)
        return late

    def run_until(self, last):
        while last in self.waiting:
            late = self.waiting.popleft()
            try:
                late.work()
            except Exception as error:
                late.error = error

    def capture(self, work):
        """On a GPU nothing runs while it is recorded; here nothing is recorded but the fact."""
        self.num_captured += 1

        def replay():
            self.num_replayed += 1
            work()

        return replay

    def synchronize(self):
        if self.waiting:
            self.run_until(self.waiting[-1])


class CountingQueue(CudaQueue):
    """A GPU's. `num_captured` and `num_replayed` count as a `LateQueue`'s do."""

    num_captured = num_replayed = 0

    def capture(self, work):
        self.num_captured += 1
        replay = super().capture(work)

        def counted():
            self.num_replayed += 1
            replay()

        return counted


def make_queue():
    return CountingQueue(TRITON_DEVICE) if DEVICE == "cuda" else LateQueue()


def make_operations():
    return TritonOperations(TRITON_DEVICE) if DEVICE == "cuda" else PaddedOperations()


def make_steps():
    return TritonDeviceSteps() if DEVICE == "cuda" else TorchDeviceSteps()


class PaddedOperations(TorchOperations):
    """The torch backend with the padding of a bucket: tokens with slot -1 and sequences of no
    tokens, which a GPU's kernels pass over. Their results are NaN, which must not be read."""

    def rotary_and_cache(self, qkv_TN, positions_T, slot_mapping_T, kv_cache, params):
        number = int((slot_mapping_T >= 0).sum())
        q_THD = super().rotary_and_cache(
            qkv_TN[:number], positions_T[:number], slot_mapping_T[:number], kv_cache, params
        )
        return _padded(q_THD, len(qkv_TN))

    def paged_attention(self, q_THD, k_cache, v_cache, metadata, params):
        number = len(metadata.slot_mapping_T)
        out_THD = super().paged_attention(q_THD[:number], k_cache, v_cache, metadata, params)
        return _padded(out_THD, len(q_THD))

    def make_attention_planner(self, spec):
        return _PaddedPlanner(super().make_attention_planner(spec))


class _PaddedPlanner:
    def __init__(self, planner):
        self._planner = planner

    def plan(self, *, query_start_loc_R1, seq_lens_R, block_table_RM, slot_mapping_T, **counts):
        num_sequences, num_tokens = int((seq_lens_R > 0).sum()), int(query_start_loc_R1[-1])
        lengths_R = query_start_loc_R1.diff()
        if counts["num_decode_tokens"] < counts["num_decodes"]:  # found on the device
            number = int((lengths_R[:num_sequences] == 1).sum())
            counts |= {"num_decodes": number, "num_decode_tokens": number}
            lengths_R = lengths_R[:num_sequences]
        num_decodes = counts["num_decodes"]
        assert (lengths_R[:num_decodes] <= 1).all()
        assert (lengths_R[num_decodes:] > 1).all()
        assert (slot_mapping_T[num_tokens:] == -1).all()
        return self._planner.plan(
            query_start_loc_R1=query_start_loc_R1[: num_sequences + 1].clone(),
            seq_lens_R=seq_lens_R[:num_sequences].clone(),
            block_table_RM=block_table_RM[:num_sequences].clone(),
            slot_mapping_T=slot_mapping_T[:num_tokens].clone(),
            **counts,
        )


def _padded(real_THD, num_tokens):
    padded_THD = torch.full((num_tokens, *real_THD.shape[1:]), torch.nan)
    padded_THD[: len(real_THD)] = real_THD
    return padded_THD
