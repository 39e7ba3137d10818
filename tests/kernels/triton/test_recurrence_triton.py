"""Recurrent layers on Triton against transformers' rules and the torch backend, which is the
specification: their outputs, and the records that they leave behind."""

import copy
import dataclasses

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels.interface.kv_cache import StateShape
from kernels.interface.operations import AttentionMetadata
from kernels.interface.recurrence import ConvolutionParams, GatedNormParams, RecurrentCache
from kernels.torch import recurrence as torch_recurrence
from kernels.triton.operations import TritonOperations
from tests.kernels.cpu.test_recurrence import RULES, Layer, Sequence, expected_of, step

CPU = torch.device("cpu")
OPS = {
    name: TritonOperations(CPU, batch_invariant=name == "invariant") for name in ("", "invariant")
}
SMALL = {"block_size": 4, "key_size": 8, "value_size": 6}
WIDE = {"block_size": 16, "key_size": 72, "value_size": 36}
"""Keys in three parts of 32 elements, values in three programs' and in two."""


def make_layer(rule, sizes):
    name, decay_size = rule
    return Layer(name, **sizes, decay_size=decay_size or sizes["key_size"])


def make_cache(shape, block_size, contents=None):
    """An empty cache, or one of these contents."""
    rows = [((block_size, *part), dtype) for part, dtype in shape.row_parts]
    parts = StateShape(*zip(*shape.state_parts, *rows, strict=True))
    blocks_BN = torch.zeros(64, -(-parts.block_bytes // 64) * 64, dtype=torch.uint8)
    cache = RecurrentCache(*parts.view(blocks_BN))
    for part, content in zip(cache, contents or (), strict=bool(contents)):
        part.copy_(content)
    return cache


def copied(layer):
    """With a cache of its own, of the same contents."""
    layer = copy.copy(layer)
    layer.cache = make_cache(layer.shape, layer.block_size, layer.cache)
    return layer


def of_dtype(layer, dtype):
    """A copy whose convolution has such inputs, and an empty cache."""
    layer = copy.copy(layer)
    layer.shape = dataclasses.replace(layer.shape, dtype=dtype)
    layer.params = dataclasses.replace(layer.params, shape=layer.shape)
    layer.convolution = dataclasses.replace(layer.convolution, shape=layer.shape)
    layer.cache = make_cache(layer.shape, layer.block_size)
    return layer


@pytest.mark.parametrize(
    ("rule", "sizes", "name"),
    [
        (RULES[0], WIDE, "invariant"),
        (RULES[1], SMALL, ""),
        (RULES[2], WIDE, ""),
        (RULES[3], SMALL, "invariant"),
    ],
)
def test_it_is_the_rule_token_by_token(rule, sizes, name):
    torch.manual_seed(0)
    layer = make_layer(rule, sizes)
    sequence = Sequence(layer, 35, 1)
    out = torch.cat([step(OPS[name], layer, [(sequence, num)]) for num in (18, 1, 16)])
    expected = expected_of(layer, sequence)
    torch.testing.assert_close(out.unflatten(1, (4, -1)), expected, atol=2e-6, rtol=2e-5)


def test_blocks_of_several_tiles_leave_what_the_specification_leaves():
    """Chunks that end in any tile, a decode across them; batch-invariant with equal bits."""
    torch.manual_seed(0)
    theirs = make_layer(RULES[0], SMALL | {"block_size": 32})
    sequence = Sequence(theirs, 49, 1)
    at_once = step(OPS["invariant"], copied(theirs), [(sequence, 49)])
    for name in OPS:
        sequence.begin()
        mine, again = copied(theirs), copied(theirs)
        for num in (15, 2, 31, 1):
            start = sequence.num_done
            out = step(OPS[name], mine, [(sequence, num)])
            if name == "invariant":
                assert torch.equal(out, at_once[start : start + num])
            sequence.num_done = start
            right = step(torch_recurrence, again, [(sequence, num)])
            torch.testing.assert_close(out, right, atol=3e-6, rtol=3e-5)
        for found, right in zip(mine.cache, again.cache, strict=True):
            torch.testing.assert_close(found, right, atol=3e-6, rtol=3e-5)


@pytest.mark.parametrize("rule", RULES[::2])
@settings(deadline=None, max_examples=2)
@given(data=st.data())
def test_steps_of_any_sizes_leave_what_the_specification_leaves(data, rule):
    """Batch-invariant with the bits of one step; a token taken back is computed again."""
    torch.manual_seed(0)
    theirs = make_layer(rule, SMALL)
    name = data.draw(st.sampled_from(list(OPS)))
    mine = copied(theirs)
    sequences = [Sequence(theirs, 13, 1), Sequence(theirs, 5, 20)]
    at_once = [step(OPS[name], mine, [(each, each.length)]) for each in sequences]
    mine = copied(theirs)
    for each in sequences:
        each.begin()
    while waiting := [at for at in range(2) if sequences[at].num_done < sequences[at].length]:
        chosen = data.draw(st.lists(st.sampled_from(waiting), unique=True, min_size=1))
        pairs = []
        for at in chosen:
            left = sequences[at].length - sequences[at].num_done
            pairs.append((sequences[at], data.draw(st.integers(1, min(left, 9)))))
        starts = [each.num_done for each, _ in pairs]
        out = step(OPS[name], mine, pairs)
        for (each, _), start in zip(pairs, starts, strict=True):
            each.num_done = start
        torch.testing.assert_close(out, step(torch_recurrence, theirs, pairs), atol=2e-6, rtol=2e-5)
        for found, right in zip(mine.cache, theirs.cache, strict=True):
            torch.testing.assert_close(found, right, atol=2e-6, rtol=2e-5)
        if name == "invariant":
            parts = out.split([num for _, num in pairs])
            for at, start, found in zip(chosen, starts, parts, strict=True):
                assert torch.equal(found, at_once[at][start : start + len(found)])
        for each, num in pairs:
            most = min(num - 1, each.num_done % each.size + each.size - 1)
            each.num_done -= data.draw(st.integers(0, most))


@pytest.mark.parametrize("name", OPS)
def test_drafts_are_requests_of_a_token_behind_one_another_and_padding_is_none(name):
    """With the bits of steps of one token, across a block's start; nothing else is written."""
    torch.manual_seed(0)
    layer = make_layer(RULES[0], SMALL)
    long, other = Sequence(layer, 12, 1), Sequence(layer, 5, 20)
    for each, num in ((long, 6), (other, 4)):
        step(OPS[name], layer, [(each, num)])
    drafted = copied(layer)
    expected = [step(OPS[name], layer, [(long, 1)]) for _ in range(5)]
    expected.append(step(OPS[name], layer, [(other, 1)]))

    tables = torch.full((8, 3), 63, dtype=torch.int32)  # stale behind what a request has
    for row, (table, length) in enumerate(
        [*((long.table, 7 + n) for n in range(5)), (other.table, 5)]
    ):
        num_blocks = -(-length // 4)
        tables[row, :num_blocks] = torch.tensor(table[:num_blocks])
    metadata = AttentionMetadata(
        query_start_loc_R1=torch.tensor([0, 1, 2, 3, 4, 5, 6, 6, 6], dtype=torch.int32),
        seq_lens_R=torch.tensor([7, 8, 9, 10, 11, 5, 0, 0], dtype=torch.int32),
        block_table_RM=tables,
        slot_mapping_T=torch.empty(0, dtype=torch.int64),
        block_size=4,
        sliding_window=None,
        plan=None,
    )
    x, a, b = (
        torch.cat(
            [long_part[6:11], other_part[4:], torch.full((3, other_part.shape[1]), torch.nan)]
        )
        for long_part, other_part in ((long.x, other.x), (long.a, other.a), (long.b, other.b))
    )
    qkv = OPS[name].convolve(x, layer.convolution, drafted.cache, metadata)
    out = OPS[name].recur(qkv, a, b, layer.params, drafted.cache, metadata)
    assert torch.equal(out[:6], torch.cat(expected))
    for found, right in zip(drafted.cache, layer.cache, strict=True):
        assert torch.equal(found, right)


@pytest.mark.parametrize(
    ("dtype", "places", "kept"),
    [(torch.float16, 9, torch.float32), (torch.bfloat16, 6, torch.bfloat16)],
)
def test_activations_of_half_the_size_are_within_their_roundings(dtype, places, kept):
    """The interpreter truncates to bfloat16 where the device rounds. `kept`: dtype of the
    convolution's inputs in the cache."""
    torch.manual_seed(0)
    layer = of_dtype(make_layer(RULES[0], SMALL), kept)
    sequence = Sequence(layer, 9, 1)
    for part in ("x", "a", "b"):
        setattr(sequence, part, getattr(sequence, part).to(dtype))
    out = step(OPS["invariant"], layer, [(sequence, 9)])
    again = of_dtype(layer, kept)
    sequence.begin()
    expected = step(torch_recurrence, again, [(sequence, 9)])
    assert out.dtype == dtype
    torch.testing.assert_close(out, expected, atol=2.0**-places, rtol=2.0 ** (1 - places))
    for part in ("inputs_BSC", "tails_BVC"):
        assert torch.equal(getattr(layer.cache, part), getattr(again.cache, part))


def test_a_convolution_alone_has_columns_of_a_wider_tensor_a_bias_and_no_activation():
    torch.manual_seed(0)
    shape = dataclasses.replace(
        make_layer(RULES[3], SMALL).shape, num_heads=0, num_key_heads=0, num_channels=150, width=3
    )
    params = ConvolutionParams(
        shape=shape, weight_WC=torch.randn(3, 150), bias_C=torch.randn(150), silu=False
    )
    x = torch.randn(21, 200)[:, 20:170]
    noise = [torch.randn(64, *part) for part, _ in shape.state_parts]
    noise += [torch.randn(64, 4, *part) for part, _ in shape.row_parts]
    caches = [make_cache(shape, 4, noise) for _ in range(2)]
    metadata = AttentionMetadata(
        query_start_loc_R1=torch.tensor([0, 2, 11, 12, 21], dtype=torch.int32),
        seq_lens_R=torch.tensor([2, 15, 9, 9], dtype=torch.int32),
        block_table_RM=torch.tensor([[1, 0, 0, 0], [8, 2, 0, 3], [0, 4, 5, 0], [0, 6, 7, 0]]).int(),
        slot_mapping_T=torch.empty(0, dtype=torch.int64),
        block_size=4,
        sliding_window=None,
        plan=None,
    )
    out, right = (
        ops.convolve(x, params, cache, metadata)
        for ops, cache in zip((OPS[""], torch_recurrence), caches, strict=True)
    )
    torch.testing.assert_close(out, right, atol=2e-6, rtol=2e-5)
    for part, expected in zip(*caches, strict=True):
        assert torch.equal(part, expected)


@pytest.mark.parametrize("activation", ["silu", "sigmoid"])
@pytest.mark.parametrize(("size", "gate_first"), [(10, False), (60, True)])
@pytest.mark.parametrize(("dtype", "rtol"), [(torch.float32, 1e-5), (torch.float16, 2e-3)])
def test_gated_norms_are_those_of_torch(activation, size, gate_first, dtype, rtol):
    torch.manual_seed(0)
    wide = torch.randn(7, 200).to(dtype)
    for width in {size, 60}:
        params = GatedNormParams(
            weight_N=torch.rand(width) + 0.5, size=size, eps=1e-5, activation=activation,
            gate_first=gate_first, transposed=1 if gate_first else 2,
        )  # fmt: skip
        found, right = (
            each(wide[:, 10:70], wide[:, 90:150], params)
            for each in (OPS[""].gated_norm, torch_recurrence.gated_norm)
        )
        torch.testing.assert_close(found, right, atol=1e-6, rtol=rtol)


@pytest.mark.parametrize("activation", ["sigmoid", None])
def test_gates_are_those_of_torch(activation):
    wide = torch.randn(3, 3000, generator=torch.Generator().manual_seed(0))
    for dtype, rtol in ((torch.float32, 1e-5), (torch.float16, 2e-3)):
        x, gates = wide[:, :1400].to(dtype), wide[:, 1500:2900].to(dtype)
        for gate in (gates, gates[:1]):  # the second one is for all tokens
            right = torch_recurrence.gate(x, gate, activation)
            ours = OPS[""].gate(x, gate, activation)
            torch.testing.assert_close(ours, right, atol=1e-6, rtol=rtol)


def test_what_does_not_fit_is_refused_by_name():
    layer = make_layer(RULES[0], SMALL)
    sequence = Sequence(layer, 3, 1)
    sequence.a = sequence.a[:, :3]
    with pytest.raises(ValueError, match=r"a_TN is float32 \[3, 3\].*\[3, 4\]"):
        step(OPS[""], layer, [(sequence, 3)])
    layer.block_size = 32
    with pytest.raises(ValueError, match=r"inputs is float32 \[64, 4, 56\].*\[64, 32, 56\]"):
        step(OPS[""], layer, [(Sequence(layer, 3, 1), 3)])
    x = torch.zeros(2, 60)
    params = GatedNormParams(weight_N=torch.ones(60), size=25, eps=0.0, activation="silu")
    with pytest.raises(ValueError, match="rows of 60 numbers are not groups of 25"):
        OPS[""].gated_norm(x, x, params)
    with pytest.raises(ValueError, match=r"gate_TN is float32 \[2, 59\]"):
        OPS[""].gate(x, x[:, 1:], None)
