"""Plans by hand: stands where the scheduler stands, with as many blocks as it likes.

Owns rows, blocks and counts of the sequences it was told of, so that a test names only what its
step is about. Uses only the runner's interface.
"""

import dataclasses
import random

import numpy as np

from engine_core.kv_cache import CacheCopies
from engine_core.scheduler.plan import (
    BlockUpdate,
    NewRequestData,
    ResumedRequestData,
    ScheduledBatch,
    SchedulerOutput,
)


@dataclasses.dataclass
class Line:
    """One sequence."""

    row: int
    num_prompt_tokens: int
    num_computed: int
    tables: list[list[int]]


class Plans:
    def __init__(self, *, num_groups, num_blocks=150, block_size=4, max_num_seqs=8):
        self.num_groups = num_groups
        self.block_size = block_size
        self.lines: dict[str, Line] = {}
        self.free_blocks = list(range(1, num_blocks + 1))
        random.Random(0).shuffle(self.free_blocks)
        self.free_rows = random.Random(1).sample(range(max_num_seqs), max_num_seqs)
        self.step_id = 0
        self.adapters: dict[str, str] = {}
        """By sequence."""
        self._new, self._resumed, self._updates = [], [], []
        self._finished, self._preempted = [], []
        self.swap_in, self.swap_out, self.copy = [], [], []

    # ------------------------------------------------------------------ what the next plan tells

    def add(self, name, prompt, params, *, output=(), tables=None, computed=0):
        """A new sequence, whose tables begin with `tables`."""
        self._place(name, len(prompt), tables, computed)
        self._new.append((name, list(prompt), list(output), params))

    def resume(self, name, token_ids, *, tables=None, computed=0):
        """A known sequence goes on with these tokens, in its row if it has one."""
        self._place(name, None, tables, computed)
        self._resumed.append((name, list(token_ids)))

    def update(self, name, start, block_ids):
        """Ids to be replaced or added, one list a group."""
        line = self.lines[name]
        for table, ids in zip(line.tables, block_ids, strict=True):
            table[start : start + len(ids)] = ids
        self._updates.append(BlockUpdate(name, line.row, start, tuple(block_ids)))

    def finish(self, name):
        self._finished.append(name)
        self.free_rows.append(self.lines.pop(name).row)

    def preempt(self, name):
        self._preempted.append(name)
        self.free_rows.append(self.lines[name].row)
        self.lines[name].row = -1

    def take_blocks(self, number):
        return [self.free_blocks.pop() for _ in range(number)]

    # ------------------------------------------------------------------ the plan

    def plan(self, counts, *, drafts=None) -> SchedulerOutput:
        """Run `counts[name]` tokens of each, in that order; blocks are given as needed."""
        fresh = {name for name, *_ in self._new} | {name for name, _ in self._resumed}
        for name, count in counts.items():
            self._cover(name, count, tell=name not in fresh)
        lines = [self.lines[name] for name in counts]
        plan = SchedulerOutput(
            step_id=self.step_id,
            batch=ScheduledBatch(
                req_ids=list(counts),
                rows=np.array([line.row for line in lines], np.int64),
                num_computed_tokens=np.array([line.num_computed for line in lines], np.int32),
                num_scheduled_tokens=np.array(list(counts.values()), np.int32),
            ),
            scheduled_new_reqs=[self._new_data(*new) for new in self._new],
            resumed_reqs=[self._resumed_data(*again) for again in self._resumed],
            block_updates=self._updates,
            copies=CacheCopies(swap_in=self.swap_in, swap_out=self.swap_out, copy=self.copy),
            total_num_scheduled_tokens=sum(counts.values()),
            scheduled_spec_decode_tokens=drafts or {},
            finished_req_ids=self._finished,
            preempted_req_ids=self._preempted,
            num_output_tokens=np.zeros(len(lines), np.int32),
        )
        for name, count in counts.items():
            self.lines[name].num_computed += count
        self.step_id += 1
        self._new, self._resumed, self._updates = [], [], []
        self._finished, self._preempted = [], []
        self.swap_in, self.swap_out, self.copy = [], [], []
        return plan

    def _place(self, name, num_prompt_tokens, tables, computed):
        known = self.lines.get(name)
        row = known.row if known is not None and known.row >= 0 else self.free_rows.pop()
        if num_prompt_tokens is None:
            num_prompt_tokens = known.num_prompt_tokens
        tables = [list(table) for table in tables or [[] for _ in range(self.num_groups)]]
        self.lines[name] = Line(row, num_prompt_tokens, computed, tables)

    def _cover(self, name, count, *, tell):
        line = self.lines[name]
        width = -(-(line.num_computed + count) // self.block_size)
        start = len(line.tables[0])
        if width > start:
            more = tuple(self.take_blocks(width - start) for _ in line.tables)
            for table, ids in zip(line.tables, more, strict=True):
                table += ids
            if tell:
                self._updates.append(BlockUpdate(name, line.row, start, more))

    def _new_data(self, name, prompt, output, params):
        line = self.lines[name]
        return NewRequestData(
            req_id=name,
            prompt_token_ids=prompt,
            output_token_ids=output,
            mm_features=[],
            sampling_params=params,
            block_ids=tuple(list(table) for table in line.tables),
            num_computed_tokens=line.num_computed,
            lora_request=self.adapters.get(name),
            row=line.row,
        )

    def _resumed_data(self, name, token_ids):
        line = self.lines[name]
        tables = tuple(list(table) for table in line.tables)
        return ResumedRequestData(name, line.row, token_ids, tables, line.num_computed)


class Drive:
    """Plans, run at once; keeps what each sequence was given."""

    def __init__(self, runner, **options):
        self.runner = runner
        config = runner.config
        sizes = {"num_groups": config.num_groups, "block_size": config.block_size}
        self.plans = Plans(**sizes | options)
        self.tokens: dict[str, list[int]] = {}
        self.logprobs: dict[str, list] = {}

    def add(self, name, prompt, params, *, output=(), **where):
        self.tokens[name] = [*prompt, *output]
        self.plans.add(name, prompt, params, output=output, **where)

    def step(self, counts):
        """Run one plan. Returns the runner's answer; sampled tokens are appended."""
        output = self.runner.execute(self.plans.plan(counts))
        self.runner.rows.check()
        for name, token_id in zip(output.req_ids, output.sampled_token_ids, strict=True):
            needs_sampling = self.plans.lines[name].num_computed == len(self.tokens[name])
            if needs_sampling and name not in output.failures:
                self.tokens[name].append(int(token_id))
        for name, columns in (output.logprobs or {}).items():
            self.logprobs.setdefault(name, []).append(columns)
        return output

    def decode(self, *names, steps=1):
        for _ in range(steps):
            self.step(dict.fromkeys(names, 1))
