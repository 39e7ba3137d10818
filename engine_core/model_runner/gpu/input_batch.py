"""The host's side of the device's rows: what a plan changes in them, and columns to plan steps by.
Tokens are counted when the step that chooses them is launched: the host knows how many there are
before it knows which."""

import dataclasses
from collections.abc import Iterable

import numpy as np
import numpy.typing as npt

from engine_core.kv_cache import BlockIds
from engine_core.model_runner.config import RunnerConfig
from engine_core.model_runner.row_parts import Int32Array, Int64Array, RowParts
from engine_core.model_runner.rows import PlacedRow, RunnerRows, TableWrites
from engine_core.model_runner.sampler_chain import RowChain
from engine_core.model_runner.sampling_params import ResolvedSampling
from engine_core.scheduler import SchedulerOutput
from engine_core.scheduler.records.prompt_content import token_ranges
from kernels.interface.sampling_rows import (
    MAX_DEVICE_LOGPROBS,
    MAX_LISTED_TOKENS,
    NUM_STATE_WORDS,
    WORD_BITS,
    StateFlag,
    StateWord,
    TokenList,
    num_mask_words,
)
from kernels.interface.step_inputs import TOKEN_TABLE, RowUpdate


@dataclasses.dataclass(frozen=True, slots=True)
class PenaltyRow:
    """A row whose penalties count its tokens anew: the prompt's ranges and [num_prompt_tokens,
    num_tokens) of the row, as they are once the updates are carried out."""

    row: int
    prompt_ranges: list[slice]
    num_prompt_tokens: int
    num_tokens: int


@dataclasses.dataclass(slots=True)
class RowChanges:
    """Changes of rows that are written on the device before a step."""

    rows: list[RowUpdate] = dataclasses.field(default_factory=list)
    """Updates of tokens and block tables; no two write one cell."""
    sampling: list[RowUpdate] = dataclasses.field(default_factory=list)
    """Updates of sampling states (as the table of tokens) and lists; no two write one cell."""
    penalties: list[PenaltyRow] = dataclasses.field(default_factory=list)


class GPUInputBatch:
    """`rows`, `parts`: of the same runner."""

    def __init__(self, rows: RunnerRows, parts: RowParts, config: RunnerConfig) -> None:
        max_num_rows = config.max_num_seqs
        self._rows = rows
        self.parts = parts
        self._vocab_size = config.vocab_size
        self._reports_processed = config.reports_processed
        self._writes = TableWrites(config)
        self.num_tokens: Int64Array = np.zeros(max_num_rows, np.int64)
        """Tokens of each row, those in flight included; of a step with drafts one until it is known
        how many there are. Of a row that is pooled one more, so that it is never sampled."""
        self.generation: Int64Array = np.zeros(max_num_rows, np.int64)
        """[row]: grows as the row is written anew."""
        self.is_truncated: npt.NDArray[np.bool_] = np.zeros(max_num_rows, np.bool_)
        self.needs_full: npt.NDArray[np.bool_] = np.zeros(max_num_rows, np.bool_)
        self.min_length: Int64Array = np.zeros(max_num_rows, np.int64)
        self.num_logprobs: Int64Array = np.full(max_num_rows, -1, np.int64)
        self.logprob_ids: dict[int, tuple[int, ...]] = {}
        """Tokens to report, by row, of rows that name them: the host reports those."""
        self.chains: dict[int, RowChain] = {}
        """Samplers by llama.cpp's names, by row, of rows that have any."""
        self._device = config.ops.device
        self.refusals: dict[int, str] = {}
        """Why the device cannot serve a row's request, by row."""

    def update(self, plan: SchedulerOutput) -> RowChanges:
        """Do on the host what the plan says of its rows. Returns what the device has to do."""
        freed, placed = self._rows.free(plan), self._rows.place(plan)
        for row in freed:
            self.refusals.pop(row, None)
            self.chains.pop(row, None)
        changes = RowChanges()
        for each in placed:
            self._place(each, changes)
        self.parts.update(plan, freed, placed)
        for update in plan.block_updates:
            changes.rows += self._table_updates(update.row, update.start, update.block_ids)
        if plan.scheduled_spec_decode_tokens:
            for row, name in zip(plan.batch.rows.tolist(), plan.batch.req_ids, strict=True):
                if drafts := plan.scheduled_spec_decode_tokens.get(name):
                    start = int(self.num_tokens[row])
                    changes.rows.append(RowUpdate(TOKEN_TABLE, row, start, drafts))
        changes.rows = _without_overlap(changes.rows)
        return changes

    def append_tokens(self, rows: Int64Array) -> None:
        """Count a token that is being chosen for each of these rows, once if a row is named often:
        for the drafts that are accepted see `append_drafts`."""
        self.num_tokens[rows] += 1

    def append_drafts(
        self, rows: Int64Array, generations: Int64Array, num_more: Int64Array
    ) -> None:
        """Count accepted drafts too. Rows of another generation have other tokens by now."""
        is_same = self.generation[rows] == generations
        self.num_tokens[rows[is_same]] += num_more[is_same]

    def _place(self, placed: PlacedRow, changes: RowChanges) -> None:
        row, sampling = placed.row, placed.request.sampling
        packed = pack_sampling(sampling, vocab_size=self._vocab_size)
        self.num_tokens[row] = placed.num_known
        self.generation[row] += 1
        self.is_truncated[row] = sampling.is_truncated
        self.needs_full[row] = packed.needs_full or (
            self._reports_processed and sampling.num_logprobs >= 0
        )
        self.min_length[row] = sampling.min_length
        self.num_logprobs[row] = sampling.num_logprobs
        self.logprob_ids.pop(row, None)
        if sampling.logprob_ids:
            self.logprob_ids[row] = sampling.logprob_ids
        prompt_ranges = token_ranges(placed.request.prompt_embeds, sampling.num_prompt_tokens)
        self.chains.pop(row, None)
        if (chain := RowChain.of(sampling, prompt_ranges, self._device)) is not None:
            self.chains[row] = chain
        self.refusals.pop(row, None)
        if packed.refusal is not None:
            self.refusals[row] = packed.refusal
        changes.rows.append(RowUpdate(TOKEN_TABLE, row, 0, placed.token_ids))
        changes.rows += self._table_updates(row, 0, placed.block_ids)
        changes.sampling += [
            RowUpdate(table, row, 0, words) for table, words in packed.tables.items() if len(words)
        ]
        if sampling.params.has_penalties:
            changes.penalties.append(
                PenaltyRow(
                    row,
                    prompt_ranges,
                    sampling.num_prompt_tokens,
                    len(placed.token_ids),
                )
            )

    def _table_updates(self, row: int, start: int, block_ids: BlockIds) -> list[RowUpdate]:
        writes = self._writes.of(block_ids)
        return [RowUpdate(group, row, start, ids) for group, ids in writes if ids]


def _without_overlap(updates: list[RowUpdate]) -> list[RowUpdate]:
    """The same cells with their last ids, each written once; order no longer matters."""
    by_row: dict[tuple[int, int], list[RowUpdate]] = {}
    for update in updates:
        if len(update.ids):
            by_row.setdefault((update.table, update.row), []).append(update)
    result = []
    for (table, row), same_row in by_row.items():
        if len(same_row) == 1:
            result += same_row
            continue
        cells: dict[int, int] = {}
        for update in same_row:
            cells |= {update.start + offset: int(id_) for offset, id_ in enumerate(update.ids)}
        columns = np.array(sorted(cells))
        for run in np.split(columns, np.flatnonzero(np.diff(columns) != 1) + 1):
            ids = [cells[column] for column in run.tolist()]
            result.append(RowUpdate(table, row, int(run[0]), ids))
    return result


# ---------------------------------------------------------------------- sampling


@dataclasses.dataclass(frozen=True, slots=True)
class PackedSampling:
    """What a request asked of sampling, as words of its row on the device.

    Attributes:
        tables: by TOKEN_TABLE the state ([16], or with a mask of allowed tokens behind it), by
            TokenList the lists; float32 as words.
        needs_full: something that only SamplingMode.FULL carries out, in every step.
        refusal: why the device cannot serve this request.
    """

    tables: dict[int, Int32Array]
    needs_full: bool
    refusal: str | None


def num_device_logprobs(vocab_size: int) -> int:
    """Most log-probabilities a token that the device reports; for more the host does."""
    return min(MAX_DEVICE_LOGPROBS, vocab_size)


def pack_sampling(sampling: ResolvedSampling, *, vocab_size: int) -> PackedSampling:
    """See `kernels.interface.sampling_rows` for the layout."""
    params = sampling.params
    assert params.is_greedy or params.seed is not None
    on_device = 0 <= sampling.num_logprobs <= num_device_logprobs(vocab_size)
    on_device &= not sampling.logprob_ids
    biases, min_tokens_ids = params.logit_bias, sampling.min_tokens_ids
    refusal = None
    for name, number in (
        ("logit_bias", len(biases)),
        ("stop_token_ids with min_tokens", len(min_tokens_ids)),
    ):
        if number > MAX_LISTED_TOKENS:
            refusal = (
                f"{name} names {number} tokens, the device takes {MAX_LISTED_TOKENS}; name fewer"
            )
    if refusal is not None:
        biases, min_tokens_ids = {}, ()

    state = np.zeros(NUM_STATE_WORDS, np.int32)
    reals = state.view(np.float32)
    reals[StateWord.TEMPERATURE] = 1.0 if params.is_greedy else params.temperature
    reals[StateWord.TOP_P] = params.top_p
    reals[StateWord.MIN_P] = params.min_p
    reals[StateWord.REPETITION] = params.repetition_penalty
    reals[StateWord.PRESENCE] = params.presence_penalty
    reals[StateWord.FREQUENCY] = params.frequency_penalty
    seed = np.array([params.seed or 0], np.uint64).view(np.int32)
    state[StateWord.TOP_K] = sampling.top_k
    state[StateWord.SEED_LOW], state[StateWord.SEED_HIGH] = seed
    state[StateWord.NUM_LOGPROBS] = sampling.num_logprobs if on_device else -1
    state[StateWord.MIN_LENGTH] = sampling.min_length
    state[StateWord.NUM_MIN_TOKENS_IDS] = len(min_tokens_ids)
    state[StateWord.NUM_BIASES] = len(biases)
    has_mask = params.allowed_token_ids is not None
    state[StateWord.FLAGS] = (
        StateFlag.GREEDY * params.is_greedy
        | StateFlag.COUNTED * params.has_penalties
        | StateFlag.MASKED * has_mask
    )
    if params.allowed_token_ids is not None:
        state = np.concatenate([state, _mask(params.allowed_token_ids, vocab_size)])
    return PackedSampling(
        tables={
            TOKEN_TABLE: state,
            TokenList.MIN_TOKENS_IDS: np.array(min_tokens_ids, np.int32),
            TokenList.BIAS_IDS: np.array(list(biases), np.int32),
            TokenList.BIAS_VALUES: np.array(list(biases.values()), np.float32).view(np.int32),
        },
        needs_full=bool(
            params.has_penalties or biases or has_mask or on_device or sampling.chained is not None
        ),
        refusal=refusal,
    )


def _mask(token_ids: Iterable[int], vocab_size: int) -> Int32Array:
    """Bit t % 32 of word t // 32 for each token."""
    bits = np.zeros(num_mask_words(vocab_size) * WORD_BITS, np.uint8)
    bits[list(token_ids)] = 1
    return np.packbits(bits, bitorder="little").view("<i4").astype(np.int32)
