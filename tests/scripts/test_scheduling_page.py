"""The user's page of scheduling says something of everything that can be set."""

import dataclasses
from pathlib import Path

from engine_core.options.scheduling import SchedulingOptions

PAGE = (Path(__file__).parents[2] / "docs" / "scheduling.md").read_text()


def test_every_scheduling_option_is_on_the_page():
    fields = dataclasses.fields(SchedulingOptions)
    missing = [f.name for f in fields if f"--{f.name.replace('_', '-')}" not in PAGE]
    missing = [name for name in missing if f"--no-{name.replace('_', '-')}" not in PAGE]
    assert not missing
