"""Codes as GGUF blocks: which numbers are exact, and how far the others may be."""

import gguf
import pytest
import torch

from kernels.cpu.grouped_codes import as_blocks
from kernels.interface.weights import GroupedCodes, QuantisedTensor

N, E = 300, 256  # more rows than are converted at once


def part_of(blocks, *, codes, scales, zeros=None, table=None):
    arrays = {"codes": codes, "scales": scales} | ({} if zeros is None else {"zeros": zeros})
    return QuantisedTensor(
        type_name="made",
        shape=tuple(codes.shape),
        arrays=arrays,
        decode=lambda given: GroupedCodes(
            given["codes"], given["scales"], given.get("zeros"), table
        ),
        block_inputs=codes.shape[1] // scales.shape[1],
        blocks=blocks,
    )


def meant(part):
    kind = gguf.GGMLQuantizationType[part.blocks]
    return torch.from_numpy(gguf.quants.dequantize(as_blocks(part).numpy(), kind))


def random_scales(num_groups):
    """Float16 holds them."""
    return (torch.rand(N, num_groups) * 0.02 + 0.001).half().float()


@pytest.mark.parametrize("num_groups", [8, 2, 1])
def test_symmetric_integers_are_exact(num_groups):
    scales = random_scales(num_groups)
    codes = torch.randint(0, 16, (N, E), dtype=torch.uint8)
    part = part_of("Q4_0", codes=codes, scales=scales, zeros=torch.full((N, num_groups), 8))
    assert torch.equal(meant(part), part.dequantise())
    whole = torch.randint(-128, 128, (N, E), dtype=torch.int8)
    part = part_of("Q8_0", codes=whole, scales=scales)
    assert torch.equal(meant(part), part.dequantise())
    bytes_from_0 = (whole.int() + 128).to(torch.uint8)
    zeros = torch.full((N, num_groups), 128)
    assert torch.equal(
        meant(part_of("Q8_0", codes=bytes_from_0, scales=scales, zeros=zeros)), part.dequantise()
    )


def test_zeros_become_minima_that_are_rounded_by_at_most_a_128th_of_a_step():
    scales, zeros = random_scales(4), torch.randint(0, 17, (N, 4))
    codes = torch.randint(0, 16, (N, E), dtype=torch.uint8)
    part = part_of("Q4_1", codes=codes, scales=scales, zeros=zeros)
    away = (meant(part) - part.dequantise()).view(N, 4, -1) / scales[..., None]
    assert 0 < away.abs().max() <= 1 / 128


def test_eight_bits_with_zeros_are_rounded_to_a_127th_of_the_largest():
    codes = torch.randint(0, 256, (N, E), dtype=torch.uint8)
    part = part_of("Q8_0", codes=codes, scales=random_scales(2), zeros=torch.full((N, 2), 100))
    exact = part.dequantise().view(N, -1, 32)
    largest = exact.abs().amax(-1, keepdim=True)
    assert ((meant(part).view(exact.shape) - exact) / largest).abs().max() < 0.57 / 127


def test_float8_is_exact_from_an_eighth_of_a_groups_largest_on():
    codes = (torch.randn(N, E) * 30).to(torch.float8_e4m3fn)
    codes[0], codes[1, :32] = 0, torch.arange(32).to(torch.uint8).view(torch.float8_e4m3fn)
    part = part_of("Q8_0", codes=codes, scales=2.0 ** torch.randint(-9, 0, (N, 2)))
    exact = part.dequantise().view(N, -1, 32)
    away = (meant(part).view(exact.shape) - exact).abs()
    largest = exact.abs().amax(-1, keepdim=True).expand(exact.shape)
    assert away[exact.abs() * 8 >= largest].max() == 0
    assert (away <= largest / 128).all()
    assert away.norm() < 0.005 * exact.norm()


@pytest.mark.parametrize(
    ("codes", "scales", "message"),
    [
        (torch.full((4, 32), 0x7F, dtype=torch.uint8).view(torch.float8_e4m3fn), 1.0, "not finite"),
        (torch.ones(4, 32, dtype=torch.int8), 1e6, "does not fit float16; use --quantization none"),
    ],
)
def test_what_blocks_cannot_hold_is_refused(codes, scales, message):
    part = part_of("Q8_0", codes=codes, scales=torch.full((4, 1), scales))
    with pytest.raises(ValueError, match=message):
        as_blocks(part)
