"""The streams that a process was started with."""

import os
import sys


def open_standard_streams() -> None:
    """Streams that were closed by the process's parent become /dev/null: else a socket or a file
    of ours gets their number, and what is meant for standard error is written into it."""
    for number, (name, mode) in enumerate((("stdin", "r"), ("stdout", "w"), ("stderr", "w"))):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # takes the lowest number that is free
            stream = open(number, mode, closefd=False)  # noqa: SIM115
            setattr(sys, name, stream)
            setattr(sys, f"__{name}__", stream)


def flush_standard_streams() -> None:
    """Before exit. What cannot be written, as the disk is full or the reader gone, is given up:
    Python would exit with 120 instead of our exit code."""
    for stream in filter(None, (sys.__stdout__, sys.__stderr__)):
        try:
            stream.flush()
        except OSError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
