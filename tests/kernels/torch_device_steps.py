"""Step inputs and sampling on CPU tensors, a sequence at a time: what a GPU's must equal."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from kernels.interface.device_steps import LogitMasks, RowFunction, SamplingMode
from kernels.interface.sampling import Penalties, SamplingLimits
from kernels.interface.sampling_rows import (
    WORD_BITS,
    SamplingRows,
    StateFlag,
    StateWord,
    StepResults,
    TokenList,
)
from kernels.interface.step_inputs import TOKEN_TABLE, DeviceRows, PackedLayout, StepTensors
from kernels.torch.sampling import (
    apply_penalties,
    sample_from_all,
    sample_truncated,
    truncate_by_sorting,
)

_RECORD_WORDS = 4


@dataclass(frozen=True, slots=True)
class _Sequence:
    """One sequence of a packed step."""

    row: int
    computed: int
    start: int
    stop: int
    sample_index: int
    shift: int
    drafts: tuple[int, ...]
    """Before it in this step, in order."""

    @property
    def seq_len(self) -> int:
        return self.computed + self.stop - self.start


def _sequences(packed: torch.Tensor, layout: PackedLayout) -> list[_Sequence]:
    words = packed.tolist()
    starts = words[layout.query_start_at :]
    found: list[_Sequence] = []
    for index in range(words[0]):
        draft = words[layout.draft_at + index]
        found.append(
            _Sequence(
                row=words[layout.rows_at + index],
                computed=words[layout.computed_at + index],
                start=starts[index],
                stop=starts[index + 1],
                sample_index=words[layout.sample_index_at + index],
                shift=words[layout.shift_at + index],
                drafts=() if draft < 0 else (*found[-1].drafts, draft),
            )
        )
    return found


class TorchDeviceSteps:
    """See `kernels.interface.device_steps.DeviceStepOperations`."""

    def apply_row_updates(self, packed: torch.Tensor, rows: DeviceRows) -> None:
        """See `DeviceStepOperations.apply_row_updates`."""
        words = packed.tolist()
        num_updates, records_at, ids_at = words[3:6]
        for update in range(num_updates):
            record = words[records_at + _RECORD_WORDS * update :]
            table, row, start, first = record[:_RECORD_WORDS]
            stop = record[2 * _RECORD_WORDS - 1]
            into = rows.token_ids[row] if table == TOKEN_TABLE else rows.block_tables[table, row]
            ids = packed[ids_at + first : ids_at + stop][: max(0, into.shape[0] - start)]
            into[start : start + len(ids)] = ids

    def prepare_step(
        self,
        packed: torch.Tensor,
        layout: PackedLayout,
        rows: DeviceRows,
        out: StepTensors,
        *,
        block_size: int,
    ) -> None:
        """See `DeviceStepOperations.prepare_step`."""
        sequences = _sequences(packed, layout)
        out.token_ids_T.zero_()
        out.positions_T.zero_()
        out.slot_mappings_GT.fill_(-1)
        out.query_start_loc_R1.fill_(int(packed[1]))
        out.seq_lens_R.zero_()
        out.logits_at_R.zero_()
        for index, sequence in enumerate(sequences):
            tokens = slice(sequence.start, sequence.stop)
            positions = torch.arange(sequence.computed, sequence.seq_len)
            tables_GM = rows.block_tables[:, sequence.row]
            out.query_start_loc_R1[index] = sequence.start
            out.seq_lens_R[index] = sequence.seq_len
            out.positions_T[tokens] = positions + sequence.shift
            out.token_ids_T[tokens] = rows.token_ids[sequence.row, positions].long()
            blocks_GT = tables_GM[:, positions // block_size].long()
            out.slot_mappings_GT[:, tokens] = blocks_GT * block_size + positions % block_size
            num_blocks = -(-sequence.seq_len // block_size)
            out.block_tables_GRM[:, index, :num_blocks] = tables_GM[:, :num_blocks]
            if sequence.sample_index >= 0:
                out.logits_at_R[sequence.sample_index] = sequence.stop - 1

    def append_sampled(
        self,
        packed: torch.Tensor,
        layout: PackedLayout,
        token_ids_N: torch.Tensor,
        rows: DeviceRows,
        *,
        num_sequences: int,
    ) -> None:
        """See `DeviceStepOperations.append_sampled`."""
        for sequence in _sequences(packed, layout):
            if sequence.sample_index >= 0 and sequence.seq_len < rows.token_ids.shape[1]:
                rows.token_ids[sequence.row, sequence.seq_len] = token_ids_N[sequence.sample_index]

    def make_sampler(
        self,
        *,
        num_rows: int,
        num_logits: int,
        vocab_size: int,
        device: torch.device,
        reports_processed: bool = False,
        reports_logits: bool = False,
    ) -> TorchStepSampler:
        """See `DeviceStepOperations.make_sampler`."""
        words = torch.zeros(StepResults.num_words(num_logits, vocab_size), dtype=torch.int32)
        return TorchStepSampler(
            SamplingRows.allocate(num_rows=num_rows, vocab_size=vocab_size, device=device),
            StepResults.over(words, capacity=num_logits, vocab_size=vocab_size),
            reports_processed,
            reports_logits,
        )


@dataclass(frozen=True, slots=True)
class TorchStepSampler:
    """See `kernels.interface.device_steps.StepSampler`."""

    rows: SamplingRows
    results: StepResults
    reports_processed: bool
    reports_logits: bool

    def sample(
        self,
        logits_NV: torch.Tensor,
        packed: torch.Tensor,
        layout: PackedLayout,
        *,
        num_sequences: int,
        mode: SamplingMode,
        masks: LogitMasks | None = None,
        chains: Mapping[int, RowFunction] | None = None,
    ) -> torch.Tensor:
        """See `StepSampler.sample`."""
        assert (masks is None and not chains) or mode is SamplingMode.FULL
        raw_NV, logits_NV = logits_NV, logits_NV.to(torch.float32, copy=True)
        counted: list[tuple[int, int]] = []
        for sequence in _sequences(packed, layout):
            if sequence.sample_index >= 0:
                index = sequence.sample_index
                chain = (chains or {}).get(index)
                self._sample_row(logits_NV[index], sequence, mode, masks, chain)
                before = slice(sequence.sample_index - len(sequence.drafts), sequence.sample_index)
                if self.results.token_ids_C[before].tolist() == [*sequence.drafts]:
                    token_id = int(self.results.token_ids_C[sequence.sample_index])
                    counted.append((sequence.row, token_id))
        for row, token_id in counted if mode is SamplingMode.FULL else ():
            if self.rows.state_NX[row, StateWord.FLAGS] & StateFlag.COUNTED:
                self.rows.output_counts_NV[row, token_id] += 1
        return logits_NV if self.reports_processed else raw_NV

    def _sample_row(
        self,
        logits_V: torch.Tensor,
        sequence: _Sequence,
        mode: SamplingMode,
        masks: LogitMasks | None,
        chain: RowFunction | None,
    ) -> None:
        out, sample_index = self.results, sequence.sample_index
        words = self.rows.state_NX[sequence.row, : len(StateWord)]
        numbers, reals = words.tolist(), words.view(torch.float32).tolist()
        raw_V = logits_V.clone()
        if mode is SamplingMode.FULL:
            out.raw_best_logits_C[sample_index] = raw_V.amax()
            if masks is not None and masks.is_masked_R[sample_index]:
                allowed_V = _bits(masks.bits_RW[sample_index])[: self.rows.vocab_size]
                logits_V[~allowed_V] = -torch.inf
            self._change(logits_V, sequence, numbers, reals)
            if chain is not None:
                logits_V.copy_(chain(logits_V))
        best = logits_V.amax()
        temperature = reals[StateWord.TEMPERATURE]
        if temperature > 0 and best.isfinite() and (best / temperature).isinf():
            best = torch.tensor(torch.inf)
        # NaN, as +inf, tells of logits that are no numbers
        out.best_logits_C[sample_index] = torch.inf if best.isnan() else best
        token_id = self._choose(logits_V, sequence, numbers, mode) if best.isfinite() else 0
        out.token_ids_C[sample_index] = token_id
        if self.reports_processed and not numbers[StateWord.FLAGS] & StateFlag.GREEDY:
            logits_V[:] = truncate_by_sorting(
                logits_V / temperature,
                top_k=numbers[StateWord.TOP_K],
                top_p=reals[StateWord.TOP_P],
                min_p=reals[StateWord.MIN_P],
            )
        if mode is SamplingMode.FULL and numbers[StateWord.NUM_LOGPROBS] >= 0:
            raw_V = logits_V if self.reports_processed else raw_V
            self._report(raw_V, token_id, sample_index, numbers[StateWord.NUM_LOGPROBS])

    def _change(
        self,
        logits_V: torch.Tensor,
        sequence: _Sequence,
        numbers: list[int],
        reals: list[float],
    ) -> None:
        rows, row = self.rows, sequence.row
        lists_3M = rows.lists_3NM[:, row]
        if numbers[StateWord.FLAGS] & StateFlag.MASKED:
            allowed_V = _bits(rows.state_NX[row, rows.mask_words])[: rows.vocab_size]
            logits_V[~allowed_V] = -torch.inf
        if sequence.seq_len < numbers[StateWord.MIN_LENGTH]:
            min_tokens_ids = lists_3M[
                TokenList.MIN_TOKENS_IDS, : numbers[StateWord.NUM_MIN_TOKENS_IDS]
            ]
            logits_V[min_tokens_ids.long()] = -torch.inf
        num_biases = numbers[StateWord.NUM_BIASES]
        biases = lists_3M[TokenList.BIAS_VALUES, :num_biases].view(torch.float32)
        logits_V[lists_3M[TokenList.BIAS_IDS, :num_biases].long()] += biases
        if numbers[StateWord.FLAGS] & StateFlag.COUNTED:
            counts_V = rows.output_counts_NV[row].float()
            for draft in sequence.drafts:
                counts_V[draft] += 1
            apply_penalties(
                logits_V,
                _bits(rows.prompt_bits_NW[row])[: rows.vocab_size],
                counts_V,
                Penalties(
                    repetition_penalty=reals[StateWord.REPETITION],
                    presence_penalty=reals[StateWord.PRESENCE],
                    frequency_penalty=reals[StateWord.FREQUENCY],
                ),
            )

    def _choose(
        self, logits_V: torch.Tensor, sequence: _Sequence, numbers: list[int], mode: SamplingMode
    ) -> int:
        state = self.rows.state_NX[sequence.row]
        if numbers[StateWord.FLAGS] & StateFlag.GREEDY:
            return int(logits_V.argmax())
        logits_1V = (logits_V / state.view(torch.float32)[StateWord.TEMPERATURE])[None]
        seed_1 = state[StateWord.SEED_LOW : StateWord.SEED_HIGH + 1].clone().view(torch.int64)
        position_1 = torch.tensor([sequence.seq_len])
        top_k_1 = state[StateWord.TOP_K].long()[None]
        top_p_1 = state.view(torch.float32)[StateWord.TOP_P][None]
        min_p_1 = state.view(torch.float32)[StateWord.MIN_P][None]
        if mode is SamplingMode.PLAIN or not (top_k_1 > 0 or top_p_1 < 1 or min_p_1 > 0):
            return int(sample_from_all(logits_1V, seed_1, position_1))
        limits = SamplingLimits(top_k_R=top_k_1, top_p_R=top_p_1, min_p_R=min_p_1)
        return int(sample_truncated(logits_1V, seed_1, position_1, limits))

    def _report(self, raw_V: torch.Tensor, token_id: int, sample_index: int, number: int) -> None:
        out = self.results
        logprobs_V = raw_V if self.reports_logits else raw_V.log_softmax(dim=0)
        values, ids = (each[:number] for each in logprobs_V.sort(descending=True, stable=True))
        out.logprob_ids_CN[sample_index, 0] = token_id
        out.logprob_ids_CN[sample_index, 1 : number + 1] = ids
        out.logprobs_CN[sample_index, 0] = logprobs_V[token_id]
        out.logprobs_CN[sample_index, 1 : number + 1] = values
        out.ranks_C[sample_index] = (logprobs_V > logprobs_V[token_id]).sum() + 1


def _bits(words_W: torch.Tensor) -> torch.Tensor:
    """The bits of int32 words, lowest first, as bool."""
    shifts = torch.arange(WORD_BITS, dtype=torch.int32)
    return ((words_W[:, None] >> shifts) & 1).flatten().bool()
