"""What both runners answer with: tokens, log-probabilities, reasons of failures."""

from collections.abc import Mapping

import numpy as np
import numpy.typing as npt
import torch

from engine_core.scheduler import ModelRunnerOutput, SchedulerOutput
from protocol.outputs import Logprobs

NOT_FINITE = "the model's logits are not finite numbers"
NO_TOKEN_LEFT = (
    "no token is possible: structured_outputs, allowed_token_ids and min_tokens together leave "
    "none; change one of them"
)

INFINITE = (
    "repetition_penalty or temperature makes the model's logits infinite; set them nearer to 1"
)


def runner_output(
    plan: SchedulerOutput,
    place_N: npt.NDArray[np.int64],
    token_ids_N: npt.NDArray[np.integer],
    reports: Mapping[int, Logprobs],
    failures: Mapping[int, str],
) -> ModelRunnerOutput:
    """The answer in the order of the plan.

    Args:
        place_N: of each sampled sequence its place in the plan.
        token_ids_N: what was chosen; not meant where the sequence failed.
        reports, failures: by index among the sampled.
    """
    request_ids = plan.batch.req_ids
    token_ids_R = np.zeros(len(request_ids), np.int32)
    token_ids_R[place_N] = token_ids_N
    token_ids_R[place_N[list(failures)]] = 0
    sampled: npt.NDArray[np.int32] | list[list[int]] = token_ids_R
    if plan.scheduled_spec_decode_tokens:  # a list a sequence, empty where nothing was sampled
        sampled = [[] for _ in request_ids]
        for place in np.delete(place_N, list(failures)).tolist():
            sampled[place] = [int(token_ids_R[place])]
    return ModelRunnerOutput(
        req_ids=request_ids,
        sampled_token_ids=sampled,
        logprobs={
            request_ids[place_N[at]]: report for at, report in reports.items() if at not in failures
        }
        or None,
        failures={request_ids[place_N[at]]: why for at, why in failures.items()},
    )


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
