"""What a step needs on the device beside the model: its inputs and its sampling.

The tests hold it against a specification in torch (`tests/kernels/torch_device_steps.py`).

    packed step --> apply_row_updates --> rows (tokens, block tables, sampling state)
         |                                  |                ^
         +----------> prepare_step <--------+                | append_sampled
                          |                                  |
                     StepTensors --> model --> logits --> sample --> tokens, log-probabilities
"""

import enum
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

import torch

from kernels.interface.sampling_rows import SamplingRows, StepResults
from kernels.interface.step_inputs import DeviceRows, PackedLayout, StepTensors


class SamplingMode(enum.Enum):
    """What the sampled rows of a step need together. Few, because each is a CUDA graph a bucket."""

    PLAIN = "plain"
    """Greedy, or sampled from the whole distribution."""
    TRUNCATED = "truncated"
    """top_k, top_p or min_p somewhere."""
    FULL = "full"
    """Anything."""


RowFunction = Callable[[torch.Tensor], torch.Tensor]
"""Of a row of logits, float32 [V], to another, which does not wait for the device."""


@dataclass(frozen=True, slots=True)
class LogitMasks:
    """What rows of logits may give. `bits_RW`: int32, W = ceil(V / 32), rows contiguous: bit t % 32
    of word t // 32 allows token t. `is_masked_R`: bool, of which rows they are looked at."""

    bits_RW: torch.Tensor
    is_masked_R: torch.Tensor


class StepSampler(Protocol):
    """Chooses the tokens of steps, and has the memory for it."""

    @property
    def rows(self) -> SamplingRows: ...

    @property
    def results(self) -> StepResults:
        """The results of the last `sample`, on the device."""

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
        """One token for each sampled sequence of the packed step, into `results`. Returns the
        logits that log-probabilities are of: those that were given, or processed ones.

            raw logits -> masks -> allowed tokens -> min_tokens -> bias -> penalties -> chains ->
            greedy rows end here -> temperature -> min_p, top_k, top_p -> the best of logits + noise

        Noise is a function of (seed, position, token), position being the index in its sequence of
        the token that is chosen. Log-probabilities and ranks are of the raw logits, unless
        `make_sampler` was told otherwise: the chosen
        token's, then those of the likeliest tokens, as many as StateWord.NUM_LOGPROBS says. Tokens
        are counted for those whose state says COUNTED, but not behind a draft that is not the token
        sampled before it; for its own penalties a row counts the drafts before it. Other entries
        are not written.

        Args:
            logits_NV: floating, row n belongs to the n-th sampled entry; rows behind them hold
                anything. Not changed.
            packed: int32, of this step.
            num_sequences: of the step, may count padding.
            mode: what the sampled rows may need; a mode that leaves out an option ignores it.
            masks: for each row of logits; only in mode FULL.
            chains: by row of logits what becomes of it; only in mode FULL.
        """


class DeviceStepOperations(Protocol):
    """The operations of a GPU runner beside `kernels.interface.operations.Operations`.

    The number of sequences is read from the packed step, on the device: so a call whose tensors are
    those of a bucket can be captured in a CUDA graph and replayed for any step that fits.
    Nothing here waits for the device. All calls of an engine go to one stream, in order: a step
    reads the tokens that the step before it appended."""

    def apply_row_updates(self, packed: torch.Tensor, rows: DeviceRows) -> None:
        """`table[row, start : start + n] = ids` for each packed update; -1 is the table of tokens.

        Args:
            packed: int32, made by `pack_step`. Updates of one buffer write no cell twice.
            rows: written in place. What is past a table's width is dropped (blocks allocated ahead
                of max_model_len).
        """

    def prepare_step(
        self,
        packed: torch.Tensor,
        layout: PackedLayout,
        rows: DeviceRows,
        out: StepTensors,
        *,
        block_size: int,
    ) -> None:
        """Gather the step's inputs from the rows: of token i of a sequence

            position = computed + i     token = tokens[row, position]
            slot = table[row, position // S] * S + position % S

        Args:
            packed: int32, made by `pack_step` with `layout`.
            rows: read; every update of this step is in them.
            out: overwritten. Its sizes, at least the step's, decide how much padding there is.
        """

    def append_sampled(
        self,
        packed: torch.Tensor,
        layout: PackedLayout,
        token_ids_N: torch.Tensor,
        rows: DeviceRows,
        *,
        num_sequences: int,
    ) -> None:
        """`tokens[row, seq_len] = token_ids_N[sample]` for each sampled entry of the step. What is
        written behind the first draft that is not accepted is no token of the row.

        Args:
            packed: of the step that sampled.
            token_ids_N: int32 or int64, in order. A token for which a row has no room (position
                max_model_len) is dropped.
            rows: `token_ids` is written in place.
            num_sequences: of the step, may count padding.
        """

    def make_sampler(
        self,
        *,
        num_rows: int,
        num_logits: int,
        vocab_size: int,
        device: torch.device,
        reports_processed: bool = False,
        reports_logits: bool = False,
    ) -> StepSampler:
        """With memory for `num_rows` rows of the persistent batch, and for `num_logits` rows of
        logits a step: one for each of these rows, and one for each draft.

        Args:
            reports_processed: log-probabilities are of what is drawn from; greedy rows' logits are
                divided by no temperature. Only mode FULL knows them.
            reports_logits: these logits are reported in place of log-probabilities.
        """
