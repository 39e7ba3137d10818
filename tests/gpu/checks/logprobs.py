"""Log-probabilities of the sampled and of the likeliest tokens, and the sampled one's rank."""

import torch

from kernels.triton.sampling.logprobs import LogprobsMemory, report_logprobs
from tests.gpu.checks.errors import num_different, poison, scaled_error, worst
from tests.kernels.triton.columns import columns_of

MOST = 20


class Inputs:
    """Random rows; each asks for another number of logprobs."""

    def __init__(self, num_rows: int, vocab_size: int, device: str) -> None:
        def empty(*shape: int, dtype: torch.dtype) -> torch.Tensor:
            return poison(torch.empty(shape, dtype=dtype, device=device))

        self.logits_RV = 4 * torch.randn(num_rows, vocab_size, device=device)
        self.token_ids_R = torch.randint(vocab_size, (num_rows,), device=device)
        self.token_ids_R[::2] = self.logits_RV[::2].argmax(dim=1)
        counts_R = torch.arange(num_rows, device=device) % (MOST + 1)
        self.num_logprobs_R = (MOST - counts_R).int()
        self.columns = columns_of(num_rows, device=device, num_logprobs_N=self.num_logprobs_R)
        self.memory = LogprobsMemory.allocate(num_rows, vocab_size, MOST, torch.device(device))
        self.ids_RN = empty(num_rows, 1 + MOST, dtype=torch.int32)
        self.logprobs_RN = empty(num_rows, 1 + MOST, dtype=torch.float32)
        self.ranks_R = empty(num_rows, dtype=torch.int32)

    def call(self) -> None:
        report_logprobs(
            self.logits_RV,
            self.token_ids_R,
            self.columns,
            memory=self.memory,
            out_ids_RN=self.ids_RN,
            out_logprobs_RN=self.logprobs_RN,
            out_ranks_R=self.ranks_R,
        )


def check(num_rows: int, vocab_size: int, *, device: str) -> float:
    """Ids and ranks exactly, log-probabilities within 1e-5; nothing else is written."""
    inputs = Inputs(num_rows, vocab_size, device)
    inputs.call()
    logprobs_RV = inputs.logits_RV.double().log_softmax(dim=1)
    order_RV = inputs.logits_RV.sort(dim=1, descending=True, stable=True).indices[:, :MOST]
    ids_RN = torch.cat([inputs.token_ids_R[:, None], order_RV], dim=1)
    expected_RN = logprobs_RV.gather(1, ids_RN)
    asked_RN = torch.arange(1 + MOST, device=device) <= inputs.num_logprobs_R[:, None]
    chosen_R1 = inputs.logits_RV.gather(1, inputs.token_ids_R[:, None])
    ranks_R = (inputs.logits_RV > chosen_R1).sum(dim=1) + 1
    return worst(
        num_different(inputs.ids_RN[asked_RN], ids_RN.int()[asked_RN]),
        num_different(inputs.ranks_R, ranks_R.int()),
        scaled_error(inputs.logprobs_RN[asked_RN], expected_RN[asked_RN]),
        float((~inputs.logprobs_RN[~asked_RN].isnan()).sum()),
    )
