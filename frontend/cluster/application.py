"""From a deployment to an application of Ray Serve, for `engine-core on-ray` and for Serve's own
configuration files, such as KubeRay's: `import_path: frontend.cluster.application:build`."""

import hashlib
import re
from importlib.metadata import version
from pathlib import Path
from typing import Any

import msgspec
from ray import cloudpickle, serve
from ray.serve import Application
from ray.serve.config import AutoscalingConfig, AutoscalingPolicy

from frontend.cluster.autoscaling import ScaleByLoad
from frontend.cluster.deployment import (
    Autoscaling,
    Deployment,
    ModelDeployment,
    deployment_of,
    read_deployment,
)
from frontend.cluster.directory_actor import ensure_directory
from frontend.cluster.engine_replica import EngineReplica
from frontend.cluster.http_replica import HttpReplica, ServedReplicas
from frontend.cluster.resources import actor_options, resource_options

_HEALTH_PERIOD_S = 5.0
_GRACE_S = 20.0
"""Beyond a drain."""


def build(arguments: dict[str, Any]) -> Application:
    """`arguments`: the tables of a deployment file, or `file`, its path on the head's node.
    Raises ConfigurationError."""
    if "file" in arguments:
        return make_application(read_deployment(Path(arguments["file"])))
    return make_application(deployment_of(arguments))


def make_application(deployment: Deployment) -> Application:
    """Starts the deployment's directory. Raises InvalidInput: settings of [http] that contradict
    each other."""
    api_keys = deployment.server.check()
    ensure_directory()
    engines = [_engines(each, number) for number, each in enumerate(deployment.models)]
    server, http = deployment.server, deployment.http
    served = tuple(map(ServedReplicas.of, deployment.models))
    arguments = (served, http, server, api_keys)
    http_replicas = serve.deployment(
        serve.ingress()(HttpReplica),
        name="http",
        num_replicas=http.replicas,
        ray_actor_options=resource_options(http.resources),
        max_ongoing_requests=2 * server.max_concurrent_requests,  # refused by the application
        graceful_shutdown_timeout_s=server.drain_timeout,
        graceful_shutdown_wait_loop_s=1.0,
    )
    return _versioned(http_replicas, arguments).bind(*arguments, engines)


def _versioned(deployment: serve.Deployment, arguments: object) -> serve.Deployment:
    """Else `serve.run` would replace every replica each time, also those that do not change."""
    content = version("engine-core").encode() + cloudpickle.dumps(arguments)
    return deployment.options(version=hashlib.sha256(content).hexdigest(), _internal=True)


def _engines(model: ModelDeployment, number: int) -> Application:
    scaling = model.autoscaling
    limits = {
        "target_ongoing_requests": scaling.target_ongoing_requests,
        "look_back_period_s": scaling.look_back_period_s,
    }
    replicas = serve.deployment(
        EngineReplica,
        name=f"engine-{number}-{re.sub(r'[^A-Za-z0-9]+', '-', model.served_name)}",
        ray_actor_options=actor_options(model),
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
    alike = msgspec.structs.replace(
        model,
        min_replicas=0,
        max_replicas=None,
        autoscaling=Autoscaling(look_back_period_s=scaling.look_back_period_s),
    )
    return _versioned(replicas, alike).bind(alike)
