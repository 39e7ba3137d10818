"""The process that renders chat templates, seen from the client: started when a template is first
rendered, ended and started again where a template passes a limit."""

import atexit
import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

from frontend.errors import ChatTemplateError

CPU_LIMIT_S = 1.0
MEMORY_LIMIT_BYTES = 512 << 20
MAX_PROMPT_CHARS = 16 << 20
OUT_OF_MEMORY = 77
"""Exit code."""
_WALL_LIMIT_S = 30.0
"""For a machine that is too busy, and a process that was stopped."""
_EXIT_WAIT_S = 5.0
_DISTRUST = "do not trust this template, pass another one as chat_template"


class TemplateProcess:
    """Renders one conversation at a time, for all threads.

    A request is JSON, with its length in 8 bytes before it. The answer is "+" and the prompt
    or "-" and the text of a ChatTemplateError, the length in 8 bytes between the two."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._socket: socket.socket | None = None
        self._lock = threading.Lock()
        atexit.register(self.close)
        if hasattr(os, "register_at_fork"):
            os.register_at_fork(after_in_child=self._forget)

    def start(self) -> None:
        """Before the first `render`, which then need not wait for it."""
        with self._lock, contextlib.suppress(ChatTemplateError):
            self._running()

    def render(self, request: dict[str, Any]) -> str:
        """Calls `template_sandbox.render` there.

        Raises:
            ChatTemplateError: what that raises, or the limit that was passed.
            RecursionError: `request` is nested too deeply.
            TypeError: it has keys that JSON cannot hold.
        """
        data = json.dumps(request).encode()
        with self._lock:
            channel = self._running()
            try:
                channel.sendall(len(data).to_bytes(8, "little") + data)
                head = _receive(channel, 9)
                # a character has 4 bytes at most; it may say more only if the sandbox leaks
                num_bytes = min(int.from_bytes(head[1:], "little"), 4 * MAX_PROMPT_CHARS)
                text = _receive(channel, num_bytes).decode("utf-8", "surrogatepass")
            except ConnectionError:
                raise ChatTemplateError(self._why_it_ended()) from None
            except TimeoutError:
                self._end()
                raise ChatTemplateError(
                    f"the chat template was not rendered within {_WALL_LIMIT_S:g} s; try again "
                    "when the machine is less busy"
                ) from None
            except BaseException:  # such as Ctrl-C: an answer would be taken for the next one's
                self._end()
                raise
        if head[:1] != b"+":
            raise ChatTemplateError(text)
        return text

    def close(self) -> None:
        """End the process, if there is one and nothing is being rendered. The next `render` starts
        another."""
        if self._lock.acquire(blocking=False):
            self._end()
            self._lock.release()

    def _running(self) -> socket.socket:
        if self._socket is None or self._process is None or self._process.poll() is not None:
            self._end()
            if getattr(sys, "frozen", False) or not sys.executable:
                raise ChatTemplateError(
                    "this program has no Python interpreter to start, and chat templates need a "
                    "process of their own; give generate() a prompt instead"
                )
            command = [sys.executable, "-P", "-W", "ignore", "-m", "frontend.template_sandbox"]
            try:
                paths = os.pathsep.join(path or str(Path.cwd()) for path in sys.path)
                self._socket, theirs = socket.socketpair()
                with theirs:
                    self._process = subprocess.Popen(
                        command,
                        stdin=theirs.fileno(),
                        stdout=theirs.fileno(),
                        env={**os.environ, "PYTHONPATH": paths},
                    )
            except OSError as error:
                self._end()
                raise ChatTemplateError(
                    f"cannot start a process for the chat template: {error.strerror}; close other "
                    "processes"
                ) from error
            self._socket.settimeout(_WALL_LIMIT_S)
        return self._socket

    def _end(self) -> None:
        """At once: it has nothing to lose."""
        if self._socket is not None:
            self._socket.close()
        if self._process is not None:
            self._process.kill()
            self._process.wait()
        self._socket = self._process = None

    def _why_it_ended(self) -> str:
        assert self._process is not None
        code: int | None = None
        with contextlib.suppress(subprocess.TimeoutExpired):
            code = self._process.wait(_EXIT_WAIT_S)
        self._end()
        if code is None:
            return f"the process that renders the chat template gave no answer; {_DISTRUST}"
        if code == -signal.SIGPROF:
            return (
                f"the chat template took more than {CPU_LIMIT_S:g} s of processor time; {_DISTRUST}"
            )
        if code == OUT_OF_MEMORY:
            mib = MEMORY_LIMIT_BYTES >> 20
            return (
                f"the chat template needs more memory than {mib} MiB; shorten the conversation, or "
                "pass another template as chat_template"
            )
        how = f"by signal {-code}" if code < 0 else f"with exit code {code}"
        return f"the process that renders the chat template ended {how}; {_DISTRUST}"

    def _forget(self) -> None:
        """In a forked child: the process is the parent's."""
        self._process = self._socket = None
        self._lock = threading.Lock()


def _receive(channel: socket.socket, num_bytes: int) -> bytes:
    """Raises ConnectionError if it ends before."""
    received = bytearray()
    while len(received) < num_bytes:
        part = channel.recv(min(num_bytes - len(received), 1 << 20))
        if not part:
            raise ConnectionResetError
        received += part
    return bytes(received)
