"""What both runners answer with: log-probabilities, reasons of failures, lists of tokens."""

import numpy as np
import numpy.typing as npt
import torch

from protocol.outputs import Logprobs

NOT_FINITE = "the model's logits are not finite numbers"
NO_TOKEN_LEFT = (
    "no token is possible: allowed_token_ids holds only tokens that min_tokens forbids; change one "
    "of them"
)


def as_token_lists(
    token_ids_R: npt.NDArray[np.int32], sampled_R: npt.NDArray[np.int64]
) -> list[list[int]]:
    """What a step with drafts answers: a list a sequence, empty where nothing was sampled."""
    lists: list[list[int]] = [[] for _ in token_ids_R]
    for index in sampled_R.tolist():
        lists[index] = [int(token_ids_R[index])]
    return lists


def report_logprobs(
    logprobs_WV: torch.Tensor,
    chosen_W: npt.NDArray[np.int64],
    num_logprobs_W: npt.NDArray[np.int64],
) -> list[Logprobs]:
    """The sampled token, then the likeliest, a row each: one `topk` for each number asked for.

    Args:
        logprobs_WV: of the raw logits.
        chosen_W: the sampled tokens.
        num_logprobs_W: how many of the likeliest tokens each row reports, at most V.
    """
    chosen_W1 = torch.from_numpy(chosen_W)[:, None]
    own_W1 = logprobs_WV.gather(1, chosen_W1)
    ranks = ((logprobs_WV > own_W1).sum(dim=1) + 1).tolist()
    reports: dict[int, Logprobs] = {}
    for number in sorted(set(num_logprobs_W.tolist())):  # np.unique imports numpy.ma
        indices = np.flatnonzero(num_logprobs_W == number)
        alike = torch.from_numpy(indices)
        values_NK, ids_NK = logprobs_WV[alike].topk(number, dim=1)
        ids = torch.cat([chosen_W1[alike], ids_NK], dim=1).numpy().astype("<i4")
        values = torch.cat([own_W1[alike], values_NK], dim=1).numpy().astype("<f4")
        for index, row_ids, row_values in zip(indices.tolist(), ids, values, strict=True):
            reports[index] = Logprobs(
                num_positions=1,
                width=number + 1,
                token_ids=row_ids.tobytes(),
                logprobs=row_values.tobytes(),
                ranks=[ranks[index]],
            )
    return [reports[index] for index in range(len(chosen_W))]
