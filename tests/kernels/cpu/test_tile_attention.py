"""Attention over keys and values in bfloat16, by products of pairs, and in bytes on the matrix unit
or its emulation."""

import pytest
import torch

from kernels.cpu.operations import CpuOperations
from kernels.interface.operations import AttentionParams
from tests.covering import covering_pairs
from tests.kernels.cpu.test_native_kv_cache import (
    HEADS,
    PIECES,
    Sequences,
    check_bits_in_any_step,
    values_of,
)
from tests.kernels.paged_steps import reference_paged_attention

pytestmark = pytest.mark.slow


@pytest.fixture
def ops(library, pairs_isa):
    return CpuOperations(library, linear_weights="bfloat16")


def sequences(ops, dtype, head_size, window=None, block_size=4):
    lengths = [stop for _, _, stop in PIECES]
    return Sequences(ops, dtype, lengths, head_size=head_size, window=window, block_size=block_size)


def queries(head_size):
    num_tokens = sum(stop - first for _, first, stop in PIECES)
    generator = torch.Generator().manual_seed(head_size)
    return torch.randn(num_tokens, HEADS, head_size, generator=generator)


@covering_pairs(window=[None, 50], head_size=[64, 80, 128], block_size=[4, 16, 32])
def test_bytes_have_the_bits_of_the_vector_units(
    library, matrix_isa, head_size, window, block_size
):
    ops = CpuOperations(library, linear_weights="bfloat16")
    held, q = sequences(ops, torch.int8, head_size, window, block_size), queries(head_size)
    out, _, _ = held.attend(q, PIECES)
    with library.forced_isa("avx512"):
        assert torch.equal(held.attend(q, PIECES)[0], out)


@pytest.mark.parametrize("window", [None, 50])
@pytest.mark.parametrize("head_size", [32, 64, 96, 128])
def test_bfloat16_errs_less_than_torch_in_bfloat16(ops, head_size, window):
    held, q = sequences(ops, torch.bfloat16, head_size, window), queries(head_size)
    out, metadata, arguments = held.attend(q, PIECES)
    parameters = AttentionParams(**arguments)
    values = [values_of(cache) for cache in held.caches.parts]
    exact = reference_paged_attention(
        q.double(), *(v.double() for v in values), metadata, parameters
    )
    half = reference_paged_attention(q.bfloat16(), *held.caches.parts, metadata, parameters)
    error, allowed = out.double() - exact, half.double() - exact
    assert 0 < error.square().mean() <= allowed.square().mean()
    assert error.abs().max() <= 1.5 * allowed.abs().max()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.int8])
@pytest.mark.parametrize("window", [None, 50])
def test_a_token_has_the_same_bits_in_a_prompt_a_chunk_a_crowd_and_alone(ops, dtype, window):
    check_bits_in_any_step(ops, dtype, window)


@pytest.mark.parametrize("window", [None, 50])
def test_what_no_query_sees_is_not_read(ops, window):
    held, q = sequences(ops, torch.bfloat16, 64, window), queries(64)
    out, _, _ = held.attend(q, PIECES)
    seen = torch.zeros(held.caches.keys.shape[:2], dtype=torch.bool)
    for sequence, first, stop in PIECES:
        low = 0 if window is None else max(0, first - window + 1)
        keys = torch.arange(low, stop)
        seen[held.table[sequence].long()[keys // seen.shape[1]], keys % seen.shape[1]] = True
    for cache in held.caches.parts:
        cache[~seen] = float("nan")
    assert torch.equal(held.attend(q, PIECES)[0], out)


@pytest.mark.parametrize("which", ["softcap", "sinks_H", "alibi_slopes_H"])
def test_softcap_sinks_and_slopes(ops, which):
    held, q = sequences(ops, torch.bfloat16, 64), queries(64)
    options = {
        "softcap": 3.0,
        "sinks_H": torch.linspace(-2, 2, HEADS),
        "alibi_slopes_H": torch.logspace(-6, -1, HEADS, base=2),
    }
    _, metadata, arguments = held.attend(q, PIECES)
    parameters = AttentionParams(**arguments, **{which: options[which]})
    out = ops.paged_attention(q, *held.caches.parts, metadata, parameters)
    values = [values_of(cache) for cache in held.caches.parts]
    expected = reference_paged_attention(q, *values, metadata, parameters)
    torch.testing.assert_close(out, expected, atol=3e-2, rtol=3e-2)
