"""Checks kernels, models and the engine on a GPU, and times what passes.

    python scripts/gpu_suite.py --list
    python scripts/gpu_suite.py --json suite.json [--only TEXT] [--time-limit 470] [--seed N]

Needs torch, triton, transformers and numpy; what else the engine imports comes from the wheels that
scripts/fetch_wheels.py left in .cache/wheels, where it is not installed. A table goes to stdout,
one JSON document to --json FILE, rewritten as results come. Nothing is timed whose check did not
pass in this run. Exit code 0, 1 if something failed or did not run, 2 for wrong options or without
a GPU, 130 after Ctrl-C.
"""

import argparse
import contextlib
import dataclasses
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

# `python scripts/gpu_suite.py` puts only this folder on the path
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from scripts.gpu.frame import Group, exit_code
from scripts.gpu.registry import NOT_THERE, group_names, load_group
from scripts.gpu.report import as_list, as_table
from scripts.gpu.suite import Suite, run_process
from scripts.gpu.wheels import WheelsNotInstalled, installed_wheels


def main(arguments: Sequence[str]) -> int:
    """Run one command line. Returns the exit code."""
    parser = argparse.ArgumentParser(prog="gpu_suite", description=__doc__.splitlines()[0])
    parser.add_argument("--list", action="store_true", help="names only; needs no GPU")
    parser.add_argument("--only", default="", help="groups, checks and timings with this in them")
    parser.add_argument("--json", type=Path, help="write the document there")
    parser.add_argument("--time-limit", type=float, default=470.0, help="seconds for everything")
    parser.add_argument("--seed", type=int, default=int(time.time()), help="default: a new one")
    try:
        options = parser.parse_args(arguments)
    except SystemExit as ended:
        return int(ended.code or 0)
    groups = [load_group(name) for name in group_names()] + list(NOT_THERE)
    groups = [group.select(options.only) for group in groups]
    groups = [
        group
        for group in groups
        if group.checks or group.timings or group.figures or options.only in group.name
    ]
    if not groups:
        print(f"gpu_suite: nothing has {options.only!r} in its name; see --list", file=sys.stderr)
        return 2
    if options.list:
        print(as_list(groups))
        return 0
    if not _gpu_is_there():
        print(
            "gpu_suite: no GPU: torch finds no CUDA device here; --list shows what would run",
            file=sys.stderr,
        )
        return 2

    def save(document: dict[str, Any]) -> None:
        if options.json is not None:
            options.json.write_text(json.dumps(document, indent=1) + "\n")

    with contextlib.ExitStack() as wheels:
        if any(group.needs_engine for group in groups):
            groups = with_wheels(groups, wheels)
        suite = Suite(
            groups,
            options.only,
            options.time_limit,
            run_process,
            time.monotonic,
            save,
            seed=options.seed,
        )
        try:
            document = suite.execute()
        except KeyboardInterrupt:
            return 130
    print(as_table(document))
    return exit_code(document["rows"])


def with_wheels(groups: Sequence[Group], wheels: contextlib.ExitStack) -> list[Group]:
    """The groups, able to import what the engine needs until `wheels` is closed; those that need
    that are broken if it cannot be had."""
    try:
        wheels.enter_context(installed_wheels())
    except WheelsNotInstalled as error:
        return [_without_wheels(group, str(error)) for group in groups]
    return list(groups)


def _without_wheels(group: Group, why: str) -> Group:
    if not group.needs_engine:
        return group
    return dataclasses.replace(group, checks=(), timings=(), figures=(), broken=why)


def _gpu_is_there() -> bool:
    import torch

    return torch.cuda.is_available()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
