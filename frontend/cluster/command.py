"""`engine-core on-ray`: deploys a file on a Ray cluster, or on one of this machine's own."""

import contextlib
import json
import logging
import signal
import sys
import threading
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from engine_core.errors import ConfigurationError, StartupError
from frontend.cluster.deployment import NAME, Deployment, read_deployment
from frontend.errors import EngineClientError
from protocol.logs import log_to_stderr

logger = logging.getLogger(__name__)

_PROXY_ATTEMPTS = 5
_MOST_SAID = 2000
"""Characters of a replica's end."""

_CONTROLLER_ENVIRONMENT = {"RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S": "60"}
"""A proxy imports for longer than the default of 5 s on a busy machine, and would be killed."""


def on_ray(
    file: Annotated[
        Path, Parameter(show=True, help="The deployment, a TOML file; see docs/guides/cluster.md.")
    ],
    /,
    *,
    address: Annotated[
        str | None,
        Parameter(
            show=True,
            help="Of a Ray cluster: auto, HOST:PORT or ray://HOST:PORT. Default: the one of "
            "RAY_ADDRESS or of `ray start` on this machine, else one that is started here and "
            "ends with this command.",
        ),
    ] = None,
    detach: Annotated[
        bool,
        Parameter(show=True, help="Return when it serves, and leave it running.", negative=""),
    ] = False,
    stop: Annotated[
        bool, Parameter(show=True, help="End what was left running.", negative="")
    ] = False,
    check: Annotated[bool, Parameter(show=True, help="Only check the file.", negative="")] = False,
) -> int:
    """Serve models over HTTP on a Ray cluster until Ctrl-C."""
    log_to_stderr("info")
    deployment = read_deployment(file)
    try:
        deployment.server.check()
    except EngineClientError as error:
        raise ConfigurationError(f"{file}: {error}") from None
    if check:
        models = ", ".join(each.served_name for each in deployment.models)
        sys.stdout.write(f"{file} can be deployed: {models}\n")
        return 0
    if find_spec("ray") is None:
        raise ConfigurationError(
            "on-ray needs Ray, the extra `cluster`; install it with "
            "`pip install 'engine-core[cluster]'`, on every node of the cluster"
        )
    return _on_ray(deployment, address, detach=detach, stop=stop)


def _on_ray(deployment: Deployment, address: str | None, *, detach: bool, stop: bool) -> int:
    import ray
    from ray import serve

    from frontend.cluster.application import make_application
    from frontend.cluster.directory_actor import remove_directory

    server = deployment.server
    try:
        ray.init(address=address or ("auto" if detach or stop else None), log_to_driver=False)
    except (ConnectionError, ValueError, RuntimeError) as error:
        raise StartupError(f"no Ray cluster at {address or 'this machine'}: {error}") from None
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # ray.init() has set another
    try:
        if not stop:
            http_options = {
                "host": server.host,
                "port": server.port,
                "ssl_certfile": server.ssl_certfile and str(server.ssl_certfile),
                "ssl_keyfile": server.ssl_keyfile and str(server.ssl_keyfile),
            }
            environment = {"runtime_env": {"env_vars": _CONTROLLER_ENVIRONMENT}}
            _patiently(
                lambda: serve.start("EveryNode", http_options, controller_options=environment)
            )
            try:
                application = make_application(deployment)
                _patiently(lambda: serve.run(application, name=NAME, route_prefix="/"))
                _announce(deployment)
                if detach:
                    return 0
                threading.Event().wait()
            except KeyboardInterrupt:
                logger.info("stopping; requests that run have their drain timeouts to end")
        serve.delete(NAME)
        remove_directory()
    except (RuntimeError, TimeoutError, ray.exceptions.RayError) as error:
        raise StartupError(f"the deployment did not start: {_reason(error)}") from None
    finally:
        ray.shutdown()
    return 0


def _patiently(start: Callable[[], object]) -> None:
    """Serve waits a minute for its proxies, which a busy machine exceeds; they start all the same,
    and calling it again changes nothing. Raises TimeoutError: they do not."""
    for _ in range(_PROXY_ATTEMPTS - 1):
        with contextlib.suppress(TimeoutError):
            start()
            return
        logger.info("Ray Serve's proxies are not there yet")
    start()


def _reason(error: Exception) -> str:
    """The error, with what replicas ended with where Serve knows it."""
    from ray import serve
    from ray.exceptions import RayError

    said = [str(error), "see Ray Serve's logs"]
    with contextlib.suppress(RayError, KeyError):
        for deployment in serve.status().applications[NAME].deployments.values():
            text = deployment.message.strip()
            if deployment.status not in ("HEALTHY", "UPDATING") and text:
                said.insert(1, text.rpartition("EngineStartError: ")[2][-_MOST_SAID:])
    return "\n".join(said)


def _announce(deployment: Deployment) -> None:
    server = deployment.server
    url = f"http{'s' if server.ssl_certfile else ''}://{server.host}:{server.port}"
    names = [each.served_name for each in deployment.models]
    text = json.dumps({"event": "ready", "url": url, "models": names})
    if sys.stdout.isatty():
        text = f"\nServing {', '.join(names)} at {url}/v1\n\nCtrl-C stops it.\n"
    print(text, flush=True)  # noqa: T201
