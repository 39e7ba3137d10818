"""A step's inputs made on the device: row updates, the gather, sampled tokens appended. All exact.

The reference is the backend of CPU tensors, which says each rule a sequence at a time.
"""

import dataclasses

import numpy as np
import torch

from kernels.interface.step_inputs import (
    TOKEN_TABLE,
    DeviceRows,
    PackedLayout,
    RowUpdate,
    StepTensors,
    pack_step,
)
from kernels.triton.step_inputs import append_sampled, apply_row_updates, prepare_step
from tests.gpu.checks.errors import num_different, poison
from tests.kernels.torch_device_steps import TorchDeviceSteps

BLOCK_SIZE = 16
NUM_GROUPS = 2
PADDING = (37, 5)
"""Tokens and sequences of a bucket behind the step's own."""
SPARE_ROWS = 7


@dataclasses.dataclass(frozen=True, slots=True)
class Shape:
    """Sequences of one token, then others, each of `chunk` tokens."""

    num_decodes: int
    num_chunks: int
    chunk: int = 1
    max_model_len: int = 8192

    @property
    def num_sequences(self) -> int:
        return self.num_decodes + self.num_chunks

    @property
    def num_tokens(self) -> int:
        return self.num_decodes + self.num_chunks * self.chunk

    @property
    def width(self) -> int:
        return -(-self.max_model_len // BLOCK_SIZE)


class RandomStep:
    """Rows of random tokens and blocks, and a step of some of them, packed on the device.

    Attributes:
        sampled_N: of the step before; `appended_N` of this one.
    """

    def __init__(self, shape: Shape, *, num_updates: int, device: str) -> None:
        generator = np.random.default_rng(int(torch.randint(2**31, ())))
        self.shape = shape
        num_rows, number = shape.num_sequences + SPARE_ROWS, shape.num_sequences
        self.rows = DeviceRows.allocate(
            num_rows=num_rows,
            max_model_len=shape.max_model_len,
            block_size=BLOCK_SIZE,
            num_groups=NUM_GROUPS,
            device=torch.device(device),
        )
        for table in (self.rows.token_ids, self.rows.block_tables):
            # slots of the last blocks do not fit 32 bits
            table.copy_(torch.randint(1, 2**31 // BLOCK_SIZE * 4, table.shape))
        self.layout = PackedLayout(number + PADDING[1])
        scheduled = np.array([1] * shape.num_decodes + [shape.chunk] * shape.num_chunks)
        self.num_computed = generator.integers(0, shape.max_model_len - scheduled + 1)
        self.num_computed[0] = shape.max_model_len - scheduled[0]  # full: what it samples is lost
        self.row_of = generator.permutation(num_rows)[:number]
        self.needs_sampling = generator.random(number) < 0.8
        updates = self._updates(num_updates, generator)
        words = np.full(self.layout.num_words(updates), -77, np.int32)
        num_words = pack_step(
            words,
            self.layout,
            rows=self.row_of,
            num_computed=self.num_computed,
            num_scheduled=scheduled,
            needs_sampling=self.needs_sampling,
            updates=updates,
        )
        self.packed = torch.from_numpy(words[:num_words]).to(device)
        self.appended_N = torch.randint(2**31, (number,), device=device)

    def tensors(self, padding: tuple[int, int], *, device: str) -> StepTensors:
        """Of a bucket, poisoned."""
        out = StepTensors.allocate(
            num_tokens=self.shape.num_tokens + padding[0],
            num_sequences=self.shape.num_sequences + padding[1],
            num_groups=NUM_GROUPS,
            width=self.shape.width,
            device=torch.device(device),
        )
        for name in StepTensors.__slots__:
            poison(getattr(out, name))
        return out

    def run(self, out: StepTensors) -> None:
        """The three launches that every step has."""
        apply_row_updates(self.packed, self.rows)
        prepare_step(self.packed, self.layout, self.rows, out, block_size=BLOCK_SIZE)
        append_sampled(
            self.packed,
            self.layout,
            self.appended_N,
            self.rows,
            num_sequences=out.seq_lens_R.shape[0],
        )

    def _updates(self, number: int, generator: np.random.Generator) -> list[RowUpdate]:
        """Each in a row of its own; some longer than a record, some past the end of the table."""
        updates = []
        for at, row in enumerate(generator.permutation(self.rows.token_ids.shape[0])[:number]):
            table = (TOKEN_TABLE, 0, 1)[at % 3]
            size = self.shape.max_model_len if table == TOKEN_TABLE else self.shape.width
            start = int(generator.integers(size))
            ids = generator.integers(1, 1000, int(generator.integers(1, size + 5)))
            ids = ids[: size - start] if table == TOKEN_TABLE else ids[: size - start + 2]
            updates.append(RowUpdate(table, int(row), start, ids))
        return updates


def check(shape: Shape, *, num_updates: int, device: str) -> float:
    """How many numbers of the step's tensors and of the rows differ."""
    step = RandomStep(shape, num_updates=num_updates, device=device)
    # copies also where the device is the CPU
    rows = DeviceRows(
        token_ids=step.rows.token_ids.cpu().clone(),
        block_tables=step.rows.block_tables.cpu().clone(),
    )
    packed, steps = step.packed.cpu(), TorchDeviceSteps()
    expected, out = step.tensors(PADDING, device="cpu"), step.tensors(PADDING, device=device)
    steps.apply_row_updates(packed, rows)
    steps.prepare_step(packed, step.layout, rows, expected, block_size=BLOCK_SIZE)
    steps.append_sampled(
        packed, step.layout, step.appended_N.cpu(), rows, num_sequences=shape.num_sequences
    )
    step.run(out)
    pairs = [(getattr(out, name).cpu(), getattr(expected, name)) for name in StepTensors.__slots__]
    pairs += [(step.rows.token_ids.cpu(), rows.token_ids)]
    pairs += [(step.rows.block_tables.cpu(), rows.block_tables)]
    return sum(num_different(*pair) for pair in pairs)
