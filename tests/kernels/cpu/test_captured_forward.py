"""A captured forward pass has the bits of its operations one by one, or is run as it is."""

import dataclasses
import re

import pytest
import torch

from kernels.cpu.linear import PackedParts
from kernels.cpu.operations import CpuOperations
from kernels.interface.operations import (
    AttentionParams,
    AttentionSpec,
    ForwardContext,
    OutputRows,
    RotaryParams,
)
from kernels.interface.special_inputs import GivenRows
from kernels.torch.operations import TorchOperations
from tests.kernels.cpu.instruction_sets import covering_sets
from tests.kernels.paged_steps import make_cache

HEADS, KV_HEADS, HEAD_SIZE, WIDTH, VOCAB, BLOCK = 9, 3, 8, 72, 50, 4
NUM_BLOCKS = 40


@pytest.fixture
def ops(library, isa):
    return CpuOperations(library)


def weight(*shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))) * 0.2


class ToyModel:
    """Two layers with everything that can be captured."""

    head_size, block, kv_dtype, num_features = HEAD_SIZE, BLOCK, torch.float32, 50
    num_blocks, model_len = NUM_BLOCKS, 64

    def __init__(self, ops, *, packed_embedding=False, window=None, extra=None):
        self.ops = ops
        self.window = window
        self.extra = extra
        self.num_calls = 0
        width = HEADS * self.head_size
        self.qkv = self.prepare_qkv(width, KV_HEADS * self.head_size)
        self.output = ops.prepare_linear(weight(width, width))
        self.gate_up = ops.prepare_linear(weight(2 * self.num_features, width))
        self.down = ops.prepare_linear(weight(width, self.num_features))
        self.norm = weight(width)
        self.head_norm = weight(self.head_size)
        self.embedding = weight(VOCAB, width)
        if packed_embedding:
            self.embedding = ops.prepare_linear(self.embedding)
        self.table = weight(self.model_len, self.head_size)
        self.scale = torch.tensor(3.3)
        self.sinks = weight(HEADS)
        self.captured = ops.capture(self.forward)

    def prepare_qkv(self, width, kv):
        parts = (self.ops.prepare_linear(weight(kv, width)) for _ in "kv")
        return PackedParts((self.ops.prepare_linear(weight(width, width), weight(width)), *parts))

    def forward(self, token_ids_T, positions_T, context):
        ops = self.ops
        self.num_calls += 1
        residual = ops.embedding(token_ids_T, self.embedding).mul_(self.scale)
        residual = ops.replace_rows(residual, context.given)
        out = None
        for layer, activate in enumerate((ops.silu_and_mul, ops.gelu_tanh_and_mul)):
            if out is None:
                x = ops.rms_norm(residual, self.norm, 1e-5)
            else:
                x, residual = ops.add_rms_norm(out, residual, self.norm, 1e-5)
            metadata = context.metadata[layer]
            q = ops.rotary_and_cache(
                ops.linear(x, self.qkv),
                positions_T,
                metadata.slot_mapping_T,
                context.kv_caches[layer],
                RotaryParams(
                    num_query_heads=HEADS,
                    head_size=self.head_size,
                    cos_sin_PD=self.table,
                    q_norm_weight_D=self.head_norm if layer else None,
                    k_norm_weight_D=self.head_norm if layer else None,
                    norm_eps=1e-6,
                ),
            )
            if layer:
                q = ops.take_rows(q, context.output)
                residual = ops.take_rows(residual, context.output)
                context = context.behind_take_rows
                metadata = context.metadata[layer]
            attended = ops.paged_attention(
                q,
                *context.kv_caches[layer].parts,
                metadata,
                AttentionParams(
                    scale=0.4,
                    sliding_window=self.window if layer else None,
                    softcap=4.0 if layer else None,
                    sinks_H=self.sinks if layer else None,
                ),
            )
            out = ops.linear(attended.flatten(1), self.output)
            x, residual = ops.add_rms_norm(out, residual, self.norm, 1e-5)
            out = ops.linear(activate(ops.linear(x, self.gate_up)), self.down)
        if self.extra is not None:
            out = self.extra(out)
        return ops.add_rms_norm(out, residual, self.norm, 1e-5)[0]


class Steps:
    """Caches and planners as a runner has them."""

    def __init__(self, ops, model):
        self.block, self.each = model.block, (model.num_blocks - 1) // 3
        self.caches = [
            make_cache(
                ops, model.num_blocks, model.block, KV_HEADS, model.head_size, model.kv_dtype
            )
            for _ in range(2)
        ]
        *self.planners, self.output_planner = [
            ops.make_attention_planner(
                AttentionSpec(
                    num_query_heads=HEADS,
                    num_kv_heads=KV_HEADS,
                    head_size=model.head_size,
                    block_size=model.block,
                    sliding_window=window,
                    max_num_seqs=8,
                    max_num_batched_tokens=200,
                    max_model_len=model.model_len,
                    dtype=torch.float32,
                    kv_dtype=model.kv_dtype,
                )
            )
            for window in (None, model.window, model.window)
        ]

    def inputs(self, requests):
        """Of requests (first position, tokens): each has a third of the blocks behind the first."""
        own = torch.arange(self.each)
        positions = torch.cat([torch.arange(at, at + count) for at, count in requests])
        table = torch.stack([own + self.each * r + 1 for r in range(len(requests))]).int()
        slots = torch.cat(
            [
                table[r, torch.arange(at, at + count) // self.block].long() * self.block
                + torch.arange(at, at + count) % self.block
                for r, (at, count) in enumerate(requests)
            ]
        )
        metadata = [
            planner.plan(
                query_start_loc_R1=torch.tensor([0, *(n for _, n in requests)]).cumsum(0).int(),
                seq_lens_R=torch.tensor([at + count for at, count in requests]).int(),
                block_table_RM=table,
                slot_mapping_T=slots.clone(),
                num_decodes=0,
                num_decode_tokens=0,
            )
            for planner in self.planners
        ]
        return positions % VOCAB, positions, ForwardContext(self.caches, metadata, self.planners)

    def putting_out(self, requests, counts):
        """Their inputs, where of each request so many of the last tokens are put out."""
        ids, positions, context = self.inputs(requests)
        whole = context.metadata[1]
        stops = torch.tensor([n for _, n in requests]).cumsum(0).tolist()
        rows = [
            row
            for stop, count in zip(stops, counts, strict=True)
            for row in range(stop - count, stop)
        ]
        has = [r for r, count in enumerate(counts) if count]
        metadata = self.output_planner.plan(
            query_start_loc_R1=torch.tensor([0, *(counts[r] for r in has)]).cumsum(0).int(),
            seq_lens_R=whole.seq_lens_R[has],
            block_table_RM=whole.block_table_RM[has],
            slot_mapping_T=whole.slot_mapping_T[rows],
            num_decodes=0,
            num_decode_tokens=0,
        )
        output = OutputRows(torch.tensor(rows), metadata)
        return ids, positions, dataclasses.replace(context, output=output)


@pytest.mark.parametrize("packed_embedding", [False, True])
def test_rows_that_a_step_gives_replace_embeddings(ops, packed_embedding):
    """In any order, and those of this step alone."""
    model = ToyModel(ops, packed_embedding=packed_embedding)
    eager, captured = Steps(ops, model), Steps(ops, model)
    plain = []
    for places in ([], [6, 0, 3], list(range(9)), []):
        given = GivenRows(torch.tensor(places, dtype=torch.int64), weight(len(places), WIDTH))
        results = []
        for steps, run in ((eager, model.forward), (captured, model.captured)):
            ids, positions, context = steps.inputs([(0, 9)])
            context = dataclasses.replace(context, given=given if places else None)
            results.append(run(ids, positions, context))
        assert torch.equal(*results)
        plain.append(results[1])
    assert model.captured.is_captured
    assert torch.equal(plain[0], plain[3])
    assert (plain[1] != plain[0])[[0, 3, 6]].any(dim=1).all()


def test_rows_given_outside_the_step_or_of_another_size_are_refused(ops):
    model = ToyModel(ops)
    steps = Steps(ops, model)
    for places, size, reason in (
        ([7], WIDTH, "row 7 is given, the step has 7"),
        ([-1], WIDTH, "row -1 is given"),
        ([0], WIDTH - 1, "given rows have 71 columns, they replace rows of 72"),
    ):
        ids, positions, context = steps.inputs([(0, 7)])
        given = GivenRows(torch.tensor(places), torch.zeros(1, size))
        with pytest.raises(ValueError, match=reason):
            model.captured(ids, positions, dataclasses.replace(context, given=given))


STEPS = [[(0, 5)], [(5, 1)], [(6, 1), (0, 30)], [(7, 40), (30, 1), (0, 2)], [(47, 1), (31, 2)]]


@pytest.mark.parametrize("packed_embedding", [False, True])
@pytest.mark.parametrize("window", [None, 6])
def test_steps_of_any_size_have_the_bits_of_single_operations(ops, packed_embedding, window):
    model = ToyModel(ops, packed_embedding=packed_embedding, window=window)
    eager, captured = Steps(ops, model), Steps(ops, model)
    results = []
    for requests in STEPS:
        expected = model.forward(*eager.inputs(requests))
        results.append((model.captured(*captured.inputs(requests)), expected))
    assert model.captured.is_captured
    assert model.num_calls == len(STEPS) + 1  # 42 tokens fit what the first step made room for
    for ours, expected in results:  # a later step has not written to an earlier one's result
        assert torch.equal(ours, expected)
    for ours, expected in zip(captured.caches, eager.caches, strict=True):
        assert all(map(torch.equal, ours.parts, expected.parts))


class PanelModel(ToyModel):
    """Where operations are run as one, or make rows ready for the product behind them: heads, and
    halves of a gated product, of whole panels."""

    num_features, num_blocks, model_len = 96, 3 * 52 + 1, 208

    def __init__(self, ops, head_size, block, kv_dtype, **options):
        self.head_size, self.block, self.kv_dtype = head_size, block, kv_dtype
        super().__init__(ops, **options)

    def prepare_qkv(self, width, kv):
        outputs = width + 2 * kv
        return self.ops.prepare_linear(weight(outputs, width), weight(outputs))


PANEL_STEPS = [
    [(0, 47), (0, 1)],
    [(47, 48)],
    [(95, 2), (1, 60), (0, 70)],
    [(97, 100), (61, 33), (70, 67)],
    [(197, 1), (94, 1), (137, 1)],
    [(95, 49)],
]
PANEL_CACHES = [
    (32, 16, torch.float32),
    (64, 4, torch.float32),
    (96, 16, torch.int8),
    (32, 4, torch.int8),
    (64, 16, torch.bfloat16),
]


def check_panel_model(library, weights, head_size, block, kv_dtype):
    ops = CpuOperations(library, linear_weights=weights)
    model = PanelModel(ops, head_size, block, kv_dtype)
    eager, captured = Steps(ops, model), Steps(ops, model)
    for requests in PANEL_STEPS:
        expected = model.forward(*eager.inputs(requests))
        assert torch.equal(model.captured(*captured.inputs(requests)), expected), requests
        for ours, theirs in zip(captured.caches, eager.caches, strict=True):
            for one, other in zip(ours.parts, theirs.parts, strict=True):
                # of int8, scales may be NaN where nothing was written
                assert torch.equal(one.view(torch.uint8), other.view(torch.uint8)), requests
    assert model.captured.is_captured


@covering_sets(weights=["float32", "bfloat16", "int8", "int4"], cache=PANEL_CACHES)
def test_layers_of_whole_panels_have_the_bits_of_single_operations(library, isa, weights, cache):
    """Rotation and cache write behind the product, rows made ready by norms and activations, on
    both sides of the rows from which two are one."""
    check_panel_model(library, weights, *cache)


@pytest.mark.parametrize("weights", ["bfloat16", "int8", "int4"])
def test_they_have_them_by_the_matrix_unit(library, matrix_isa, weights):
    check_panel_model(library, weights, 64, 16, torch.bfloat16)


PUT_OUT = [[1], [1], [0, 1], [3, 1, 0], [1, 2]]


@pytest.mark.parametrize("lends", [False, True])
@pytest.mark.parametrize("window", [None, 6])
def test_rows_that_are_put_out_have_the_bits_that_they_have_among_all(ops, window, lends):
    """Whether a step names them or not; the caches are those of all tokens."""
    model = ToyModel(ops, window=window)
    run = ops.capture(model.forward, lends=lends)
    whole, eager, captured = (Steps(ops, model) for _ in range(3))
    for requests, counts in zip(STEPS, PUT_OUT, strict=True):
        expected = model.forward(*whole.inputs(requests))
        inputs = captured.putting_out(requests, counts)
        rows = inputs[2].output.rows_N
        assert len(rows) == sum(counts)
        for ours in (run(*inputs), model.forward(*eager.putting_out(requests, counts))):
            assert torch.equal(ours, expected[rows])
        assert torch.equal(run(*captured.inputs(requests)), expected)
    assert run.is_captured
    for ours, expected in zip(captured.caches + eager.caches, 2 * whole.caches, strict=True):
        assert all(map(torch.equal, ours.parts, expected.parts))


@pytest.mark.parametrize("rows", [[7], [-1], [3, 3], [3, 2]])
def test_rows_put_out_outside_the_step_or_out_of_order_are_refused(ops, rows):
    model = ToyModel(ops)
    steps = Steps(ops, model)
    ids, positions, context = steps.putting_out([(0, 7)], [len(rows)])
    context = dataclasses.replace(
        context, output=dataclasses.replace(context.output, rows_N=torch.tensor(rows))
    )
    with pytest.raises(ValueError, match=f"output row {rows[-1]} at {len(rows) - 1} is not in "):
        model.captured(ids, positions, context)


def test_a_plan_of_other_rows_than_those_put_out_is_refused(ops):
    model = ToyModel(ops)
    steps = Steps(ops, model)
    ids, positions, context = steps.putting_out([(0, 7)], [2])
    output = dataclasses.replace(context.output, rows_N=torch.tensor([6]))
    with pytest.raises(ValueError, match="attention is planned for 2 tokens, the step has 1"):
        model.captured(ids, positions, dataclasses.replace(context, output=output))


def test_what_needs_all_tokens_behind_the_choice_of_rows_is_not_captured(ops, caplog):
    caplog.set_level("INFO")

    def forward(token_ids_T, positions_T, context):
        x = ops.take_rows(ops.embedding(token_ids_T, weight(VOCAB, WIDTH)), context.output)
        return ops.replace_rows(x, context.given)

    captured = ops.capture(forward)
    ids = torch.arange(5)
    captured(ids, ids, ForwardContext(kv_caches=[], metadata=[], ops=ops))
    assert captured.is_captured is False
    assert "it does GIVEN_ROWS behind the choice of rows" in caplog.text


def test_more_tokens_than_there_is_room_for_and_other_caches_are_captured_anew(ops):
    model = ToyModel(ops)
    steps = Steps(ops, model)
    model.captured(*steps.inputs([(0, 3)]))
    crowd = [(0, 50), (0, 50)]
    ours = model.captured(*steps.inputs(crowd))
    assert model.num_calls == 2
    other = Steps(ops, model)
    assert torch.equal(model.captured(*other.inputs(crowd)), ours)
    assert model.num_calls == 3
    assert torch.equal(other.caches[1].keys, steps.caches[1].keys)


@pytest.mark.parametrize(
    ("extra", "reason"),
    [
        (lambda x: x + 1, "__add__"),
        (lambda x: torch.ones(WIDTH) * x, "mul"),
        (torch.tanh, "tanh"),
        (lambda x: x[:, :5], "__getitem__"),
        (lambda x: x.relu(), r"\.relu"),
        (lambda x: x.mul_(torch.ones(WIDTH)), "more than one number"),
        (lambda x: x.flatten(0), "from dimension 0 on"),
    ],
)
def test_a_forward_pass_that_does_more_is_run_as_it_is_and_says_once_why(
    ops, extra, reason, caplog
):
    caplog.set_level("INFO")
    model = ToyModel(ops, extra=lambda x: (extra(x), x)[1])
    steps = Steps(ops, model)
    expected = model.forward(*Steps(ops, model).inputs([(0, 7)]))
    for _ in range(2):
        assert torch.equal(model.captured(*steps.inputs([(0, 7)])), expected)
    assert model.captured.is_captured is False
    (line,) = [record.getMessage() for record in caplog.records]
    assert re.search(f"not captured, each operation is a call: .*{reason}", line)


@pytest.mark.parametrize("error", [AttributeError, TypeError])
def test_a_bug_in_the_model_is_raised(ops, error, caplog):
    caplog.set_level("INFO")

    def broken(x):
        raise error("a bug of the model")

    model = ToyModel(ops, extra=broken)
    for _ in range(2):
        with pytest.raises(error, match="a bug of the model"):
            model.captured(*Steps(ops, model).inputs([(0, 7)]))
    assert not caplog.records


def test_attention_planned_by_torch_is_not_captured(ops, caplog):
    caplog.set_level("INFO")
    model, steps = ToyModel(ops), Steps(TorchOperations(), ToyModel(ops))
    expected = model.forward(*Steps(TorchOperations(), model).inputs([(0, 7)]))
    assert torch.equal(model.captured(*steps.inputs([(0, 7)])), expected)
    assert "attention is planned in tuple, not natively" in caplog.text


def test_a_weight_in_half_precision_is_not_captured(ops):
    model = ToyModel(ops)
    model.embedding = model.embedding.bfloat16()
    with pytest.raises(TypeError, match=r"bfloat16"):  # run as it is, dtypes do not mix
        model.captured(*Steps(ops, model).inputs([(0, 7)]))
    assert model.captured.is_captured is False


def test_what_the_library_refuses_is_an_error(ops):
    model = ToyModel(ops)
    steps = Steps(ops, model)
    token_ids, positions, context = steps.inputs([(0, 7)])
    model.captured(token_ids, positions, context)
    with pytest.raises(ValueError, match=r"token id 50 at 2 is outside the vocabulary of 50"):
        model.captured(torch.tensor([0, 1, 50, 3, 4, 5, 6]), positions, context)
    with pytest.raises(ValueError, match=r"position 64 of token 0 is outside the table"):
        model.captured(token_ids, positions + 64, context)
    with pytest.raises(ValueError, match=r"must be contiguous int64"):
        model.captured(token_ids, positions.int(), context)
    with pytest.raises(ValueError, match=r"attention is planned for 7 tokens, the step has 6"):
        model.captured(token_ids[:6], positions[:6], context)
    with pytest.raises(ValueError, match=r"slot 160 of token 6 is outside the cache"):
        context.metadata[0].slot_mapping_T[6] = NUM_BLOCKS * BLOCK
        model.captured(token_ids, positions, context)


def test_what_a_captured_pass_lends_holds_until_its_next_call(ops):
    def forward(token_ids_T, positions_T, context):
        return ops.embedding(token_ids_T, weight(VOCAB, WIDTH))

    lending, keeping = ops.capture(forward, lends=True), ops.capture(forward)
    context = ForwardContext(kv_caches=[], metadata=[], ops=ops)
    lent, kept = {}, []
    for ids in map(torch.tensor, ([3, 1, 4], [1, 5], [9, 2, 6], list(range(100)), [5, 3])):
        rows, positions = weight(VOCAB, WIDTH)[ids % VOCAB], torch.arange(len(ids))
        out = lending(ids % VOCAB, positions, context)
        assert torch.equal(out, rows)
        kept.append((keeping(ids % VOCAB, positions, context), rows))
        lent.setdefault(len(ids), []).append(out)
    assert lent[3][0] is lent[3][1], "of the same memory"
    assert all(torch.equal(out, rows) for out, rows in kept)


def gated_pass(ops, num_inputs, size, kind, *, bias=None, behind=None):
    """Embedding, product of two halves, activation. `behind`: what a model does with the halves."""

    def forward(token_ids_T, positions_T, context):
        both = ops.linear(ops.embedding(token_ids_T, table), gate_up)
        view = both.view(-1, 2, size) if behind is not None else both
        out = getattr(ops, kind)(both)
        return out if behind is None else behind(ops, both, view, out)

    table = weight(VOCAB, num_inputs)
    gate_up = ops.prepare_linear(weight(2 * size, num_inputs), bias)
    return forward


def gated_results(ops, forward, *sizes):
    """Of steps of so many tokens: as captured, and operation by operation."""
    captured = ops.capture(forward)
    context = ForwardContext(kv_caches=[], metadata=[], ops=ops)
    for num_tokens in sizes:
        ids, positions = torch.arange(num_tokens) * 7 % VOCAB, torch.arange(num_tokens)
        yield captured(ids, positions, context), forward(ids, positions, context), captured


def check_gated_products(library, weights, kind, sizes):
    ops = CpuOperations(library, linear_weights=weights)
    for num_inputs, size in sizes:
        forward = gated_pass(ops, num_inputs, size, kind, bias=weight(2 * size))
        for ours, expected, captured in gated_results(
            ops, forward, 1, 47, 48, 127, 128, 129, 200, 300, 50
        ):
            assert captured.is_captured
            assert torch.equal(ours, expected), (num_inputs, size, len(ours))


LINEAR_FORMATS = ["float32", "bfloat16", "int8", "int4"]


@covering_sets(weights=LINEAR_FORMATS, kind=["silu_and_mul", "gelu_tanh_and_mul", "gelu_and_mul"])
def test_a_product_and_its_gated_activation_as_one_have_the_same_bits(library, isa, weights, kind):
    """On both sides of the rows from which they are one, of its blocks of rows, and of what one
    task takes; with a bias in both halves; halves that are no whole panels stay two operations."""
    check_gated_products(library, weights, kind, ((72, 32), (64, 96), (130, 352), (64, 50)))


@pytest.mark.parametrize("weights", LINEAR_FORMATS)
def test_they_have_them_by_tiles_of_the_matrix_unit(library, matrix_isa, weights):
    check_gated_products(library, weights, "silu_and_mul", ((64, 96), (130, 352)))


@pytest.mark.parametrize(
    "behind",
    [
        lambda ops, both, view, out: ops.silu_and_mul(both),
        lambda ops, both, view, out: view.flatten(1),
        lambda ops, both, view, out: view.contiguous().flatten(1),
        lambda ops, both, view, out: both,
        lambda ops, both, view, out: both.clone(),
        lambda ops, both, view, out: both.mul_(torch.tensor(2.0)),
        lambda ops, both, view, out: torch.cat((out, both), 1),
    ],
)
def test_a_model_that_reads_a_product_behind_its_gated_activation_gets_it(ops, behind):
    forward = gated_pass(ops, 40, 64, "gelu_and_mul", behind=behind)
    for ours, expected, captured in gated_results(ops, forward, 60, 5):
        assert torch.equal(ours, expected)
        assert captured.is_captured is False


@pytest.mark.parametrize("weights", ["bfloat16", "int8"])
def test_an_activation_that_is_read_behind_its_product_is_there(library, weights):
    ops = CpuOperations(library, linear_weights=weights)
    table, gate_up = weight(VOCAB, 40), ops.prepare_linear(weight(128, 40))
    down, other = (ops.prepare_linear(weight(size, 64)) for size in (40, 50))
    again = ops.prepare_linear(weight(7, 40))
    for last in (
        lambda out: torch.cat((ops.linear(out, down), out), 1),
        lambda out: torch.cat((ops.linear(out, down), ops.linear(out, other)), 1),
        lambda out: torch.cat((ops.linear(out, down), out.mul_(torch.tensor(2.0))), 1),
        lambda out: ops.linear(ops.linear(out, down), again),
    ):

        def forward(token_ids_T, positions_T, context, last=last):
            return last(ops.silu_and_mul(ops.linear(ops.embedding(token_ids_T, table), gate_up)))

        for ours, expected, captured in gated_results(ops, forward, 60, 5):
            assert torch.equal(ours, expected)
            assert captured.is_captured


def test_a_product_changed_before_its_gated_activation_is_not_skipped(ops):
    def forward(token_ids_T, positions_T, context):
        both = ops.linear(ops.embedding(token_ids_T, table), gate_up).mul_(torch.tensor(3.0))
        return ops.silu_and_mul(both)

    table, gate_up = weight(VOCAB, 40), ops.prepare_linear(weight(128, 40))
    for ours, expected, captured in gated_results(ops, forward, 60):
        assert torch.equal(ours, expected)
        assert captured.is_captured


def test_a_captured_pass_calls_the_host_between_its_operations(ops):
    """Each run gives the host its step's rows; what fails there ends the pass, not the next."""
    seen, failing = [], []

    def all_reduce(x_TE):
        seen.append(x_TE.clone())
        if failing:
            raise OSError("another rank is gone")
        return x_TE.mul_(2.0)

    def forward(token_ids_T, positions_T, context):
        return ops.reduce(ops.embedding(token_ids_T, weight(VOCAB, WIDTH)), all_reduce)

    captured = ops.capture(forward)
    context = ForwardContext(kv_caches=[], metadata=[], ops=ops)
    for ids in (torch.tensor([3, 1, 4]), torch.tensor([1])):
        out = captured(ids, torch.arange(len(ids)), context)
        assert torch.equal(seen[-1], weight(VOCAB, WIDTH)[ids])
        assert torch.equal(out, 2.0 * seen[-1])
    assert captured.is_captured
    failing.append(True)
    with pytest.raises(OSError, match="another rank is gone"):
        captured(torch.tensor([2]), torch.tensor([0]), context)
    failing.clear()
    assert torch.equal(captured(torch.tensor([2]), torch.tensor([0]), context), 2.0 * seen[-1])
