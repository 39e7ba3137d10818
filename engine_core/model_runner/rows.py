"""Which sequence has which row of a runner's batch; the scheduler chooses it, and a sequence keeps
it from step to step. What it asked for is also kept while it has none."""

import dataclasses

from engine_core.kv_cache import BlockIds
from engine_core.model_runner.config import RunnerConfig
from engine_core.model_runner.sampling_params import ResolvedSampling, Seeds, resolve_sampling
from engine_core.scheduler import SchedulerOutput
from engine_core.scheduler.mm_features import MultiModalFeature
from engine_core.scheduler.plan import NewRequestData, ResumedRequestData
from engine_core.scheduler.prompt_embeds import EmbeddedRows
from protocol.pooling import PoolingParams


@dataclasses.dataclass(frozen=True, slots=True)
class PlacedRow:
    """A new or resumed sequence; its row is written anew. `token_ids`: prompt, then output."""

    row: int
    token_ids: list[int]
    block_ids: BlockIds
    sampling: ResolvedSampling
    adapter: str | None = None
    """Its fingerprint."""
    num_computed_tokens: int = 0
    prompt_embeds: tuple[EmbeddedRows, ...] = ()
    mm_features: tuple[MultiModalFeature, ...] = ()
    pooling: PoolingParams | None = None

    @property
    def num_known(self) -> int:
        """Tokens with which it is sampled. One that is pooled never catches up with it."""
        return len(self.token_ids) + (self.pooling is not None)


class RunnerRows:
    """Rows for as many sequences as may run at once."""

    def __init__(self, config: RunnerConfig) -> None:
        self._eos_token_ids = config.eos_token_ids
        self._vocab_size = config.vocab_size
        self._seeds = Seeds(config.collectives, config.ops.device)
        self._row_of: dict[str, int] = {}
        self._sequence_of: list[str | None] = [None] * config.max_num_seqs
        self._sampling_of: dict[str, ResolvedSampling] = {}
        """Of every sequence that has not finished, with a row or preempted."""
        self._adapter_of: dict[str, str] = {}
        """Likewise, of those that have one."""
        self._embeds_of: dict[str, tuple[EmbeddedRows, ...]] = {}
        """Likewise."""
        self._mm_features_of: dict[str, tuple[MultiModalFeature, ...]] = {}
        """Likewise."""
        self._pooling_of: dict[str, PoolingParams] = {}

    def free(self, plan: SchedulerOutput) -> list[int]:
        """Forget what finished and take the rows of what was preempted. Returns the freed rows."""
        for request_id in plan.finished_req_ids:
            self._sampling_of.pop(request_id, None)
            self._adapter_of.pop(request_id, None)
            self._embeds_of.pop(request_id, None)
            self._mm_features_of.pop(request_id, None)
            self._pooling_of.pop(request_id, None)
        gone = (*plan.finished_req_ids, *plan.preempted_req_ids)
        rows = [self._row_of.pop(request_id) for request_id in gone if request_id in self._row_of]
        for row in rows:
            self._sequence_of[row] = None
        return rows

    def place(self, plan: SchedulerOutput) -> list[PlacedRow]:
        """The plan's new and resumed sequences, each in a row that is free or its own."""
        for new in plan.scheduled_new_reqs:
            if new.lora_request is not None:
                self._adapter_of[new.req_id] = new.lora_request
            if new.prompt_embeds:
                self._embeds_of[new.req_id] = new.prompt_embeds
            if new.mm_features:
                self._mm_features_of[new.req_id] = new.mm_features
            if new.pooling_params is not None:
                self._pooling_of[new.req_id] = new.pooling_params
            self._sampling_of[new.req_id] = resolve_sampling(
                new.sampling_params,
                num_prompt_tokens=len(new.prompt_token_ids),
                eos_token_ids=self._eos_token_ids,
                vocab_size=self._vocab_size,
                draw_seed=self._seeds.draw,
            )
        placed = [
            self._place(new, [*new.prompt_token_ids, *new.output_token_ids])
            for new in plan.scheduled_new_reqs
        ]
        return placed + [self._place(again, again.token_ids) for again in plan.resumed_reqs]

    def mm_features_of(self, request_id: str) -> tuple[MultiModalFeature, ...]:
        """The images and sounds of a sequence that has not finished."""
        return self._mm_features_of.get(request_id, ())

    def check(self) -> None:
        """Assert that every taken row is one sequence's."""
        taken = {name: row for row, name in enumerate(self._sequence_of) if name is not None}
        assert taken == self._row_of
        assert self._row_of.keys() <= self._sampling_of.keys()

    def _place(self, data: NewRequestData | ResumedRequestData, token_ids: list[int]) -> PlacedRow:
        request_id, row = data.req_id, data.row
        assert self._sequence_of[row] in (None, request_id), "two sequences in one row"
        assert self._row_of.get(request_id, row) == row, "one sequence in two rows"
        self._row_of[request_id] = row
        self._sequence_of[row] = request_id
        return PlacedRow(
            row,
            token_ids,
            data.block_ids,
            self._sampling_of[request_id],
            self._adapter_of.get(request_id),
            num_computed_tokens=data.num_computed_tokens,
            prompt_embeds=self._embeds_of.get(request_id, ()),
            mm_features=self.mm_features_of(request_id),
            pooling=self._pooling_of.get(request_id),
        )
