"""A captured pass over recurrent layers has the bits of its operations one by one."""

import pytest
import torch

from kernels.cpu.operations import CpuOperations
from kernels.interface.kv_cache import KVCache, KVShape, StateShape
from kernels.interface.operations import ForwardContext
from kernels.interface.recurrence import (
    ConvolutionParams,
    GatedNormParams,
    RecurrenceParams,
    RecurrenceShape,
    RecurrentCache,
)

VOCAB, WIDTH, BLOCK, NUM_BLOCKS, KEY, VALUE = 50, 40, 4, 30, 8, 10
NUM_KEYS, NUM_VALUES = 2 * KEY, 4 * VALUE
CHANNELS = 2 * NUM_KEYS + NUM_VALUES
SHAPE = RecurrenceShape(
    num_key_heads=2, num_heads=4, key_size=KEY, value_size=VALUE, num_channels=CHANNELS, width=4,
    dtype=torch.float32,
)  # fmt: skip


@pytest.fixture
def ops(library, isa):
    return CpuOperations(library)


def weight(*shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))) * 0.2


class RecurrentModel:
    """A layer by each rule with an MLP behind; q, k, v and z are columns of one product."""

    def __init__(self, ops):
        self.ops, self.embedding, self.norm = ops, weight(VOCAB, WIDTH), weight(WIDTH)
        self.first = ops.prepare_linear(weight(CHANNELS + NUM_VALUES, WIDTH))
        self.shares = ops.prepare_linear(weight(8, WIDTH))
        self.last = ops.prepare_linear(weight(WIDTH, NUM_VALUES))
        self.gate_up = ops.prepare_linear(weight(2 * NUM_VALUES, WIDTH))
        self.convolution = ConvolutionParams(shape=SHAPE, weight_WC=weight(4, CHANNELS))
        self.rules = [
            RecurrenceParams(
                shape=SHAPE, starts=(0, NUM_KEYS, 2 * NUM_KEYS), rate_H=weight(4).abs(),
                bias_HD=None if rule == "plain" else weight(4, 1), rule=rule,
                normed=rule == "delta", skip_H=weight(4) if rule == "discretised" else None,
            )
            for rule in ("delta", "discretised", "plain")
        ]  # fmt: skip
        self.gated_norm = GatedNormParams(
            weight_N=weight(VALUE), size=VALUE, eps=1e-6, activation="silu", transposed=2
        )
        rows = [((BLOCK, *part), dtype) for part, dtype in SHAPE.row_parts]
        self.parts = StateShape(*zip(*SHAPE.state_parts, *rows, strict=True))

    def forward(self, token_ids_T, _positions_T, context):
        ops, residual = self.ops, self.ops.embedding(token_ids_T, self.embedding)
        for layer, params in enumerate(self.rules):
            metadata, cache = context.metadata[layer], RecurrentCache(*context.states[layer])
            x = ops.rms_norm(residual, self.norm, 1e-5)
            qkv, z = ops.linear(x, self.first).split([CHANNELS, NUM_VALUES], 1)
            b, a = ops.linear(x, self.shares).split([4, 4], 1)
            qkv = ops.convolve(qkv, self.convolution, cache, metadata)
            out = ops.gated_norm(ops.recur(qkv, a, b, params, cache, metadata), z, self.gated_norm)
            out = ops.gate(ops.gate(out, z, "sigmoid"), out, None)
            if layer == 2:
                out, residual = (ops.take_rows(each, context.output) for each in (out, residual))
            x, residual = ops.add_rms_norm(ops.linear(out, self.last), residual, self.norm, 1e-5)
            out = ops.linear(ops.silu_and_mul(ops.linear(x, self.gate_up)), self.last)
            residual = ops.add_rms_norm(out, residual, self.norm, 1e-5)[1]
        return residual


class Steps:
    """States and a planner as a runner has them."""

    def __init__(self, ops, model):
        no_keys = torch.empty(NUM_BLOCKS, 0)
        self.caches = [KVCache(no_keys, no_keys, KVShape(BLOCK, 0, 0, 0, torch.float32))] * 3
        self.blocks = [ops.allocate_blocks(NUM_BLOCKS, model.parts.block_bytes) for _ in range(3)]
        self.states = {layer: model.parts.view(each) for layer, each in enumerate(self.blocks)}
        self.ops = ops
        self.planner = ops.make_state_planner(BLOCK)

    def inputs(self, requests):
        """Of requests (first position, tokens)."""
        positions = torch.cat([torch.arange(at, at + count) for at, count in requests])
        tables = [[1 + 8 * r + i for i in range(8)] for r in range(len(requests))]
        metadata = self.planner.plan(
            query_start_loc_R1=torch.tensor([0, *(n for _, n in requests)]).cumsum(0).int(),
            seq_lens_R=torch.tensor([at + count for at, count in requests]).int(),
            block_table_RM=torch.tensor(tables).int(),
            slot_mapping_T=torch.zeros(len(positions), dtype=torch.int64),
            num_decodes=0,
            num_decode_tokens=0,
        )
        context = ForwardContext(self.caches, [metadata] * 3, self.ops, states=self.states)
        return positions % VOCAB, positions, context


STEPS = [[(0, 9)], [(9, 1), (0, 20)], [(10, 1), (20, 1)], [(11, 3), (21, 1), (0, 5)], [(14, 2)]]


def test_a_captured_pass_over_states_has_the_bits_of_its_operations(ops):
    model = RecurrentModel(ops)
    run = ops.capture(model.forward)
    eager, captured = Steps(ops, model), Steps(ops, model)
    for requests in STEPS:
        expected = model.forward(*eager.inputs(requests))
        assert expected.isfinite().all()
        assert torch.equal(run(*captured.inputs(requests)), expected)
        assert all(map(torch.equal, captured.blocks, eager.blocks))
    assert run.is_captured


def test_tables_of_a_captured_pass_are_checked(ops):
    model = RecurrentModel(ops)
    ids, positions, context = Steps(ops, model).inputs([(0, 9)])
    context.metadata[0].block_table_RM[0, 2] = NUM_BLOCKS
    with pytest.raises(ValueError, match="block 2 of request 0 is 30, outside the cache of 30"):
        ops.capture(model.forward)(ids, positions, context)


@pytest.mark.parametrize(
    ("extra", "reason"),
    [
        (lambda ops, x, states: x.split([3, 4], 1), "splits"),
        (
            lambda ops, x, states: ops.gate(x, x.split([10, 30], 1)[1], None),
            "is multiplied by a gate",
        ),
        (lambda ops, x, states: x.split([10, 30], 1)[1].clone(), "copies"),
    ],
)
def test_columns_that_do_not_fit_are_not_captured(library, extra, reason, caplog):
    caplog.set_level("INFO")
    ops = CpuOperations(library)

    def forward(token_ids_T, _positions_T, context):
        x = ops.embedding(token_ids_T, weight(VOCAB, WIDTH))
        if not isinstance(x, torch.Tensor):
            extra(ops, x, context.states)
        return x

    run, ids = ops.capture(forward), torch.arange(5)
    run(ids, ids, ForwardContext(kv_caches=[], metadata=[], ops=ops))
    assert run.is_captured is False
    assert reason in caplog.text
