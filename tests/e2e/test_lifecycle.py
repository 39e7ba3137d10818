"""The daemon as an operator sees it: ready line, signals, exit codes, refusals to start."""

import contextlib
import os
import select
import signal
import subprocess
import sys
import time

import pytest
from daemons import run_to_exit, running_daemon
from raw_client import RawClient

from engine_core.errors import ExitCode
from protocol.calls import Drain, Ping, ResetPrefixCache
from protocol.codec import decode_engine_message
from protocol.errors import ErrorCode
from protocol.outputs import FinishReason, Heartbeat

PROMPT = list(range(1, 40))
SMALL = ("--num-blocks", 64)


def test_the_ready_line_has_what_a_parent_needs_and_is_the_only_one(tiny_llama):
    """Two processes, an address between them. Proves S200."""
    options = (*SMALL, "--block-size", 8)
    with running_daemon(tiny_llama, *options, program=("-m", "engine_core.cli")) as daemon:
        ready = daemon.ready
        assert ready["event"] == "ready"
        assert ready["address"].startswith("ipc://")
        assert ready["model"] == tiny_llama.name
        assert (ready["max_model_len"], ready["num_blocks"], ready["block_size"]) == (256, 64, 8)
        assert ready["instruction_set"]
        assert ready["ready_s"] > 0
        phases = ready["phases_s"]
        assert list(phases) == ["imports", "files", "weights", "cache", "warm_up", "serving"]
        assert phases["imports"] > 0
        assert sum(phases.values()) == pytest.approx(ready["ready_s"], abs=0.004)  # as rounded
        assert daemon.stop() == 0
        assert '"max_num_batched_tokens": 512' in daemon.log()  # resolved values


def test_sigterm_lets_running_requests_finish_and_refuses_new_ones(tiny_llama):
    with running_daemon(tiny_llama, *SMALL) as daemon, RawClient(daemon.address) as client:
        client.request("long", PROMPT, max_tokens=200)
        client.call(Ping())
        daemon.process.send_signal(signal.SIGTERM)
        while not (message := client.socket.poll(5000)) or not daemon.log().count("draining"):
            assert message
        client.request("late", PROMPT)
        ends = client.collect("long", "late")
        assert len(ends["long"][0]) == 200
        assert ends["late"][1].code is ErrorCode.DRAINING
        assert daemon.process.wait(10) == 0


def test_a_second_sigterm_aborts_and_every_request_hears_of_it(tiny_llama):
    with (
        running_daemon(tiny_llama, *SMALL, "--max-num-batched-tokens", 1) as daemon,
        RawClient(daemon.address) as client,
    ):
        for number in range(3):
            client.request(f"r{number}", PROMPT, max_tokens=200)
        client.call(Ping())
        daemon.process.send_signal(signal.SIGTERM)
        while "draining" not in daemon.log():
            time.sleep(0.001)
        daemon.process.send_signal(signal.SIGTERM)
        ends = client.collect("r0", "r1", "r2")
        assert {end.finish_reason for _, end in ends.values()} <= {
            FinishReason.ABORT,
            FinishReason.LENGTH,
        }
        assert daemon.process.wait(10) == 0


def test_a_drain_ends_at_its_timeout(tiny_llama):
    with (
        running_daemon(
            tiny_llama, *SMALL, "--drain-timeout", 0, "--max-num-batched-tokens", 1
        ) as daemon,
        RawClient(daemon.address) as client,
    ):
        client.request("r", PROMPT * 5, max_tokens=50)
        client.call(Ping())
        daemon.process.send_signal(signal.SIGINT)
        _, end = client.collect("r")["r"]
        assert end.finish_reason is FinishReason.ABORT
        assert "stopping" in end.detail
        assert daemon.process.wait(10) == 0


def test_an_idle_daemon_keeps_in_touch_its_statistics_tell_and_a_client_may_end_it(tiny_llama):
    with running_daemon(tiny_llama, *SMALL) as daemon, RawClient(daemon.address) as client:
        for _ in range(2):
            assert client.socket.poll(20_000)
            assert isinstance(decode_engine_message(client.socket.recv()), Heartbeat)
        first, _ = client.complete(PROMPT, request_id="a")
        assert client.complete(PROMPT, request_id="b")[0] == first
        before = client.statistics()
        assert before.num_cached_prompt_tokens == 32
        assert before.num_finished["length"] == 2
        assert before.num_blocks_cached > 0
        assert client.call(ResetPrefixCache()).num_blocks_evicted == before.num_blocks_cached
        client.complete(PROMPT, request_id="c")
        after = client.statistics()
        assert after.num_cached_prompt_tokens == 32
        assert after.num_prompt_tokens == 3 * len(PROMPT)
        assert after.num_blocks_in_use == 0
        assert client.call(Drain()).num_requests_left == 0
        assert daemon.process.wait(10) == 0


def test_options_come_from_a_toml_file_and_the_command_line_wins(tiny_llama, tmp_path):
    config = tmp_path / "engine.toml"
    config.write_text("block_size = 8\nnum_blocks = 100\nmax_num_seqs = 3\n")
    with running_daemon(tiny_llama, "--config", config, "--num-blocks", 50) as daemon:
        assert (daemon.ready["block_size"], daemon.ready["num_blocks"]) == (8, 50)
        assert '"max_num_seqs": 3' in daemon.log()


def test_the_daemon_dies_with_its_parent_when_asked_to(tiny_llama):
    with running_daemon(tiny_llama, *SMALL, program=("-m", "engine_core.cli")) as daemon:
        daemon.process.stdin.close()
        assert daemon.process.wait(10) == 0


def test_a_killed_test_run_leaves_no_daemon(tiny_llama, tmp_path):
    """What tests start ends with pytest, also if nothing can be cleaned up."""
    (tmp_path / "test_forever.py").write_text(
        "import time\n"
        "from daemons import running_daemon\n"
        "def test_forever():\n"
        f"    with running_daemon({str(tiny_llama)!r}, '--num-blocks', 8) as daemon:\n"
        "        print(f'\\nPID {daemon.process.pid}', flush=True)\n"
        "        time.sleep(60)\n"
    )
    with subprocess.Popen(
        [sys.executable, "-m", "pytest", "-s", "-p", "no:cacheprovider", "test_forever.py"],
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
    ) as run:
        pid = next(line.split()[1] for line in run.stdout if line.startswith("PID"))
        daemon = os.pidfd_open(int(pid))
        run.kill()
    try:
        assert select.select([daemon], [], [], 10)[0], f"process {pid} goes on"
    finally:
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(daemon, signal.SIGKILL)
        os.close(daemon)


def test_two_daemons_on_one_address_the_second_is_refused_before_loading(tiny_llama):
    with running_daemon(tiny_llama, *SMALL) as daemon:
        second = run_to_exit("--model", tiny_llama, "--bind", daemon.address)
        assert second.returncode == ExitCode.START_FAILED
        assert "in use" in second.stderr
        assert "Traceback" not in second.stderr
        assert second.stdout == ""
        with RawClient(daemon.address) as client:
            client.complete(PROMPT)


WRONG, NO_START = ExitCode.WRONG_OPTIONS, ExitCode.START_FAILED


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["--num-blocks", "0"], WRONG, "num-blocks"),
        (["--kv-cache-memory", "1"], NO_START, "holds no block"),
        (["--kv-cache-memory", "100TiB"], WRONG, "lower --num-blocks or --kv-cache-memory"),
        (["--num-blocks", "10", "--kv-cache-memory", "1GiB"], WRONG, "contradict"),
        (["--num-blocks", "2", "--max-model-len", "200"], NO_START, "hold a request of 32 tokens"),
        (["--max-model-len", "1000"], WRONG, "the model was made for 256"),
        (
            ["--num-blocks", "20", "--watermark", "0.5", "--max-model-len", "161"],
            NO_START,
            "keeps free",
        ),
        (["--host-cache-memory", "1"], NO_START, "holds no block"),
        (["--host-cache-memory", "100TiB", "--num-blocks", "8"], WRONG, "free beside the KV cache"),
        (["--preemption-mode", "swap"], WRONG, "give --host-cache-memory"),
        (["--priority-ageing-s", "3"], WRONG, "no effect with --scheduling-policy fair"),
        (["--trace", "/nowhere/file"], WRONG, "there is no folder /nowhere"),
        (["--bind", "http://x"], WRONG, "use ipc://PATH or tcp://HOST:PORT"),
        (["--no-such-option"], WRONG, "no-such-option"),
        (["--config", "/nowhere.toml"], WRONG, "nowhere.toml"),
        (["--model", "/nowhere"], NO_START, "/nowhere"),
    ],
)
def test_what_cannot_work_is_refused_at_start_in_one_message(tiny_llama, arguments, code, words):
    model = [] if "--model" in arguments else ["--model", tiny_llama]
    result = run_to_exit(*model, *arguments)
    assert result.returncode == code
    assert words in " ".join(result.stderr.split())
    assert "Traceback" not in result.stderr
    assert result.stdout == ""
