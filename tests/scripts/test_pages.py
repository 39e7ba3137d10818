"""The users' pages say something of everything that can be set, and the defaults in force."""

import dataclasses
import re
from pathlib import Path

from engine_core.options.scheduling import SchedulingOptions
from engine_core.startup.device import defaults_of

DOCS = Path(__file__).parents[2] / "docs"
OF_DEVICES = (
    "model", "device", "dtype", "batch-invariant", "quantization", "weight-cache-size",
    "load-format", "model-config", "capture-at-start", "enforce-eager", "kv-cache-dtype",
    "cpu-experts",
)  # fmt: skip


def test_every_option_is_on_its_page():
    of_scheduling = [f.name.replace("_", "-") for f in dataclasses.fields(SchedulingOptions)]
    for name, options in (("guides/gpu.md", OF_DEVICES), ("concepts/scheduling.md", of_scheduling)):
        page = (DOCS / name).read_text()
        assert not [each for each in options if not re.search(f"--(no-)?{each}", page)]


def test_the_defaults_on_a_gpu_are_those_in_force():
    import torch

    page = (DOCS / "guides/gpu.md").read_text()
    for option, value in dataclasses.asdict(defaults_of(torch.device("cuda"))).items():
        assert f"| `--{option.replace('_', '-')}` | {value} |" in page
