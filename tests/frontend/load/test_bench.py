"""The load test as a program: against the scripted engine, and servers with known delays."""

import contextlib
import csv
import fcntl
import io
import itertools
import json
import os
import pty
import struct
import subprocess
import sys
import termios
from pathlib import Path
from typing import NamedTuple

import pytest
from fake_engine import FakeEngine
from fake_model import ids_of, saying

from frontend.cli.app import run_command_line
from tests.frontend.load.fake_servers import FakeServer

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[3]


class Done(NamedTuple):
    returncode: int
    stdout: str
    stderr: str


def load_test(*options):
    """Its exit code and what it said; the clients are processes of their own."""
    stdout, stderr = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(stdout), contextlib.redirect_stderr(stderr):
        typed = [str(option) for option in options]
        code = run_command_line(typed if typed[0] == "compare" else ["bench", *typed])
    return Done(code, stdout.getvalue(), stderr.getvalue())


# ---------------------------------------------------------------------- the engine's socket


def test_open_loop_sends_every_scheduled_request_from_several_processes(address, tmp_path):
    report, rows = tmp_path / "report.json", tmp_path / "rows.csv"
    options = ["--request-rate", 50, "--num-prompts", 30, "--processes", 2, "--ignore-eos"]
    options += ["--input-len", "uniform:4:16", "--output-len", "uniform:2:8", "--num-warmups", 1]
    options += ["--prefixes", 1, "--prefix-len", 5, "--json", report, "--csv", rows]
    with FakeEngine(address) as engine:
        done = load_test("--address", address, *options, "--metadata", "gpu=none", "run=2")
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
    assert document["request_rate"] == 50
    assert document["metadata"] == {"gpu": "none", "run": "2"}
    assert document["model"]["name"] == "fake"
    assert document["statistics_after"] and document["environment"]
    assert len(document["requests"]["index"]) == 30
    with rows.open() as file:
        found = list(csv.DictReader(file))
    assert [int(row["index"]) for row in found] == document["requests"]["index"]
    assert all(float(row["ttft_s"]) > 0 for row in found)
    assert "30 of 30 requests finished" in done.stderr


def test_closed_loop_keeps_so_many_requests_running_and_no_more(address):
    running = []
    options = ["--max-concurrency", 3, "--processes", 2, "--num-prompts", 12, "--output-len", 10]

    def next_token(request, number):
        running.append(engine.num_live)
        return ids_of("a")[0]

    with FakeEngine(address, next_token=next_token) as engine:
        done = load_test("--address", address, *options)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["completed"] == 12
    assert max(running) == 3


def test_duration_ends_a_closed_loop(address):
    options = ["--max-concurrency", 2, "--duration", 0.5, "--output-len", 4]
    with FakeEngine(address) as engine:
        done = load_test("--address", address, *options)
    assert json.loads(done.stdout)["completed"] == len(engine.requests) > 2


def test_prompts_are_cut_from_a_text(address, tmp_path):
    text = tmp_path / "text.txt"
    text.write_text("abc")
    with FakeEngine(address, next_token=saying("x", then_eos=True)) as engine:
        load_test("--address", address, "--num-prompts", 1, "--input-len", 6, "--text", text)
    assert engine.requests[0].prompt_token_ids in [ids_of(t * 2) for t in ("abc", "bca", "cab")]


def test_conversations_go_on_with_the_answer_in_tokens_and_through_the_chat_template(address):
    options = ["--max-concurrency", 1, "--num-prompts", 4, "--turns", 3, "--input-len", 5]
    options += ["--output-len", 3, "--seed", 3]
    with FakeEngine(address, next_token=saying("hey")) as engine:
        assert load_test("--address", address, *options).returncode == 0
        in_tokens = [request.prompt_token_ids for request in engine.requests]
        engine.requests.clear()
        done = load_test("--address", address, "--backend", "engine-chat", *options)
        in_chats = [request.prompt_token_ids for request in engine.requests]
    assert done.returncode == 0, done.stderr
    later = [(one, two) for one, two in itertools.pairwise(in_tokens) if len(two) > len(one)]
    assert later
    for one, two in later:
        assert two[: len(one) + 3] == one + ids_of("hey")
        assert len(two) == len(one) + 3 + 5
    assert len(in_chats) == 4 and in_chats != in_tokens


def test_refusals_and_failures_are_counted_by_kind_with_exit_code_1(address):
    options = ["--max-concurrency", 1, "--num-prompts", 4, "--output-len", 4]
    numbers = iter(range(4))
    fates = {}

    def refuse(request):
        fates[request.request_id] = next(numbers)
        return "no" if fates[request.request_id] == 0 else None

    def fail(request, _number):
        return "broken" if fates[request.request_id] == 1 else None

    with FakeEngine(address, refuse=refuse, fail=fail):
        done = load_test("--address", address, *options)
    assert done.returncode == 1
    results = json.loads(done.stdout)["results"]
    assert results["errors"] == {"rejected: invalid_request": 1, "finish reason error": 1}
    assert results["num_finished"] == 2


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--input-len", "600"], "limit is 512"),
        (["--input-len", "x"], "must be written as 512"),
        (["--speed", "1"], "--speed"),
        (["--goodput", "speed:1"], "KEY:MILLISECONDS"),
        (["--model", "x"], "--model is x and does nothing, as --backend is engine"),
        (["compare", "absent.json", "absent.json"], "cannot read absent.json"),
    ],
)
def test_wrong_options_are_one_line_and_exit_code_2(address, options, words):
    target = [] if options[0] == "compare" else ["--address", address, "--num-prompts", 1]
    with FakeEngine(address):
        done = load_test(*options, *target)
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1)
    assert words in done.stderr


def test_missing_daemon_is_one_line_and_exit_code_1(address):
    done = load_test("--address", address, "--num-prompts", 1)
    assert (done.returncode, done.stderr.count("\n")) == (1, 1)
    assert "no engine answers" in done.stderr


def test_a_person_at_a_terminal_sees_the_table_and_no_document(address):
    master, slave = pty.openpty()
    fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("4H", 30, 100, 0, 0))
    command = [sys.executable, "scripts/load_test.py", "--address", address, "--num-prompts", "2"]
    with FakeEngine(address):
        done = subprocess.run(
            [*command, "--output-len", "4"], cwd=ROOT, stdout=slave, stderr=slave, timeout=120
        )
    os.close(slave)
    seen = os.read(master, 65536).decode()
    os.close(master)
    assert done.returncode == 0
    assert "2 of 2 requests finished" in seen
    assert "100%" in seen  # the progress bar
    assert "{" not in seen


# ---------------------------------------------------------------------- servers of others


@pytest.mark.parametrize(
    ("backend", "path"),
    [
        ("openai", "/v1/completions"),
        ("openai-chat", "/v1/chat/completions"),
        ("ollama", "/api/generate"),
        ("ollama-chat", "/api/chat"),
    ],
)
def test_each_api_is_measured_with_the_delays_that_its_server_has(backend, path, monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", "sk-secret")
    server = FakeServer(first_s=0.15, gap_s=0.05)
    options = ["--request-rate", 10, "--burstiness", "inf", "--num-prompts", 8]
    options += ["--input-len", 12, "--output-len", 5, "--header", "X-Test=yes"]
    with server.serving() as url:
        base = f"{url}/v1" if backend == "openai-chat" else url
        done = load_test("--backend", backend, "--base-url", base, *options)
    assert done.returncode == 0, done.stderr
    document = json.loads(done.stdout)
    assert (document["completed"], document["total_output_tokens"]) == (8, 40)
    assert document["total_input_tokens"] == 8 * 12  # as the server counts
    # the first token, not the event that only names the role; a busy machine adds to each, and
    # what it adds to the first token is missing between the tokens
    results = document["results"]
    assert 0.15 <= results["ttft_from_send_s"]["p50"] <= results["ttft_s"]["p50"]
    assert document["median_ttft_ms"] == 1000 * results["ttft_from_send_s"]["p50"]
    decode_s = (results["end_to_end_s"]["p50"] - results["ttft_s"]["p50"]) / 4
    assert results["tpot_s"]["p50"] == pytest.approx(decode_s, rel=0.2)
    assert results["inter_token_s"]["mean"] == pytest.approx(results["tpot_s"]["mean"])
    assert results["inter_token_s"]["count"] == 8 * 4
    assert results["end_to_end_s"]["p50"] >= 0.35
    assert server.paths == {path}
    headers = server.headers[0]
    assert (headers["authorization"], headers["x-test"]) == ("Bearer sk-secret", "yes")
    assert "sk-secret" not in done.stdout + done.stderr
    body = server.bodies[0]
    assert body["model"] == ("fake:latest" if "ollama" in backend else "fake")


def test_fields_of_the_body_are_added_and_left_out():
    server = FakeServer(first_s=0)
    extra = '{"top_k": 7, "temperature": null}'
    load = ("--num-prompts", 3, "--max-concurrency", 1)
    with server.serving() as url:
        done = load_test("--base-url", url, *load, "--extra-body", extra)
    assert done.returncode == 0
    assert len(server.connections) <= 1 + 1, "the connection is used again"
    assert server.bodies[0]["top_k"] == 7
    assert "temperature" not in server.bodies[0]


def test_a_server_that_stands_still_shows_as_latency_from_the_arrival():
    # nothing begins from 0.3 to 1.3 s: with 20 arrivals a second 20 requests wait 0.5 s on average
    server = FakeServer(first_s=0.01, gap_s=0.001, stands_still=(0.3, 1.3))
    load = ["--burstiness", "inf", "--num-prompts", 40, "--output-len", 2]
    with server.serving() as url:
        done = load_test("--base-url", url, "--request-rate", 20, *load)
        server.started_at = None
        limited = load_test("--base-url", url, "--request-rate", 20, "--max-concurrency", 1, *load)
    results = json.loads(done.stdout)["results"]
    assert results["num_finished"] == 40
    assert results["ttft_s"]["mean"] > 0.2
    # one at a time: the requests that could not be sent wait here, and only the arrival tells it
    results = json.loads(limited.stdout)["results"]
    assert results["ttft_s"]["mean"] > 0.15
    assert results["ttft_from_send_s"]["mean"] < results["ttft_s"]["mean"] / 2
    assert server.most_running > 10


def test_failures_of_a_server_are_named_and_turns_behind_them_too():
    fates = {1: 500, 2: "cut", 3: "error", 4: 429}
    with FakeServer(first_s=0, gap_s=0, fate=fates.get).serving() as url:
        done = load_test("--base-url", url, "--max-concurrency", 1, "--num-prompts", 12)
        chats = FakeServer(fate=lambda number: 503 if number == 0 else None)
    assert done.returncode == 1
    assert json.loads(done.stdout)["results"]["errors"] == {
        "HTTP 500": 1,
        "broken stream": 1,
        "error in the stream": 1,
        "HTTP 429": 1,
    }
    assert "out of memory" in done.stderr
    assert 'for example: status 429: {"error": {"message": "no"}}' in done.stderr
    with chats.serving() as url:
        options = ["--turns", 40, "--num-prompts", 6, "--max-concurrency", 1]
        done = load_test("--backend", "openai-chat", "--base-url", url, *options)
    results = json.loads(done.stdout)["results"]
    assert results["num_requests"] == 6
    assert results["errors"] == {"HTTP 503": 1, "not sent: the turn before it failed": 5}
    assert len(chats.bodies) == 1


def test_a_request_that_takes_too_long_has_failed():
    with FakeServer(first_s=60).serving() as url:
        done = load_test("--base-url", url, "--num-prompts", 2, "--request-timeout", 0.3)
    assert json.loads(done.stdout)["results"]["errors"] == {"TimeoutError": 2}


def test_a_server_that_is_not_there_is_one_line_and_exit_code_1():
    done = load_test("--base-url", "http://127.0.0.1:9", "--num-prompts", 1)
    assert (done.returncode, done.stderr.count("\n")) == (1, 1)
    assert "does not name a model" in done.stderr


def test_a_sweep_makes_a_page_and_two_results_are_compared(tmp_path):
    page, sweep, slow = (tmp_path / name for name in ("page.html", "sweep.json", "slow.json"))
    load = ["--max-concurrency", 1, 4, "--num-prompts", 16, "--output-len", 6]
    with FakeServer(first_s=0.02, gap_s=0.01).serving() as url:
        done = load_test("--base-url", url, *load, "--json", sweep, "--html", page)
    assert done.returncode == 0, done.stderr
    runs = json.loads(sweep.read_text())["runs"]
    assert [run["max_concurrency"] for run in runs] == [1, 4]
    assert runs[1]["output_throughput"] > 1.5 * runs[0]["output_throughput"]
    text = page.read_text()
    for words in ("Throughput and TTFT", "Output throughput", "4 at once: a row a request"):
        assert words in text
    assert "<script" not in text and "http://www" not in text and "@import" not in text
    with FakeServer(first_s=0.02, gap_s=0.03).serving() as url:
        load_test("--base-url", url, *load, "--json", slow)
    done = load_test("compare", sweep, slow, "--html", page)
    assert done.returncode == 0, done.stderr
    for rows in json.loads(done.stdout)["comparisons"]:
        [tpot] = [row for row in rows if row["figure"] == "TPOT mean, ms"]
        assert tpot["verdict"] == "worse"
        assert 1 < tpot["low"] < tpot["ratio"] < tpot["high"]
    assert "Two load tests compared" in page.read_text()
