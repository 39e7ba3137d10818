"""A rank beside the first of a replica: an actor with a worker's process, which joins the engine at
its address. Each has a bundle of the replica's placement group, so it may be on another node."""

import asyncio
import os
import subprocess
import sys

import ray
from ray.util.placement_group import get_current_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from frontend.cluster.deployment import ModelDeployment
from frontend.cluster.keys import KeyFiles
from frontend.cluster.resources import actor_options


class _RankActor:
    async def work(self, model: ModelDeployment, address: str, keys: dict[str, bytes]) -> str:
        """Returns how the process ended. With the actor it ends, too."""
        key_files = KeyFiles(keys)
        command = [
            *(sys.executable, "-m", "engine_core.cli", "--join", address, "--model", model.model),
            *("--keys", str(key_files.of_client), "--exit-on-stdin-eof"),
            *("--parent-pid", str(os.getpid()), *model.worker_arguments()),
        ]
        process = subprocess.Popen(command, stdin=subprocess.PIPE)
        try:
            code = await asyncio.to_thread(process.wait)
        finally:
            process.kill()
            key_files.close()
        return f"a worker ended with exit code {code}; its actor's log says why"


def start_ranks(
    model: ModelDeployment, address: str, keys: dict[str, bytes]
) -> list["ray.ObjectRef[str]"]:
    """From a replica, the ranks after its own. What comes, or fails, says that one has ended."""
    group = get_current_placement_group()
    found = []
    for number in range(1, model.num_ranks):
        actor = ray.remote(_RankActor).options(
            **actor_options(model),
            scheduling_strategy=PlacementGroupSchedulingStrategy(
                group, placement_group_bundle_index=number
            ),
        )
        found.append(actor.remote().work.remote(model, address, keys))
    return found
