"""Sampling columns that ask for nothing but what a test gives."""

from dataclasses import replace

import torch

from kernels.triton.sampling.columns import SamplingColumns
from tests.gpu.device import DEVICE


def columns_of(
    rows: int, *, num_rows: int | None = None, device: str = DEVICE, **values: torch.Tensor
) -> SamplingColumns:
    """Of `rows` rows of logits, the first `num_rows` of them real."""
    columns = SamplingColumns.allocate(rows, torch.device(device))
    columns.num_rows_1.fill_(rows if num_rows is None else num_rows)
    for neutral in (columns.temperature_N, columns.top_p_N, columns.repetition_N):
        neutral.fill_(1.0)
    return replace(columns, **values)
