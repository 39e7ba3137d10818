"""A Ray cluster of several raylets on this machine, and a deployment on it, as `engine-core on-ray`
makes it. It ends with the tests."""

import contextlib
import json
import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import httpx
import pytest

SETTINGS = {
    "RAY_SERVE_REPLICA_AUTOSCALING_METRIC_PUSH_INTERVAL_S": "1",
    "RAY_SERVE_HANDLE_AUTOSCALING_METRIC_PUSH_INTERVAL_S": "1",
    "RAY_health_check_period_ms": "1000",
    "RAY_USAGE_STATS_ENABLED": "0",
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
    "PYTHONPATH": str(Path.cwd()),
}
WITHIN_S = 600
OBJECT_STORE_BYTES = 80 * 2**20


def free_port():
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def eventually(condition, within_s=WITHIN_S):
    """The condition's first true value."""
    deadline_s = time.monotonic() + within_s
    while not (value := condition()):
        assert time.monotonic() < deadline_s, f"not within {within_s} s"
        time.sleep(0.2)
    return value


class RayCluster:
    """A head that runs no replicas of engines, and nodes that do."""

    def __init__(self, folder):
        from ray.cluster_utils import Cluster

        self._folder = folder
        self.port = free_port()
        head = self._node_options(num_cpus=0, resources={"front": 1})
        self._cluster = Cluster(initialize_head=True, head_node_args=head, shutdown_at_exit=True)

    def _node_options(self, **options):
        return {"object_store_memory": OBJECT_STORE_BYTES, "include_dashboard": False, **options}

    def add_node(self, **resources):
        """A node with resources of these names, and the port of its HTTP proxy."""
        port = free_port()
        node = self._cluster.add_node(
            **self._node_options(num_cpus=0, resources=resources),
            env_vars={"RAY_SERVE_WORKER_PROXY_HTTP_PORT": str(port)},
        )
        return node, port

    def kill_node(self, node):
        """SIGKILL, as when a machine is switched off."""
        self._cluster.remove_node(node, allow_graceful=False)

    @property
    def url(self):
        return f"http://127.0.0.1:{self.port}"

    def engines(self):
        """The state of each engine by name and address."""
        with contextlib.suppress(httpx.HTTPError):
            return httpx.get(f"{self.url}/health", timeout=60).json()["engines"]
        return {}

    def deploy(self, text):
        file = self._folder / "deployment.toml"
        file.write_text(f"[http]\nport = {self.port}\n{text}")
        self._on_ray(file, "--detach")

    def delete(self):
        self._on_ray(self._folder / "deployment.toml", "--stop")

    def _on_ray(self, file, *options):
        command = [sys.executable, "-m", "engine_core.cli", "on-ray", str(file)]
        done = subprocess.run(
            [*command, "--address", self._cluster.address, *options],
            capture_output=True, text=True, timeout=WITHIN_S, check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        return done.stdout and json.loads(done.stdout)

    def close(self):
        self._cluster.shutdown()


@pytest.fixture(scope="module")
def ray_cluster(tmp_path_factory):
    pytest.importorskip("ray")
    before = dict(os.environ)
    os.environ.update(SETTINGS)
    cluster = RayCluster(tmp_path_factory.mktemp("cluster"))
    try:
        yield cluster
    finally:
        cluster.close()
        os.environ.clear()
        os.environ.update(before)
