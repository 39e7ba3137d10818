"""One worker, as rank 0 sees it."""

import dataclasses
import subprocess
from collections import deque

import zmq

from engine_core.workers.meeting import how_it_ended
from engine_core.workers.messages import WorkerAnswer


@dataclasses.dataclass(slots=True, eq=False)
class Worker:
    """`process`: None for one that has joined."""

    rank: int
    socket: "zmq.Socket[bytes]"
    identity: bytes
    pid: int
    host: str
    process: "subprocess.Popen[bytes] | None"
    answers: "deque[WorkerAnswer]" = dataclasses.field(default_factory=deque)
    failed_because: str = ""
    """The reason why its last step failed."""

    def __str__(self) -> str:
        where = "" if self.process is not None else ", joined"
        return f"rank {self.rank} (pid {self.pid}{where})"

    def how_it_ended(self, limit_s: float) -> str:
        """What became of one that cannot be reached; its process has so many seconds to end."""
        if self.process is None:
            return "is gone, or its network is"
        try:
            return how_it_ended(self.process.wait(limit_s))
        except subprocess.TimeoutExpired:
            return "has closed its connection"
