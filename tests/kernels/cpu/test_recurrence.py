"""Recurrent layers in blocks against transformers' token-by-token rules, however steps are cut."""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers.models.qwen3_5.modeling_qwen3_5 import torch_recurrent_gated_delta_rule

from kernels.cpu.library import load_library
from kernels.cpu.operations import CpuOperations
from kernels.interface.kv_cache import StateShape
from kernels.interface.operations import AttentionMetadata
from kernels.interface.recurrence import (
    ConvolutionParams,
    GatedNormParams,
    RecurrenceParams,
    RecurrenceShape,
    RecurrentCache,
)
from kernels.torch import recurrence as torch_recurrence
from tests.kernels.cpu import instruction_sets

NUM_BLOCKS = 64
KINDS = ("torch", *instruction_sets.KINDS)


class Layer:
    """A recurrent layer with a cache of noise, as blocks that others have left."""

    def __init__(self, rule, *, block_size=4, key_size=8, value_size=6, decay_size=1):
        self.shape = shape = RecurrenceShape(
            num_key_heads=2, num_heads=4, key_size=key_size, value_size=value_size,
            num_channels=4 * key_size + 4 * value_size, width=4, dtype=torch.float32,
            decay_size=decay_size,
        )  # fmt: skip
        self.params = RecurrenceParams(
            shape=shape, starts=(0, 2 * key_size, 4 * key_size), rate_H=torch.rand(4) + 0.1,
            bias_HD=None if rule == "plain" else torch.randn(4, decay_size), rule=rule,
            skip_H=torch.randn(4) if rule == "discretised" else None,
            normed=rule == "delta", q_scale=key_size**-0.5,
        )  # fmt: skip
        weight = torch.randn(4, shape.num_channels) / 2
        self.convolution = ConvolutionParams(shape=shape, weight_WC=weight)
        self.block_size = block_size
        rows = [((block_size, *part), dtype) for part, dtype in shape.row_parts]
        shapes, dtypes = zip(*shape.state_parts, *rows, strict=True)
        parts = StateShape(shapes, dtypes)
        blocks = torch.randn(NUM_BLOCKS, parts.block_bytes // 4).view(torch.uint8)
        self.cache = RecurrentCache(*parts.view(blocks))


class Sequence:
    """One request: its inputs, and a table that keeps what the next token needs."""

    def __init__(self, layer, num_tokens, first_block):
        self.x = torch.randn(num_tokens, layer.shape.num_channels)
        self.a = torch.randn(num_tokens, 4 * layer.shape.decay_size)
        self.b = torch.randn(num_tokens, 4)
        self.first_block, self.size = first_block, layer.block_size
        self.length = num_tokens
        self.begin()

    def begin(self):
        self.num_done = 0
        self.table = [0] * -(-self.length // self.size)

    def give(self, num_tokens):
        """The place of a step with so many; blocks within it stay null but for the last two."""
        end = self.num_done + num_tokens
        last = (end - 1) // self.size
        for block in range(self.num_done // self.size, last + 1):
            held = self.table[block] or block >= last - 1
            self.table[block] = self.first_block + block if held else 0
        return slice(self.num_done, end)


def step(ops, layer, pairs):
    """Run requests with numbers of tokens. Returns their outputs, one after another."""
    rows = [sequence for sequence, _ in pairs]
    slices = [sequence.give(num) for sequence, num in pairs]
    width = max(len(sequence.table) for sequence, _ in pairs)
    tables = [s.table + [0] * (width - len(s.table)) for s, _ in pairs]
    metadata = AttentionMetadata(
        query_start_loc_R1=torch.tensor([0, *(n for _, n in pairs)]).cumsum(0).int(),
        seq_lens_R=torch.tensor([part.stop for part in slices], dtype=torch.int32),
        block_table_RM=torch.tensor(tables, dtype=torch.int32),
        slot_mapping_T=torch.empty(0, dtype=torch.int64),
        block_size=layer.block_size,
        sliding_window=None,
        plan=None,
    )
    x, a, b = (
        torch.cat([getattr(each, name)[part] for each, part in zip(rows, slices, strict=True)])
        for name in "xab"
    )
    x, a, b = (F.pad(each, (3, 2))[:, 3:-2] for each in (x, a, b))  # columns of wider tensors
    qkv = ops.convolve(x, layer.convolution, layer.cache, metadata)
    out = ops.recur(qkv, a, b, layer.params, layer.cache, metadata)
    for (sequence, _), part in zip(pairs, slices, strict=True):
        sequence.num_done = part.stop
    return out


@pytest.fixture(scope="module")
def run_on():
    library = load_library()

    def run(kind, call):
        if kind == "torch":
            return call(torch_recurrence)
        if kind not in library.isas:
            pytest.skip(f"this machine has no {kind}")
        with library.forced_isa(kind):
            return call(CpuOperations(library))

    return run


SHAPES = [(4, 8, 6), (16, 128, 128), (16, 40, 72), (8, 16, 20)]
RULES = [("delta", 1), ("delta", 0), ("discretised", 1), ("plain", 1)]
"""Decays of a head: 0 stands for one a key's element."""


def expected_of(layer, sequence):
    """Token by token, by transformers' rule where it has one."""
    shape, params = layer.shape, layer.params
    key_size, value_size = shape.key_size, shape.value_size
    padded = F.pad(sequence.x.T[None], (3, 0))
    weight = layer.convolution.weight_WC.T[:, None]
    convolved = F.silu(F.conv1d(padded, weight, groups=len(weight)))[0].T
    q, k, v = convolved.split([2 * key_size, 2 * key_size, 4 * value_size], 1)
    q, k = (x.unflatten(1, (2, key_size)).repeat_interleave(2, 1) for x in (q, k))
    v = v.unflatten(1, (4, value_size))
    steps = torch.ones(len(v), 4, 1)
    if params.bias_HD is not None:
        steps = F.softplus(sequence.a.unflatten(1, (4, -1)) + params.bias_HD)
    decay = -params.rate_H[:, None] * steps
    if params.rule == "delta" and shape.decay_size == 1:
        return torch_recurrent_gated_delta_rule(
            q[None], k[None], v[None], g=decay[None, ..., 0], beta=sequence.b.sigmoid()[None],
            use_qk_l2norm_in_kernel=True,
        )[0][0]  # fmt: skip
    if params.normed:
        q, k = (x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6) for x in (q, k))
    state, out = torch.zeros(4, value_size, key_size).double(), []
    for t in range(len(v)):
        state = state * decay[t].double().exp()[:, None]
        u = v[t].double()
        if params.rule == "delta":
            u = u - torch.einsum("hpn,hn->hp", state, k[t].double())
            u = u * sequence.b[t].double().sigmoid()[:, None]
        elif params.rule == "discretised":
            u = u * steps[t]
        state = state + u[..., None] * k[t].double()[:, None]
        o = torch.einsum("hpn,hn->hp", state, q[t].double() * params.q_scale)
        out.append(o if params.skip_H is None else o + params.skip_H[:, None] * v[t])
    return torch.stack(out).float()


@pytest.mark.parametrize(("block_size", "key_size", "value_size"), SHAPES)
@pytest.mark.parametrize(("rule", "decay_size"), RULES)
@pytest.mark.parametrize("kind", KINDS)
def test_it_is_the_rule_token_by_token(
    run_on, kind, rule, decay_size, block_size, key_size, value_size
):
    torch.manual_seed(0)
    sizes = {"block_size": block_size, "key_size": key_size, "value_size": value_size}
    layer = Layer(rule, **sizes, decay_size=decay_size or key_size)
    sequence = Sequence(layer, 39, 1)
    out = run_on(kind, lambda ops: step(ops, layer, [(sequence, 39)])).unflatten(1, (4, -1))
    torch.testing.assert_close(out, expected_of(layer, sequence), atol=2e-6, rtol=2e-5)


@pytest.mark.parametrize("kind", KINDS)
@settings(deadline=None, max_examples=25)
@given(data=st.data(), rule=st.sampled_from(RULES), sizes=st.sampled_from(SHAPES[:3:2]))
def test_steps_of_any_sizes_and_tokens_taken_back_give_the_same_bits(
    run_on, kind, data, rule, sizes
):
    torch.manual_seed(0)
    block_size, key_size, value_size = sizes
    layer = Layer(
        rule[0], block_size=block_size, key_size=key_size, value_size=value_size,
        decay_size=rule[1] or key_size,
    )  # fmt: skip
    sequences = [Sequence(layer, 41, 1), Sequence(layer, 14, 20)]

    def check(ops):
        expected = [step(ops, layer, [(each, each.length)]) for each in sequences]
        for each in sequences:
            each.begin()
        while waiting := [i for i, each in enumerate(sequences) if each.num_done < each.length]:
            chosen = data.draw(st.lists(st.sampled_from(waiting), unique=True, min_size=1))
            chosen = [sequences[i] for i in chosen]
            counts = [data.draw(st.integers(1, each.length - each.num_done)) for each in chosen]
            pairs = list(zip(chosen, counts, strict=True))
            starts = [each.num_done for each in chosen]
            out = step(ops, layer, pairs).split([num for _, num in pairs])
            for (sequence, num), start, found in zip(pairs, starts, out, strict=True):
                right = expected[sequences.index(sequence)][start : start + num]
                if kind == "torch":  # whose silu differs by the place in a tensor
                    torch.testing.assert_close(found, right, atol=1e-6, rtol=1e-5)
                else:
                    assert torch.equal(found, right)
                # drafts that are rejected: their rows are dropped, across a block's start, too
                most = min(num - 1, sequence.num_done % block_size + block_size - 1)
                sequence.num_done -= data.draw(st.integers(0, most))

    run_on(kind, check)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("rule", "decay_size"), RULES[:3])
def test_a_request_starts_behind_a_block_that_one_before_it_fills_in_the_step(
    run_on, kind, rule, decay_size
):
    """And behind one of its own that it has begun; with other requests among them."""
    torch.manual_seed(0)
    layer = Layer(rule, decay_size=decay_size or 8)
    first, other = Sequence(layer, 12, 1), Sequence(layer, 9, 10)
    second = Sequence(layer, 12, 20)
    for name in "xab":
        getattr(second, name)[:8] = getattr(first, name)[:8]

    def run(ops):
        alone = step(ops, layer, [(second, 12)])[8:]
        second.begin()
        second.table[:2], second.num_done = [1, 2], 8
        out = step(ops, layer, [(first, 8), (other, 9), (second, 3)])[17:]
        rest = step(ops, layer, [(second, 1)])
        return alone, torch.cat([out, rest])

    alone, shared = run_on(kind, run)
    if kind == "torch":
        torch.testing.assert_close(shared, alone, atol=1e-6, rtol=1e-5)
    else:
        assert torch.equal(shared, alone)


@pytest.mark.parametrize(
    ("table", "text"),
    [
        ([1, 64, 3], "block 1 of request 1 is 64, outside the cache of 64"),
        ([1, -1, 3], "block 1 of request 1 is -1, outside the cache of 64"),
        ([1, 2, 0], "block 2 of request 1 is the null block.*state that is kept"),
        ([0, 2, 3], "block 0 of request 1 is the null block.*state that is read"),
    ],
)
def test_tables_that_cannot_be_are_refused_before_anything_is_written(run_on, table, text):
    layer = Layer("delta")
    sequences = [Sequence(layer, 9, 10), Sequence(layer, 12, 1)]
    sequences[1].num_done = 3
    sequences[1].give = lambda num_tokens: slice(3, 3 + num_tokens)
    sequences[1].table = table
    before = [part.clone() for part in layer.cache]
    pairs = [(sequences[0], 9), (sequences[1], 8)]

    def run(ops):
        with pytest.raises(ValueError, match=text):
            step(ops, layer, pairs)

    run_on("portable", run)
    assert all(map(torch.equal, layer.cache, before))


@pytest.mark.parametrize("kind", KINDS[1:])
def test_a_convolution_alone_over_a_wider_block_has_a_bias_and_no_activation(run_on, kind):
    torch.manual_seed(0)
    layer = Layer("plain")
    x = torch.randn(7, layer.shape.num_channels)
    params = ConvolutionParams(
        shape=layer.shape, weight_WC=layer.convolution.weight_WC, silu=False,
        bias_C=torch.randn(layer.shape.num_channels),
    )  # fmt: skip
    metadata = AttentionMetadata(
        query_start_loc_R1=torch.tensor([0, 7]), seq_lens_R=torch.tensor([7]),
        block_table_RM=torch.tensor([[3, 4]]), slot_mapping_T=torch.empty(0, dtype=torch.int64),
        block_size=4, sliding_window=None, plan=None,
    )  # fmt: skip
    ours = run_on(kind, lambda ops: ops.convolve(x, params, layer.cache, metadata))
    kept = [part.clone() for part in layer.cache]
    expected = torch_recurrence.convolve(x, params, layer.cache, metadata)
    torch.testing.assert_close(ours, expected, atol=1e-6, rtol=1e-6)
    assert all(map(torch.equal, layer.cache, kept))


@pytest.mark.parametrize("kind", KINDS[1:])
@pytest.mark.parametrize("activation", ["silu", "sigmoid"])
@pytest.mark.parametrize("gate_first", [False, True])
@pytest.mark.parametrize("weight_size", [21, 63])
def test_gates_and_gated_norms_are_those_of_torch(
    run_on, kind, activation, gate_first, weight_size
):
    torch.manual_seed(0)
    x, gate = torch.randn(5, 140).split([70, 70], 1)
    x, gate = x[:, :63], gate[:, 3:66]
    params = GatedNormParams(
        weight_N=torch.randn(weight_size), size=21, eps=1e-5, activation=activation,
        gate_first=gate_first, transposed=1 if gate_first else 3,
    )  # fmt: skip

    def run(ops):
        gates = [ops.gate(x, gate, each) for each in ("sigmoid", None)]
        return [ops.gated_norm(x, gate, params), *gates]

    for ours, expected in zip(run_on(kind, run), run(torch_recurrence), strict=True):
        torch.testing.assert_close(ours, expected, atol=1e-6, rtol=1e-6)
