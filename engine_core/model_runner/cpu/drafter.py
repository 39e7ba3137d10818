"""What makes drafts in the runner, and what all these share: how many, and how they are sampled."""

from abc import ABC, abstractmethod
from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import torch

from engine_core.model_runner.config import RunnerConfig
from engine_core.model_runner.cpu.input_batch import CPUInputBatch, StepInputs
from engine_core.model_runner.cpu.sampler import CPUSampler
from engine_core.model_runner.row_parts import Int64Array, RowPart, StepPart, StepRows
from engine_core.model_runner.rows import PlacedRow
from engine_core.scheduler import DraftTokenIds, ModelRunnerOutput, SchedulerOutput

BoolArray = npt.NDArray[np.bool_]


class DraftSampling:
    """Drafts are sampled as the model's tokens are: by the sequence's parameters, and with the
    noise of (seed, position). So the better the guess, the more often both choose the same token,
    at any temperature."""

    def __init__(self, config: RunnerConfig, batch: CPUInputBatch, sampler: CPUSampler) -> None:
        self.batch = batch
        self._sampler = sampler
        self._max_model_len = config.max_model_len
        self._max_len: Int64Array = np.zeros(config.max_num_seqs, np.int64)
        """[row], length at which the sequence ends."""

    def place(self, placed: PlacedRow) -> None:
        """A sequence takes a row."""
        sampling = placed.request.sampling
        limit = sampling.num_prompt_tokens + sampling.params.max_tokens
        self._max_len[placed.row] = min(limit, self._max_model_len)

    def num_wanted(self, plan: SchedulerOutput, is_sampled: BoolArray) -> Int64Array:
        """[R] as in the plan's batch: drafts behind what the step sampled."""
        rows = plan.batch.rows
        num_wanted: Int64Array = np.zeros(len(rows), np.int64)
        if plan.num_drafts_wanted is not None:
            num_wanted = np.minimum(plan.num_drafts_wanted, plan.num_lookahead_slots)
        left = self._max_len[rows] - self.batch.num_tokens[rows] - 1
        num_wanted = np.minimum(num_wanted, left)
        num_wanted[~is_sampled | (num_wanted < 0)] = 0
        return num_wanted

    def sample(
        self,
        rows: Int64Array,
        num_wanted: Int64Array,
        logits_RV: torch.Tensor,
        go_on: Callable[[BoolArray, Int64Array, Int64Array], torch.Tensor],
    ) -> list[list[int]]:
        """Drafts behind the tokens of these rows; they stay in the rows.

        Args:
            num_wanted: [R], at least 1.
            logits_RV: behind the last token of each row.
            go_on: (is_left, rows, positions) -> logits behind drafts: of the rows given last
                time, those that are left, and where their last draft stands.
        """
        lengths = self.batch.num_tokens[rows]
        drafts: list[list[int]] = [[] for _ in rows]
        places = np.arange(len(rows))
        for number in range(int(num_wanted.max())):
            before = {index: drafts[place] for index, place in enumerate(places.tolist()) if number}
            positions = lengths[places] + number
            sampled = self._sampler.sample(logits_RV, rows[places], positions, before)
            is_left = num_wanted[places] > number + 1
            for index, (place, token_id) in enumerate(
                zip(places.tolist(), sampled.token_ids.tolist(), strict=True)
            ):
                if index in sampled.failures:
                    is_left[index] = False
                else:
                    drafts[place].append(token_id)
            self.batch.token_ids[rows[places], positions] = sampled.token_ids
            places = places[is_left]
            if not len(places):
                break
            logits_RV = go_on(is_left, rows[places], positions[is_left])
        return drafts


class DraftStep(StepPart):
    """A step in which a drafter may make drafts."""

    def __init__(self, drafter: "Drafter", plan: SchedulerOutput, inputs: StepInputs) -> None:
        self._drafter = drafter
        self._plan = plan
        self._inputs = inputs
        self._num_tokens = drafter.batch.num_tokens[plan.batch.rows]

    def begin(self) -> None:
        self._drafter.begin(self._plan, self._inputs)

    def answer(self, output: ModelRunnerOutput) -> None:
        plan, drafter = self._plan, self._drafter
        is_sampled = drafter.batch.num_tokens[plan.batch.rows] > self._num_tokens
        output.draft_token_ids = drafter.propose(plan, self._inputs, is_sampled)


class Drafter(RowPart, ABC):
    """A model that runs in the step of another, over the same rows and blocks."""

    def __init__(self, sampling: DraftSampling) -> None:
        self.batch = sampling.batch
        self.sampling = sampling

    def place(self, placed: PlacedRow) -> None:
        self.sampling.place(placed)

    def of_step(self, plan: SchedulerOutput, rows: StepRows) -> DraftStep:
        assert isinstance(rows, StepInputs)
        return DraftStep(self, plan, rows)

    def begin(self, plan: SchedulerOutput, inputs: StepInputs) -> None:
        """Rows and copies of the plan are in place, and its tokens are not computed yet."""

    @abstractmethod
    def propose(
        self, plan: SchedulerOutput, inputs: StepInputs, is_sampled: BoolArray
    ) -> DraftTokenIds | None:
        """After a step, whose tokens are in their rows. `is_sampled`: [R] as in the plan's batch,
        which got any. `inputs`: in the order of the step's tokens; on a GPU a sequence with drafts
        is several of one token each."""

    def keep_states(self) -> None:
        """Called behind each pass of a GPU's model, inside a captured one, too."""

    @abstractmethod
    def compute_nothing(self, counts: list[int]) -> None:
        """Launch what drafts launch behind a step of so many tokens of each of the first rows;
        before the first plan, as it writes to what their tables name."""
