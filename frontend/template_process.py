"""The process that renders chat templates, seen from the client: started when a template is first
rendered, ended and started again where a template passes a limit."""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import select
import signal
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
    or "-" and the text of a ChatTemplateError, the length in 8 bytes between the two.
    """

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._lock = threading.Lock()
        self._poll = select.poll()
        atexit.register(self.close)
        os.register_at_fork(after_in_child=self._forget)

    def render(self, request: dict[str, Any]) -> str:
        """Calls `template_sandbox.render` there.

        Raises:
            ChatTemplateError: what that raises, or the limit that was passed.
            RecursionError: `request` is nested too deeply.
            TypeError: it has keys that JSON cannot hold.
        """
        data = json.dumps(request).encode()
        with self._lock:
            process = self._running()
            assert process.stdin is not None and process.stdout is not None
            try:
                process.stdin.write(len(data).to_bytes(8, "little") + data)
                process.stdin.flush()
                if not self._poll.poll(_WALL_LIMIT_S * 1000):
                    self._end()
                    raise ChatTemplateError(
                        f"the chat template was not rendered within {_WALL_LIMIT_S:g} s; try "
                        "again when the machine is less busy"
                    )
                head = process.stdout.read(9)
                # a character has 4 bytes at most; it may say more only if the sandbox leaks
                num_bytes = min(int.from_bytes(head[1:], "little"), 4 * MAX_PROMPT_CHARS)
                encoded = process.stdout.read(num_bytes)
            except BrokenPipeError:
                head, num_bytes, encoded = b"", 0, b""
            except ChatTemplateError:
                raise
            except BaseException:  # such as Ctrl-C: an answer would be taken for the next one's
                self._end()
                raise
            if len(head) < 9 or len(encoded) < num_bytes:
                raise ChatTemplateError(self._why_it_ended())
        text = encoded.decode("utf-8", "surrogatepass")
        if head[:1] != b"+":
            raise ChatTemplateError(text)
        return text

    def close(self) -> None:
        """End the process, if there is one. The next `render` starts another."""
        with self._lock:
            if self._process is not None:
                self._end()

    def _running(self) -> subprocess.Popen[bytes]:
        if self._process is None or self._process.poll() is not None:
            command = [sys.executable, "-P", "-W", "ignore", "-m", "frontend.template_sandbox"]
            paths = os.pathsep.join(path or str(Path.cwd()) for path in sys.path)
            try:
                self._process = subprocess.Popen(
                    command,
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    env={**os.environ, "PYTHONPATH": paths},
                )
            except OSError as error:
                raise ChatTemplateError(
                    f"cannot start a process for the chat template: {error.strerror}; close other "
                    "processes"
                ) from error
            assert self._process.stdout is not None
            self._poll = select.poll()
            self._poll.register(self._process.stdout, select.POLLIN)
        return self._process

    def _end(self) -> None:
        """At once: it has nothing to lose."""
        assert self._process is not None
        process, self._process = self._process, None
        for stream in (process.stdin, process.stdout):
            assert stream is not None
            with contextlib.suppress(OSError):  # unsent bytes of a request
                stream.close()
        process.kill()
        process.wait()

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
        self._process = None
        self._lock = threading.Lock()
