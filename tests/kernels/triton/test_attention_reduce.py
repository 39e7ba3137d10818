"""Merging two attention states against attention over all keys at once.

The reduce of splits is tested with what it reduces, in test_attention.
"""

import pytest
import torch

from kernels.triton.attention_reduce import merge_states, reference_merge_states


def make_state(generator, rows=17, heads=3, head_size=80, dtype=torch.float32):
    out = torch.randn(rows, heads, head_size, generator=generator).to(dtype)
    return out, torch.randn(rows, heads, generator=generator) * 5


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("head_size", [16, 80, 128])
@pytest.mark.parametrize("rows", [1, 5, 16, 17])
def test_merged_states_are_as_defined(rows, head_size, dtype):
    generator = torch.Generator().manual_seed(0)
    a = make_state(generator, rows, 3, head_size, dtype)
    b = make_state(generator, rows, 3, head_size, dtype)
    out, lse = merge_states(*a, *b)
    expected_out, expected_lse = reference_merge_states(*a, *b)
    tolerance = 1e-5 if dtype == torch.float32 else 2e-3
    assert out.dtype == dtype
    torch.testing.assert_close(out.float(), expected_out, rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(lse, expected_lse, rtol=1e-5, atol=1e-5)


def test_two_halves_of_the_keys_merge_to_the_whole():
    generator = torch.Generator().manual_seed(0)
    scores = torch.randn(5, 3, 40, generator=generator) * 3
    values = torch.randn(3, 40, 64, generator=generator)

    def attend(start, stop):
        part = scores[..., start:stop]
        out = torch.einsum("thl,hld->thd", part.softmax(-1), values[:, start:stop])
        return out.contiguous(), part.logsumexp(-1)

    out, lse = merge_states(*attend(0, 13), *attend(13, 40))
    expected_out, expected_lse = attend(0, 40)
    torch.testing.assert_close(out, expected_out, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(lse, expected_lse, rtol=1e-5, atol=1e-5)


def test_a_state_that_saw_nothing_counts_for_nothing_even_if_it_holds_nan():
    generator = torch.Generator().manual_seed(0)
    (out_a, lse_a), (out_b, lse_b) = make_state(generator), make_state(generator)
    out_b[3:6], lse_b[3:6] = float("nan"), float("-inf")
    out_a[5:8], lse_a[5:8] = float("nan"), float("-inf")
    out, lse = merge_states(out_a, lse_a, out_b, lse_b)
    torch.testing.assert_close(out[3:5], out_a[3:5])
    torch.testing.assert_close(out[6:8], out_b[6:8])
    torch.testing.assert_close(lse[3:5], lse_a[3:5])
    assert (out[5] == 0).all() and (lse[5] == float("-inf")).all()


def test_an_empty_state_merges_to_an_empty_state():
    out, lse = merge_states(*[torch.empty(0, 3, 64), torch.empty(0, 3)] * 2)
    assert out.shape == (0, 3, 64) and lse.shape == (0, 3)


def test_what_does_not_fit_is_refused():
    out, lse = make_state(torch.Generator().manual_seed(0))
    with pytest.raises(ValueError, match="out_b"):
        merge_states(out, lse, out[:3], lse)
    with pytest.raises(ValueError, match="lse_a"):
        merge_states(out, lse.T, out, lse)
    with pytest.raises(ValueError, match="out_a"):
        merge_states(out.transpose(0, 1).contiguous().transpose(0, 1), lse, out, lse)
    with pytest.raises(TypeError, match="float32"):
        merge_states(out, lse.half(), out, lse)
    with pytest.raises(TypeError, match="one dtype"):
        merge_states(out, lse, out.half(), lse)
