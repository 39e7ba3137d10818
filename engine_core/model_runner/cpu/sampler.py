"""Chooses the next token of each row, by what the row's request asked for.

raw logits, reported unless processed ones are -> logits processors
-> masks -> allowed tokens -> min_tokens -> bias -> penalties -> greedy rows take the best here
-> temperature -> min_p -> top_k -> top_p -> Gumbel-max
A row with a chain has llama.cpp's samplers behind the bias, in place of all down to Gumbel-max."""

import dataclasses
from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt
import torch

from engine_core.model_runner.cpu.row_processors import RowProcessors
from engine_core.model_runner.logit_masks import RowMasks
from engine_core.model_runner.output import INFINITE, NO_TOKEN_LEFT, NOT_FINITE, report_logprobs
from engine_core.model_runner.sampler_chain import RowChain
from engine_core.model_runner.sampling_params import ResolvedSampling
from engine_core.model_runner.vocabulary_rows import VocabularyRows, WholeVocabulary
from engine_core.scheduler.records.prompt_content import EmbeddedRows, token_ranges
from kernels.interface.sampling import Penalties, SamplingLimits, SamplingOperations
from kernels.torch.sampling import truncate_by_sorting
from protocol.outputs import Logprobs
from protocol.sampling import SamplingParams

_NONE: npt.NDArray[np.int64] = np.zeros(0, np.int64)


@dataclasses.dataclass(frozen=True, slots=True)
class SampledRows:
    """One token a row of logits. `failures` says, by index, why a row has none; `logprobs` holds
    by index what was asked for."""

    token_ids: npt.NDArray[np.int64]
    logprobs: dict[int, Logprobs]
    failures: dict[int, str]


@dataclasses.dataclass(slots=True)
class PenaltyCounts:
    """What penalties need of the tokens so far: a bool mask of the prompt's, and how often each is
    in the output, as float32."""

    prompt_mask_V: torch.Tensor
    output_counts_V: torch.Tensor

    @classmethod
    def of(
        cls, prompt_token_ids: Sequence[int], output_token_ids: Sequence[int], vocab_size: int
    ) -> "PenaltyCounts":
        prompt_mask_V = torch.zeros(vocab_size, dtype=torch.bool)
        prompt_mask_V[torch.tensor(prompt_token_ids, dtype=torch.int64)] = True
        output_ids = torch.tensor(output_token_ids, dtype=torch.int64)
        counts_V = torch.bincount(output_ids, minlength=vocab_size).to(torch.float32)
        return cls(prompt_mask_V, counts_V)


@dataclasses.dataclass(slots=True)
class LogitRules:
    """What changes single logits of a row before the distribution is formed. Columns are
    int64."""

    params: SamplingParams
    min_length: int
    min_tokens_columns: torch.Tensor
    bias_columns: torch.Tensor
    bias_values: torch.Tensor
    allowed_columns: torch.Tensor | None
    counts: PenaltyCounts | None
    chain: RowChain | None


class CPUSampler:
    """Columns by row of the persistent batch, and the steps from logits to tokens over them.

    Args:
        ops: the backend.
        vocabulary: that a row of logits is of; None: `vocab_size` tokens.
        processors: the operator's; None: there are none.
        reports_processed: log-probabilities are of what is drawn from, not of the raw logits.
        token_ids: [row, position], the batch's, for rows with a chain. What stands before the
            position to be sampled are the sequence's tokens, then drafts.
    """

    def __init__(
        self,
        ops: SamplingOperations,
        *,
        max_num_rows: int,
        vocab_size: int,
        processors: RowProcessors | None = None,
        vocabulary: VocabularyRows | None = None,
        reports_processed: bool = False,
        token_ids: npt.NDArray[np.int32] | None = None,
    ) -> None:
        self._ops = ops
        self._token_ids = token_ids
        self.vocabulary = vocabulary or WholeVocabulary(vocab_size)
        self.processors = processors
        self._reports_processed = reports_processed
        self._vocab_size = vocab_size
        self._temperature: npt.NDArray[np.float32] = np.ones(max_num_rows, np.float32)
        self._top_k: npt.NDArray[np.int64] = np.zeros(max_num_rows, np.int64)
        self._top_p: npt.NDArray[np.float32] = np.ones(max_num_rows, np.float32)
        self._min_p: npt.NDArray[np.float32] = np.zeros(max_num_rows, np.float32)
        self._seed: npt.NDArray[np.int64] = np.zeros(max_num_rows, np.int64)
        """The 64 bits of the seed, as a signed number."""
        self._is_greedy: npt.NDArray[np.bool_] = np.ones(max_num_rows, np.bool_)
        self._is_plain: npt.NDArray[np.bool_] = np.ones(max_num_rows, np.bool_)
        """Greedy, without rules or log-probabilities: only the best logit is needed."""
        self._is_truncated: npt.NDArray[np.bool_] = np.zeros(max_num_rows, np.bool_)
        self._num_logprobs: npt.NDArray[np.int64] = np.full(max_num_rows, -1, np.int64)
        self._logprob_ids: dict[int, tuple[int, ...]] = {}
        """Tokens to report, by row, of rows that name them."""
        self._rules: dict[int, LogitRules] = {}
        """Rules by row, of rows that have any; `_has_rules` says the same as a column."""
        self._has_rules: npt.NDArray[np.bool_] = np.zeros(max_num_rows, np.bool_)

    # ------------------------------------------------------------------ rows

    def write_row(
        self,
        row: int,
        sampling: ResolvedSampling,
        token_ids: Sequence[int],
        embeds: Sequence[EmbeddedRows] = (),
    ) -> None:
        """A request takes the row with these tokens; nothing of an earlier one is left."""
        params = sampling.params
        self._temperature[row] = params.temperature
        self._top_k[row] = sampling.top_k
        self._top_p[row] = params.top_p
        self._min_p[row] = params.min_p
        self._seed[row] = np.uint64(params.seed or 0).astype(np.int64)
        self._is_greedy[row] = params.is_greedy
        self._is_truncated[row] = sampling.is_truncated
        self._num_logprobs[row] = sampling.num_logprobs
        self._logprob_ids.pop(row, None)
        if sampling.logprob_ids:
            self._logprob_ids[row] = sampling.logprob_ids
        rules = self._rules_of(sampling, token_ids, embeds)
        self._has_rules[row] = rules is not None
        self._is_plain[row] = params.is_greedy and sampling.num_logprobs < 0 and rules is None
        if rules is None:
            self._rules.pop(row, None)
        else:
            self._rules[row] = rules

    def free_row(self, row: int) -> None:
        """The row's rules need memory no longer."""
        self._rules.pop(row, None)

    def append_tokens(self, rows: npt.NDArray[np.int64], token_ids: npt.NDArray[np.int64]) -> None:
        """Count a token that was chosen for each of these rows, of which one may occur often."""
        if not self._rules:
            return
        for index in np.flatnonzero(self._has_rules[rows]).tolist():
            counts = self._rules[int(rows[index])].counts
            if counts is not None:
                counts.output_counts_V[int(token_ids[index])] += 1

    def _rules_of(
        self,
        sampling: ResolvedSampling,
        token_ids: Sequence[int],
        embeds: Sequence[EmbeddedRows],
    ) -> LogitRules | None:
        params = sampling.params
        if not (
            params.has_penalties
            or params.logit_bias
            or params.allowed_token_ids is not None
            or sampling.min_tokens_ids
            or sampling.chained is not None
        ):
            return None
        allowed, start = params.allowed_token_ids, sampling.num_prompt_tokens
        prompt_ranges = token_ranges(embeds, start)
        first, tokens = self.vocabulary.tokens.start, self.vocabulary.tokens
        bias = {id_: value for id_, value in params.logit_bias.items() if id_ in tokens}
        prompt = [id_ for part in prompt_ranges for id_ in token_ids[part]]
        return LogitRules(
            params=params,
            min_length=sampling.min_length,
            min_tokens_columns=self._columns(sampling.min_tokens_ids),
            bias_columns=torch.tensor(list(bias), dtype=torch.int64) - first,
            bias_values=torch.tensor(list(bias.values()), dtype=torch.float32),
            allowed_columns=None if allowed is None else self._columns(allowed),
            counts=(
                PenaltyCounts.of(prompt, token_ids[start:], self._vocab_size)
                if params.has_penalties
                else None
            ),
            chain=RowChain.of(sampling, prompt_ranges, torch.device("cpu")),
        )

    def _columns(self, token_ids: Sequence[int]) -> torch.Tensor:
        """Columns of these tokens in rows of logits, without tokens that have none there."""
        columns = torch.tensor(token_ids, dtype=torch.int64) - self.vocabulary.tokens.start
        return columns[(columns >= 0) & (columns < len(self.vocabulary.tokens))]

    # ------------------------------------------------------------------ one step

    def sample(
        self,
        logits_RV: torch.Tensor,
        rows: npt.NDArray[np.int64],
        positions: npt.NDArray[np.int64],
        drafts_before: Mapping[int, Sequence[int]],
        masks: RowMasks | None = None,
    ) -> SampledRows:
        """
        Args:
            logits_RV: float32; may be overwritten. On another device they are copied to the host
                unless all that is wanted is the best of each.
            rows: [R], the row of the batch that each row of logits belongs to.
            positions: [R], index in the sequence of the token being chosen.
            drafts_before: by index, drafts that count as the sequence's last tokens before that
                position, behind those that `append_tokens` was told of. Rules hold as if they had
                been sampled.
            masks: of rows that follow a grammar or their own tokens.
        """
        is_plain = masks is None and self._is_plain[rows].all()
        if is_plain and (self.processors is None or not self.processors.is_changed[rows].any()):
            best_ids_R, best_R = (each.cpu() for each in self._ops.best_of_rows(logits_RV))
            return SampledRows(best_ids_R.numpy(), {}, _not_numbers(logits_RV, best_R))
        logits_RV = logits_RV.cpu()
        requested = np.flatnonzero(self._num_logprobs[rows] >= 0)
        told_WV: torch.Tensor | None = None
        asking = rows[requested]
        if requested.size and not self._reports_processed:
            stay = self._is_greedy[asking].all() and not self._has_rules[asking].any()
            is_copied = masks is not None or self.processors is not None or not stay
            if len(asking) < len(rows) or is_copied:
                told_WV = logits_RV[torch.from_numpy(requested)]
            else:
                told_WV = logits_RV
        is_changed = self._has_rules[rows]
        ruled = np.flatnonzero(is_changed) if self._rules else _NONE
        if masks is None or self.processors is not None:
            best_ids_R, best_R = self._ops.best_of_rows(logits_RV)
            failures = _not_numbers(logits_RV, best_R)
        if self.processors is not None:
            processed, broken = self.processors.apply(logits_RV, rows, positions, failures)
            is_changed[processed] = True
            failures |= broken
        if masks is not None:
            index_M, bits_MW = torch.from_numpy(masks.index_M), torch.from_numpy(masks.bits_MW)
            best_ids_R, best_R, before_R = self._ops.best_of_masked_rows(
                logits_RV, index_M, bits_MW
            )
            if self.processors is None:
                failures = _not_numbers(logits_RV, before_R)
                best_R[list(failures)] = 0.0
        for index in ruled.tolist():
            if index in failures:
                continue
            rules, position = self._rules[int(rows[index])], int(positions[index])
            drafts = drafts_before.get(index, ())
            _apply_rules(logits_RV[index], rules, position, drafts, self._ops)
            if rules.chain is not None:
                assert self._token_ids is not None
                row_L = torch.from_numpy(self._token_ids[int(rows[index])])
                whole_V = self.vocabulary.whole(logits_RV[index, None])[0]
                mine = slice(self.vocabulary.tokens.start, self.vocabulary.tokens.stop)
                logits_RV[index] = rules.chain.apply(whole_V, row_L, position)[mine]
        changed = np.flatnonzero(is_changed)
        if changed.size:
            part_RV = logits_RV if len(changed) == len(rows) else logits_RV[changed]
            best_ids_R[changed], best_R[changed] = self._ops.best_of_rows(part_RV)
        failures = self._impossible(logits_RV, best_R, rows) | failures
        if requested.size and self._reports_processed:
            told_WV = self._drawn_from(logits_RV[torch.from_numpy(requested)], asking)
        chosen = self._choose(logits_RV, rows, positions, best_ids_R.numpy())
        logprobs: dict[int, Logprobs] = {}
        if told_WV is not None:
            named = {
                at: self._logprob_ids[row]
                for at, row in enumerate(asking.tolist() if self._logprob_ids else ())
                if row in self._logprob_ids
            }
            reported = report_logprobs(
                told_WV, chosen[requested], self._num_logprobs[asking], named, self.vocabulary
            )
            logprobs = {
                index: columns
                for index, columns in zip(requested.tolist(), reported, strict=True)
                if index not in failures
            }
        return SampledRows(chosen, logprobs, failures)

    def _drawn_from(self, logits_WV: torch.Tensor, rows: npt.NDArray[np.int64]) -> torch.Tensor:
        """The logits of these rows, changed in place: divided by the temperature, and -inf where
        min_p, top_k and top_p leave nothing. Those of greedy rows stay."""
        for index, row in enumerate(rows.tolist()):
            if not self._is_greedy[row]:
                logits_WV[index] = truncate_by_sorting(
                    logits_WV[index] / torch.tensor(self._temperature[row]),
                    top_k=int(self._top_k[row]),
                    top_p=float(self._top_p[row]),
                    min_p=float(self._min_p[row]),
                )
        return logits_WV

    def _impossible(
        self, logits_RV: torch.Tensor, best_R: torch.Tensor, rows: npt.NDArray[np.int64]
    ) -> dict[int, str]:
        """Rows whose best logit is not finite by what their requests asked for. Zeroed."""
        temperature = np.where(self._is_greedy[rows], np.float32(1), self._temperature[rows])
        with np.errstate(over="ignore"):
            bad = np.flatnonzero(~np.isfinite(best_R.numpy() / temperature)).tolist()
        best = best_R.tolist() if bad else []
        for index in bad:
            logits_RV[index] = 0.0
        return {index: NO_TOKEN_LEFT if best[index] == -np.inf else INFINITE for index in bad}

    def _choose(
        self,
        logits_RV: torch.Tensor,
        rows: npt.NDArray[np.int64],
        positions: npt.NDArray[np.int64],
        best_ids: npt.NDArray[np.int64],
    ) -> npt.NDArray[np.int64]:
        """`best_ids` with those of rows that are not greedy replaced, in place."""
        greedy = self._is_greedy[rows]
        if greedy.all():
            return best_ids
        truncated = ~greedy & self._is_truncated[rows]
        for kind in (truncated, ~greedy & ~truncated):
            indices = np.flatnonzero(kind)
            if not indices.size:
                continue
            is_all = len(indices) == len(rows)
            part_RV = logits_RV if is_all else logits_RV[torch.from_numpy(indices)]
            mine = rows[indices]
            part_RV /= torch.from_numpy(self._temperature[mine])[:, None]
            seeds_R = torch.from_numpy(self._seed[mine])
            positions_R = torch.from_numpy(positions[indices])
            limits = None
            if kind is truncated:
                limits = SamplingLimits(
                    top_k_R=torch.from_numpy(self._top_k[mine]),
                    top_p_R=torch.from_numpy(self._top_p[mine]),
                    min_p_R=torch.from_numpy(self._min_p[mine]),
                )
            chosen_R = self._ops.sample(part_RV, seeds_R, positions_R, limits)
            best_ids[indices] = chosen_R.numpy()
        return best_ids


def _not_numbers(logits_RV: torch.Tensor, best_R: torch.Tensor) -> dict[int, str]:
    """Rows whose best logit is NaN or infinite. Zeroed: they are sampled with the others."""
    is_finite_R = np.isfinite(best_R.numpy())
    if is_finite_R.all():
        return {}
    bad = np.flatnonzero(~is_finite_R).tolist()
    for index in bad:
        logits_RV[index] = 0.0
        best_R[index] = 0.0
    return dict.fromkeys(bad, NOT_FINITE)


def _apply_rules(
    logits_V: torch.Tensor,
    rules: LogitRules,
    position: int,
    drafts: Sequence[int],
    ops: SamplingOperations,
) -> None:
    """Change one row of logits, in place. `drafts`: the last tokens before `position`, which are
    not counted yet."""
    if rules.allowed_columns is not None:
        allowed = logits_V[rules.allowed_columns]
        logits_V.fill_(-torch.inf)
        logits_V[rules.allowed_columns] = allowed
    if position < rules.min_length:
        logits_V[rules.min_tokens_columns] = -torch.inf
    if rules.bias_columns.numel():
        logits_V[rules.bias_columns] += rules.bias_values
    if rules.counts is not None:
        output_counts_V = rules.counts.output_counts_V
        if drafts:
            output_counts_V = output_counts_V.clone()
            for token_id in drafts:
                output_counts_V[token_id] += 1
        ops.apply_penalties(
            logits_V,
            rules.counts.prompt_mask_V,
            output_counts_V,
            Penalties(
                repetition_penalty=rules.params.repetition_penalty,
                presence_penalty=rules.params.presence_penalty,
                frequency_penalty=rules.params.frequency_penalty,
            ),
        )
