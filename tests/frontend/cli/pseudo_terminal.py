"""A program at a pseudo-terminal, and the screen as a user sees it (pyte). Not a test."""

import contextlib
import fcntl
import os
import pty
import select
import struct
import subprocess
import sys
import termios
import time

import pyte

_AT_ITS_TERMINAL = """
import os, runpy
os.close(os.open(os.ttyname(0), os.O_RDWR))  # the first that a session opens controls it
runpy.run_module("frontend.cli", run_name="__main__", alter_sys=True)
"""


class PseudoTerminal:
    """`engine-client` with these arguments, whose terminal it is: Ctrl-C typed there interrupts it.
    `state` is the user's state folder."""

    def __init__(self, *arguments, state, columns=80, rows=24):
        self._master, slave = pty.openpty()
        self._screen = pyte.HistoryScreen(columns, rows, history=1000, ratio=1)
        self._screen.write_process_input = self.type  # answers questions about the cursor
        self._stream = pyte.ByteStream(self._screen)
        self.resize(columns, rows)
        # pytest-xdist sets a size, and that would count
        environment = {name: os.environ[name] for name in os.environ.keys() - {"LINES", "COLUMNS"}}
        self.process = subprocess.Popen(
            [sys.executable, "-c", _AT_ITS_TERMINAL, *arguments],
            stdin=slave,
            stdout=slave,
            stderr=slave,
            start_new_session=True,
            env=environment | {"XDG_STATE_HOME": str(state), "TERM": "xterm-256color"},
        )
        os.close(slave)

    def resize(self, columns, rows):
        fcntl.ioctl(self._master, termios.TIOCSWINSZ, struct.pack("4H", rows, columns, 0, 0))
        self._screen.resize(rows, columns)

    def type(self, text):
        os.write(self._master, text.encode())

    def text(self):
        """The screen and what was scrolled out of it."""
        top = [
            "".join(line[column].data for column in range(self._screen.columns)).rstrip()
            for line in self._screen.history.top
        ]
        return "\n".join([*top, *(line.rstrip() for line in self._screen.display)])

    def wait_for(self, *texts, times=1, timeout_s=60):
        """Reads until each of these stands on the screen so often. Returns all of it."""
        deadline = time.monotonic() + timeout_s
        while not all(self.text().count(each) >= times for each in texts):
            left_s = deadline - time.monotonic()
            assert left_s > 0, self.text()
            if select.select([self._master], [], [], left_s)[0]:
                try:
                    self._stream.feed(os.read(self._master, 65536))
                except OSError:  # the program has ended
                    assert all(each in self.text() for each in texts), self.text()
        return self.text()

    def close(self):
        self.process.kill()
        self.process.wait()
        with contextlib.suppress(OSError):
            os.close(self._master)
