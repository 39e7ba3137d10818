"""Chooses the next token of each row.

    raw logits -> log-probabilities, for those who asked
    -> allowed tokens -> min_tokens -> bias -> penalties -> greedy rows take the best here
    -> temperature -> min_p -> top_k -> top_p -> Gumbel-max

Must not know requests, blocks or the model.
"""

import dataclasses

import numpy as np
import numpy.typing as npt
import torch

from engine_core.model_runner.sampling.logprobs import report_logprobs
from engine_core.model_runner.sampling.state import RowRules, SamplingState
from kernels.interface.operations import Operations, Penalties, SamplingLimits
from protocol.outputs import Logprobs

_NONE: npt.NDArray[np.int64] = np.zeros(0, np.int64)


@dataclasses.dataclass(frozen=True, slots=True)
class SampledTokens:
    """One token a row of logits. `failures` says, by index, why a row has none; `logprobs` holds
    by index what was asked for."""

    token_ids: npt.NDArray[np.int64]
    logprobs: dict[int, Logprobs]
    failures: dict[int, str]


class Sampler:
    """Carries out what a SamplingState holds, on a backend."""

    def __init__(self, state: SamplingState, ops: Operations) -> None:
        self._state = state
        self._ops = ops

    def sample(
        self,
        logits_RV: torch.Tensor,
        rows: npt.NDArray[np.int64],
        positions: npt.NDArray[np.int64],
    ) -> SampledTokens:
        """
        Args:
            logits_RV: float32; may be overwritten.
            rows: [R], the row of the state that each row of logits belongs to.
            positions: [R], index in the sequence of the token being chosen.
        """
        state = self._state
        if state.is_plain[rows].all():
            best_ids_R, best_R = self._ops.best_of_rows(logits_RV)
            return SampledTokens(best_ids_R.numpy(), {}, _not_numbers(logits_RV, best_R))
        wanted = np.flatnonzero(state.wants_logprobs[rows])
        raw_WV: torch.Tensor | None = None
        if wanted.size:  # the usual "all of them" without a copy
            everyone = wanted.size == len(rows)
            asked_WV = logits_RV if everyone else logits_RV[torch.from_numpy(wanted)]
            raw_WV = asked_WV.log_softmax(dim=1)
        best_ids_R, best_R = self._ops.best_of_rows(logits_RV)
        failures = _not_numbers(logits_RV, best_R)
        ruled = np.flatnonzero(state.has_rules[rows]) if state.rules else _NONE
        for index in ruled.tolist():
            if index in failures:
                continue
            _apply_rules(logits_RV[index], state.rules[int(rows[index])], self._ops)
            if not logits_RV[index].isfinite().any():
                failures[index] = (
                    "no token is possible: allowed_token_ids holds only tokens that "
                    "min_tokens forbids; change one of them"
                )
                logits_RV[index] = 0.0  # so that it harms nobody
        if ruled.size:
            best_ids_R[ruled] = self._ops.best_of_rows(logits_RV[ruled])[0]
        chosen = self._choose(logits_RV, rows, positions, best_ids_R.numpy())
        logprobs: dict[int, Logprobs] = {}
        if raw_WV is not None:
            reported = report_logprobs(raw_WV, chosen[wanted], state.num_logprobs[rows[wanted]])
            logprobs = {
                index: columns
                for index, columns in zip(wanted.tolist(), reported, strict=True)
                if index not in failures
            }
        return SampledTokens(chosen, logprobs, failures)

    def _choose(
        self,
        logits_RV: torch.Tensor,
        rows: npt.NDArray[np.int64],
        positions: npt.NDArray[np.int64],
        best_ids: npt.NDArray[np.int64],
    ) -> npt.NDArray[np.int64]:
        """`best_ids` with those of rows that are not greedy replaced, in place."""
        state = self._state
        greedy = state.is_greedy[rows]
        if greedy.all():
            return best_ids
        truncated = ~greedy & state.is_truncated[rows]
        for kind in (truncated, ~greedy & ~truncated):
            indices = np.flatnonzero(kind)
            if not indices.size:
                continue
            part_RV = logits_RV[torch.from_numpy(indices)]
            mine = rows[indices]
            part_RV /= torch.from_numpy(state.temperature[mine])[:, None]
            seeds_R = torch.from_numpy(state.seed[mine])
            positions_R = torch.from_numpy(positions[indices])
            limits = None
            if kind is truncated:
                limits = SamplingLimits(
                    top_k_R=torch.from_numpy(state.top_k[mine]),
                    top_p_R=torch.from_numpy(state.top_p[mine]),
                    min_p_R=torch.from_numpy(state.min_p[mine]),
                )
            chosen_R = self._ops.sample(part_RV, seeds_R, positions_R, limits)
            best_ids[indices] = chosen_R.numpy()
        return best_ids


def _not_numbers(logits_RV: torch.Tensor, best_R: torch.Tensor) -> dict[int, str]:
    """Rows whose best logit is NaN or infinite; they are zeroed, so that they harm nobody."""
    is_finite_R = np.isfinite(best_R.numpy())
    if is_finite_R.all():
        return {}
    bad = np.flatnonzero(~is_finite_R).tolist()
    for index in bad:
        logits_RV[index] = 0.0
    return dict.fromkeys(bad, "the model's logits are not finite numbers")


def _apply_rules(logits_V: torch.Tensor, rules: RowRules, ops: Operations) -> None:
    """Change one row of logits, in place."""
    if rules.allowed_ids is not None:
        allowed = logits_V[rules.allowed_ids]
        logits_V.fill_(-torch.inf)
        logits_V[rules.allowed_ids] = allowed
    if rules.holds_back:
        logits_V[rules.held_back_ids] = -torch.inf
    if rules.bias_ids.numel():
        logits_V[rules.bias_ids] += rules.bias_values
    if rules.history is not None:
        ops.apply_penalties(
            logits_V,
            rules.history.prompt_mask_V,
            rules.history.output_counts_V,
            Penalties(
                repetition_penalty=rules.params.repetition_penalty,
                presence_penalty=rules.params.presence_penalty,
                frequency_penalty=rules.params.frequency_penalty,
            ),
        )
