"""Starts `engine-core` as a copy of a process that has imported it: that takes 1.5 s of a core, and
tests start hundreds of daemons. Not a test."""

import functools
import gc
import importlib
import json
import os
import random
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path


class ForkServer:
    """The process that is copied; it ends with this one."""

    def __init__(self):
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            subprocess.Popen(
                [sys.executable, __file__, str(theirs.fileno())],
                stdin=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
            )

    def start(self, arguments, environment, log, *, program=None):
        """A process whose standard error is that file; of a program's text in place of
        `engine-core`, it is given."""
        (their_stdin, stdin), (stdout, their_stdout), (reports, their_reports) = (
            os.pipe() for _ in range(3)
        )
        asked = {"argv": arguments, "environ": environment, "program": program}
        theirs = [their_stdin, their_stdout, their_reports]
        socket.send_fds(self._socket, [json.dumps(asked).encode()], [*theirs, log.fileno()])
        for each in theirs:
            os.close(each)
        return ForkedProcess(stdin, stdout, reports)


class ForkedProcess:
    """What tests use of subprocess.Popen."""

    def __init__(self, stdin, stdout, reports):
        self.stdin, self.stdout = os.fdopen(stdin, "w"), os.fdopen(stdout)
        self._reports = os.fdopen(reports)
        self.pid = int(self._reports.readline())
        self.returncode = None
        self._lock = threading.Lock()

    def wait(self, timeout=None):
        deadline_s = None if timeout is None else time.monotonic() + timeout
        while self.poll() is None:
            if deadline_s is not None and time.monotonic() > deadline_s:
                raise subprocess.TimeoutExpired("engine-core", timeout)
            time.sleep(0.005)
        return self.returncode

    def poll(self):
        with self._lock:
            if self.returncode is None and select.select([self._reports], [], [], 0)[0]:
                self.returncode = os.waitstatus_to_exitcode(int(self._reports.readline()))
                self._reports.close()
            return self.returncode

    def send_signal(self, number):
        if self.poll() is None:
            os.kill(self.pid, number)

    def terminate(self):
        self.send_signal(signal.SIGTERM)

    def kill(self):
        self.send_signal(signal.SIGKILL)


@functools.cache
def fork_server():
    return ForkServer()


def _serve(channel):
    from engine_core.startup.before_torch import share_the_cores

    share_the_cores()
    for module in ("startup.model", "startup.build", "core", "daemon"):
        importlib.import_module(f"engine_core.{module}")
    from engine_core.cli import main

    gc.freeze()
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # none is waited for here
    while True:
        data, files, _, _ = socket.recv_fds(channel, 1 << 20, 4)
        if not data:
            return
        stdin, stdout, reports, stderr = files
        if os.fork():
            for file in files:
                os.close(file)
            continue
        # who waits for the engine, and reports its end
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        channel.close()
        if engine := os.fork():
            for file in (stdin, stdout, stderr):
                os.close(file)
            os.write(reports, b"%d\n" % engine)
            os.write(reports, b"%d\n" % os.waitpid(engine, 0)[1])
            os._exit(0)
        for number, file in enumerate((stdin, stdout, stderr)):
            os.dup2(file, number)
        for file in files:
            os.close(file)
        asked = json.loads(data)
        os.environ.clear()
        os.environ.update(asked["environ"])
        random.seed()
        sys.path[:0] = asked["environ"].get("PYTHONPATH", "").split(os.pathsep)
        sys.argv[1:] = asked["argv"]
        try:
            if asked["program"] is None:
                main()
            exec(asked["program"], {"__name__": "__main__"})
        except SystemExit as ended:  # to take the interpreter apart costs as much as a start
            for thread in threading.enumerate():
                if thread is not threading.current_thread() and not thread.daemon:
                    thread.join()
            os._exit(ended.code)


if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).parents[2])
    _serve(socket.socket(fileno=int(sys.argv[1])))
