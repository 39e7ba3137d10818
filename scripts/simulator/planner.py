"""How many replicas, and which token budget, hold the promises at a load.

For each budget the fewest replicas are found by doubling and then halving, which takes it for
granted that more replicas never serve worse; budgets are swept by processes of their own.
"""

import dataclasses
import functools
import multiprocessing
import os
from typing import Any

from scripts.simulator.errors import SimulationError
from scripts.simulator.simulation import Scenario, simulate


@dataclasses.dataclass(frozen=True, slots=True)
class Trial:
    max_num_batched_tokens: int
    replicas: int
    ttft_p99_s: float | None
    tpot_p99_s: float | None
    utilisation: float | None
    output_tokens_per_s: float | None
    num_refused: int
    why_not: str | None
    """None if it holds."""

    @property
    def holds(self) -> bool:
        return self.why_not is None


def plan(
    scenario: Scenario, budgets: tuple[int, ...], max_replicas: int, num_processes: int | None
) -> dict[str, Any]:
    """The document: every trial in order, and the best: the fewest replicas, then the least p99
    time to first token.

    Raises:
        SimulationError: no promise, no budget, or a simulation that cannot be done.
    """
    targets = scenario.fleet.targets()
    if targets.ttft_s is None and targets.tpot_s is None:
        raise SimulationError("nothing is promised; give --slo-ttft-ms or --slo-tpot-ms, or both")
    for name, values in (("--budget", budgets), ("--max-replicas", (max_replicas,))):
        if not values or min(values) < 1:
            raise SimulationError(f"{name} is {list(values)}, each must be at least 1")
    budgets = tuple(sorted(set(budgets)))
    search = functools.partial(fewest_replicas, scenario, max_replicas=max_replicas)
    num_processes = min(num_processes or os.cpu_count() or 1, len(budgets))
    if num_processes == 1:
        searched = [search(budget) for budget in budgets]
    else:
        # spawn: a fork would copy whatever threads the parent has
        with multiprocessing.get_context("spawn").Pool(num_processes) as pool:
            searched = pool.map(search, budgets, chunksize=1)
    trials = [trial for of_budget in searched for trial in of_budget]
    holding = [trial for trial in trials if trial.holds]
    best = min(holding, key=lambda trial: (trial.replicas, trial.ttft_p99_s or 0.0), default=None)
    return {
        "scenario": scenario.describe(),
        "targets": dataclasses.asdict(targets),
        "max_replicas": max_replicas,
        "tried": [_describe(trial) for trial in trials],
        "best": None if best is None else _describe(best),
    }


def fewest_replicas(scenario: Scenario, budget: int, *, max_replicas: int) -> list[Trial]:
    """All trials of one budget, by replicas; the first that holds is the answer, if one does."""
    trials: dict[int, Trial] = {}

    def holds(replicas: int) -> bool:
        trials[replicas] = _try(scenario, budget, replicas)
        return trials[replicas].holds

    too_few, enough = 0, 1
    while not holds(enough):
        too_few = enough
        if enough == max_replicas:
            break
        enough = min(2 * enough, max_replicas)
    while enough - too_few > 1:
        middle = (too_few + enough) // 2
        if holds(middle):
            enough = middle
        else:
            too_few = middle
    return [trials[replicas] for replicas in sorted(trials)]


def _try(scenario: Scenario, budget: int, replicas: int) -> Trial:
    scenario = dataclasses.replace(
        scenario,
        engine=dataclasses.replace(scenario.engine, max_num_batched_tokens=budget),
        fleet=dataclasses.replace(scenario.fleet, engines=replicas),
    )
    outcome = simulate(scenario)
    requests, engines = outcome.document["requests"], outcome.document["engines"]
    ttft, tpot = (outcome.metrics.percentile_s(figure, 99) for figure in ("ttft", "tpot"))
    targets = scenario.fleet.targets()
    why_not = None
    if requests["num_refused"]:
        why_not = f"{requests['num_refused']} requests refused"
    elif targets.ttft_s is not None and ttft is not None and ttft > targets.ttft_s:
        why_not = "first tokens too late"
    elif targets.tpot_s is not None and tpot is not None and tpot > targets.tpot_s:
        why_not = "tokens too slow"
    return Trial(
        max_num_batched_tokens=budget,
        replicas=replicas,
        ttft_p99_s=ttft,
        tpot_p99_s=tpot,
        utilisation=engines["utilisation"],
        output_tokens_per_s=requests["throughput"]["output_tokens_per_s"],
        num_refused=requests["num_refused"],
        why_not=why_not,
    )


def _describe(trial: Trial) -> dict[str, Any]:
    return dataclasses.asdict(trial) | {"holds": trial.holds}
