"""Batches on a cluster of two nodes on this machine: an actor, a node and the driver are killed."""

import itertools
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.ray]

NUM_ROWS = 240
HERE = {"PYTHONPATH": str(Path.cwd())}
"""For processes that start elsewhere."""
MODEL = "smollm2-135m-instruct"


@pytest.fixture(scope="module")
def cluster():
    """Its head has no core for actors."""
    pytest.importorskip("ray")
    from ray.cluster_utils import Cluster

    found = Cluster(initialize_head=True, head_node_args={"num_cpus": 0})
    yield found
    found.shutdown()


@pytest.fixture(autouse=True)
def nodes(cluster):
    """One core each."""
    found = [cluster.add_node(num_cpus=1) for _ in range(2)]
    cluster.wait_for_nodes()
    yield found
    for node in found:
        if node in cluster.list_all_nodes():
            cluster.remove_node(node)


@pytest.fixture
def rows(tmp_path):
    found = [
        {
            "custom_id": f"row {number}",
            "url": "/v1/completions",
            "body": {"prompt": f"{number} and", "max_tokens": 24, "temperature": 0},
        }
        for number in range(NUM_ROWS)
    ]
    found[7]["body"]["max_tokens"] = -1
    (tmp_path / "in.jsonl").write_text("".join(json.dumps(each) + "\n" for each in found))
    return found


def batch(cluster, folder, model, *options):
    command = [sys.executable, "-m", "engine_core.cli", "batch", "in.jsonl", "out.jsonl"]
    command += ["--model", str(model), "--replicas", "2", "--num-blocks", "256", *options]
    environment = HERE | {"RAY_ADDRESS": cluster.address}
    with (folder / "log").open("a") as log:
        return subprocess.Popen(
            command, cwd=folder, env=os.environ | environment, stdout=log, stderr=log
        )


def wait_for_answers(folder, process, num_rows):
    def num_answered():
        path = folder / "out.jsonl.parts" / "open.jsonl"
        return path.read_bytes().count(b"\n") if path.exists() else 0

    while num_answered() < num_rows:
        assert process.poll() is None, (folder / "log").read_text()
        time.sleep(0.1)
    return num_answered()


def kill_actor(nodes):
    """One of the pool's. Returns the index of its node."""
    for index in itertools.islice(itertools.cycle(range(len(nodes))), 6000):
        [raylet] = nodes[index].all_processes["raylet"]
        command = ["pgrep", "-P", str(raylet.process.pid), "-f", "ray::.*MapWorker"]
        if found := subprocess.run(command, capture_output=True, text=True).stdout:
            os.kill(int(found.split()[0]), signal.SIGKILL)
            return index
        time.sleep(0.1)
    raise AssertionError("there is no actor")


def assert_answered(folder, rows):
    found = [json.loads(line) for line in (folder / "out.jsonl").read_text().splitlines()]
    assert [each["custom_id"] for each in found] == [each["custom_id"] for each in rows]
    errors = [each["custom_id"] for each in found if each["error"] is not None]
    assert errors == ["row 7"]
    return {each["custom_id"]: each["response"]["body"] for each in found}


def test_each_row_is_answered_once_whatever_is_killed(cluster, nodes, rows, tmp_path):
    process = batch(cluster, tmp_path, MODEL)
    before = wait_for_answers(tmp_path, process, 5)
    killed = kill_actor(nodes)
    before = wait_for_answers(tmp_path, process, before + 20)
    cluster.remove_node(nodes[1 - killed], allow_graceful=False)
    before = wait_for_answers(tmp_path, process, before + 20)
    process.kill()
    process.wait()
    nodes.append(cluster.add_node(num_cpus=1))

    process = batch(cluster, tmp_path, MODEL)
    assert process.wait() == 0, (tmp_path / "log").read_text()
    said = (tmp_path / "log").read_text()
    assert f"{NUM_ROWS} answers in out.jsonl" in said
    bodies = assert_answered(tmp_path, rows)

    (tmp_path / "alone").mkdir()
    (tmp_path / "alone" / "in.jsonl").write_text(json.dumps(rows[3]) + "\n")
    command = [sys.executable, "-m", "engine_core.cli", "batch", "in.jsonl", "out.jsonl"]
    command += ["--model", MODEL, "--num-blocks", "256"]
    subprocess.run(command, cwd=tmp_path / "alone", check=True, env=os.environ | HERE)
    alone = json.loads((tmp_path / "alone" / "out.jsonl").read_text())["response"]["body"]
    assert bodies["row 3"]["choices"] == alone["choices"]
