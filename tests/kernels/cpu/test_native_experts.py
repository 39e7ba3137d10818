"""Mixture of experts in the native library against a plain loop in float64, and torch's."""

import pytest
import torch

from kernels.cpu.operations import CpuOperations
from kernels.cpu.packing import NativePacking
from kernels.cpu.weights import GGUF_KINDS
from kernels.interface.weights import ExpertRouting, QuantisedTensor
from kernels.torch.operations import TorchOperations
from tests.kernels.cpu.instruction_sets import covering_sets
from tests.kernels.cpu.test_packing import unreadable
from tests.kernels.gguf_parts import part_of, random_blocks
from tests.kernels.test_experts import ROUTERS, make_gpt_oss, make_layer, plain, routing_of

FLOATS = ("float32", "bfloat16", "int8", "int4")


@covering_sets(
    renormalise=[False, True],
    shape=[(1, 1, 1), (1, 8, 8), (2, 3, 2), (63, 4, 1), (130, 60, 4), (3, 128, 8)],
)
def test_every_shape_equals_a_plain_loop(library, isa, shape, renormalise):
    ops = CpuOperations(library)
    *sizes, top_k = shape
    x, logits, gate_up, down = make_layer(*sizes)
    routing = ExpertRouting(top_k=top_k, renormalise=renormalise)
    out = ops.mixture_of_experts(x, logits, ops.prepare_experts(gate_up, down), routing)
    expected = plain(x, logits, gate_up, down, top_k=top_k, renormalise=renormalise)
    torch.testing.assert_close(out.double(), expected, atol=1e-5, rtol=1e-5)


@covering_sets(name=ROUTERS, activation=["silu", "relu2"])
def test_every_way_to_choose_is_that_of_torch(library, isa, name, activation):
    routing = routing_of(name)
    x, logits, gate_up, down = make_layer(70, 12)
    weights = gate_up if activation == "silu" else gate_up[:, :22], down, activation
    mine, theirs = (
        ops.mixture_of_experts(x, logits, ops.prepare_experts(*weights), routing)
        for ops in (CpuOperations(library), TorchOperations())
    )
    torch.testing.assert_close(mine, theirs, atol=1e-5, rtol=1e-5)


def test_experts_of_gpt_oss_are_those_of_torch(library, isa):
    x, logits, *weights = make_gpt_oss(70, 12)
    routing = ExpertRouting(top_k=3, renormalise=True)
    mine, theirs = (
        ops.mixture_of_experts(x, logits, ops.prepare_experts(*weights), routing)
        for ops in (CpuOperations(library), TorchOperations())
    )
    torch.testing.assert_close(mine, theirs, atol=1e-4, rtol=1e-5)


def test_gelu_and_factors_on_weights_are_those_of_torch(library, isa):
    x, logits, *weights = make_layer(70, 12)
    routing = ExpertRouting(top_k=3, renormalise=True, scale_X=torch.randn(12))
    mine, theirs = (
        ops.mixture_of_experts(x, logits, ops.prepare_experts(*weights, "gelu_tanh"), routing)
        for ops in (CpuOperations(library), TorchOperations())
    )
    torch.testing.assert_close(mine, theirs, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("weights", FLOATS)
def test_a_token_has_the_same_bits_alone(library, isa, weights):
    ops = CpuOperations(library, linear_weights=weights)
    x, logits, gate_up, down = make_layer(150, 12, width=100, features=70)
    experts = ops.prepare_experts(gate_up, down)
    routing = ExpertRouting(top_k=3, renormalise=True)
    out = ops.mixture_of_experts(x, logits, experts, routing)
    for start, stop in ((0, 1), (70, 71), (149, 150), (20, 60)):
        rows = slice(start, stop)
        alone = ops.mixture_of_experts(x[rows].clone(), logits[rows].clone(), experts, routing)
        assert torch.equal(alone, out[rows])


def even_routing(num_tokens, num_experts, top_k):
    """(logits, ids [T, top_k]): the chosen weigh 1 / top_k each, exactly."""
    ids = torch.stack([torch.randperm(num_experts)[:top_k] for _ in range(num_tokens)]).sort()[0]
    return torch.full((num_tokens, num_experts), -torch.inf).scatter_(1, ids, 0.0), ids


def assert_experts_are_products_by_linear(ops, experts, gate_up, down, width, top_k):
    """Bit for bit; `gate_up`, `down`: each expert's weight as `linear` takes it."""
    x = torch.randn(45, width)
    logits, ids = even_routing(len(x), len(down), top_k)
    out = ops.mixture_of_experts(x, logits, experts, ExpertRouting(top_k=top_k, renormalise=True))
    for token, row in enumerate(x):
        expected = torch.zeros(1, width)
        for expert in ids[token].tolist():
            hidden = ops.silu_and_mul(ops.linear(row[None], gate_up[expert]))
            expected += ops.linear(hidden, down[expert]) / top_k
        assert torch.equal(out[token], expected[0])


@covering_sets(floats=FLOATS, top_k=[1, 4])
def test_experts_in_any_format_are_products_by_linear(library, isa, floats, top_k):
    ops = CpuOperations(library, linear_weights=floats)
    _, _, gate_up, down = make_layer(1, 6, width=100, features=70)
    experts = ops.prepare_experts(gate_up, down)
    alone = [[ops.prepare_linear(each) for each in side] for side in (gate_up, down)]
    assert_experts_are_products_by_linear(ops, experts, *alone, 100, top_k)


def stack_of(type_name, num_parts, num_rows, num_inputs):
    """Random matrices in a block type, whose numbers nothing asks for."""
    rows = random_blocks(type_name, num_parts * num_rows, num_inputs)
    parts = torch.from_numpy(rows.reshape(num_parts, num_rows, -1))
    return [part_of(part.numpy(), type_name, num_inputs) for part in parts]


@pytest.mark.parametrize(
    "sides", [*zip(GGUF_KINDS, reversed(GGUF_KINDS), strict=True)], ids="-".join
)
def test_experts_in_blocks_are_products_by_linear(library, isa, sides):
    ops, packing = CpuOperations(library), NativePacking(library)
    gate_up, down = stack_of(sides[0], 10, 256, 256), stack_of(sides[1], 5, 256, 256)
    experts = packing.pack_experts("mlp", gate_up, down)
    assert set(packing.bytes_by_format()) == set(sides)
    pairs = zip(gate_up[::2], gate_up[1::2], strict=True)
    alone = [[packing.pack("", parts) for parts in side] for side in (pairs, zip(down))]
    assert_experts_are_products_by_linear(ops, experts, *alone, 256, 2)


def test_a_side_of_several_formats_is_packed_as_floats(library):
    _, _, gate_up, down = make_layer(1, 2, width=64, features=32)
    rows = torch.from_numpy(random_blocks("Q8_0", 32, 64))
    blocks = QuantisedTensor("Q8_0", (32, 64), {"blocks": rows}, lambda _: gate_up[1, 32:])
    packing = NativePacking(library, "int8")
    packing.pack_experts("mlp", [*gate_up[0].chunk(2), gate_up[1, :32], blocks], [*down])
    assert packing.bytes_by_format().keys() == {"int8"}


def test_a_second_start_takes_experts_from_the_file_and_reads_no_part(library, tmp_path):
    file = tmp_path / "model.weights"
    gate_up, down = stack_of("Q4_1", 8, 32, 64), stack_of("Q8_0", 4, 64, 32)
    ops, first, second = CpuOperations(library), NativePacking(library), NativePacking(library)
    packed = first.pack_experts("mlp", gate_up, down)
    assert first.num_bytes_to_save() == sum(first.bytes_by_format().values())
    first.save(file)()
    second.open(file)
    again = second.pack_experts("mlp", *([*map(unreadable, side)] for side in (gate_up, down)))
    assert second.num_bytes_to_save() == 0
    call = torch.randn(5, 64), torch.randn(5, 4)
    routing = ExpertRouting(top_k=2, renormalise=True)
    results = [ops.mixture_of_experts(*call, each, routing) for each in (packed, again)]
    assert torch.equal(*results)


@pytest.mark.parametrize("floats", FLOATS)
def test_experts_that_are_elsewhere_add_nothing(library, floats):
    ops = CpuOperations(library, linear_weights=floats)
    x, logits, gate_up, down = make_layer(40, 6)
    whole = ops.mixture_of_experts(
        x,
        logits,
        ops.prepare_experts(gate_up, down),
        ExpertRouting(top_k=2, renormalise=True),
    )
    parts = []
    for here in (slice(0, 1), slice(1, 4), slice(4, 6)):
        routing = ExpertRouting(top_k=2, renormalise=True, first_expert=here.start)
        experts = ops.prepare_experts(gate_up[here], down[here])
        parts.append(ops.mixture_of_experts(x, logits, experts, routing))
        if floats != "float32":
            continue
        torch_ops = TorchOperations()
        theirs = torch_ops.prepare_experts(gate_up[here], down[here])
        torch.testing.assert_close(
            parts[-1],
            torch_ops.mixture_of_experts(x, logits, theirs, routing),
            atol=1e-5,
            rtol=1e-5,
        )
    assert any(bool((part == 0).all(dim=1).any()) for part in parts)
    torch.testing.assert_close(sum(parts), whole, atol=1e-5, rtol=1e-5)


def test_the_lower_id_wins_a_tie_and_a_row_of_nan_stays_in_its_row(library):
    ops = CpuOperations(library)
    x, logits, gate_up, down = make_layer(3, 5)
    logits[:] = 0
    logits[1] = float("nan")
    routing = ExpertRouting(top_k=3, renormalise=False)
    out = ops.mixture_of_experts(x, logits, ops.prepare_experts(gate_up, down), routing)
    assert out[1].isnan().all()
    for row in (0, 2):
        first = plain(x[row : row + 1], logits[:1, :3], gate_up, down, top_k=3, renormalise=True)
        torch.testing.assert_close(out[row].double(), first[0] * 0.6, atol=1e-5, rtol=1e-5)


def test_no_tokens_give_no_rows(library):
    ops = CpuOperations(library)
    x, logits, gate_up, down = make_layer(0, 4)
    routing = ExpertRouting(top_k=2, renormalise=True)
    experts = ops.prepare_experts(gate_up, down)
    assert ops.mixture_of_experts(x, logits, experts, routing).shape == (0, 36)


def test_what_does_not_fit_is_refused(library):
    ops = CpuOperations(library)
    x, logits, gate_up, down = make_layer(2, 4)
    experts = ops.prepare_experts(gate_up, down)
    for wrong, text in (
        (ExpertRouting(top_k=5, renormalise=True), r"top_k is 5; it must lie in \[1, 4\]"),
        (ExpertRouting(top_k=1, renormalise=True, bias_X=torch.zeros(3)), "bias is .*4"),
        (ExpertRouting(top_k=1, renormalise=True, first_expert=1), "experts 1 to 5 of 4"),
        (ExpertRouting(top_k=1, renormalise=True, weights_dtype=torch.bfloat16), "bfloat16"),
    ):
        with pytest.raises(ValueError, match=text):
            ops.mixture_of_experts(x, logits, experts, wrong)
    with pytest.raises(ValueError, match=r"x is .* must be contiguous"):
        routing = ExpertRouting(top_k=1, renormalise=True)
        ops.mixture_of_experts(x[:, :9], logits, experts, routing)
    with pytest.raises(ValueError, match=r"\(4, 44, 36\).*\(3, 36, 22\).*\[X, 2F, E\]"):
        ops.prepare_experts(gate_up, down[:3])
