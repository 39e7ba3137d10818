"""Fuzzing of attention, rotation and captured steps: random requests over a random cache."""

import dataclasses

import torch

from kernels.cpu.attention import NativeAttentionPlanner
from kernels.cpu.captured_forward import CapturedForward
from kernels.cpu.kv_cache import KVCacheFormat, block_shapes
from kernels.cpu.library import NativeLibrary
from kernels.cpu.operations import CpuOperations
from kernels.cpu.weights import pack_float
from kernels.interface.kv_cache import KVCache, KVShape
from kernels.interface.operations import (
    AttentionMetadata,
    AttentionParams,
    AttentionSpec,
    ForwardContext,
    OutputRows,
    RotaryParams,
)
from tests.kernels.cpu.fuzz.products import random_weight
from tests.kernels.cpu.fuzz.random_case import RandomCase, must_refuse


def _stored(case: RandomCase, kind: KVCacheFormat, shape: tuple[int, ...]) -> torch.Tensor:
    """A cache of any content: with scales and codes of any bytes where it has them."""
    if kind is KVCacheFormat.I8:
        return case.integers(shape, 256, torch.uint8)
    values = case.numbers(*shape)
    return values.bfloat16() if kind is KVCacheFormat.BF16 else values


class _Step:
    """A random cache, the requests of a step, and their plan."""

    def __init__(self, case: RandomCase) -> None:
        self.heads_each, self.kv_heads = case.between(1, 9), case.between(1, 3)
        self.heads = self.heads_each * self.kv_heads
        self.head_size = 32 * case.between(1, 4) if case.one_in(3) else 2 * case.size(64)
        self.kv_size = self.kv_heads * self.head_size
        self.block_size = (1, 2, 4, 16, 32)[case.below(5)]
        self.window = case.size(200) if case.one_in(3) else None
        num_requests = case.between(1, 5)
        queries = [case.size(60) if case.one_in(2) else case.below(3) for _ in range(num_requests)]
        self.bidirectional = case.one_in(3)
        lengths = [count + case.below(300) * (not self.bidirectional) for count in queries]
        widths = [-(-length // self.block_size) for length in lengths]
        self.num_blocks = sum(widths) + 1
        free = torch.randperm(self.num_blocks)
        self.table = torch.full((num_requests, max(widths) + case.below(2)), -7).int()
        for r, width in enumerate(widths):
            self.table[r, :width] = free[sum(widths[:r]) : sum(widths[: r + 1])]
        self.starts = torch.tensor([0, *queries]).cumsum(0).int()
        self.lengths = torch.tensor(lengths).int()
        self.num_tokens = sum(queries)
        slots = [
            self.table[r, position // self.block_size] * self.block_size
            + position % self.block_size
            for r in range(num_requests)
            for position in range(lengths[r] - queries[r], lengths[r])
        ]
        self.slots = torch.tensor([int(slot) for slot in slots], dtype=torch.int64)
        self.positions = case.integers((self.num_tokens,), 50, torch.int64)
        self.kind = KVCacheFormat(case.below(len(KVCacheFormat)))
        dtypes = {KVCacheFormat.BF16: torch.bfloat16, KVCacheFormat.I8: torch.int8}
        kv_dtype = dtypes.get(self.kind, torch.float32)
        size = self.head_size
        shape = KVShape(self.block_size, self.kv_heads, size, size, kv_dtype)
        self.k, self.v = (
            _stored(case, self.kind, (self.num_blocks, *each)) for each in block_shapes(shape)
        )
        self.cache = KVCache(self.k, self.v, shape)
        self.spec = spec = AttentionSpec(
            num_query_heads=self.heads,
            num_kv_heads=self.kv_heads,
            head_size=self.head_size,
            block_size=self.block_size,
            sliding_window=self.window,
            max_num_seqs=num_requests,
            max_num_batched_tokens=self.num_tokens,
            max_model_len=max(lengths),
            dtype=torch.float32,
            kv_dtype=kv_dtype,
            bidirectional=self.bidirectional,
        )
        rounds = case.one_in(2)
        self.planner = NativeAttentionPlanner(spec, rounds=rounds)
        self.output_planner = NativeAttentionPlanner(spec, rounds=rounds)

    def plan(self) -> AttentionMetadata:
        return self.planner.plan(
            query_start_loc_R1=self.starts,
            seq_lens_R=self.lengths,
            block_table_RM=self.table,
            slot_mapping_T=self.slots,
            num_decodes=0,
            num_decode_tokens=0,
        )

    def output(self, case: RandomCase) -> OutputRows | None:
        """Some of the last tokens of each request; None: there are none."""
        queries = self.starts.diff()
        counts = torch.tensor([case.below(int(count) + 1) for count in queries])
        has = torch.nonzero(counts).flatten()
        if not len(has):
            return None
        stops = self.starts[1:][has].tolist()
        rows = torch.cat([torch.arange(s - n, s) for s, n in zip(stops, counts[has], strict=True)])
        metadata = self.output_planner.plan(
            query_start_loc_R1=torch.cat([torch.zeros(1), counts[has].cumsum(0)]).int(),
            seq_lens_R=self.lengths[has],
            block_table_RM=self.table[has],
            slot_mapping_T=self.slots[rows],
            num_decodes=0,
            num_decode_tokens=0,
        )
        return OutputRows(rows, metadata)


def attention(library: NativeLibrary, case: RandomCase) -> None:
    run = CpuOperations(library)
    step = _Step(case)
    q = case.numbers(step.num_tokens, step.heads, step.head_size)

    def attend() -> torch.Tensor:
        return run.paged_attention(
            q,
            step.k,
            step.v,
            step.plan(),
            AttentionParams(
                scale=0.1,
                sliding_window=step.window,
                softcap=30.0 if case.one_in(3) else None,
                sinks_H=case.numbers(step.heads) if case.one_in(3) else None,
                alibi_slopes_H=case.numbers(step.heads) if case.one_in(3) else None,
                distance_bias_HN=case.numbers(step.heads, 15) if case.one_in(3) else None,
            ),
        )

    attend()
    busy = [r for r in range(len(step.lengths)) if step.starts[r + 1] > step.starts[r]]
    if not busy:
        return
    r = busy[case.below(len(busy))]
    last = (int(step.lengths[r]) - 1) // step.block_size
    wrong: tuple[tuple[torch.Tensor, object, int], ...] = (
        (step.table, (r, last), case.index(step.num_blocks)),
        (step.lengths, r, step.table.shape[1] * step.block_size + 1),
        (step.lengths, r, int(step.starts[r + 1] - step.starts[r]) - 1),
        (step.starts, r + 1, int(step.starts[r]) - 1),
        (step.starts, len(step.lengths), step.num_tokens + 1),
        (step.starts, 0, 1),
    )
    tensor, at, value = wrong[case.below(len(wrong))]
    tensor[at] = value  # type: ignore[index]
    must_refuse(f"attention with {value} at {at}", attend)


def chosen_keys(library: NativeLibrary, case: RandomCase) -> None:
    ops, step = CpuOperations(library), _Step(case)
    if step.bidirectional:
        return
    num_heads, size, top_k = case.size(70), case.size(40), case.between(1, 90)
    value_size = case.between(1, 40)
    key_size = value_size + case.between(1, 9)
    kv_dtype = torch.bfloat16 if case.one_in(2) else torch.float32
    sizes = step.block_size, 1, key_size, value_size, kv_dtype
    shape = KVShape(*sizes, values_in_keys=True, index_size=size)
    gap = 4 * case.below(3)
    cache = ops.view_kv_cache(ops.allocate_blocks(step.num_blocks, shape.block_bytes + gap), shape)
    assert cache.index is not None
    for part in (cache.keys, cache.index.keys):
        part.copy_(case.numbers(*part.shape))
    spec = dataclasses.replace(
        step.spec,
        num_query_heads=step.heads,
        num_kv_heads=1,
        head_size=key_size,
        value_size=value_size,
        kv_dtype=kv_dtype,
        sliding_window=None,
    )
    step.planner = NativeAttentionPlanner(spec, rounds=case.one_in(2))
    index_q, q = (
        case.strided(step.num_tokens, heads * each).view(step.num_tokens, heads, each)
        for heads, each in ((num_heads, size), (step.heads, key_size))
    )
    weights, index, params = (
        case.numbers(step.num_tokens, num_heads),
        cache.index,
        AttentionParams(scale=0.1),
    )

    def choose() -> torch.Tensor:
        return ops.choose_keys(index_q, weights, index, step.plan(), top_k)

    chosen = choose()
    ops.attend_chosen(q, cache, step.plan(), params, chosen)
    behind = [
        (int(step.starts[r + 1]) - 1, int(length))
        for r, length in enumerate(step.lengths)
        if length > top_k and step.starts[r + 1] > step.starts[r]
    ]
    if behind:
        token, length = behind[case.below(len(behind))]
        chosen[token, case.below(top_k)] = case.index(length)
        must_refuse(
            f"a choice of {chosen[token]} of {length} keys",
            lambda: ops.attend_chosen(q, cache, step.plan(), params, chosen),
        )
        r = int((step.starts > token).nonzero()[0]) - 1
        step.table[r, (length - 1) // step.block_size] = case.index(step.num_blocks)
        must_refuse("a choice in a block that is not there", choose)


def rotary(library: NativeLibrary, case: RandomCase) -> None:
    run = CpuOperations(library)
    step = _Step(case)
    angles = case.numbers(50, 2 * case.between(1, step.head_size // 2))
    normed = case.one_in(2)

    def rotate() -> torch.Tensor:
        return run.rotary_and_cache(
            case.numbers(step.num_tokens, (step.heads + 2 * step.kv_heads) * step.head_size),
            step.positions,
            step.slots,
            step.cache,
            RotaryParams(
                num_query_heads=step.heads,
                head_size=step.head_size,
                cos_sin_PD=angles,
                q_norm_weight_D=case.numbers(step.head_size) if normed else None,
                k_norm_weight_D=case.numbers(step.head_size) if normed else None,
                norm_eps=1e-5,
            ),
        )

    rotate()
    if step.num_tokens:
        at = case.below(step.num_tokens)
        if case.one_in(2):
            step.positions[at] = case.index(50)
        else:
            step.slots[at] = case.index(step.num_blocks * step.block_size)
        must_refuse("a rotation with a wrong index", rotate)


def captured_step(library: NativeLibrary, case: RandomCase) -> None:
    ops = CpuOperations(library)
    step = _Step(case)
    size = case.size(64)
    heads_size = step.heads * step.head_size
    table, norm = case.numbers(case.size(50), size), case.numbers(size)
    places, pair = case.numbers(50, size), case.numbers(2, size)
    into = pack_float(library, case.numbers(heads_size + 2 * step.kv_size, size))
    back = pack_float(library, case.numbers(size, heads_size))
    half = 32 * case.size(5)  # whole panels are joined with their activation
    gate_up = random_weight(library, case, size, 2 * half)
    last = random_weight(library, case, half)
    angles = case.numbers(50, step.head_size)
    factor = torch.tensor(0.5)
    takes_rows = case.one_in(2) and not step.bidirectional
    output = step.output(case) if takes_rows else None

    def forward(ids_T: torch.Tensor, positions_T: torch.Tensor, c: ForwardContext) -> torch.Tensor:
        residual, at = ops.embedding(ids_T, table), ops.embedding(positions_T, places)
        residual, _ = ops.add_layer_norm(residual, at, pair, 1e-5)
        x = ops.activate(ops.layer_norm(residual, pair, 1e-5), "gelu")
        q = ops.rotary_and_cache(
            ops.linear(ops.rms_norm(x, norm, 1e-5), into),
            positions_T,
            c.metadata[0].slot_mapping_T,
            c.kv_caches[0],
            RotaryParams(num_query_heads=step.heads, head_size=step.head_size, cos_sin_PD=angles),
        )
        if takes_rows:
            q, residual = ops.take_rows(q, c.output), ops.take_rows(residual, c.output)
            c = c.behind_take_rows
        attended = ops.paged_attention(
            q,
            *c.kv_caches[0].parts,
            c.metadata[0],
            AttentionParams(scale=0.1, sliding_window=step.window),
        )
        out = ops.linear(attended.flatten(1), back)
        x, residual = ops.add_rms_norm(out, residual, norm, 1e-5)
        return ops.linear(ops.silu_and_mul(ops.linear(x, gate_up)), last).mul_(factor)

    captured = CapturedForward(library, forward)
    context = ForwardContext(kv_caches=[step.cache], metadata=[step.plan()], ops=ops, output=output)
    ids = case.integers((step.num_tokens,), len(table), torch.int64)
    for _ in range(2):
        out = captured(ids, step.positions, context)
        assert captured.is_captured, "a forward pass of native operations was not captured"
        num_rows = len(ids) if output is None else len(output.rows_N)
        assert out.shape == (num_rows, last.num_outputs)
    if not len(ids):
        return
    if output is not None and case.one_in(2):
        output.rows_N[case.below(len(output.rows_N))] = case.index(len(ids))
        must_refuse("an output row that is none", lambda: captured(ids, step.positions, context))
        return
    wrong, limit = ((ids, len(table)), (step.positions, 50))[case.below(2)]
    wrong[case.below(len(ids))] = case.index(limit)
    must_refuse("a step with a wrong index", lambda: captured(ids, step.positions, context))
