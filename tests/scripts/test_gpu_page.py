"""The user's page of GPUs says something of every option that depends on the device."""

import dataclasses
from pathlib import Path

from engine_core.options.device import DeviceOptions
from engine_core.startup.device import defaults_of

PAGE = (Path(__file__).parents[2] / "docs" / "gpu.md").read_text()


def test_every_device_option_is_on_the_page():
    names = [f"--{field.name.replace('_', '-')}" for field in dataclasses.fields(DeviceOptions)]
    assert not [name for name in names if name not in PAGE]


def test_the_defaults_are_those_in_force():
    import torch

    defaults = defaults_of(torch.device("cuda"))
    for option, value in dataclasses.asdict(defaults).items():
        assert f"| `--{option.replace('_', '-')}` | {value} |" in PAGE
