"""The images of docs/deployment/Containerfile: built here, and run as an operator runs them, with
nothing that a pod of the chart has not.

Needs podman or docker, and the base image: there, to be pulled, or made by `base_image` beside this
file. IMAGE_BUILD_OPTIONS has what the build needs on this machine, such as `--volume` of a mirror's
certificate.
"""

import functools
import json
import os
import re
import shlex
import shutil
import subprocess
import threading
import time
from pathlib import Path

import httpx
import pytest

from frontend import LLM, SamplingParams

pytestmark = [pytest.mark.slow, pytest.mark.packages, pytest.mark.timeout(7200)]

ROOT = Path(__file__).parents[2]
CONTAINER_FILE = ROOT / "docs/deployment/Containerfile"
TOOL = shutil.which("podman") or shutil.which("docker") or ""
UID = 10001
LOCKED = ("--read-only", "--tmpfs", "/tmp", "--cap-drop", "ALL", "--memory", "3g",
          "--security-opt", "no-new-privileges")  # fmt: skip
SOCKET = "ipc:///run/engine-core/engine.sock"
PROMPT = "The capital of France is"


def run(*arguments, check=True):
    done = subprocess.run([TOOL, *map(str, arguments)], capture_output=True, text=True, check=False)
    assert not check or done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done


@pytest.fixture(scope="module")
def image():
    """Builds a target once, and gives its name."""
    if not TOOL:
        pytest.skip("needs podman or docker: apt-get install podman")
    base = re.search(r"^FROM (\S+) AS base$", CONTAINER_FILE.read_text(), re.MULTILINE)[1]
    if run("image", "inspect", base, check=False).returncode:
        pulled = run("pull", base, check=False)
        if pulled.returncode:
            pytest.skip(f"cannot pull {base}: {pulled.stderr.strip().splitlines()[-1]}")
    own = ("--format", "docker", "--pull=never", "--layers") if "podman" in TOOL else ()
    options = shlex.split(os.environ.get("IMAGE_BUILD_OPTIONS", ""))

    @functools.cache
    def build(target):
        name = f"localhost/engine-core-test-{target}"
        run("build", *own, *options, "--target", target, "-t", name, "-f", CONTAINER_FILE, ROOT)
        return name

    return build


@pytest.fixture
def start(smollm2, tmp_path):
    """Starts a container with a cache of one model, and gives its id."""
    containers = []
    (tmp_path / "cache").mkdir(mode=0o700)
    (tmp_path / "cache/models").mkdir()
    shutil.copy(smollm2, tmp_path / "cache/models")

    def run_container(image, *arguments, options=(), owner=UID):
        for path in (tmp_path / "cache", *(tmp_path / "cache").rglob("*")):
            os.chown(path, owner, owner)
        volume = ("-v", f"{tmp_path}/cache:/cache", "-e", "HF_HUB_OFFLINE=1")
        made = run("run", "-d", *LOCKED, *volume, *options, image, *arguments)
        containers.append(made.stdout.strip())
        return containers[-1]

    yield run_container
    for container in containers:
        run("rm", "-f", "-v", container, check=False)


def logs(container):
    done = run("logs", container)
    return done.stdout + done.stderr


def exit_code(container):
    return int(run("wait", container).stdout)


def wait_for(condition, container):
    deadline_s = time.monotonic() + 300
    while not condition():
        running = run("inspect", "-f", "{{.State.Running}}", container).stdout.strip()
        assert running == "true" and time.monotonic() < deadline_s, logs(container)
        time.sleep(0.5)


def is_healthy(container, image):
    """By the image's own check, run now."""
    (check,) = json.loads(run("inspect", image).stdout)
    kind, *command = (check.get("Healthcheck") or check["Config"]["Healthcheck"])["Test"]
    assert kind == "CMD"
    return run("exec", container, *command, check=False).returncode == 0


def check_that_it_is_locked_up(container):
    assert run("exec", container, "id", "-u").stdout.strip() == str(UID)
    assert run("exec", container, "touch", "/x", check=False).returncode
    assert run("exec", container, "touch", "/home/engine/x", check=False).returncode
    for compiler in ("cc", "g++"):
        assert run("exec", container, "which", compiler, check=False).returncode
    assert "torch runs" not in logs(container), "the native kernels are in the image"


@pytest.fixture(scope="module")
def answer(smollm2):
    """Of this tree's engine."""
    with LLM(model=str(smollm2), num_threads=2) as llm:
        params = SamplingParams(temperature=0, max_tokens=12)
        return llm.generate(PROMPT, params)[0].outputs[0].text


def test_the_image_of_http_serves_and_drains(image, start, answer):
    name = image("http")
    container = start(name, options=("--init", "-p", "127.0.0.1::8000"))
    url = "http://" + run("port", container, "8000").stdout.split()[-1]

    def is_ready():
        try:
            return httpx.get(f"{url}/ready").status_code == 200
        except httpx.TransportError:
            return False

    wait_for(is_ready, container)
    check_that_it_is_locked_up(container)
    assert is_healthy(container, name)
    body = {"prompt": PROMPT, "temperature": 0, "max_tokens": 12}
    choice = httpx.post(f"{url}/v1/completions", json=body, timeout=60).json()["choices"][0]
    assert choice["text"] == answer
    body |= {"max_tokens": 200, "ignore_eos": True, "stream": True}
    with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=120) as stream:
        lines = stream.iter_lines()
        next(lines)
        stop = threading.Thread(target=run, args=("stop", "--time", "60", container))
        stop.start()
        *_, last = [line for line in lines if line]
    stop.join()
    assert last == "data: [DONE]"
    assert exit_code(container) == 0, logs(container)


def test_the_image_of_the_daemon_serves_on_its_socket(image, start, answer):
    name = image("daemon")
    container = start(name, options=("-v", "/run/engine-core"))
    wait_for(lambda: is_healthy(container, name), container)
    check_that_it_is_locked_up(container)
    client = ("exec", container, "engine-client", "complete", "--address", SOCKET)
    told = run(*client, "--temperature", 0, "--max-tokens", 12, "--json", PROMPT).stdout
    assert json.dumps(answer)[1:-1] in told
    run("stop", "--time", "60", container)
    assert exit_code(container) == 0, logs(container)


@pytest.mark.parametrize(
    ("arguments", "owner", "code", "words"),
    [
        (("smollm2-135m-instruct",), UID, 2, "there are no keys"),
        (("--insecure", "no-such-model"), UID, 3, "no-such-model"),
        (("--insecure", "smollm2-135m-instruct"), 0, 3, f"let user {UID} read it"),
    ],
    ids=["no keys", "no such model", "a cache of root's"],
)
def test_a_container_that_cannot_serve_ends_with_its_code(
    image, start, arguments, owner, code, words
):
    container = start(image("http"), *arguments, owner=owner)
    assert exit_code(container) == code, logs(container)
    assert words in logs(container)
