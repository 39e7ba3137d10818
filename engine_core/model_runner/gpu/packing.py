"""What a step sends to the device: one buffer of int32 words in one copy. Updates that do not fit
are sent in extra packets first. The layout of each part is `pack_step`'s.

    words of the buffer   | columns | updates of rows | pad | updates of sampling state |
                          0                           state_at                          num_words
"""

import dataclasses
from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt
import torch

from engine_core.model_runner.gpu.input_batch import RowChanges
from engine_core.model_runner.gpu.queue import DeviceQueue
from engine_core.model_runner.gpu.step import GPUStep
from kernels.interface.device_steps import DeviceStepOperations
from kernels.interface.step_inputs import DeviceRows, PackedLayout, RowUpdate, pack_step

Int32Array = npt.NDArray[np.int32]

_UPDATE_WORDS = 1 << 18
"""Words of updates in one copy: few steps start prompts of more tokens."""
_UPDATES_ONLY = PackedLayout(capacity=0)
_EMPTY = np.zeros(0, np.int32)
_ALIGNMENT = 4
"""Words; Triton compiles another kernel for a pointer that is not a multiple of 16 bytes."""


@dataclasses.dataclass(frozen=True, slots=True)
class PackedStep:
    """A step's words on the host.

    Attributes:
        host: the buffer that they lie in, the device's until the step is done.
        num_words: to copy.
        state_at: where updates of sampling state start; None: there are none.
        before: packets of updates of rows, then of sampling state, that did not fit.
    """

    host: torch.Tensor
    num_words: int
    state_at: int | None
    before: tuple[list[Int32Array], list[Int32Array]]


class PackedStepBuffer:
    """The device's buffer, always the same, and the host's, one for each step in flight.

    Args:
        layout: for the most sequences that a step can have.
        num_slots: host buffers: as many as steps can be in flight.
    """

    def __init__(self, queue: DeviceQueue, layout: PackedLayout, *, num_slots: int) -> None:
        self.layout = layout
        size = layout.num_words() + _UPDATES_ONLY.num_words() + _ALIGNMENT + _UPDATE_WORDS
        self.device_words = torch.zeros(size, dtype=torch.int32, device=queue.device)
        self._hosts = [queue.host_tensor((size,), torch.int32) for _ in range(num_slots)]
        self._empty = queue.host_tensor((layout.num_words(),), torch.int32)
        _pack(self._empty.numpy(), layout, None, ())

    def pack(self, slot: int, step: GPUStep | None, changes: RowChanges) -> PackedStep:
        """The step's columns and all changes, into the slot's buffer, which the device no longer
        reads."""
        host = self._hosts[slot]
        words = host.numpy()
        rows, sampling = changes.rows, changes.sampling
        before: tuple[list[Int32Array], list[Int32Array]] = ([], [])
        state_at = -(-self.layout.num_words(rows) // _ALIGNMENT) * _ALIGNMENT
        if state_at + _UPDATES_ONLY.num_words(sampling) > len(words):
            before = (_packets(rows, len(words)), _packets(sampling, len(words)))
            rows, sampling = [], []
        num_words = _pack(words, self.layout, step, rows)
        if not sampling:
            return PackedStep(host, num_words, None, before)
        num_words = state_at + _pack(words[state_at:], _UPDATES_ONLY, None, sampling)
        return PackedStep(host, num_words, state_at, before)

    def send(
        self,
        packed: PackedStep,
        steps: DeviceStepOperations,
        *,
        rows: DeviceRows,
        sampling: DeviceRows,
    ) -> None:
        """Copy to the device and carry out all updates but those of rows that are in the step's own
        words; those are left to the caller."""
        for packets, table in zip(packed.before, (rows, sampling), strict=True):
            for packet in packets:
                # from pageable memory: the bytes are taken before the call returns
                self.device_words[: len(packet)].copy_(torch.from_numpy(packet), non_blocking=True)
                steps.apply_row_updates(self.device_words[: len(packet)], table)
        words = self.device_words[: packed.num_words]
        words.copy_(packed.host[: packed.num_words], non_blocking=True)
        if packed.state_at is not None:
            steps.apply_row_updates(words[packed.state_at :], sampling)

    def send_empty(self) -> None:
        """A step of no sequences: whatever is launched on it changes nothing."""
        self.device_words[: len(self._empty)].copy_(self._empty, non_blocking=True)


def _pack(
    words: Int32Array, layout: PackedLayout, step: GPUStep | None, updates: Sequence[RowUpdate]
) -> int:
    return pack_step(
        words,
        layout,
        rows=_EMPTY if step is None else step.rows_R,
        num_computed=_EMPTY if step is None else step.num_computed_R,
        num_scheduled=_EMPTY if step is None else step.num_scheduled_R,
        needs_sampling=_EMPTY.astype(np.bool_) if step is None else step.needs_sampling_R,
        drafts=None if step is None else step.drafts_R,
        shifts=None if step is None else step.shifts_R,
        updates=updates,
    )


def _packets(updates: Sequence[RowUpdate], max_words: int) -> list[Int32Array]:
    packets = []
    for part in cut_updates(updates, max_words):
        packets.append(np.zeros(_UPDATES_ONLY.num_words(part), np.int32))
        _pack(packets[-1], _UPDATES_ONLY, None, part)
    return packets


def cut_updates(updates: Sequence[RowUpdate], max_words: int) -> Iterator[list[RowUpdate]]:
    """The same cells in parts that take at most `max_words` each, packed by themselves.
    Raises ValueError: not even one id fits."""
    part: list[RowUpdate] = []
    # a part of one update with so many ids fits: records are 4 words for at most 1024 ids
    most_ids = (max_words - _UPDATES_ONLY.num_words()) * 1024 // 1028 - 8
    if most_ids < 1:
        raise ValueError(f"{max_words} words hold no update; make the buffer larger")
    for update in updates:
        for start in range(0, len(update.ids), most_ids):
            ids = update.ids[start : start + most_ids]
            piece = RowUpdate(update.table, update.row, update.start + start, ids)
            if part and _UPDATES_ONLY.num_words([*part, piece]) > max_words:
                yield part
                part = []
            part.append(piece)
    if part:
        yield part
