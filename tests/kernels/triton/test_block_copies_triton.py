"""Copies of KV blocks against torch, in Triton's interpreter."""

import pytest
import torch

from kernels.triton.kv_cache import (
    copy_blocks_reference,
    copy_within,
    runs_of,
    swap_blocks,
)

DTYPES = [torch.float32, torch.bfloat16, torch.float8_e4m3fn]


def _cache(num_blocks: int, dtype: torch.dtype = torch.bfloat16, D: int = 80) -> torch.Tensor:
    torch.manual_seed(num_blocks)
    return torch.randn(num_blocks, 2, 3, 16, D).to(dtype)


def _bytes(cache: torch.Tensor) -> torch.Tensor:
    return cache.view(torch.uint8)


def _ids(*ids: int) -> torch.Tensor:
    return torch.tensor(ids, dtype=torch.int64)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("D", [64, 80])
def test_blocks_are_copied_and_others_stay(dtype: torch.dtype, D: int) -> None:
    cache = _cache(9, dtype, D)
    before, expected = cache.clone(), cache.clone()
    src_ids, dst_ids = _ids(0, 8, 8, 3), _ids(5, 1, 2, 7)
    copy_blocks_reference(expected, src_ids, dst_ids)
    copy_within(cache, src_ids, dst_ids)
    assert torch.equal(_bytes(cache), _bytes(expected))
    for block in (0, 3, 4, 6, 8):
        assert torch.equal(_bytes(cache[block]), _bytes(before[block]))


@pytest.mark.parametrize(
    ("src_ids", "dst_ids"),
    [(_ids(1, 2, 3), _ids(2, 3, 4)), (_ids(1, 2), _ids(2, 1)), (_ids(4), _ids(4))],
    ids=["chain", "exchange", "itself"],
)
def test_all_is_read_before_any_is_written(src_ids: torch.Tensor, dst_ids: torch.Tensor) -> None:
    cache = _cache(6)
    before = cache.clone()
    copy_within(cache, src_ids, dst_ids)
    for src, dst in zip(src_ids.tolist(), dst_ids.tolist(), strict=True):
        assert torch.equal(cache[dst], before[src])


def test_no_pairs_copy_nothing() -> None:
    cache = _cache(3)
    before = cache.clone()
    copy_within(cache, _ids(), _ids())
    swap_blocks(cache, _cache(2), _ids(), _ids())
    assert torch.equal(cache, before)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_swap_out_and_in_returns_every_byte(dtype: torch.dtype) -> None:
    device, host = _cache(8, dtype), _cache(5, dtype)
    before, host_before = device.clone(), host.clone()
    device_ids, host_ids = _ids(7, 2, 3, 4), _ids(0, 2, 3, 1)
    swap_blocks(device, host, device_ids, host_ids)
    assert torch.equal(_bytes(host[host_ids]), _bytes(before[device_ids]))
    assert torch.equal(_bytes(host[4]), _bytes(host_before[4]))
    _bytes(device)[device_ids] = 0
    swap_blocks(host, device, host_ids, device_ids)
    assert torch.equal(_bytes(device), _bytes(before))


def test_pairs_that_rise_together_are_one_run() -> None:
    assert runs_of(_ids(7, 3, 4, 5), _ids(2, 0, 1, 9)) == [(3, 0, 2), (5, 9, 1), (7, 2, 1)]
    assert runs_of(_ids(4, 5, 6), _ids(1, 2, 3)) == [(4, 1, 3)]
    assert runs_of(_ids(4, 5), _ids(2, 1)) == [(4, 2, 1), (5, 1, 1)]
    assert runs_of(_ids(), _ids()) == []


def test_what_does_not_fit_is_refused_by_name() -> None:
    cache = _cache(4)
    with pytest.raises(ValueError, match=r"dst_ids_N spans 1\.\.4, the cache has blocks 0\.\.3"):
        copy_within(cache, _ids(0, 0), _ids(1, 4))
    with pytest.raises(ValueError, match=r"src_ids_N spans -1"):
        copy_within(cache, _ids(-1), _ids(1))
    with pytest.raises(ValueError, match="twice in dst_ids_N"):
        copy_within(cache, _ids(0, 1), _ids(2, 2))
    with pytest.raises(ValueError, match="2 sources, 1 destinations"):
        copy_within(cache, _ids(0, 1), _ids(2))
    with pytest.raises(ValueError, match=r"torch.int32 .* make it int64"):
        copy_within(cache, _ids(0).int(), _ids(2))
    with pytest.raises(ValueError, match=r"make it \[B, 2, K, S, D\]"):
        copy_within(cache[:, 0], _ids(0), _ids(2))
    with pytest.raises(ValueError, match="one cache; use copy_within"):
        swap_blocks(cache, cache, _ids(0), _ids(2))
    with pytest.raises(ValueError, match="allocate both tiers alike"):
        swap_blocks(cache, _cache(4, torch.float32), _ids(0), _ids(2))
