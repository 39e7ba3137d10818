"""Rotation and cache write against torch, in Triton's interpreter."""

import pytest
import torch

from kernels.interface.kv_cache import KVCache, KVShape
from kernels.interface.operations import RotaryParams
from kernels.torch.kv_cache import rotary_and_cache as torch_rotary_and_cache
from kernels.triton.attention.rotary_cache import rotary_and_cache, write_kv_cache
from tests.gpu.checks.rotary import rotary_and_cache_reference
from tests.gpu.device import DEVICE

# every head size, full and partial rotation, GQA groups 1, 3, 4, 7, awkward block sizes
SHAPES = [  # H, K, D, rotary_size, S, T
    (9, 3, 64, 64, 16, 5),
    (14, 2, 64, 64, 32, 1),
    (4, 4, 80, 32, 16, 3),
    (2, 2, 80, 80, 16, 3),
    (6, 2, 96, 96, 64, 2),
    (3, 1, 128, 96, 16, 4),
    (8, 8, 128, 128, 128, 2),
    (8, 4, 256, 256, 16, 2),
    (8, 1, 512, 512, 16, 2),
]


def _table(num_positions: int, rotary_size: int, dtype: torch.dtype) -> torch.Tensor:
    frequencies = 10000.0 ** (-torch.arange(0, rotary_size, 2).float() / rotary_size)
    angles = torch.arange(num_positions).float()[:, None] * frequencies
    return torch.cat([angles.cos(), angles.sin()], dim=1).to(dtype)


def _case(
    H: int, K: int, D: int, rotary_size: int, S: int, T: int, dtype: torch.dtype = torch.float32
) -> dict[str, torch.Tensor]:
    torch.manual_seed(H * D + T)
    slots_T = torch.randperm(4 * S)[:T] + S
    slots_T[0] = 2 * S - 1  # a block's last slot
    if T > 2:
        slots_T[1] = 2 * S
        slots_T[2] = -1
    return {
        "qkv_TN": torch.randn(T, (H + 2 * K) * D).to(dtype),
        "cos_sin_PD": _table(70, rotary_size, dtype),
        "positions_T": torch.randint(0, 70, (T,)),
        "slot_mapping_T": slots_T.unique() if T == 1 else slots_T,
        "q_norm_weight_D": torch.randn(D).to(dtype),
        "k_norm_weight_D": torch.randn(D).to(dtype),
    }


def _cache(K: int, S: int, D: int, dtype: torch.dtype) -> KVCache:
    """Views of one tensor full of NaN."""
    kv_cache_B2KSD = torch.full((6, 2, K, S, D), float("nan")).to(dtype)
    return KVCache(kv_cache_B2KSD[:, 0], kv_cache_B2KSD[:, 1], KVShape(S, K, D, D, dtype))


def _rotate(run, kv_cache, *, qkv_TN, positions_T, slot_mapping_T, **params):
    return run(qkv_TN, positions_T, slot_mapping_T, kv_cache, RotaryParams(**params))


def _near_fp8(shape: torch.Size) -> torch.Tensor:
    """Values that round to fp8 up and down, but never to the next power of two: the interpreter's
    conversion loses that carry. Some are past the largest fp8."""
    mantissa = 1.0 + torch.randint(1, 7, shape) / 8 + (torch.rand(shape) - 0.5) * 0.12
    values = mantissa * 2.0 ** torch.randint(-4, 7, shape)
    values[:, ::9] = 1000.0
    return values * torch.where(torch.rand(shape) < 0.5, -1.0, 1.0)


def _assert_close(actual: torch.Tensor, expected: torch.Tensor) -> None:
    tolerance = {torch.float32: 1e-5, torch.float16: 2**-10}[expected.dtype]
    scale = float(expected.float().nan_to_num().abs().max())
    torch.testing.assert_close(
        actual, expected, rtol=0, atol=tolerance * max(scale, 1.0), equal_nan=True
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize(("H", "K", "D", "rotary_size", "S", "T"), SHAPES)
def test_norm_rotation_and_write_are_those_of_torch(
    H: int, K: int, D: int, rotary_size: int, S: int, T: int, dtype: torch.dtype
) -> None:
    case = _case(H, K, D, rotary_size, S, T, dtype)
    expected_cache, cache = _cache(K, S, D, dtype), _cache(K, S, D, dtype)
    heads = {"num_query_heads": H, "head_size": D, "norm_eps": 1e-6}
    expected = _rotate(rotary_and_cache_reference, expected_cache, **case, **heads)
    before = case["qkv_TN"].clone()
    actual = _rotate(rotary_and_cache, cache, **case, **heads)
    _assert_close(actual, expected)
    _assert_close(cache.keys, expected_cache.keys)
    assert torch.equal(cache.values.nan_to_num(-7.0), expected_cache.values.nan_to_num(-7.0))
    assert torch.equal(case["qkv_TN"][:, H * D :], before[:, H * D :])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_the_reference_is_the_torch_backend(dtype: torch.dtype) -> None:
    H, K, D, S, T = 9, 3, 64, 16, 6
    case = _case(H, K, D, 48, S, T, dtype)
    case["slot_mapping_T"][2] = 5  # the torch backend knows no padding
    heads = {"num_query_heads": H, "head_size": D, "norm_eps": 1e-6}
    cache = _cache(K, S, D, dtype)
    k_cache_BSKD, v_cache_BSKD = (torch.full((6, S, K, D), float("nan")).to(dtype) for _ in "kv")
    expected = _rotate(rotary_and_cache_reference, cache, **case, **heads)
    actual = _rotate(
        torch_rotary_and_cache, KVCache(k_cache_BSKD, v_cache_BSKD, cache.shape), **case, **heads
    )
    assert torch.equal(actual, expected)
    for ours, theirs in ((cache.keys, k_cache_BSKD), (cache.values, v_cache_BSKD)):
        assert torch.equal(ours.transpose(1, 2).nan_to_num(9.0), theirs.nan_to_num(9.0))


@pytest.mark.skipif(DEVICE == "cuda", reason="on a GPU torch rounds elsewhere")
def test_float16_is_rounded_where_torch_rounds() -> None:
    H, K, D, S, T = 7, 1, 64, 16, 5
    case = _case(H, K, D, 64, S, T, torch.float16)
    del case["q_norm_weight_D"], case["k_norm_weight_D"]
    expected_cache, cache = (_cache(K, S, D, torch.float16) for _ in range(2))
    heads = {"num_query_heads": H, "head_size": D}
    expected = _rotate(rotary_and_cache_reference, expected_cache, **case, **heads)
    actual = _rotate(rotary_and_cache, cache, **case, **heads)
    assert torch.equal(actual, expected)
    assert torch.equal(cache.keys.nan_to_num(9.0), expected_cache.keys.nan_to_num(9.0))


@pytest.mark.parametrize("missing", ["norms", "q norm", "none, values have one"])
def test_norms_can_be_left_out(missing: str) -> None:
    H, K, D, S, T = 6, 2, 64, 16, 4
    case = _case(H, K, D, 64, S, T)
    if missing in ("norms", "q norm"):
        del case["q_norm_weight_D"]
    if missing == "norms":
        del case["k_norm_weight_D"]
    if "values" in missing:
        case["v_norm_weight_D"] = torch.randn(D)
    heads = {"num_query_heads": H, "head_size": D, "norm_eps": 1e-5}
    expected_cache, cache = (_cache(K, S, D, torch.float32) for _ in range(2))
    expected = _rotate(rotary_and_cache_reference, expected_cache, **case, **heads)
    actual = _rotate(rotary_and_cache, cache, **case, **heads)
    _assert_close(actual, expected)
    _assert_close(cache.keys, expected_cache.keys)
    _assert_close(cache.values, expected_cache.values)


def test_a_float32_table_and_float32_norm_weights_serve_a_half_model() -> None:
    H, K, D, S, T = 6, 2, 64, 16, 4
    case = _case(H, K, D, 64, S, T, torch.float16)
    for name in ("cos_sin_PD", "q_norm_weight_D", "k_norm_weight_D"):
        case[name] = case[name].float()
    heads = {"num_query_heads": H, "head_size": D, "norm_eps": 1e-5}
    expected_cache, cache = (_cache(K, S, D, torch.float16) for _ in range(2))
    expected = _rotate(rotary_and_cache_reference, expected_cache, **case, **heads)
    actual = _rotate(rotary_and_cache, cache, **case, **heads)
    _assert_close(actual, expected)
    _assert_close(cache.keys, expected_cache.keys)


def test_rotated_bfloat16_is_within_its_roundings_of_torch() -> None:
    """The interpreter truncates where the device rounds: 2^-7 for each of two roundings."""
    H, K, D, S, T = 3, 1, 64, 16, 4
    case = _case(H, K, D, 64, S, T, torch.bfloat16)
    del case["q_norm_weight_D"], case["k_norm_weight_D"]
    heads = {"num_query_heads": H, "head_size": D, "norm_eps": 1e-5}
    expected_cache, cache = (_cache(K, S, D, torch.bfloat16) for _ in range(2))
    expected = _rotate(rotary_and_cache_reference, expected_cache, **case, **heads)
    actual = _rotate(rotary_and_cache, cache, **case, **heads)
    scale = float(expected.float().abs().max())
    torch.testing.assert_close(actual, expected, rtol=0, atol=2**-6 * scale)
    assert torch.equal(cache.values.nan_to_num(9.0), expected_cache.values.nan_to_num(9.0))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_an_fp8_cache_holds_clamped_values(dtype: torch.dtype) -> None:
    H, K, D, S, T = 2, 2, 64, 16, 4
    case = _case(H, K, D, 64, S, T, dtype)
    case["qkv_TN"] = _near_fp8(case["qkv_TN"].shape).to(dtype)
    case["cos_sin_PD"][:, :32], case["cos_sin_PD"][:, 32:] = 1.0, 0.0  # no rotation
    del case["q_norm_weight_D"], case["k_norm_weight_D"]
    heads = {"num_query_heads": H, "head_size": D}
    expected_cache, cache = (_cache(K, S, D, torch.float8_e4m3fn) for _ in range(2))
    _rotate(rotary_and_cache_reference, expected_cache, **case, **heads)
    _rotate(rotary_and_cache, cache, **case, **heads)
    for ours, theirs in zip(cache.parts, expected_cache.parts, strict=True):
        assert torch.equal(ours.view(torch.uint8), theirs.view(torch.uint8))


def test_padding_rows_are_left_alone() -> None:
    H, K, D, S, T = 3, 1, 64, 16, 4
    case = _case(H, K, D, 64, S, T)
    case["slot_mapping_T"][-1] = -1
    case["positions_T"][-1] = 10**9  # never read
    before = case["qkv_TN"].clone()
    cache = _cache(K, S, D, torch.float32)
    heads = {"num_query_heads": H, "head_size": D, "norm_eps": 1e-5}
    _rotate(rotary_and_cache, cache, **case, **heads)
    padding_T = case["slot_mapping_T"] < 0
    assert torch.equal(case["qkv_TN"][padding_T], before[padding_T])
    assert int((~cache.keys.isnan()).any(-1).sum()) == int((~padding_T).sum()) * K


def test_a_row_has_the_same_bits_alone_and_in_a_crowd() -> None:
    H, K, D, S, T = 9, 3, 80, 16, 5
    case = _case(H, K, D, 32, S, T)
    heads = {"num_query_heads": H, "head_size": D, "norm_eps": 1e-6}
    alone = {name: x[4:5].clone() if name.endswith(("TN", "_T")) else x for name, x in case.items()}
    crowd_THD = _rotate(rotary_and_cache, _cache(K, S, D, torch.float32), **case, **heads)
    alone_THD = _rotate(rotary_and_cache, _cache(K, S, D, torch.float32), **alone, **heads)
    assert torch.equal(crowd_THD[4:5], alone_THD)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_writing_keys_and_values_copies_their_bits(dtype: torch.dtype) -> None:
    K, D, S, T = 3, 80, 16, 4
    k_TKD = torch.randn(T, 2 * K, D).to(dtype)[:, :K]
    v_TKD = torch.randn(T, K, D).to(dtype)
    slots_T = torch.tensor([31, -1, 32, 0])
    cache = _cache(K, S, D, dtype)
    write_kv_cache(k_TKD, v_TKD, slots_T, cache)
    for part_TKD, cache_BKSD in ((k_TKD, cache.keys), (v_TKD, cache.values)):
        for token, slot in enumerate(slots_T.tolist()):
            if slot >= 0:
                assert torch.equal(cache_BKSD[slot // S, :, slot % S], part_TKD[token])
        assert int((~cache_BKSD.isnan()).any(-1).sum()) == 3 * K


def test_an_empty_step_writes_nothing() -> None:
    cache = _cache(1, 16, 64, torch.float32)
    empty_TKD, no_slots_T = torch.empty(0, 1, 64), torch.empty(0, dtype=torch.int64)
    write_kv_cache(empty_TKD, empty_TKD, no_slots_T, cache)
    assert cache.keys.isnan().all()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"qkv_TN": torch.zeros(4, 63)}, r"\[4, 320\]"),
        ({"slot_mapping_T": torch.zeros(3, dtype=torch.int64)}, r"int64 \[4\]"),
        ({"positions_T": torch.zeros(4).int()}, r"positions_T .* int64 \[4\]"),
        ({"cos_sin_PD": torch.zeros(70, 66)}, "cos_sin_PD is .* 64"),
        ({"q_norm_weight_D": torch.zeros(63)}, r"q_norm_weight_D .* \[64\]"),
        ({"k_norm_weight_D": torch.zeros(64).half()}, "float32"),
        ({"kv_cache": _cache(2, 16, 64, torch.float32)}, r"\[4, 448\]"),
        ({"kv_cache": _cache(1, 16, 64, torch.float16)}, "float8_e4m3fn"),
    ],
)
def test_what_does_not_fit_is_refused_by_name(change: dict[str, object], message: str) -> None:
    arguments = {**_case(3, 1, 64, 64, 16, 4), **change}
    cache = arguments.pop("kv_cache", _cache(1, 16, 64, torch.float32))
    with pytest.raises(ValueError, match=message):
        _rotate(rotary_and_cache, cache, **arguments, num_query_heads=3, head_size=64)
