"""`engine-client pause`, `resume`, `sleep`, `wake-up` and `update-weights`."""

from __future__ import annotations

import json
import sys
from collections.abc import Awaitable, Callable

import msgspec

from frontend.async_llm import AsyncLLM
from frontend.cli.connected import connected
from frontend.cli.options import DaemonOptions
from protocol.calls import EngineStatus


async def run_control(
    daemon: DaemonOptions,
    command: str,
    change: Callable[[AsyncLLM], Awaitable[EngineStatus]],
    *,
    prints_json: bool,
) -> int:
    """Make the call and show what the engine does now. Returns the exit code.

    Raises:
        EngineClientError: no engine answers, or it refuses.
    """
    async with connected(daemon, command) as llm:
        status = await change(llm)
    text = (
        json.dumps(msgspec.structs.asdict(status))
        if prints_json
        else f"{status.state}, weights version {status.weights_version}, "
        f"{status.num_requests} unfinished requests"
    )
    sys.stdout.write(text + "\n")
    return 0
