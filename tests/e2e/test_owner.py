"""An engine that a program started for itself ends with it, however and whenever that is killed,
and leaves no process behind."""

import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from processes import command_of, is_running, maps, wait_until, wait_until_gone

from tests.covering import covering_pairs

pytestmark = pytest.mark.slow

OWNER = """
import os, sys, threading, time
from frontend.engine.daemon import ChildDaemon

model, *options = sys.argv[1:]
daemon = ChildDaemon(["--model", model, "--num-blocks", "16", *options])
print(daemon.process.pid, flush=True)
FORK
line = daemon._ready.result()
print(line, flush=True)
time.sleep(600)
"""
FORK = """
if not os.fork():  # as multiprocessing does: the copy keeps the pipe to the engine open
    print(os.getpid(), flush=True)
    time.sleep(600)
"""


def start(*arguments, fork="", **environment):
    return subprocess.Popen(
        [sys.executable, "-c", OWNER.replace("FORK", fork), *map(str, arguments)],
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | environment,
    )


def descendants(pid):
    """Of this process, and all others in its session."""
    found = []
    for each in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            state, parent, group, session = each.read_text().rpartition(")")[2].split()[:4]
            number = int(each.parent.name)
            if state != "Z" and pid in (number, int(parent), int(group), int(session)):
                found.append(number)
    return found


def everything(pid):
    """With the engine of a supervisor, which has a session of its own."""
    found = set(descendants(pid))
    return found | {each for child in found for each in descendants(child)}


@covering_pairs(
    options=[[], ["--supervise"]],
    fork=["", FORK],
    moment=["at once", "while torch is imported", "serving"],
)
def test_an_engine_ends_with_its_killed_owner(tiny_llama, options, fork, moment):
    owner = start(tiny_llama, *options, fork=fork)
    engine = int(owner.stdout.readline())
    copy = int(owner.stdout.readline()) if fork else None
    try:
        if moment == "while torch is imported":
            wait_until(lambda: any(maps(pid, "libtorch") for pid in everything(engine)))
        elif moment == "serving":
            assert "ready" in owner.stdout.readline()
        pids = everything(engine)
        owner.kill()
        owner.wait()
        wait_until_gone(*pids)
        assert not everything(engine)
    finally:
        if copy is not None:
            os.kill(copy, signal.SIGKILL)


SLOW_COMPILER = """#!/bin/sh
case "$1" in --version) exec g++ --version;; esac
sleep 600 &
sleep 600
"""


@pytest.mark.parametrize("options", [[], ["--supervise"]])
@pytest.mark.parametrize("killed", ["owner", "engine"])
def test_a_compiler_that_the_start_waits_for_ends_too(tiny_llama, tmp_path, options, killed):
    compiler = tmp_path / "slow-compiler"
    compiler.write_text(SLOW_COMPILER)
    compiler.chmod(0o755)
    owner = start(
        tiny_llama,
        *options,
        CXX=str(compiler),
        ENGINE_CORE_NATIVE_CACHE=str(tmp_path / "cache"),
        ENGINE_CORE_NATIVE="1",
    )
    engine = int(owner.stdout.readline())

    def compilers_children():
        return [pid for pid in everything(engine) if "sleep" in command_of(pid)]

    wait_until(compilers_children)
    pids = everything(engine)
    if killed == "engine":
        [killed_engine] = (
            [p for p in pids if p != engine and maps(p, "libtorch")] if options else [engine]
        )
        os.kill(killed_engine, signal.SIGKILL)
        wait_until_gone(*set(pids) - {engine})
    owner.kill()
    owner.wait()
    wait_until_gone(*everything(engine))


def test_a_download_that_the_start_waits_for_ends_too(tmp_path):
    fake_pip = tmp_path / "pip"
    fake_pip.mkdir()
    (fake_pip / "__init__.py").touch()
    (fake_pip / "__main__.py").write_text("import time\ntime.sleep(600)\n")
    owner = start(
        "smollm2-135m-instruct",
        PYTHONPATH=os.pathsep.join([str(tmp_path), *sys.path]),
        ENGINE_CORE_CACHE=str(tmp_path / "cache"),
    )
    engine = int(owner.stdout.readline())
    wait_until(lambda: [p for p in everything(engine) if "download" in command_of(p)])
    pids = everything(engine)
    owner.kill()
    owner.wait()
    wait_until_gone(*pids)


def test_the_end_of_the_thread_that_started_it_is_no_end_of_its_owner(tiny_llama):
    """As PR_SET_PDEATHSIG would have it."""
    program = OWNER.replace(
        'daemon = ChildDaemon(["--model", model, "--num-blocks", "16", *options])',
        "made = []\n"
        "def make(): made.append(ChildDaemon(['--model', model, '--num-blocks', '16']))\n"
        "thread = threading.Thread(target=make); thread.start(); thread.join()\n"
        "daemon = made[0]",
    ).replace("FORK", "")
    owner = subprocess.Popen(
        [sys.executable, "-c", program, str(tiny_llama)], stdout=subprocess.PIPE, text=True
    )
    engine = int(owner.stdout.readline())
    try:
        assert "ready" in owner.stdout.readline()
        time.sleep(1)
        assert is_running(engine)
    finally:
        owner.kill()
        owner.wait()
    wait_until_gone(engine)
