"""What both runners answer with: tokens, log-probabilities, reasons of failures."""

import dataclasses
from collections.abc import Mapping

import numpy as np
import numpy.typing as npt
import torch

from engine_core.model_runner.drafts import VerifiedRows
from engine_core.model_runner.vocabulary_rows import VocabularyRows
from engine_core.scheduler import ModelRunnerOutput, SchedulerOutput
from protocol.outputs import Logprobs

NOT_FINITE = "the model's logits are not finite numbers"
NO_TOKEN_LEFT = (
    "no token is possible: structured_outputs, allowed_token_ids, bad_words, min_tokens and "
    "logits processors leave none; change one of them"
)

INFINITE = (
    "repetition_penalty, temperature or a logits processor makes the model's logits infinite; set "
    "them nearer to 1"
)
_BY_PARAMETERS = frozenset({NO_TOKEN_LEFT, INFINITE})


def runner_output(
    plan: SchedulerOutput,
    place_S: npt.NDArray[np.int64],
    token_ids_N: npt.NDArray[np.integer],
    reports: Mapping[int, Logprobs],
    failures: Mapping[int, str],
    verified: VerifiedRows | None = None,
) -> ModelRunnerOutput:
    """The answer in the order of the plan.

    Args:
        place_S: of each sampled sequence its place in the plan.
        token_ids_N: what was chosen for each row of logits; not meant where it failed.
        reports, failures: by row of logits.
        verified: the rows of logits of a step with drafts; None: one a sequence.
    """
    if verified is not None:
        return _verified_output(plan, place_S, token_ids_N, reports, failures, verified)
    request_ids = plan.batch.req_ids
    token_ids_R = np.zeros(len(request_ids), np.int32)
    token_ids_R[place_S] = token_ids_N
    token_ids_R[place_S[list(failures)]] = 0
    return ModelRunnerOutput(
        req_ids=request_ids,
        sampled_token_ids=token_ids_R,
        logprobs={
            request_ids[place_S[at]]: report for at, report in reports.items() if at not in failures
        }
        or None,
        failures={request_ids[place_S[at]]: why for at, why in failures.items()},
        refused={request_ids[place_S[at]] for at in failures if failures[at] in _BY_PARAMETERS},
    )


def _verified_output(
    plan: SchedulerOutput,
    place_S: npt.NDArray[np.int64],
    token_ids_N: npt.NDArray[np.integer],
    reports: Mapping[int, Logprobs],
    failures: Mapping[int, str],
    verified: VerifiedRows,
) -> ModelRunnerOutput:
    """Sequences without drafts as ever. A row of logits that failed behind accepted drafts ends
    nothing yet: these are given out, and the next step fails."""
    names, start_S = plan.batch.req_ids, verified.start_S
    counts_S = np.add.reduceat(verified.taken(token_ids_N, failures), start_S, dtype=int)
    joined: dict[int, Logprobs] = {}
    for at, start in enumerate(start_S.tolist() if reports else ()):
        if start in reports and counts_S[at]:
            positions = Logprobs.joined([reports[start + behind] for behind in range(counts_S[at])])
            assert positions is not None
            joined[at] = positions
    failed = {at: failures[int(start_S[at])] for at in np.flatnonzero(counts_S == 0).tolist()}
    return dataclasses.replace(
        runner_output(plan, place_S, token_ids_N[start_S], joined, failed),
        verified_token_ids={
            names[place_S[at]]: token_ids_N[start_S[at] :][: counts_S[at]].tolist()
            for at in np.flatnonzero((verified.counts_S > 1) & (counts_S > 0)).tolist()
        },
    )


def report_logprobs(
    logits_WV: torch.Tensor,
    chosen_W: npt.NDArray[np.int64],
    num_logprobs_W: npt.NDArray[np.int64],
    named: Mapping[int, tuple[int, ...]],
    vocabulary: VocabularyRows,
) -> list[Logprobs]:
    """The sampled token, then the likeliest, a row each: one call for each number asked for.

    Args:
        logits_WV: as the model gave them.
        chosen_W: the sampled tokens.
        num_logprobs_W: how many of the likeliest tokens each row reports, at most V.
        named: by row, tokens that it reports in their place, as many.
        vocabulary: that the columns are of.
    """
    chosen_W1 = torch.from_numpy(chosen_W)[:, None]
    reports: dict[int, Logprobs] = {}
    is_named_W = np.isin(np.arange(len(chosen_W)), list(named))
    asked = sorted(set(zip(num_logprobs_W.tolist(), is_named_W.tolist(), strict=True)))
    for number, is_named in asked:  # np.unique imports numpy.ma
        indices = np.flatnonzero((num_logprobs_W == number) & (is_named_W == is_named)).tolist()
        is_all = len(indices) == len(chosen_W)
        logits_NV, ids_NL = (
            (logits_WV, chosen_W1) if is_all else (logits_WV[indices], chosen_W1[indices])
        )
        if is_named:
            ids_NL = torch.cat([ids_NL, torch.tensor([named[index] for index in indices])], dim=1)
        found = vocabulary.token_logprobs(logits_NV, ids_NL, 0 if is_named else number)
        ids = torch.cat([ids_NL, found.top_ids_RK], dim=1).numpy().astype("<i4")
        values = torch.cat([found.own_RN, found.top_RK], dim=1).numpy().astype("<f4")
        for index, row_ids, row_values, rank in zip(
            indices, ids, values, found.ranks_R.tolist(), strict=True
        ):
            reports[index] = Logprobs(
                num_positions=1,
                width=number + 1,
                token_ids=row_ids.tobytes(),
                logprobs=row_values.tobytes(),
                ranks=[rank],
            )
    return [reports[index] for index in range(len(chosen_W))]
