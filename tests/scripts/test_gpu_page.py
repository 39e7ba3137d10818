"""The user's page of GPUs says something of every option that depends on the device."""

import dataclasses
from pathlib import Path

from engine_core.startup.device import defaults_of

PAGE = (Path(__file__).parents[2] / "docs" / "gpu.md").read_text()


def test_every_device_option_is_on_the_page():
    names = (
        "model", "device", "dtype", "batch-invariant", "quantization", "weight-cache",
        "load-format", "model-config", "capture-at-start", "enforce-eager", "kv-cache-dtype",
    )  # fmt: skip
    assert not [name for name in names if f"--{name}" not in PAGE]


def test_the_defaults_are_those_in_force():
    import torch

    defaults = defaults_of(torch.device("cuda"))
    for option, value in dataclasses.asdict(defaults).items():
        assert f"| `--{option.replace('_', '-')}` | {value} |" in PAGE
