"""Log lines as JSON: whatever Python code writes to standard error is one object a line. Each test
is a process of its own, as the streams are a process's."""

import json
import subprocess
import sys
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

BEGIN = """
import logging, os, sys, threading, warnings
from protocol.logs import log_to_stderr
log_to_stderr("info", "json")
"""


def run(program, begin=BEGIN, **streams):
    streams = {"stderr": subprocess.PIPE, "stdout": subprocess.PIPE} | streams
    return subprocess.run(
        [sys.executable, "-c", begin + program], text=True, timeout=60, check=False, **streams
    )


def lines_of(program):
    return [json.loads(line) for line in run(program).stderr.splitlines()]


def test_a_line_has_time_level_logger_message_and_pid():
    [line] = lines_of("logging.getLogger('a.b').warning('%d\\n\"é\"', 3)")
    assert list(line) == ["time", "level", "logger", "message", "pid"]
    assert (line["level"], line["logger"], line["message"]) == ("warning", "a.b", '3\n"é"')
    assert line["time"].endswith("Z")
    age = datetime.now(UTC) - datetime.fromisoformat(line["time"])
    assert timedelta(0) <= age < timedelta(minutes=1)
    assert line["pid"] > 1


def test_an_exception_is_part_of_its_line():
    [line] = lines_of("try: 1 / 0\nexcept Exception: logging.exception('no')")
    assert line["message"] == "no"
    assert line["exception"].splitlines()[-1] == "ZeroDivisionError: division by zero"


@pytest.mark.parametrize(
    ("program", "words"),
    [
        ("warnings.warn('old')", "UserWarning: old"),
        ("print('one', file=sys.stderr); sys.stderr.write('two\\rthree\\n')", "one two three"),
        ("from tqdm import tqdm\nfor _ in tqdm(range(3)): pass\nprint('x', file=sys.stderr)", "x"),
        ("1 / 0", "ZeroDivisionError"),
        ("t = threading.Thread(target=lambda: 1 / 0); t.start(); t.join()", "ZeroDivisionError"),
        ("class A:\n def __del__(self): 1 / 0\nA()", "ZeroDivisionError"),
        (
            "from transformers.utils import logging as l; l.get_logger('t').warning('w')",
            "w",
        ),
        ("logging.info('%d', 'no number')", "not all arguments|number"),
    ],
)
def test_what_does_not_log_is_logged(program, words):
    found = lines_of(program)
    text = " ".join(line["message"] + line.get("exception", "") for line in found)
    assert any(word in text for word in words.split("|")), found


def test_a_full_disk_neither_ends_the_process_nor_fills_memory():
    program = """
import resource
for number in range(20_000):
    logging.info("x" * 1000)
    if number == 1000:
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 4096)
"""
    with Path("/dev/full").open("w") as full:
        for begin in (BEGIN, BEGIN.replace('"json"', '"text"')):
            assert run(program, begin, stderr=full).stdout == "True\n"


STREAMS = """
import contextlib, os, sys
from engine_core.process.logs import flush_standard_streams, open_standard_streams
CLOSE
open_standard_streams()
for text, stream in (("out", sys.stdout), ("err", sys.stderr)):
    with contextlib.suppress(OSError): print(text, file=stream)
file = os.open("/dev/zero", os.O_RDONLY)
flush_standard_streams()
sys.exit(7 if file > 2 else 1)
"""


def test_closed_streams_are_opened_so_that_no_file_takes_their_number():
    for closed in ("0", "1", "2", "0, 1, 2"):
        close = f"""
if len(sys.argv) < 2:
    for number in ({closed},): os.close(number)
    os.execv(sys.executable, [sys.executable, "-c", CODE, "again"])
"""
        code = STREAMS.replace("CLOSE", "")
        done = run(STREAMS.replace("CLOSE", close), f"CODE = {code!r}\n")
        assert (done.returncode, done.stderr) == (7, "" if "2" in closed else "err\n")


def test_a_full_disk_does_not_change_the_exit_code():
    with Path("/dev/full").open("w") as full:
        assert run(STREAMS.replace("CLOSE", ""), "", stdout=full, stderr=full).returncode == 7
