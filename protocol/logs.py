"""Log lines on standard error, as text or as JSON: the daemon's and the HTTP server's are alike."""

import io
import json
import logging
import os
import sys
import threading
from datetime import UTC, datetime
from types import TracebackType
from typing import Any, Literal, TextIO

LogFormat = Literal["text", "json"]
DATE_FORMAT = "%Y-%m-%d %H:%M:%S"
"""The format of a log line's local time."""


def log_to_stderr(level: str, log_format: LogFormat = "text") -> None:
    """Replaces what was set before.

    Args:
        level: a name such as "info".
        log_format: with "json" whatever Python code writes to standard error becomes log lines:
            warnings, uncaught errors, texts of libraries. Stacks after a crash of native code
            (faulthandler) stay text.
    """
    is_json = log_format == "json"
    stream = sys.__stderr__
    handler = _Handler(stream)
    handler.setFormatter(_JsonFormatter() if is_json else _LineFormatter())
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)
    logging.captureWarnings(is_json)
    if is_json and stream is not None:
        os.environ["TQDM_DISABLE"] = "1"  # progress bars of libraries
        sys.stderr = _StderrToLog(stream)
        sys.excepthook = _log_uncaught
        threading.excepthook = _log_uncaught_in_thread


def printable(text: str) -> str:
    """On one line: line ends, control characters and halves of surrogate pairs are escaped, so that
    a text that others sent begins no line of its own, and no escape sequence of a terminal."""
    if text.isprintable():
        return text
    escaped = (c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)
    return "".join(escaped)


class _LineFormatter(logging.Formatter):
    """A line a message, whatever it quotes; a traceback keeps its lines."""

    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname)-7s %(name)s: %(message)s", DATE_FORMAT)

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802
        record.message = printable(record.message)
        return super().formatMessage(record)


class _Handler(logging.StreamHandler[TextIO]):
    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802
        """A disk that is full, or a reader that is gone: there is no place to say it."""
        if not isinstance(sys.exception(), OSError):
            super().handleError(record)


class _JsonFormatter(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        line = json_line(record.levelname, record.name, record.getMessage(), record.created)
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line)


def json_line(level: str, logger: str, message: str, time_s: float) -> dict[str, Any]:
    """A log line as JSON; `time_s` counts from the epoch."""
    moment = datetime.fromtimestamp(time_s, UTC)
    return {
        "time": moment.isoformat(timespec="milliseconds").replace("+00:00", "Z"),
        "level": level.lower(),
        "logger": logger,
        "message": message,
        "pid": os.getpid(),
    }


class _StderrToLog(io.TextIOBase):
    """`sys.stderr` for code that does not log: each line that it writes is a line of the log."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._begun = threading.local()

    def write(self, text: str) -> int:
        *lines, rest = (getattr(self._begun, "text", "") + text).replace("\r", "\n").split("\n")
        self._begun.text = rest
        for line in filter(str.strip, lines):
            logging.getLogger("stderr").warning("%s", line)
        return len(text)

    def fileno(self) -> int:
        return self._stream.fileno()


def _log_uncaught(
    kind: type[BaseException], error: BaseException, traceback: TracebackType | None
) -> None:
    logging.getLogger("engine_core").critical("uncaught", exc_info=(kind, error, traceback))


def _log_uncaught_in_thread(args: threading.ExceptHookArgs) -> None:
    if args.exc_value is not None:
        _log_uncaught(args.exc_type, args.exc_value, args.exc_traceback)
