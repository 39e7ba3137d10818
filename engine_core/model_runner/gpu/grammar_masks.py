"""Masks of sequences that follow a grammar, on their way to the device: made while it computes."""

import numpy as np
import torch

from engine_core.model_runner.gpu.queue import DeviceQueue
from engine_core.model_runner.gpu.step import GPUStep
from engine_core.model_runner.logit_masks import logit_masks
from engine_core.scheduler.plan import TokenMasks
from kernels.interface.device_steps import LogitMasks
from kernels.interface.sampling_rows import num_mask_words

_ALIGNMENT = 16
"""Words: a mask's row begins as those of the sampling state do, so that no kernel is compiled for
another layout."""


class GrammarMasks:
    """Made at the first step that has masks: pinned memory is slow to make.

    Args:
        num_logits: most rows of logits of a step.
        num_slots: host buffers: as many as steps can be in flight.
    """

    def __init__(
        self, queue: DeviceQueue, *, num_logits: int, vocab_size: int, num_slots: int
    ) -> None:
        self._num_words = num_mask_words(vocab_size)
        stride = -(-self._num_words // _ALIGNMENT) * _ALIGNMENT
        self._device = LogitMasks(
            bits_RW=torch.zeros((num_logits, stride), dtype=torch.int32, device=queue.device),
            is_masked_R=torch.zeros(num_logits, dtype=torch.bool, device=queue.device),
        )
        self._hosts = [
            LogitMasks(
                bits_RW=queue.host_tensor((num_logits, stride), torch.int32),
                is_masked_R=queue.host_tensor((num_logits,), torch.bool),
            )
            for _ in range(num_slots)
        ]

    def send(self, slot: int, step: GPUStep, masks: TokenMasks) -> LogitMasks:
        """Waits on the host until they are there, and copies them to the device."""
        is_first_N = np.ones(len(step.sampled_N), np.bool_)
        if step.drafts_R is not None:
            is_first_N = step.drafts_R[step.needs_sampling_R] < 0
        found = logit_masks(masks, step.sampled_N[is_first_N], np.flatnonzero(is_first_N))
        number, host = len(step.sampled_N), self._hosts[slot]
        host.is_masked_R[:number] = False
        host.is_masked_R.numpy()[found.index_M] = True
        host.bits_RW.numpy()[found.index_M, : self._num_words] = found.bits_MW
        self._device.is_masked_R[:number].copy_(host.is_masked_R[:number], non_blocking=True)
        self._device.bits_RW[:number].copy_(host.bits_RW[:number], non_blocking=True)
        return LogitMasks(
            bits_RW=self._device.bits_RW[:number, : self._num_words],
            is_masked_R=self._device.is_masked_R[:number],
        )
