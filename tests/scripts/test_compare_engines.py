"""The comparison of engines: in which order they are asked, how, and what is reported."""

import json
import os
import sys
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
from fake_engine import FakeEngine

from frontend.load.clients import ClientsFailed, Daemon, OpenLoop, run_clients
from frontend.load.http_streams import Server
from frontend.load.records import RequestRecord
from frontend.load.requests import PlannedRequest
from scripts import compare_engines
from scripts.compare_engines import main
from scripts.comparison import peers
from scripts.comparison.engines import (
    Conditions,
    Running,
    parse_engine,
    parse_peer,
    parse_server,
)
from scripts.comparison.figures import Incomplete, figures_of
from scripts.comparison.processes import EngineFailed, peak_memory_bytes, process_tree
from scripts.comparison.rounds import (
    as_table,
    run_resident_rounds,
    run_rounds,
    summarise_rounds,
)
from scripts.comparison.workloads import Workload
from tests.frontend.load import fake_servers

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
FAKE_SERVER = f"{sys.executable} {fake_servers.__file__} {{port}}"
FAKE_LIBRARY = Path(__file__).with_name("fake_library_peer.py")
WARM_UP = [Workload("first token", (PlannedRequest(0, [1, 2], 1),))]
BATCH = Workload("W1", tuple(PlannedRequest(at, [at, 7], 5) for at in range(6)))
SINGLE = Workload("W2", (PlannedRequest(0, [1, 2, 3], 8),))
ARRIVING = Workload("W3@20", tuple(PlannedRequest(at, [at], 4, 0.05 * at) for at in range(5)))


@pytest.fixture
def conditions(tmp_path):
    return Conditions(
        model="none",
        num_threads=1,
        client_processes=2,
        startup_timeout_s=20.0,
        workload_timeout_s=20.0,
        logs=tmp_path,
    )


# ------------------------------------------------------------------ rounds


class ScriptedEngine:
    """Answers at once; keeps a common diary."""

    def __init__(self, name, diary, *, fail_start=False, fail_in=""):
        self.name = name
        self._diary, self._fail_start, self._fail_in = diary, fail_start, fail_in

    @contextmanager
    def launch(self, conditions):
        self._diary.append(f"{self.name} up")
        if self._fail_start:
            raise EngineFailed("no such library")
        yield Running(self._run, None, {})
        self._diary.append(f"{self.name} down")

    def _run(self, workload):
        self._diary.append(f"{self.name} {workload.name}")
        if workload.name == self._fail_in:
            raise EngineFailed("out of memory")
        return [
            RequestRecord(at, 0.0, 0.0, finished_s=1.0, num_output_tokens=one.num_output_tokens)
            for at, one in enumerate(workload.requests)
        ]


def test_engines_alternate_and_only_one_is_up(conditions):
    diary = []
    engines = [ScriptedEngine(name, diary) for name in "AB"]
    run_rounds(engines, [[SINGLE]] * 2, WARM_UP, conditions, report=lambda _: None)
    once = [f"{n} {what}" for n in "AB" for what in ("up", "first token", "W2", "down")]
    assert diary == once * 2


def test_resident_engines_are_asked_each_workload_in_turn(conditions):
    diary = []
    engines = [ScriptedEngine(name, diary) for name in "AB"]
    rounds = [[BATCH, SINGLE]] * 3
    done = run_resident_rounds(engines, rounds, WARM_UP, conditions, report=lambda _: None)
    assert diary[:4] == ["A up", "A first token", "B up", "B first token"]
    forth, back = (["A", "B"], ["B", "A"])
    asked = [f"{n} {w}" for order in (forth, back, forth) for w in ("W1", "W2") for n in order]
    assert diary[4:] == [*asked, "B down", "A down"]
    assert summarise_rounds(done, ["A"], ["A", "B"])["medians"]["B"]["W2"]["num_rounds"] == 3


@pytest.mark.parametrize("run_rounds", [run_rounds, run_resident_rounds])
def test_a_peer_that_fails_is_told_as_failed_and_never_as_a_figure(conditions, run_rounds):
    diary = []
    engines = [
        ScriptedEngine("A", diary),
        ScriptedEngine("B", diary, fail_start=True),
        ScriptedEngine("C", diary, fail_in="W1"),
    ]
    done = run_rounds(engines, [[BATCH, SINGLE]] * 2, WARM_UP, conditions, report=lambda _: None)
    summary = summarise_rounds(done, ["A"], ["A", "B", "C"])
    assert diary.count("B up") == 1  # it is not started a second time
    assert summary["medians"]["B"] == {}
    assert "W1" not in summary["medians"]["C"] and "W2" in summary["medians"]["C"]
    assert summary["ratios"]["A / B"] == {} and "W2" in summary["ratios"]["A / C"]
    failed = [(one["engine"], one["workload"], one["reason"]) for one in summary["failed"]]
    assert failed.count(("C", "W1", "out of memory")) == 2
    assert ("B", "start", "no such library") in failed
    assert "failed: C, round 2, W1: out of memory" in as_table(summary)


# ------------------------------------------------------------------ engines with an address


def test_clients_stream_from_our_engine_on_time(address):
    with FakeEngine(address) as engine:
        loop = OpenLoop(ARRIVING.requests)
        records = run_clients(Daemon(address), loop, num_processes=2, timeout_s=20).records
        prompts = sorted(list(request.prompt_token_ids) for request in engine.requests)
    assert prompts == [[at] for at in range(5)]
    assert [record.index for record in records] == [0, 1, 2, 3, 4]
    assert [record.num_output_tokens for record in records] == [4] * 5
    assert [record.due_s for record in records] == [0.05 * at for at in range(5)]
    assert all(record.sent_s >= record.due_s for record in records)
    assert {"ttft_p50_ms", "itl_p99_ms"} <= figures_of(ARRIVING, records).keys()


def test_a_server_is_launched_measured_and_gone(conditions):
    with parse_server(f"fake={FAKE_SERVER}").launch(conditions) as running:
        assert running.facts == {"model": "fake"} and running.ready_s > 0
        [pid] = [p for p in process_tree(os.getpid()) if b"fake_servers" in _command_line(p)]
        assert peak_memory_bytes(pid) > 1e6
        records = running.run(BATCH)
        figures = figures_of(BATCH, records)
    assert [len(record.gaps_s) for record in records] == [4] * 6
    assert figures["itl_p50_ms"] > 0 and figures["ttft_p50_ms"] > 0
    assert all(record.last_token_s - record.sent_s >= 0.04 for record in records), "4 pauses"
    assert peak_memory_bytes(pid) == 0


def _command_line(pid):
    return Path(f"/proc/{pid}/cmdline").read_bytes()


def test_a_server_that_does_not_count_is_counted_by_its_events(conditions):
    with parse_server(f"fake={FAKE_SERVER} uncounted").launch(conditions) as running:
        assert "output_tok_s" in figures_of(SINGLE, running.run(SINGLE))
    asked = Server.at("http://there").request([1, 2], 8)
    assert b'"ignore_eos": true' in asked and b'"max_tokens": 8' in asked


@pytest.mark.parametrize(
    ("fate", "words"), [("short", "7 tokens came, not 8"), ("die", "closed|Reset")]
)
def test_a_server_that_falls_short_or_dies_has_no_figures(conditions, fate, words):
    with parse_server(f"fake={FAKE_SERVER} {fate}").launch(conditions) as running:
        records = running.run(SINGLE)
    with pytest.raises(Incomplete, match=words):
        figures_of(SINGLE, records)


def test_a_server_that_ends_before_it_is_ready_says_its_last_words(conditions):
    dying = f"{sys.executable} -c 'import sys; sys.exit(\"no model {{port}}\")'"
    with (
        pytest.raises(EngineFailed, match="ended with code 1; its last lines: no model"),
        parse_server(f"dying={dying}").launch(conditions),
    ):
        pass


def test_clients_give_up_after_their_time(address):
    with FakeEngine(address, step_s=1.5), pytest.raises(ClientsFailed, match=r"within 0\.2 s"):
        run_clients(Daemon(address), OpenLoop(SINGLE.requests), num_processes=1, timeout_s=0.2)


# ------------------------------------------------------------------ libraries


def _library(*options):
    words = (sys.executable, str(FAKE_LIBRARY), "fake", *options)
    return replace(parse_peer(f"vllm={sys.executable}"), words=words)


def test_a_library_is_asked_in_its_own_python_whatever_it_prints(conditions):
    with _library().launch(conditions) as running:
        assert running.facts == {"version": "1.2"}
        assert figures_of(BATCH, running.run(BATCH))["output_tok_s"] == 60
        assert {"decode_tok_s", "itl_p99_ms"} <= figures_of(SINGLE, running.run(SINGLE)).keys()


def test_what_a_library_cannot_do_is_not_measured_and_a_fault_is_a_failure(conditions):
    engines = [_library("fault=raise"), _library(), _library("colour=red")]
    warm_ups = [[], [*WARM_UP, ARRIVING], WARM_UP]  # the second cannot be warmed up by all
    rounds = [
        run_rounds([one], [[BATCH, ARRIVING]], warm_up, conditions, report=lambda _: None)[0]
        for one, warm_up in zip(engines, warm_ups, strict=True)
    ]
    assert rounds[0].failed == {"W1": "RuntimeError: no kernel for this"}
    assert "server" in rounds[0].not_measured["W3@20"]
    assert (rounds[1].failed, "W1" in rounds[1].figures) == ({}, True)
    assert rounds[2].failed == {"start": "not ready: this peer has no option colour; omit it"}
    assert "peak_engine_mb" in rounds[1].figures["start"]


# ------------------------------------------------------------------ the command line


def test_the_script_compares_what_it_is_given_and_prints_one_json_line(
    tmp_path, monkeypatch, capsys
):
    monkeypatch.setattr(compare_engines, "_workloads", lambda *_: ([[BATCH, ARRIVING]], WARM_UP))
    options = ["--workloads", "W1,W3@20", "--rounds", "1"]
    options += ["--server", f"one={FAKE_SERVER}", "--server", f"short={FAKE_SERVER} short"]
    code = main([*options, "--json", str(tmp_path / "out.json")])
    done = capsys.readouterr()
    assert (code, done.out.count("\n")) == (1, 1), done.err
    document = json.loads(done.out)
    assert document == json.loads((tmp_path / "out.json").read_text())
    assert {"W1", "W3@20", "start"} == document["medians"]["one"].keys()
    start = document["medians"]["one"]["start"]
    assert 0 < start["launch_to_ready_s"] < start["launch_to_first_token_s"]
    assert start["peak_engine_mb"] > 1
    # it does not even answer the warm-up in full
    assert document["medians"]["short"] == {} and document["failed"][0]["engine"] == "short"
    assert "failed: short" in done.err and "commit" in document


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ([], "give --engine, --peer and --server"),
        (["--engine", "a=", "--engine", "a=--dtype float32"], "names of their own"),
        (["--engine", "--dtype float32"], "begins with no name"),
        (["--server", "a=serve --port 80"], "{port}"),
        (["--peer", "a=ftp://there"], "is not an http:// or https:// address"),
        (["--peer", "nobody=python3"], "openvino, vllm"),
        (["--engine", "a=", "--engine", "b=", "--rounds", "0"], "at least 1"),
        (["--speed", "1"], "--speed"),
    ],
)
def test_wrong_options_are_one_line_and_exit_code_2(options, words, capsys):
    assert main(options) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and words in error


def test_descriptions_say_what_is_wrong_with_them():
    with pytest.raises(ValueError, match="is set by the comparison"):
        parse_engine("a=--num-threads 4")
    with pytest.raises(ValueError, match="write env:X=VALUE"):
        parse_engine("a=env:X")
    with pytest.raises(ValueError, match="not KEY=VALUE"):
        parse_peer("vllm=python3 fast")
    peer = parse_peer("vllm-bf16=python3 dtype=bfloat16 env:A=1")
    assert peer.words == ("python3", peers.__file__, "vllm", "dtype=bfloat16")
    assert peer.environment == {"A": "1"}
