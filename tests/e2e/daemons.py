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

    def __init__(self, model, *options, bind=None, program=("-m", "engine_core.cli")):
        self._folder = tempfile.TemporaryDirectory(prefix="ec-")
        bind = bind or f"ipc://{self._folder.name}/engine.sock"
        command = [sys.executable, *map(str, program), "--bind", bind, "--exit-on-stdin-eof"]
        command += [] if model is None else ["--model", str(model)]
        command += map(str, options)
        self._log = Path(self._folder.name) / "log"
        with self._log.open("w") as log:
            self.process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                env=os.environ | {"OMP_NUM_THREADS": "2"},
            )
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

    def close(self):
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        self.process.stdin.close()
        self._folder.cleanup()


@contextlib.contextmanager
def running_daemon(model, *options, **more):
    daemon = Daemon(model, *options, **more)
    try:
        yield daemon
    finally:
        daemon.close()


def run_to_exit(*arguments, timeout_s=120):
    """Run `engine-core` with these arguments until it exits by itself; its default address is in a
    folder of its own."""
    with tempfile.TemporaryDirectory(prefix="ec-") as folder:
        return subprocess.run(
            [sys.executable, "-m", "engine_core.cli", *map(str, arguments)],
            capture_output=True,
            text=True,
            timeout=timeout_s,
            stdin=subprocess.DEVNULL,
            env=os.environ | {"XDG_RUNTIME_DIR": folder},
        )
