"""A model whose keys and values can be read back: a slot holds a hash of all tokens up to it, a
state's block the hash at its start and behind each of its tokens, made of what stands before it.

Stands where the model runner stands: it follows plans alone, keeps its own block tables, carries
out the copies, and asserts before every read that each token that attention may see is in its slot,
put there by the same prefix. Its next token is a function of the prefix (and of the sequence's
seed), so that every sequence has one right answer no matter who ran beside it, what was preempted,
swapped, shared or speculated.
"""

import dataclasses
import struct
from collections.abc import Collection, Iterable

import numpy as np

from engine_core.kv_cache import NULL_BLOCK_ID, KVCacheGroupSpec
from engine_core.model_runner.decode_steps import run_decode_steps
from engine_core.scheduler import DraftTokenIds, ModelRunnerOutput, SchedulerOutput
from protocol.outputs import Logprobs
from protocol.pooling import PoolingParams
from protocol.sampling import SamplingParams

VOCAB = 5
_MODULUS = 2**61 - 1


_known_hashes: dict[tuple[str | None, tuple[int, ...]], list[int]] = {}
_MOST_KNOWN = 10_000


def first_hash(salt: str | None) -> int:
    return 17 if salt is None else 1000 + len(salt) * 31 + sum(map(ord, salt))


def next_hash(value: int, token_id: int) -> int:
    return (value * 1_000_003 + token_id + 1) % _MODULUS


def prefix_hashes(token_ids: list[int], salt: str | None) -> list[int]:
    """Of every prefix. Not to be changed: it is kept for the next call."""
    tokens = tuple(token_ids)
    hashes = _known_hashes.get((salt, tokens))
    if hashes is None:
        shorter = _known_hashes.get((salt, tokens[:-1])) if len(tokens) > 1 else None
        hashes = [] if shorter is None else list(shorter)
        value = hashes[-1] if hashes else first_hash(salt)
        for token_id in tokens[len(hashes) :]:
            value = next_hash(value, token_id)
            hashes.append(value)
        if len(_known_hashes) >= _MOST_KNOWN:
            _known_hashes.clear()
        _known_hashes[salt, tokens] = hashes
    return hashes


def next_token(token_ids: list[int], salt: str | None, seed: int | None = None) -> int:
    return ((prefix_hashes(token_ids, salt)[-1] ^ ((seed or 0) * 2654435761)) >> 7) % VOCAB


def log_probabilities(token_ids: list[int], salt: str | None) -> list[float]:
    """Of every token of the vocabulary behind this prefix; not normalised, and never equal."""
    value = prefix_hashes(token_ids, salt)[-1]
    return [
        -0.1 - ((value >> (9 * token)) % 512) / 100.0 - token / 1000.0 for token in range(VOCAB)
    ]


def as_column(sampled: ModelRunnerOutput, drafted: Collection[str] = ()) -> ModelRunnerOutput:
    """What stands where no token is sampled, or drafts are verified, is not read."""
    lists = dict(zip(sampled.req_ids, sampled.sampled_token_ids, strict=True))
    column = [
        token_ids[0] if token_ids and name not in drafted else -1
        for name, token_ids in lists.items()
    ]
    return dataclasses.replace(
        sampled,
        sampled_token_ids=np.array(column, np.int32),
        verified_token_ids={name: lists[name] for name in drafted},
    )


@dataclasses.dataclass
class _Row:
    name: str
    token_ids: list[int]
    tables: list[list[int]]
    params: SamplingParams
    salt: str | None
    """Of keys and values."""
    token_salt: str | None
    """Of the choice of tokens."""
    pooling: PoolingParams | None = None
    num_pooled: int = 0
    """Tokens that were computed in this row."""


class PagedModel:
    """`salts`, and `token_salts` where they differ, by request id are for the test to fill.
    `computes_in_order`: else no sequence may read a state that another writes in the same step."""

    def __init__(
        self,
        groups: tuple[KVCacheGroupSpec, ...],
        num_blocks: int,
        block_size: int,
        num_host_blocks: int = 0,
        *,
        computes_in_order: bool = True,
    ):
        self.computes_in_order = computes_in_order
        self.groups = groups
        self.block_size = block_size
        self.num_slots = block_size + 1
        """Of each block."""
        size = (num_blocks + 1 + num_host_blocks) * self.num_slots
        self.memory: list[int | None] = [None] * size
        self.rows: dict[int, _Row] = {}
        self.row_of: dict[str, int] = {}
        self.known: dict[str, SamplingParams] = {}
        self.pooling: dict[str, PoolingParams | None] = {}
        self.salts: dict[str, str | None] = {}
        self.token_salts: dict[str, str | None] = {}
        self.num_copied = [0, 0, 0]
        """Blocks copied in, out and within the device."""

    def execute(self, plan: SchedulerOutput) -> ModelRunnerOutput:
        self.follow(plan)
        if plan.num_decode_steps > 1:
            return run_decode_steps(plan, lambda one: as_column(self._run(one)))
        return self._run(plan)

    def _run(self, plan: SchedulerOutput) -> ModelRunnerOutput:
        batch = plan.batch
        inputs = {}
        entries = list(
            zip(
                batch.req_ids,
                batch.rows.tolist(),
                batch.num_computed_tokens.tolist(),
                batch.num_scheduled_tokens.tolist(),
                strict=True,
            )
        )
        if not self.computes_in_order:
            self._read_states(entries)
        for name, row_index, start, count in entries:
            row = self.rows[row_index]
            assert row.name == name
            drafts = plan.scheduled_spec_decode_tokens.get(name, [])
            tokens = row.token_ids + drafts
            stop = start + count
            assert stop <= len(tokens)
            assert not drafts or stop == len(tokens)
            inputs[row_index] = (tokens, start, stop)
            row.num_pooled += count
            self._write(row, tokens, start, stop)
            self._read(row, tokens, start, stop)
        for row_index, (tokens, start, stop) in inputs.items():
            self._read(self.rows[row_index], tokens, start, stop)
        if not self.computes_in_order:
            self._read_states(entries)
        sampled, logprobs, pooled = [], {}, {}
        for row_index, (tokens, _, stop) in inputs.items():
            row = self.rows[row_index]
            if row.pooling is not None:
                sampled.append([])
                if stop == len(tokens):
                    pooled[row.name] = np.array([row.num_pooled], np.float32)
                continue
            sampled.append(self._sample(row, tokens) if stop == len(tokens) else [])
            if sampled[-1] and row.params.logprobs is not None:
                logprobs[row.name], best = self._logprobs(row)
                sampled[-1] = [best]
            row.token_ids += sampled[-1]
        return ModelRunnerOutput(
            req_ids=batch.req_ids,
            sampled_token_ids=sampled,
            logprobs=logprobs or None,
            pooled=pooled,
        )

    def draft(self, name: str, wrong: list[bool]) -> DraftTokenIds:
        """As many drafts as flags; the wrong ones are off by one."""
        row = self.rows[self.row_of[name]]
        drafts: list[int] = []
        for is_wrong in wrong:
            token = next_token(row.token_ids + drafts, row.token_salt, row.params.seed)
            drafts.append((token + is_wrong) % VOCAB)
        return DraftTokenIds(req_ids=[name], draft_token_ids=[drafts])

    # ------------------------------------------------------------------ the plan

    def follow(self, plan: SchedulerOutput, *, with_copies: bool = True) -> None:
        for name in plan.finished_req_ids:
            self._drop(name)
            self.known.pop(name, None)
        for name in plan.preempted_req_ids:
            self._drop(name)
        if with_copies:
            self._copy(plan)
        for new in plan.scheduled_new_reqs:
            assert new.req_id not in self.known
            self.known[new.req_id] = new.sampling_params
            self.pooling[new.req_id] = new.pooling_params
            tokens = [*new.prompt_token_ids, *new.output_token_ids]
            self._enter(new.req_id, new.row, tokens, new.block_ids)
        for again in plan.resumed_reqs:
            assert again.req_id in self.known
            self._drop(again.req_id)
            self._enter(again.req_id, again.row, again.token_ids, again.block_ids)
        for update in plan.block_updates:
            row = self.rows[update.row]
            assert row.name == update.req_id
            for table, block_ids in zip(row.tables, update.block_ids, strict=True):
                assert update.start <= len(table)
                table[update.start :] = block_ids

    def _drop(self, name: str) -> None:
        row = self.row_of.pop(name, None)
        if row is not None:
            del self.rows[row]

    def _enter(self, name: str, row: int, tokens: list[int], block_ids) -> None:
        assert row not in self.rows, f"row {row} is not free"
        request_id = name.split("#")[0]
        salt = self.salts[request_id]
        token_salt = self.token_salts.get(request_id, salt)
        tables = [list(table) for table in block_ids]
        params, pooling = self.known[name], self.pooling[name]
        self.rows[row] = _Row(name, list(tokens), tables, params, salt, token_salt, pooling)
        self.row_of[name] = row

    def _copy(self, plan: SchedulerOutput) -> None:
        copies = plan.copies
        for index, pairs in enumerate((copies.swap_in, copies.swap_out, copies.copy)):
            self.num_copied[index] += len(pairs)
            for source, target in pairs:
                for offset in range(self.num_slots):
                    value = self.memory[source * self.num_slots + offset]
                    self.memory[target * self.num_slots + offset] = value

    # ------------------------------------------------------------------ the cache

    def _slot(self, table: list[int], position: int) -> int:
        """Behind a block's slots is that of the state at its start."""
        index, offset = divmod(position, self.block_size)
        assert table[index] != NULL_BLOCK_ID, f"position {position} is needed and was dropped"
        return table[index] * self.num_slots + offset

    def _state(self, row: _Row, table: list[int], tokens: list[int], stop: int) -> int:
        """Behind the first `stop` tokens, of the block of the last of them: its start and rows."""
        if not stop:
            return first_hash(row.salt)
        size = self.block_size
        start = (stop - 1) // size * size
        begin = self._slot(table, start)
        state = self.memory[begin + size]
        assert state == (prefix_hashes(tokens, row.salt)[start - 1] if start else None)
        state = first_hash(row.salt) if state is None else state
        for offset, token in enumerate(tokens[start:stop]):
            state = next_hash(state, token)
            assert self.memory[begin + offset] == state, f"{row.name}: another token's row"
        return state

    def _read_states(self, entries: Iterable[tuple[str, int, int, int]]) -> None:
        """All that the sequences of a step start from is there before any of them writes, and still
        when the last of them has written."""
        for _, row_index, start, _ in entries:
            row = self.rows[row_index]
            for spec, table in zip(self.groups, row.tables, strict=True):
                if spec.is_sparse:
                    self._state(row, table, row.token_ids, start)

    def _write(self, row: _Row, tokens: list[int], start: int, stop: int) -> None:
        """Sequences in the batch's order: one may start behind a block that another has filled in
        this step. Nothing is written to the null block."""
        hashes, size = prefix_hashes(tokens, row.salt), self.block_size
        for group, (spec, table) in enumerate(zip(self.groups, row.tables, strict=True)):
            if not spec.is_sparse:
                for position in range(start, stop):
                    self.memory[self._slot(table, position)] = hashes[position] * 8 + group
                continue
            state = self._state(row, table, tokens, start)
            for position in range(start, stop):
                block_id, offset = table[position // size], position % size
                if block_id and not offset:
                    self.memory[block_id * self.num_slots + size] = state if position else None
                state = next_hash(state, tokens[position])
                if block_id:
                    self.memory[block_id * self.num_slots + offset] = state

    def _read(self, row: _Row, tokens: list[int], start: int, stop: int) -> None:
        hashes, size = prefix_hashes(tokens, row.salt), self.block_size
        for group, (spec, table) in enumerate(zip(self.groups, row.tables, strict=True)):
            if spec.is_sparse:
                assert self._state(row, table, tokens, stop) == hashes[stop - 1]
                continue
            window = spec.reach
            first = 0 if window is None else max(0, start + 1 - window)
            expected = [value * 8 + group for value in hashes[first:stop]]
            blocks = table[first // size : -(-stop // size)]
            assert NULL_BLOCK_ID not in blocks, f"{row.name}: a block is needed and was dropped"
            found: list[int | None] = []
            for block_id in blocks:
                begin = block_id * self.num_slots
                found += self.memory[begin : begin + size]
            begin = first % size
            assert found[begin : begin + len(expected)] == expected

    def _sample(self, row: _Row, tokens: list[int]) -> list[int]:
        seed = row.params.seed
        sampled = [next_token(row.token_ids, row.token_salt, seed)]
        for draft in tokens[len(row.token_ids) :]:
            if draft != sampled[-1]:
                break
            sampled.append(next_token(row.token_ids + sampled, row.token_salt, seed))
        return sampled

    def _logprobs(self, row: _Row) -> tuple[Logprobs, int]:
        """And the likeliest token, which a greedy sampler takes."""
        values = log_probabilities(row.token_ids, row.token_salt)
        wanted = row.params.logprobs
        assert wanted is not None
        best = sorted(range(VOCAB), key=lambda token: -values[token])[:wanted]
        entries = [best[0], *best]
        columns = Logprobs(
            num_positions=1,
            width=len(entries),
            token_ids=struct.pack(f"<{len(entries)}i", *entries),
            logprobs=struct.pack(f"<{len(entries)}f", *(values[token] for token in entries)),
            ranks=[1],
        )
        return columns, best[0]
