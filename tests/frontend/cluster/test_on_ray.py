"""A deployment on a Ray cluster of several raylets: nodes and engines are lost under load, replicas
come and go, and every stream ends with the tokens that an undisturbed one has, or is broken."""

import asyncio
import contextlib
import os
import signal
import threading
from pathlib import Path

import httpx
import pytest

from tests.frontend.cluster.conftest import WITHIN_S, eventually
from tests.frontend.cluster.streams import BROKEN, DONE, streams

pytestmark = [pytest.mark.slow, pytest.mark.ray]

PROMPTS = [f"Story number {number} begins like this:" for number in range(8)]
NUM_TOKENS = 200
MODEL = """
[[models]]
model = "smollm2-135m-instruct"
name = "small"
resources = {engine = 1}
options = {num_threads = 1, kv_cache_memory = "128MiB", max_num_seqs = 16}
health_timeout_s = 5
"""
ELASTIC = """
max_replicas = 3
[models.autoscaling]
target_ongoing_requests = 2
upscale_delay_s = 1
downscale_delay_s = 5
downscale_to_zero_delay_s = 5
look_back_period_s = 3
"""


@pytest.fixture(scope="module")
def expected(ray_cluster):
    """What each prompt gives, undisturbed."""
    ray_cluster.first_node = ray_cluster.add_node(engine=1)
    ray_cluster.deploy(f"resources = {{front = 1}}\n{MODEL}")
    found = asyncio.run(streams(ray_cluster.url, "small", PROMPTS, NUM_TOKENS))
    assert {each.how for each in found} == {DONE}
    assert len({each.text for each in found}) == len(PROMPTS)
    return [each.text for each in found]


def ask(cluster, on_piece=lambda: None, url=None, num_tokens=NUM_TOKENS):
    return asyncio.run(streams(url or cluster.url, "small", PROMPTS, num_tokens, on_piece))


def once_after(num_pieces, action):
    """For `on_piece`: the action, in a thread, when so many have come."""
    threads = []
    left = [num_pieces]

    def on_piece():
        left[0] -= 1
        if left[0] == 0:
            threads.append(threading.Thread(target=action))
            threads[0].start()

    return on_piece


def whole(outcomes, expected):
    return [(each.how, each.error, each.text) for each in outcomes] == [
        (DONE, "", text) for text in expected
    ]


def engine_pids():
    """Of the deployments of this test's Ray."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            words = (folder / "cmdline").read_bytes().split(b"\0")
            if b"--model-name=small" in words and b"engine_core.cli" in words:
                found.append(int(folder.name))
    return found


def test_a_node_is_lost_under_load(ray_cluster, expected):
    node, port = ray_cluster.add_node(engine=1, front=1)
    ray_cluster.deploy(f"replicas = 2\nresources = {{front = 1}}\n{MODEL}min_replicas = 2\n")
    eventually(lambda: len(ray_cluster.engines()) == 2)
    there = f"http://127.0.0.1:{port}"
    eventually(lambda: is_answered(there))
    both = {}

    def at(name, url, on_piece=lambda: None):
        both[name] = ask(ray_cluster, on_piece, url)

    on_the_node = threading.Thread(target=at, args=("lost", there))
    on_the_node.start()
    at("kept", ray_cluster.url, once_after(200, lambda: ray_cluster.kill_node(node)))
    on_the_node.join()
    # Serve's proxy on the head may have sent some to the HTTP replica that was lost
    assert DONE in {each.how for each in both["kept"]}
    assert BROKEN in {each.how for each in both["lost"]}
    for outcomes in both.values():
        for outcome, text in zip(outcomes, expected, strict=True):
            assert outcome.how in (DONE, BROKEN), outcome
            assert outcome.text == text if outcome.how == DONE else text.startswith(outcome.text)
    ray_cluster.add_node(engine=1, front=1)
    eventually(lambda: len(ray_cluster.engines()) == 2)
    assert whole(ask(ray_cluster), expected)


def is_answered(url):
    with contextlib.suppress(httpx.HTTPError):
        return httpx.get(f"{url}/v1/models", timeout=60).status_code == 200
    return False


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
def test_an_engine_dies_or_hangs_under_load(ray_cluster, expected, how):
    ray_cluster.deploy(f"resources = {{front = 1}}\n{MODEL}")
    eventually(lambda: list(ray_cluster.engines()) == ["small"])
    (pid,) = eventually(lambda: len(engine_pids()) == 1 and engine_pids())
    assert whole(ask(ray_cluster, once_after(100, lambda: os.kill(pid, how))), expected)
    assert pid not in eventually(engine_pids)


def test_replicas_follow_the_load_and_rest_without_one(ray_cluster, expected):
    for _ in range(2):
        ray_cluster.add_node(engine=1)
    ray_cluster.deploy(f"resources = {{front = 1}}\n{MODEL}min_replicas = 1{ELASTIC}")
    outcomes, is_over = [], threading.Event()

    def load():
        while not is_over.is_set():
            outcomes.append(ask(ray_cluster))

    thread = threading.Thread(target=load)
    thread.start()
    try:
        eventually(lambda: len(ray_cluster.engines()) == 3)
    finally:
        is_over.set()
        thread.join()
    eventually(lambda: list(ray_cluster.engines()) == ["small"])
    outcomes.append(ask(ray_cluster))
    ray_cluster.deploy(f"resources = {{front = 1}}\n{MODEL}min_replicas = 0{ELASTIC}")
    eventually(lambda: ray_cluster.engines() == {"small": "scaled to zero"})
    assert httpx.get(f"{ray_cluster.url}/ready", timeout=60).status_code == 200
    outcomes.append(ask(ray_cluster))
    assert all(whole(each, expected) for each in outcomes)


def test_a_node_with_a_worker_of_a_replica_is_lost_under_load(ray_cluster):
    ray_cluster.add_node(rank=2)
    node, _ = ray_cluster.add_node(rank=1)
    several = MODEL.replace("{engine = 1}", "{rank = 1}") + "tensor_parallel_size = 3\n"
    ray_cluster.deploy(f"resources = {{front = 1}}\n{several}")
    undisturbed = ask(ray_cluster, num_tokens=50)  # they are slow
    assert {each.how for each in undisturbed} == {DONE}

    outcomes, begun = [], threading.Event()

    def load():
        outcomes.extend(ask(ray_cluster, once_after(100, begun.set), num_tokens=50))

    thread = threading.Thread(target=load)
    thread.start()
    assert begun.wait(WITHIN_S)
    with contextlib.suppress(AssertionError):  # Ray's, if a process takes long to be gone
        ray_cluster.kill_node(node)
    ray_cluster.add_node(rank=1)  # which Ray does in the main thread alone
    thread.join()
    assert whole(outcomes, [each.text for each in undisturbed])


def test_what_is_stopped_is_gone(ray_cluster):
    ray_cluster.delete()
    eventually(lambda: not engine_pids())
    assert not is_answered(ray_cluster.url)
