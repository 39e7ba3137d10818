"""Sampling: thresholds, and the tokens themselves.

Two exact computations may differ where two sums lie nearer than the device's logarithm is exact
(about once in 10^6 draws), so the checks of tokens count rows that differ, and allow one.
"""

import torch

from kernels.triton.sampling.sample import SamplingMemory, sample, sample_reference
from tests.gpu.checks.errors import num_different, poison
from tests.kernels.triton.columns import columns_of

VOCABULARIES = (151936, 128256, 50257)


class Inputs:
    """Random rows. `limits`: every other row has top_k, top_p or min_p, in turn."""

    def __init__(self, num_rows: int, vocab_size: int, *, limits: bool, device: str) -> None:
        def full(value: float, dtype: torch.dtype) -> torch.Tensor:
            return torch.full((num_rows,), value, dtype=dtype, device=device)

        self.logits_RV = 4 * torch.randn(num_rows, vocab_size, device=device)
        self.seeds_R = torch.randint(-(2**62), 2**62, (num_rows,), device=device)
        self.positions_R = torch.randint(1 << 20, (num_rows,), device=device)
        self.options = {
            "is_greedy_R": torch.arange(num_rows, device=device) % 5 == 4,
            "temperature_R": 0.3 + torch.rand(num_rows, device=device),
            "top_k_R": full(0, torch.int64),
            "top_p_R": full(1, torch.float32),
            "min_p_R": full(0, torch.float32),
        }
        if limits:
            self.options["top_k_R"][0::6] = 50
            self.options["top_p_R"][1::6] = 0.9
            self.options["min_p_R"][2::6] = 0.05
            self.options["top_k_R"][3::6] = 1000
            self.options["top_p_R"][3::6] = 0.8
        self._limits = limits
        values = {name.replace("_R", "_N"): tensor for name, tensor in self.options.items()}
        self._columns = columns_of(
            num_rows,
            device=device,
            seeds_N=self.seeds_R,
            positions_N=self.positions_R,
            **values,
        )
        self._memory = SamplingMemory.allocate(num_rows, vocab_size, torch.device(device))
        self.out_R = poison(torch.empty(num_rows, dtype=torch.int64, device=device))
        self._best_R = torch.empty(num_rows, device=device)

    def call(self) -> torch.Tensor:
        sample(
            self.logits_RV,
            self._columns,
            memory=self._memory,
            out_R=self.out_R,
            best_logit_R=self._best_R,
            any_truncated=self._limits,
        )
        return self.out_R


def check(num_rows: int, vocab_size: int, *, limits: bool, device: str) -> float:
    """How many rows get another token than on the CPU."""
    inputs = Inputs(num_rows, vocab_size, limits=limits, device=device)
    expected = sample_reference(
        inputs.logits_RV.cpu(),
        inputs.seeds_R.cpu(),
        inputs.positions_R.cpu(),
        **{name: tensor.cpu() for name, tensor in inputs.options.items()},
    )
    return num_different(inputs.call().cpu(), expected)
