"""Options of disaggregated prefill: what is missing, has no effect or contradicts another one."""

from pathlib import Path

import pytest

from engine_core.devices import traits_of
from engine_core.errors import ConfigurationError
from engine_core.options.checks import check_device, check_options
from engine_core.options.disaggregation import DisaggregationOptions
from engine_core.options.engine import EngineOptions

PREFILL = {"disaggregation_mode": "prefill", "kv_transfer_bind": "tcp://127.0.0.1:5700"}
DECODE = {"disaggregation_mode": "decode", "kv_transfer_source": ("tcp://127.0.0.1:5700",)}


def options(given, **more):
    own = DisaggregationOptions(**given)
    return EngineOptions(model="m", disaggregation=own, **more)


@pytest.mark.parametrize("given", [{}, PREFILL, DECODE])
def test_what_belongs_together_is_taken(given):
    check_options(options(given))
    check_device(options(given), traits_of("cpu"))


@pytest.mark.parametrize(
    ("given", "why"),
    [
        ({"disaggregation_mode": "prefill"}, "needs --kv-transfer-bind"),
        ({"disaggregation_mode": "decode"}, "needs --kv-transfer-source"),
        ({"kv_transfer_buffer": 2**30}, "--disaggregation-mode prefill or decode"),
        (PREFILL | {"kv_transfer_timeout": 3.0}, "--disaggregation-mode decode"),
        (DECODE | {"kv_transfer_keys": Path("k")}, "--disaggregation-mode prefill"),
    ],
)
def test_what_is_missing_or_without_effect_is_named(given, why):
    with pytest.raises(ConfigurationError, match=why):
        check_options(options(given))


@pytest.mark.parametrize(
    "more", [{"enable_prefix_caching": False}, {"prefix_cache_dir": Path("d")}]
)
def test_what_cannot_be_combined_is_refused(more):
    with pytest.raises(ConfigurationError, match="cannot be combined with --"):
        check_options(options(PREFILL, **more))


def test_a_gpu_is_refused():
    with pytest.raises(ConfigurationError, match="CPU only"):
        check_device(options(DECODE), traits_of("cuda"))
