"""A model whose keys and values can be read back: a slot holds a hash of all tokens up to it.

Stands where the model runner stands: it follows plans alone, keeps its own block tables, and
asserts before every read that each token that attention may see is in its slot, put there by the
same prefix. Its next token is a function of the prefix, so that every request has one right answer
no matter who ran beside it, what was preempted, shared or speculated.
"""

import dataclasses

from engine_core.kv_cache import NULL_BLOCK_ID, KVCacheGroupSpec
from engine_core.scheduler import DraftTokenIds, ModelRunnerOutput, SchedulerOutput

VOCAB = 5
_MODULUS = 2**61 - 1


def prefix_hashes(token_ids: list[int], salt: str | None) -> list[int]:
    value = 17 if salt is None else 1000 + len(salt) * 31 + sum(map(ord, salt))
    hashes = []
    for token_id in token_ids:
        value = (value * 1_000_003 + token_id + 1) % _MODULUS
        hashes.append(value)
    return hashes


def next_token(token_ids: list[int], salt: str | None) -> int:
    return (prefix_hashes(token_ids, salt)[-1] >> 7) % VOCAB


@dataclasses.dataclass
class _Row:
    token_ids: list[int]
    tables: list[list[int]]
    salt: str | None


class PagedModel:
    def __init__(self, groups: tuple[KVCacheGroupSpec, ...], num_blocks: int, block_size: int):
        self.groups = groups
        self.block_size = block_size
        self.memory: list[int | None] = [None] * ((num_blocks + 1) * block_size)
        self.rows: dict[str, _Row] = {}
        self.known: set[str] = set()
        self.salts: dict[str, str | None] = {}

    def execute(self, plan: SchedulerOutput) -> ModelRunnerOutput:
        starts = self._follow(plan)
        names = list(plan.num_scheduled_tokens)
        inputs = {}
        for name in names:
            row, start = self.rows[name], starts[name]
            drafts = plan.scheduled_spec_decode_tokens.get(name, [])
            tokens = row.token_ids + drafts
            stop = start + plan.num_scheduled_tokens[name]
            assert stop <= len(tokens)
            assert not drafts or stop == len(tokens)
            inputs[name] = (tokens, start, stop)
            self._write(row, tokens, start, stop)
            self._read(row, tokens, start, stop)
        for name in names:
            self._read(self.rows[name], *inputs[name])
        sampled = []
        for name in names:
            row, (tokens, _, stop) = self.rows[name], inputs[name]
            sampled.append(self._sample(row, tokens) if stop == len(tokens) else [])
            row.token_ids += sampled[-1]
        return ModelRunnerOutput(req_ids=names, sampled_token_ids=sampled)

    def draft(self, name: str, wrong: list[bool]) -> DraftTokenIds:
        """As many drafts as flags; the wrong ones are off by one."""
        row = self.rows[name]
        drafts: list[int] = []
        for is_wrong in wrong:
            token = next_token(row.token_ids + drafts, row.salt)
            drafts.append((token + is_wrong) % VOCAB)
        return DraftTokenIds(req_ids=[name], draft_token_ids=[drafts])

    # ------------------------------------------------------------------ the wire

    def _follow(self, plan: SchedulerOutput) -> dict[str, int]:
        for name in plan.finished_req_ids:
            self.rows.pop(name, None)
            self.known.discard(name)
        for name in plan.preempted_req_ids:
            del self.rows[name]
        starts = {}
        for new in plan.scheduled_new_reqs:
            assert new.req_id not in self.known
            self.known.add(new.req_id)
            tokens = new.prompt_token_ids + new.output_token_ids
            tables = [list(table) for table in new.block_ids]
            self.rows[new.req_id] = _Row(tokens, tables, self.salts[new.req_id])
            starts[new.req_id] = new.num_computed_tokens
        cached = plan.scheduled_cached_reqs
        columns = (
            cached.req_ids,
            cached.resumed_from_preemption,
            cached.new_block_ids,
            cached.num_computed_tokens,
            cached.resumed_token_ids,
        )
        for name, resumed, blocks, computed, tokens in zip(*columns, strict=True):
            starts[name] = computed
            if resumed:
                assert name in self.known
                assert name not in self.rows
                assert tokens is not None
                assert blocks is not None
                tables = [list(table) for table in blocks]
                self.rows[name] = _Row(list(tokens), tables, self.salts[name])
            elif blocks is not None:
                for table, new_blocks in zip(self.rows[name].tables, blocks, strict=True):
                    table.extend(new_blocks)
        assert starts.keys() == plan.num_scheduled_tokens.keys()
        return starts

    # ------------------------------------------------------------------ the cache

    def _slot(self, table: list[int], position: int) -> int:
        block_id = table[position // self.block_size]
        assert block_id != NULL_BLOCK_ID, f"position {position} is needed and was dropped"
        return block_id * self.block_size + position % self.block_size

    def _write(self, row: _Row, tokens: list[int], start: int, stop: int) -> None:
        hashes = prefix_hashes(tokens, row.salt)
        for group, table in enumerate(row.tables):
            for position in range(start, stop):
                self.memory[self._slot(table, position)] = hashes[position] * 8 + group

    def _read(self, row: _Row, tokens: list[int], start: int, stop: int) -> None:
        hashes = prefix_hashes(tokens, row.salt)
        for group, (spec, table) in enumerate(zip(self.groups, row.tables, strict=True)):
            window = spec.sliding_window
            first = 0 if window is None else max(0, start + 1 - window)
            for position in range(first, stop):
                assert self.memory[self._slot(table, position)] == hashes[position] * 8 + group

    def _sample(self, row: _Row, tokens: list[int]) -> list[int]:
        sampled = [next_token(row.token_ids, row.salt)]
        for draft in tokens[len(row.token_ids) :]:
            if draft != sampled[-1]:
                break
            sampled.append(next_token(row.token_ids + sampled, row.salt))
        return sampled
