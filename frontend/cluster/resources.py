"""Resources of a rank, as Ray's keywords for an actor."""

from typing import Any

from frontend.cluster.deployment import ModelDeployment

_OWN_KEYWORDS = {"CPU": "num_cpus", "GPU": "num_gpus", "memory": "memory"}


def resource_options(resources: dict[str, float]) -> dict[str, Any]:
    options: dict[str, Any] = {"num_cpus": 0, "resources": {}}
    for name, amount in resources.items():
        if name in _OWN_KEYWORDS:
            options[_OWN_KEYWORDS[name]] = amount
        else:
            options["resources"][name] = amount
    return options


def actor_options(model: ModelDeployment) -> dict[str, Any]:
    return {**resource_options(model.resources), "runtime_env": {"env_vars": model.env}}
