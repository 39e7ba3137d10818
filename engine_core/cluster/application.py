"""From a deployment to an application of Ray Serve, for `engine-core on-ray` and for Serve's own
configuration files, such as KubeRay's: `import_path: engine_core.cluster.application:build`."""

import re
from pathlib import Path
from typing import Any

from ray import serve
from ray.serve import Application
from ray.serve.config import AutoscalingConfig, AutoscalingPolicy

from engine_core.cluster.autoscaling import ScaleByLoad
from engine_core.cluster.deployment import Deployment, ModelDeployment, read_deployment
from engine_core.cluster.directory_actor import ensure_directory
from engine_core.cluster.engine_replica import EngineReplica
from engine_core.cluster.http_replica import HttpReplica

DEFAULT_NAME = "engine-core"
_HEALTH_PERIOD_S = 5.0
_GRACE_S = 20.0
"""Beyond a drain."""


def build(arguments: dict[str, Any]) -> Application:
    """`arguments`: `file`, the path of a deployment file on the head node, and `name`, of the
    application, if a cluster has several. Raises ConfigurationError."""
    file = Path(arguments["file"])
    return make_application(read_deployment(file), arguments.get("name", DEFAULT_NAME))


def make_application(deployment: Deployment, name: str) -> Application:
    """Starts the deployment's directory. Raises InvalidInput: settings of [http] that contradict
    each other."""
    api_keys = deployment.server.check()
    directory = f"{name}-directory"
    ensure_directory(directory)
    engines = [_engines(each, number, directory) for number, each in enumerate(deployment.models)]
    server, http = deployment.server, deployment.http
    http_replicas = serve.deployment(
        serve.ingress()(HttpReplica),
        name="http",
        num_replicas=http.replicas,
        ray_actor_options=_actor_options(http.resources),
        max_ongoing_requests=2 * server.max_concurrent_requests,  # refused by the application
        graceful_shutdown_timeout_s=server.drain_timeout,
        graceful_shutdown_wait_loop_s=1.0,
    )
    return http_replicas.bind(deployment, api_keys, directory, engines)


def _engines(model: ModelDeployment, number: int, directory: str) -> Application:
    scaling = model.autoscaling
    limits = {
        "target_ongoing_requests": scaling.target_ongoing_requests,
        "look_back_period_s": scaling.look_back_period_s,
    }
    replicas = serve.deployment(
        EngineReplica,
        name=f"engine-{number}-{re.sub(r'[^A-Za-z0-9]+', '-', model.served_name)}",
        ray_actor_options={
            **_actor_options(model.resources),
            "runtime_env": {"env_vars": model.env},
        },
        placement_group_bundles=[model.resources] * model.num_ranks,
        placement_group_strategy=model.placement_strategy,
        autoscaling_config=AutoscalingConfig(
            min_replicas=model.min_replicas,
            max_replicas=model.most_replicas,
            upscale_delay_s=scaling.upscale_delay_s,
            downscale_delay_s=scaling.downscale_delay_s,
            downscale_to_zero_delay_s=scaling.downscale_to_zero_delay_s,
            policy=AutoscalingPolicy(
                policy_function=ScaleByLoad,
                policy_kwargs={**limits, "target_slo_attainment": scaling.target_slo_attainment},
            ),
            **limits,
        ),
        max_ongoing_requests=1000,
        health_check_period_s=_HEALTH_PERIOD_S,
        health_check_timeout_s=model.health_timeout_s + _HEALTH_PERIOD_S,
        graceful_shutdown_timeout_s=model.drain_timeout_s + _GRACE_S,
        graceful_shutdown_wait_loop_s=0.1,
    )
    return replicas.bind(model, directory)


def _actor_options(resources: dict[str, float]) -> dict[str, Any]:
    """Ray's keywords for what a bundle has as a table."""
    own = {"CPU": "num_cpus", "GPU": "num_gpus", "memory": "memory"}
    options: dict[str, Any] = {"num_cpus": 0}
    options |= {own[name]: amount for name, amount in resources.items() if name in own}
    others = {name: amount for name, amount in resources.items() if name not in own}
    return {**options, "resources": others} if others else options
