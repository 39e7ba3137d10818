"""Runs a model over a paged cache in awkward steps, to be compared with a plain full forward.

Owns the steps: shuffled block ids, uneven chunks, several requests mixed in a step, decode. Must
not know any architecture.
"""

import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch

from engine_core.models.interface import Model
from engine_core.models.layer_cache import PagedKeys, State
from kernels.cpu.operations import CpuOperations
from kernels.interface.operations import (
    AttentionSpec,
    ForwardContext,
    Operations,
    allocate_kv_cache,
)
from kernels.torch.operations import TorchOperations
from tests.native_kernels import native_library_or_skip

sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture(scope="session", params=["torch", "native"])
def ops(request: pytest.FixtureRequest) -> Operations:
    """What serves a CPU: with the native library, and without."""
    if request.param == "torch":
        return TorchOperations()
    return CpuOperations(native_library_or_skip())


class PagedRun:
    """Sequences of known tokens, fed to a model piece by piece; keeps logits of every position."""

    def __init__(
        self,
        model: Model,
        ops: Operations,
        sequences: Sequence[list[int]],
        block_size: int,
        dtype: torch.dtype,
        num_more_blocks: int = 0,
    ) -> None:
        self.model, self.ops, self.sequences = model, ops, sequences
        self.block_size, self.dtype = block_size, dtype
        spec = model.spec
        width = max(-(-len(tokens) // block_size) for tokens in sequences)
        num_blocks = len(sequences) * width
        ids = torch.randperm(num_blocks, generator=torch.Generator().manual_seed(0)) + 1
        self.block_tables = ids.view(len(sequences), width).int()
        number, unused = num_blocks + 1 + num_more_blocks, PagedKeys(1, 8, 8)
        self.caches = [
            allocate_kv_cache(
                ops,
                number,
                (each if isinstance(each, PagedKeys) else unused).kv_shape(block_size, dtype),
            )
            for each in spec.caches
        ]
        self.states = {}
        for layer, kept in enumerate(spec.caches):
            if isinstance(kept, State):
                shape = kept.state_shape(block_size)
                garbage = torch.full((number, shape.block_bytes), 77, dtype=torch.uint8)
                self.states[layer] = shape.view(garbage)
        for layer, kept in enumerate(spec.layers):
            if isinstance(kept, PagedKeys) and kept.shares is not None:
                self.caches[layer] = self.caches[kept.shares]
        for cache in self.caches:  # what other requests left behind must not be seen
            cache.keys[1:] = cache.values[1:] = 1e4
        self.planners = {
            keys: ops.make_attention_planner(
                AttentionSpec(
                    num_query_heads=spec.num_query_heads,
                    num_kv_heads=keys.num_kv_heads,
                    head_size=keys.key_size,
                    block_size=block_size,
                    sliding_window=keys.window,
                    max_num_seqs=len(sequences),
                    max_num_batched_tokens=sum(map(len, sequences)),
                    max_model_len=max(map(len, sequences)),
                    dtype=dtype,
                    kv_dtype=dtype,
                    value_size=keys.value_size_in_keys,
                )
            )
            for keys in set(spec.caches)
            if isinstance(keys, PagedKeys)
        }
        self.state_planner = ops.make_state_planner(block_size)
        self.computed = [0] * len(sequences)
        self.logits = [torch.empty(len(s), spec.vocab_size) for s in sequences]

    def encoded(self, row_T):
        """Where tokens of these sequences find what an encoder gave."""

    def step(self, counts: dict[int, int]) -> None:
        """Run the next `counts[i]` tokens of sequence i, in that order."""
        rows = list(counts)
        starts = torch.tensor([0, *counts.values()]).cumsum(0).int()
        seq_lens = torch.tensor([self.computed[i] + n for i, n in counts.items()]).int()
        tokens, positions = [], []
        for i, count in counts.items():
            span = range(self.computed[i], self.computed[i] + count)
            positions += span
            tokens += [self.sequences[i][p] for p in span]
        positions_T = torch.tensor(positions)
        row_T = torch.repeat_interleave(torch.tensor(rows), torch.tensor(list(counts.values())))
        blocks_T = self.block_tables[row_T, positions_T // self.block_size].long()
        spec = self.model.spec
        width = -(-int(seq_lens.max()) // self.block_size)
        step = {
            "query_start_loc_R1": starts,
            "seq_lens_R": seq_lens,
            "block_table_RM": self.block_tables[rows, :width],
            "slot_mapping_T": blocks_T * self.block_size + positions_T % self.block_size,
        }
        plans = {
            keys: planner.plan(**step, num_decodes=0, num_decode_tokens=0)
            for keys, planner in self.planners.items()
        }
        other = self.state_planner.plan(**step, num_decodes=0, num_decode_tokens=0)
        context = ForwardContext(
            kv_caches=self.caches,
            metadata=[plans.get(kept, other) for kept in spec.caches],
            ops=self.ops,
            states=self.states,
            encoded=self.encoded(row_T),
        )
        with torch.inference_mode():
            hidden = self.model.forward(torch.tensor(tokens), positions_T, context)
            logits = self.model.compute_logits(hidden)
        assert logits.dtype == torch.float32
        for r, (i, count) in enumerate(counts.items()):
            done = self.computed[i]
            self.logits[i][done : done + count] = logits[starts[r] : starts[r + 1]]
            self.computed[i] += count


@pytest.fixture
def paged_logits(ops: TorchOperations) -> Callable[..., list[torch.Tensor]]:
    """(model, sequences) -> logits of every position of every sequence; `on`: other operations."""

    def run(model, sequences, *, block_size=4, dtype=torch.float32, on=ops):
        return in_awkward_steps(PagedRun(model, on, sequences, block_size, dtype))

    return run


def in_awkward_steps(paged: PagedRun) -> list[torch.Tensor]:
    """All logits of a run."""
    sequences = paged.sequences
    order = list(range(len(sequences)))
    chunks = [7, 1, 5, 3, 11, 2]
    turn = 0
    while any(paged.computed[i] < len(sequences[i]) for i in order):
        counts = {}
        for i in order if turn % 2 else reversed(order):
            left = len(sequences[i]) - paged.computed[i]
            if left and (turn + i) % 4 != 3:  # now and then a request sits a step out
                counts[i] = min(left, 1 if turn > 5 else chunks[(turn + i) % len(chunks)])
        turn += 1
        if counts:
            paged.step(counts)
    return paged.logits


@pytest.fixture
def run(capsys, monkeypatch):
    """`engine-core` with these arguments: its exit code, and what it said on stdout and stderr."""
    from engine_core import cli

    def run(*arguments):
        monkeypatch.setattr("sys.argv", ["engine-core", *arguments])
        with pytest.raises(SystemExit) as ended:
            cli.main()
        said = capsys.readouterr()
        return ended.value.code, said.out, said.err

    return run
