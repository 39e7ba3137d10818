"""A head that makes drafts in the runner of its target."""

import numpy as np
import torch

from engine_core.model_runner.cache import BlockStorage, PagedKVCache
from engine_core.model_runner.config import RunnerConfig
from engine_core.model_runner.cpu.drafter import BoolArray, Drafter, DraftSampling
from engine_core.model_runner.cpu.input_batch import StepInputs, gather_step_inputs
from engine_core.model_runner.row_parts import Int64Array
from engine_core.models.decoder import decoder_of
from engine_core.models.heads.head import DraftHead
from engine_core.scheduler import SchedulerOutput
from engine_core.scheduler.runner_output import DraftTokenIds
from kernels.interface.operations import ForwardContext


class HeadDrafter(Drafter):
    """For a sequence of which the step has computed t2 t3 and sampled t4:

        position      2   3 | 4   5          a head's position holds its pass over the token
        token        t3  t4 | d5  d6         behind it, and the target's state of its own
        state        h2  h3 | g3  g4         where there is none, the head's own of the pass before
        guess             d5| d6  d7

    The head remembers in each step what the target computes in it, so a block that the target has
    filled holds the head's keys and values too, for whoever finds it. Only where another text goes
    on behind a shared prefix has the prefix's last position a wrong token in the head, and its
    state is gone. Rejected drafts are written over before they are read, as the target's are.
    """

    def __init__(
        self,
        config: RunnerConfig,
        storage: BlockStorage,
        sampling: DraftSampling,
        *,
        num_captured_tokens: int = 0,
    ) -> None:
        """`num_captured_tokens`: most of a pass that is captured once and replayed."""
        super().__init__(sampling)
        assert config.draft is not None and isinstance(config.draft.model, DraftHead)
        self._head = config.draft.model
        self._target = decoder_of(config.model, "drafts")
        self._target.keep_states(self._head.state_layers)
        self._cache = PagedKVCache(config, storage, config.draft)
        self._last_position = config.max_model_len - 1
        shape = (num_captured_tokens, config.model.spec.hidden_size)
        self._kept = [
            torch.zeros(shape, dtype=config.dtype, device=config.ops.device)
            for _ in self._head.state_layers
        ]
        """[token, E] each: states of passes that are short enough, at one address."""

    def propose(
        self, plan: SchedulerOutput, inputs: StepInputs, is_sampled: BoolArray
    ) -> DraftTokenIds | None:
        rows_T = np.repeat(inputs.rows_R, np.diff(inputs.query_start_R1))
        # behind a sequence's last token stands any
        next_T = np.minimum(inputs.positions_T + 1, self._last_position)
        states, num_tokens = self._target.states, len(rows_T)
        if num_tokens <= len(self._kept[0]):
            states = tuple(kept[:num_tokens] for kept in self._kept)
        hidden_TE = self._head.combine(states)
        begun = self._remember(
            self.batch.token_ids[rows_T, next_T],
            inputs.positions_T,
            hidden_TE,
            inputs.context_in(self._cache),
        )
        num_wanted = self.sampling.num_wanted(plan, is_sampled)
        places = np.flatnonzero(num_wanted)
        if not len(places):
            return None
        rows = plan.batch.rows[places]
        positions = self.batch.num_tokens[rows] - 2
        _, index_of = np.unique(inputs.place_R, return_index=True)  # the first of several
        first_R = inputs.query_start_R1[index_of[places]]
        last_R = self._cache.sent(first_R + positions - inputs.positions_T[first_R])
        context = self._inputs(rows, positions).context_in(self._cache)
        logits_RV, hidden_RE = self._head.guess([part[last_R] for part in begun], context)

        def go_on(is_left: BoolArray, rows: Int64Array, positions: Int64Array) -> torch.Tensor:
            nonlocal hidden_RE
            inputs = self._inputs(rows, positions - 1)
            context = inputs.context_in(self._cache)
            begun = self._remember(
                self.batch.token_ids[rows, positions],
                inputs.positions_T,
                hidden_RE[self._cache.sent(is_left)],
                context,
            )
            logits_RV, hidden_RE = self._head.guess(begun, context)
            return logits_RV

        drafts = self.sampling.sample(rows, num_wanted[places], logits_RV, go_on)
        return DraftTokenIds([plan.batch.req_ids[place] for place in places.tolist()], drafts)

    def _inputs(self, rows: Int64Array, positions: Int64Array) -> StepInputs:
        """One position of each row."""
        computed, ones = positions.astype(np.int32), np.ones(len(rows), np.int32)
        return gather_step_inputs(self.batch, rows=rows, num_computed=computed, num_scheduled=ones)

    def _remember(
        self,
        token_ids_T: np.ndarray,
        positions_T: Int64Array,
        hidden_TE: torch.Tensor,
        context: ForwardContext,
    ) -> tuple[torch.Tensor, ...]:
        token_ids, positions = token_ids_T.astype(np.int64), positions_T
        sent = self._cache.sent
        return self._head.remember(sent(token_ids), sent(positions), hidden_TE, context)

    def keep_states(self) -> None:
        for kept, state in zip(self._kept, self._target.states, strict=True):
            if len(state) <= len(kept):
                kept[: len(state)] = state

    def compute_nothing(self, counts: list[int]) -> None:
        number, num_rows = len(counts), len(self.batch.num_tokens)
        inputs = gather_step_inputs(
            self.batch,
            rows=np.arange(number) % num_rows,
            num_computed=np.zeros(number, np.int32),
            num_scheduled=np.array(counts, np.int32),
        )
        shape = (len(inputs.positions_T), self._target.spec.hidden_size)
        states = [kept.new_zeros(shape) for kept in self._kept]
        context = inputs.context_in(self._cache)
        begun = self._remember(
            inputs.token_ids_T, inputs.positions_T, self._head.combine(states), context
        )
        rows = np.arange(min(number, num_rows))
        last_R = self._cache.sent(inputs.query_start_R1[1:][rows].astype(np.int64) - 1)
        context = self._inputs(rows, np.array(counts)[rows] - 1).context_in(self._cache)
        self._head.guess([part[last_R] for part in begun], context)
