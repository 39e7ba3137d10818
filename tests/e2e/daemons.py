"""Starts and stops real daemons. Not a test."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
from pathlib import Path

from fork_server import fork_server


def slow_program(step_s):
    """A daemon whose steps take at least `step_s`, so that tests have time in a stream's middle."""
    return ("-c", _SLOW.format(step_s=step_s))


_SLOW = """
import time
from engine_core.executor import InProcessExecutor

submit = InProcessExecutor.submit

def slow(self, plan):
    time.sleep({step_s} if plan.total_num_scheduled_tokens else 0)
    submit(self, plan)

InProcessExecutor.submit = slow
from engine_core.cli import main
main()
"""


class Daemon:
    """A running `engine-core`; `ready` is its line on stdout, `log()` its stderr so far. It ends
    with this process, however that ends."""

    def __init__(self, model, *options, bind=None, program=None):
        self._folder = tempfile.TemporaryDirectory(prefix="ec-")
        self._log = Path(self._folder.name) / "log"
        self._model, self._options, self._program = model, options, program
        self.address = bind or f"ipc://{self._folder.name}/engine.sock"
        self.process = None
        self.start()

    def start(self, *, options=None):
        """Also after its death, at the same address; with other options, if they are given."""
        self._end()
        self._options = self._options if options is None else options
        arguments = ["--bind", self.address, "--exit-on-stdin-eof"]
        arguments += [] if self._model is None else ["--model", self._model]
        with self._log.open("a") as log:
            self.process = _started([*arguments, *self._options], log, self._program)
        line = self.process.stdout.readline()
        assert line, f"the daemon did not start:\n{self.log()}"
        self.ready = json.loads(line)
        self.address = self.ready["address"]
        threading.Thread(target=self.process.stdout.read, daemon=True).start()

    def log(self):
        return self._log.read_text()

    def stop(self, timeout_s=30):
        """SIGTERM, and the exit code."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        return self.process.wait(timeout_s)

    def kill(self):
        """SIGKILL, and its end."""
        self.process.kill()
        self.process.wait()

    def _end(self):
        if self.process is not None:
            self.kill()
            self.process.stdin.close()

    def close(self):
        self._end()
        self._folder.cleanup()


@contextlib.contextmanager
def running_daemon(model, *options, **more):
    daemon = Daemon(model, *options, **more)
    try:
        yield daemon
    finally:
        daemon.close()


def run_to_exit(*arguments, program=None, timeout_s=120):
    """Run `engine-core` with these arguments until it exits by itself; its default address is in a
    folder of its own."""
    with tempfile.TemporaryDirectory(prefix="ec-") as folder:
        errors = Path(folder) / "errors"
        with errors.open("w") as log:
            process = _started(arguments, log, program, XDG_RUNTIME_DIR=folder)
        process.stdin.close()
        stdout = process.stdout.read()
        code = process.wait(timeout_s)
        return subprocess.CompletedProcess(arguments, code, stdout, errors.read_text())


def _started(arguments, log, program=None, **environment):
    """A process of `engine-core`, its standard error in a file: a copy of one that has imported
    torch, which a text of a program ("-c") may change. Other programs begin as for a user."""
    arguments = [str(each) for each in arguments]
    environment = os.environ | environment
    match program:
        case None:
            return fork_server().start(arguments, environment, log)
        case ("-c", text, *more):
            arguments = [*map(str, more), *arguments]
            return fork_server().start(arguments, environment, log, program=text)
    pipe, command = subprocess.PIPE, [sys.executable, *map(str, program), *arguments]
    return subprocess.Popen(
        command, stdin=pipe, stdout=pipe, stderr=log, text=True, env=environment
    )
