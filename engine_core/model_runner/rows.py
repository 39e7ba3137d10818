"""Which sequence has which row of a runner's batch; the scheduler chooses it, and a sequence keeps
it from step to step. What it asked for is also kept while it has none."""

import dataclasses
from collections.abc import Iterator, Sequence

from engine_core.kv_cache import BlockIds
from engine_core.model_runner.config import RunnerConfig
from engine_core.model_runner.sampling_params import ResolvedSampling, Seeds, resolve_sampling
from engine_core.scheduler import SchedulerOutput
from engine_core.scheduler.plan import NewRequestData, ResumedRequestData
from engine_core.scheduler.records.prompt_content import EmbeddedRows, MultiModalFeature
from protocol.pooling import PoolingParams


@dataclasses.dataclass(frozen=True, slots=True)
class RowRequest:
    """What a sequence asked for; kept until it has finished, with a row or preempted.
    `adapter`: its fingerprint."""

    sampling: ResolvedSampling
    adapter: str | None = None
    prompt_embeds: tuple[EmbeddedRows, ...] = ()
    mm_features: tuple[MultiModalFeature, ...] = ()
    pooling: PoolingParams | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class PlacedRow:
    """A new or resumed sequence; its row is written anew. `token_ids`: prompt, then output."""

    row: int
    token_ids: list[int]
    block_ids: BlockIds
    num_computed_tokens: int
    request: RowRequest

    @property
    def num_known(self) -> int:
        """Tokens with which it is sampled. One that is pooled never catches up with it."""
        return len(self.token_ids) + (self.request.pooling is not None)


class TableWrites:
    """Where a plan's block ids stand in a row's tables. They count through all pools, kernels index
    the tensors of one."""

    def __init__(self, config: RunnerConfig) -> None:
        first_ids = config.block_ids.first_ids
        self._offsets = [first_ids[group.spec.pool] - 1 for group in config.layout.groups]

    def of(self, block_ids: Sequence[Sequence[int]]) -> Iterator[tuple[int, Sequence[int]]]:
        """(group, indexes) of ids, one list a group; lists behind those are for others."""
        for group, (offset, ids) in enumerate(zip(self._offsets, block_ids, strict=False)):
            if offset:
                ids = [max(0, block_id - offset) for block_id in ids]  # the null block is in each
            yield group, ids


class RunnerRows:
    """Rows for as many sequences as may run at once."""

    def __init__(self, config: RunnerConfig) -> None:
        self._eos_token_ids = config.eos_token_ids
        self._vocab_size = config.vocab_size
        self._seeds = Seeds(config.collectives, config.ops.device)
        self.row_of: dict[str, int] = {}
        """Row of each sequence that has one, by request id."""
        self._sequence_of: list[str | None] = [None] * config.max_num_seqs
        self.requests: dict[str, RowRequest] = {}
        """Requests of sequences that have not finished, by request id."""

    def free(self, plan: SchedulerOutput) -> list[int]:
        """Forget what finished and take the rows of what was preempted. Returns the freed rows."""
        for request_id in plan.finished_req_ids:
            self.requests.pop(request_id, None)
        gone = (*plan.finished_req_ids, *plan.preempted_req_ids)
        rows = [self.row_of.pop(request_id) for request_id in gone if request_id in self.row_of]
        for row in rows:
            self._sequence_of[row] = None
        return rows

    def place(self, plan: SchedulerOutput) -> list[PlacedRow]:
        """The plan's new and resumed sequences, each in a row that is free or its own."""
        for new in plan.scheduled_new_reqs:
            sampling = resolve_sampling(
                new.sampling_params,
                num_prompt_tokens=len(new.prompt_token_ids),
                eos_token_ids=self._eos_token_ids,
                vocab_size=self._vocab_size,
                draw_seed=self._seeds.draw,
            )
            self.requests[new.req_id] = RowRequest(
                sampling, new.lora_request, new.prompt_embeds, new.mm_features, new.pooling_params
            )
        placed = [
            self._place(new, [*new.prompt_token_ids, *new.output_token_ids])
            for new in plan.scheduled_new_reqs
        ]
        return placed + [self._place(again, again.token_ids) for again in plan.resumed_reqs]

    def check(self) -> None:
        """Assert that every taken row is one sequence's."""
        taken = {name: row for row, name in enumerate(self._sequence_of) if name is not None}
        assert taken == self.row_of
        assert self.row_of.keys() <= self.requests.keys()

    def _place(self, data: NewRequestData | ResumedRequestData, token_ids: list[int]) -> PlacedRow:
        request_id, row = data.req_id, data.row
        assert self._sequence_of[row] in (None, request_id), "two sequences in one row"
        assert self.row_of.get(request_id, row) == row, "one sequence in two rows"
        self.row_of[request_id] = row
        self._sequence_of[row] = request_id
        return PlacedRow(
            row, token_ids, data.block_ids, data.num_computed_tokens, self.requests[request_id]
        )
