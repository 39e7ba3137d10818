"""The load test as a program, against the client tests' scripted engine."""

import json
import os
import pty
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from fake_engine import FakeEngine
from fake_model import ids_of, saying

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]


@pytest.fixture
def address():
    folder = tempfile.mkdtemp(prefix="lt-")
    yield f"ipc://{folder}/engine.sock"
    shutil.rmtree(folder)


def load_test(address, *options):
    command = [sys.executable, "scripts/load_test.py", "--address", address, *options]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)


def test_open_loop_sends_every_scheduled_request_from_several_processes(address, tmp_path):
    report = tmp_path / "report.json"
    options = ["--rate", "50", "--num-requests", "30", "--processes", "2", "--ignore-eos"]
    options += ["--prompt-len", "4:16", "--output-len", "2:8", "--warmup", "1"]
    with FakeEngine(address) as engine:
        done = load_test(address, *options, "--shared-prefix-len", "5", "--json", str(report))
        requests = engine.requests[1:]  # less the warm-up
    assert done.returncode == 0, done.stderr
    assert done.stdout == ""
    document = json.loads(report.read_text())
    results = document["results"]
    assert len(requests) == results["num_requests"] == results["num_finished"] == 30
    assert len({tuple(request.prompt_token_ids[:5]) for request in requests}) == 1
    assert all(9 <= len(request.prompt_token_ids) <= 21 for request in requests)
    assert results["num_prompt_tokens"] == sum(len(r.prompt_token_ids) for r in requests)
    assert results["num_output_tokens"] == sum(r.sampling_params.max_tokens for r in requests)
    assert results["errors"] == {}
    for name in ("ttft_s", "tpot_s", "inter_token_s", "end_to_end_s"):
        assert 0 < results[name]["p50"] <= results[name]["p99"] <= results[name]["max"]
    assert document["configuration"]["rate"] == 50
    assert document["model"]["name"] == "fake"
    assert {"statistics_before", "statistics_after", "environment"} <= document.keys()
    assert "30 of 30 requests finished" in done.stderr


def test_open_loop_goes_on_sending_to_a_server_that_stands_still(address):
    # one token a second and request: a closed loop could not send 20 requests in half a second
    options = ["--rate", "100", "--num-requests", "20", "--output-len", "1"]
    with FakeEngine(address, step_s=0.5) as engine:
        done = load_test(address, *options)
    results = json.loads(done.stdout)["results"]
    assert len(engine.requests) == results["num_finished"] == 20
    # the wait for the first step is in the latency of those who came during it
    assert results["ttft_s"]["max"] > results["client_lateness_s"]["max"]
    assert results["duration_s"] < 20 * 0.5


def test_closed_loop_keeps_so_many_requests_running_and_no_more(address):
    running = []
    options = ["--concurrency", "3", "--processes", "2", "--num-requests", "12"]

    def next_token(request, number):
        running.append(engine.num_live)
        return ids_of("a")[0]

    with FakeEngine(address, next_token=next_token) as engine:
        done = load_test(address, *options, "--output-len", "10")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["results"]["num_finished"] == 12
    assert max(running) == 3


def test_duration_ends_a_closed_loop(address):
    with FakeEngine(address) as engine:
        done = load_test(address, "--concurrency", "2", "--duration", "0.5", "--output-len", "4")
    assert json.loads(done.stdout)["results"]["num_finished"] == len(engine.requests) > 2


def test_prompts_are_cut_from_a_text(address, tmp_path):
    text = tmp_path / "text.txt"
    text.write_text("abc")
    options = ["--concurrency", "1", "--num-requests", "1", "--prompt-len", "6"]
    with FakeEngine(address, next_token=saying("x", then_eos=True)) as engine:
        load_test(address, *options, "--text", str(text))
    assert engine.requests[0].prompt_token_ids in [ids_of(t * 2) for t in ("abc", "bca", "cab")]


def test_refusals_and_failures_are_counted_by_kind_with_exit_code_1(address):
    options = ["--concurrency", "1", "--num-requests", "4", "--output-len", "4"]
    numbers = iter(range(4))
    fates = {}

    def refuse(request):
        fates[request.request_id] = next(numbers)
        return "no" if fates[request.request_id] == 0 else None

    def fail(request, _number):
        return "broken" if fates[request.request_id] == 1 else None

    with FakeEngine(address, refuse=refuse, fail=fail):
        done = load_test(address, *options)
    assert done.returncode == 1
    results = json.loads(done.stdout)["results"]
    assert results["errors"] == {"rejected: invalid_request": 1, "finish reason error": 1}
    assert results["num_finished"] == 2


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ([], "either --rate"),
        (["--rate", "1", "--concurrency", "1", "--num-requests", "1"], "either --rate"),
        (["--rate", "1"], "no end"),
        (["--rate", "0", "--num-requests", "1"], "--rate is 0"),
        (["--concurrency", "0", "--num-requests", "1"], "--concurrency is 0"),
        (["--concurrency", "1", "--num-requests", "1", "--prompt-len", "x"], "no length"),
        (["--concurrency", "1", "--num-requests", "1", "--prompt-len", "600"], "limit is 512"),
        (["--speed", "1"], "--speed"),
    ],
)
def test_wrong_options_are_one_line_and_exit_code_2(address, options, words):
    with FakeEngine(address):
        done = load_test(address, *options)
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1)
    assert words in done.stderr


def test_missing_daemon_is_one_line_and_exit_code_1(address):
    done = load_test(address, "--rate", "1", "--num-requests", "1")
    assert (done.returncode, done.stderr.count("\n")) == (1, 1)
    assert "no engine answers" in done.stderr


def test_a_person_at_a_terminal_sees_the_table_and_no_document(address):
    master, slave = pty.openpty()
    command = [sys.executable, "scripts/load_test.py", "--address", address, "--concurrency", "1"]
    with FakeEngine(address):
        done = subprocess.run(
            [*command, "--num-requests", "2", "--output-len", "4"],
            cwd=ROOT,
            stdout=slave,
            stderr=slave,
            timeout=120,
        )
    os.close(slave)
    seen = os.read(master, 65536).decode()
    os.close(master)
    assert done.returncode == 0
    assert "2 of 2 requests finished" in seen
    assert "{" not in seen
    assert "lateness" in seen.splitlines()[-1]
