"""Many schedules on all cores: `python -m tests.simulation.campaign --num 100000`. The next call
goes on where the last one stopped. A seed that fails is replayed by `--seed N`, with its trace."""

import argparse
import json
import multiprocessing
import os
import sys
import time
from pathlib import Path

from tests.simulation.schedule import run_schedule
from tests.simulation.settings import Violation

_CHUNK = 200


def _run_chunk(first: int) -> tuple[int, list[tuple[int, str]], int, int]:
    failed, num_requests, num_errors = [], 0, 0
    for seed in range(first, first + _CHUNK):
        try:
            report = run_schedule(seed)
        except Violation as violation:
            failed.append((seed, str(violation).splitlines()[0]))
        else:
            num_requests += report.num_requests
            num_errors += report.num_errors
    return first, failed, num_requests, num_errors


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--num", type=int, default=100_000, help="schedules in all")
    parser.add_argument("--state", type=Path, default=Path(".simulation/campaign.json"))
    parser.add_argument("--seed", type=int, help="run this one alone, and print its trace")
    options = parser.parse_args()
    if options.seed is not None:
        print(run_schedule(options.seed, keeps_trace=True))
        return 0
    state = {"done": [], "failed": [], "num_requests": 0, "num_errors": 0, "seconds": 0.0}
    if options.state.exists():
        state = json.loads(options.state.read_text())
    options.state.parent.mkdir(exist_ok=True)
    left = [first for first in range(0, options.num, _CHUNK) if first not in set(state["done"])]
    started_s = time.monotonic() - state["seconds"]
    with multiprocessing.get_context("spawn").Pool(os.cpu_count()) as pool:
        for first, failed, num_requests, num_errors in pool.imap_unordered(_run_chunk, left):
            state["done"].append(first)
            state["failed"] += failed
            state["num_requests"] += num_requests
            state["num_errors"] += num_errors
            state["seconds"] = time.monotonic() - started_s
            options.state.write_text(json.dumps(state))
            for seed, why in failed:
                print(why, f"(replay: python -m tests.simulation.campaign --seed {seed})")
    print(
        f"{len(state['done']) * _CHUNK} schedules, {state['num_requests']} requests, "
        f"{len(state['failed'])} violations, {state['seconds']:.0f} s"
    )
    return 1 if state["failed"] else 0


if __name__ == "__main__":
    sys.exit(main())
