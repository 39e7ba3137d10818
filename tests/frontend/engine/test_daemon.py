"""An engine of the client's own: readiness, failure, last lines, and the end with its parent."""

import asyncio
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

import frontend.engine.daemon
from frontend import LLM, AsyncLLM, EngineDied, EngineStartError, InvalidInput, SamplingParams
from frontend.engine.daemon import ChildDaemon

_CHILD = str(Path(__file__).parents[1] / "child_engine.py")


@pytest.fixture
def behave(monkeypatch):
    """Makes `launch` start the stand-in in the given mode; returns the daemons that it started."""
    started: list[ChildDaemon] = []

    def set_mode(mode):
        def start(arguments, shows_log):
            assert not shows_log
            started.append(ChildDaemon(arguments, command=[sys.executable, _CHILD, mode]))
            return started[-1]

        monkeypatch.setattr(frontend.engine.daemon, "ChildDaemon", start)
        return started

    yield set_mode
    for daemon in started:
        asyncio.run(daemon.close())


def socket_folder(daemon):
    return Path(daemon.address.removeprefix("ipc://")).parent


def test_a_model_starts_an_engine_that_ends_with_the_llm(behave):
    started = behave("serve")
    with LLM(model="some-model", max_num_seqs=2, data_parallel_size=1) as llm:
        [output] = llm.generate("x", SamplingParams(max_tokens=4), use_tqdm=False)
        [daemon] = started
        assert socket_folder(daemon).stat().st_mode & 0o777 == 0o700
        assert "'--model', 'some-model', '--max-num-seqs=2'" in daemon.last_lines()
    assert len(output.outputs[0].token_ids) == 4
    assert daemon.process.returncode == 0
    assert not socket_folder(daemon).exists()


def test_an_engine_that_fails_to_start_is_told_with_its_last_lines(behave):
    started = behave("fail")
    with pytest.raises(EngineStartError, match=r"exit code 3(.|\n)*cannot find the model"):
        LLM(model="x")
    assert not socket_folder(started[0]).exists()


def test_an_engine_that_is_never_ready_is_ended(behave):
    started = behave("hang")
    with pytest.raises(EngineStartError, match=r"not ready within 0\.5 s; raise startup_timeout_s"):
        LLM(model="x", startup_timeout_s=0.5)
    assert started[0].process.poll() is not None


def test_something_that_is_no_engine_is_told(behave):
    behave("babble")
    with pytest.raises(EngineStartError, match="hello, I am no engine"):
        LLM(model="x")


async def test_an_engine_that_dies_is_told_at_once_with_its_last_lines(behave):
    behave("die")
    client = await AsyncLLM.launch("x")
    try:
        with pytest.raises(EngineDied, match=r"exit code 7(.|\n)*segmentation fault") as death:
            async for _output in client.generate("x", SamplingParams(max_tokens=500)):
                pass
        assert death.value.address == client.address
        with pytest.raises(EngineDied, match="exit code 7"):
            await client.ping()
    finally:
        await client.close()


def test_a_talkative_engine_is_not_held_up(behave):
    behave("noisy")
    with LLM(model="x") as llm:
        assert llm.generate("x", SamplingParams(max_tokens=4), use_tqdm=False)[0].finished
        assert len(llm._client._children[llm._client.address].tail) <= 50


def test_a_wrong_option_starts_nothing(behave):
    started = behave("serve")
    with pytest.raises(InvalidInput, match="cpu_offload_gb"):
        LLM(model="x", cpu_offload_gb=8)
    with pytest.raises(InvalidInput, match="data_parallel_size is 0"):
        LLM(model="x", data_parallel_size=0)
    assert started == []


def test_data_parallel_engines_share_the_requests_and_end_with_the_llm(behave):
    started = behave("serve")
    with LLM(model="some-model", data_parallel_size=2) as llm:
        llm.generate(["x"] * 8, SamplingParams(max_tokens=4), use_tqdm=False)
        assert [
            f"'--data-parallel-size=2', '--data-parallel-rank={rank}'" in daemon.last_lines()
            for rank, daemon in enumerate(started)
        ] == [True, True]
        assert sorted(llm._client.session.num_sent) == [4, 4]
    assert [daemon.process.returncode for daemon in started] == [0, 0]


def test_the_engine_ends_when_its_parent_is_killed(tmp_path):
    script = tmp_path / "parent.py"
    script.write_text(
        "import sys, time\n"
        "from frontend.engine.daemon import ChildDaemon\n"
        f"daemon = ChildDaemon([], command=[sys.executable, {_CHILD!r}, 'serve'])\n"
        "print(daemon.process.pid, flush=True)\n"
        "time.sleep(60)\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(Path(frontend.__file__).parents[1])}
    with subprocess.Popen(
        [sys.executable, script], stdout=subprocess.PIPE, text=True, env=environment
    ) as parent:
        child = int(parent.stdout.readline())
        parent.kill()
    deadline = time.monotonic() + 10
    while _is_running(child):
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_an_llm_that_was_not_closed_ends_with_the_interpreter(tmp_path):
    script = tmp_path / "user.py"
    script.write_text(
        "import sys\n"
        "import frontend.engine.daemon\n"
        "from frontend import LLM, SamplingParams\n"
        "from frontend.engine.daemon import ChildDaemon\n"
        "frontend.engine.daemon.ChildDaemon = lambda arguments, **_: ChildDaemon(\n"
        f"    arguments, command=[sys.executable, {_CHILD!r}, 'serve'])\n"
        "llm = LLM('x')\n"
        "print(llm._client._children[llm._client.address].pid)\n"
        "print(llm.generate('x', SamplingParams(max_tokens=3), use_tqdm=False)[0].finished)\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(Path(frontend.__file__).parents[1])}
    run = subprocess.run(
        [sys.executable, script],
        capture_output=True, text=True, env=environment, timeout=30, check=False,
    )  # fmt: skip
    assert (run.returncode, run.stderr) == (0, "")
    pid, finished = run.stdout.split()
    assert finished == "True"
    assert not _is_running(int(pid))


def _is_running(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state != "Z"
