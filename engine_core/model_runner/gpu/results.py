"""What the device gave back of a step: host buffers, and the answer in the order of the plan."""

import dataclasses

import numpy as np
import torch

from engine_core.model_runner.drafts import VerifiedRows
from engine_core.model_runner.gpu.step import GPUStep
from engine_core.model_runner.output import (
    INFINITE,
    NO_TOKEN_LEFT,
    NOT_FINITE,
    report_logprobs,
    runner_output,
)
from engine_core.model_runner.vocabulary_rows import VocabularyRows
from engine_core.scheduler import ModelRunnerOutput, SchedulerOutput
from kernels.interface.device_steps import SamplingMode
from kernels.interface.sampling_rows import StepResults
from protocol.outputs import Logprobs


@dataclasses.dataclass(frozen=True, slots=True)
class HostResults:
    """Where the results of a step in flight land; the device's until the step is done.
    `logits_WV`: float32, of rows of which the host reports log-probabilities, by `vocabulary`."""

    results: StepResults
    logits_WV: torch.Tensor | None
    vocabulary: VocabularyRows

    def fetch_logits(self, logits_NV: torch.Tensor, step: GPUStep) -> None:
        """Copy what the host needs of the logits that are reported."""
        if self.logits_WV is not None:
            for place, index in enumerate(step.from_host_N.tolist()):
                self.logits_WV[place].copy_(logits_NV[index], non_blocking=True)

    def fetch(self, device: StepResults, step: GPUStep) -> None:
        """Copy what sampling wrote."""
        host, number = self.results, len(step.sampled_N)
        plain = slice(device.num_plain_words)
        host.words[plain].copy_(device.words[plain], non_blocking=True)
        if step.has_reports:
            host.logprob_ids_CN[:number].copy_(device.logprob_ids_CN[:number], non_blocking=True)
            host.logprobs_CN[:number].copy_(device.logprobs_CN[:number], non_blocking=True)


def read_results(
    plan: SchedulerOutput, step: GPUStep, host: HostResults, refusals: dict[int, str]
) -> ModelRunnerOutput:
    """The step's answer, once the device is done with it.
    `refusals`: by row, why the device cannot serve it."""
    chosen_N = host.results.token_ids_C[: len(step.sampled_N)].numpy().copy()
    failed, refused = _failures(step, host.results), {}
    if refusals:
        rows = step.sampled_rows_N.tolist()
        refused = {at: refusals[row] for at, row in enumerate(rows) if row in refusals}
        failed |= refused
    reports = _device_reports(step, host.results) | _host_reports(step, host, chosen_N)
    place_S, verified = step.sampled_N, None
    if step.drafts_R is not None:
        behind_N = step.drafts_R[step.needs_sampling_R] >= 0
        place_S = place_S[~behind_N]
        verified = VerifiedRows.of(plan, place_S)
    output = runner_output(plan, place_S, chosen_N, reports, failed, verified)
    names = [plan.batch.req_ids[place] for place in step.sampled_N[list(refused)].tolist()]
    output.refused.update(output.failures.keys() & names)
    for part in step.parts:
        part.answer(output)
    return output


def _failures(step: GPUStep, results: StepResults) -> dict[int, str]:
    number = len(step.sampled_N)
    best_N = results.best_logits_C[:number].numpy()
    raw_N = results.raw_best_logits_C[:number].numpy()
    raw_N = raw_N if step.mode is SamplingMode.FULL else best_N
    failed = {}
    for index in np.flatnonzero(~(np.isfinite(best_N) & np.isfinite(raw_N))).tolist():
        by_parameters = NO_TOKEN_LEFT if best_N[index] == -np.inf else INFINITE
        failed[index] = by_parameters if np.isfinite(raw_N[index]) else NOT_FINITE
    return failed


def _device_reports(step: GPUStep, results: StepResults) -> dict[int, Logprobs]:
    if not step.has_reports:
        return {}
    ids_CN, logprobs_CN = results.logprob_ids_CN.numpy(), results.logprobs_CN.numpy()
    from_host = set(step.from_host_N.tolist())
    return {
        index: Logprobs(
            num_positions=1,
            width=1 + number,
            token_ids=ids_CN[index, : 1 + number].astype("<i4").tobytes(),
            logprobs=logprobs_CN[index, : 1 + number].astype("<f4").tobytes(),
            ranks=[int(results.ranks_C[index])],
        )
        for index, number in enumerate(step.num_logprobs_N.tolist())
        if number >= 0 and index not in from_host
    }


def _host_reports(
    step: GPUStep, host: HostResults, chosen_N: np.ndarray[tuple[int], np.dtype[np.int64]]
) -> dict[int, Logprobs]:
    if host.logits_WV is None:
        return {}
    reports = report_logprobs(
        host.logits_WV,
        chosen_N[step.from_host_N],
        step.num_logprobs_N[step.from_host_N],
        {at: ids for at, ids in enumerate(step.logprob_ids) if ids},
        host.vocabulary,
    )
    return dict(zip(step.from_host_N.tolist(), reports, strict=True))
