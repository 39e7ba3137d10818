"""A program, run with PARENT COMMAND... as the first of its process group: the command and all that
it started end when the command ends, and when process PARENT dies, however that dies."""

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1


def main(parent: int, command: list[str]) -> None:
    """Source of the signal: prctl(2), PR_SET_PDEATHSIG."""
    signal.signal(signal.SIGUSR1, lambda *_: os.killpg(0, signal.SIGKILL))
    signal.signal(signal.SIGTERM, lambda *_: None)  # the whole group gets it: the command decides
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGUSR1)
    if os.getppid() != parent:
        return
    try:
        child = os.posix_spawnp(command[0], command, os.environ)
    except OSError as error:
        sys.exit(f"cannot run {command[0]}: {error.strerror}")
    os.waitpid(child, 0)
    os.killpg(0, signal.SIGKILL)


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2:])
