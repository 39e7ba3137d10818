"""`engine-client pause`, `resume`, `sleep`, `wake-up`, `update-weights`: calls that change what the
engine does, and what it does then."""

import dataclasses
import json as json_module
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Literal

import msgspec

from frontend.async_llm import AsyncLLM
from frontend.cli.connected import connected
from frontend.cli.options import DAEMON, DaemonOptions, Flag, Json, print_fault
from frontend.event_loop import run
from frontend.rolling_update import NewRequests, ServedWeights, rolling_update
from protocol.calls import EngineStatus


def pause(
    *,
    mode: Literal["keep", "wait", "abort"] = "keep",
    json: Json = False,
    daemon: DaemonOptions = DAEMON,
) -> int:
    """
    Args:
        mode: Unfinished requests go on afterwards (keep), those that have started end first (wait),
            or all are aborted.
    """
    return _control(daemon, "pause", lambda llm: llm.pause_generation(mode=mode), prints_json=json)


def resume(*, json: Json = False, daemon: DaemonOptions = DAEMON) -> int:
    return _control(daemon, "resume", lambda llm: llm.resume_generation(), prints_json=json)


def sleep(*, level: int = 1, json: Json = False, daemon: DaemonOptions = DAEMON) -> int:
    """
    Args:
        level: 1: the memory of the KV cache is freed; 2: that of the weights, too.
    """
    return _control(daemon, "sleep", lambda llm: llm.sleep(level), prints_json=json)


def wake_up(*, json: Json = False, daemon: DaemonOptions = DAEMON) -> int:
    return _control(daemon, "wake-up", lambda llm: llm.wake_up(), prints_json=json)


def update_weights(
    model: str,
    /,
    *,
    weights_version: int | None = None,
    rolling: Flag = False,
    new_requests: NewRequests = "any",
    drain_timeout: float = 600.0,
    previous: str | None = None,
    json: Json = False,
    daemon: DaemonOptions = DAEMON,
) -> int:
    """
    Args:
        model: A folder, file or known name, as for `engine-core --model`.
        weights_version: Default: the next number.
        rolling: Of all engines of --address ADDRESS,ADDRESS, one after another; no request is lost,
            and none gets tokens of both weights.
        new_requests: With --rolling: of which weights new requests are answered meanwhile.
        drain_timeout: With --rolling: seconds for an engine's requests to end, or the update stops.
        previous: With --rolling: the old weights, for an engine that loads others than the rest.
    """
    model = _at_engine(model)
    if rolling:

        async def update() -> list[ServedWeights]:
            async with connected(daemon, "update-weights --rolling") as llm:
                return await rolling_update(
                    llm.engines,
                    model,
                    weights_version,
                    new_requests=new_requests,
                    drain_timeout_s=drain_timeout,
                    previous=None if previous is None else _at_engine(previous),
                    report=print_fault,
                )

        served = run(update())
        text = "\n".join(map(str, served))
        if json:
            text = json_module.dumps([dataclasses.asdict(each) for each in served])
        sys.stdout.write(text + "\n")
        return 0
    return _control(
        daemon,
        "update-weights",
        lambda llm: llm.update_weights(model, weights_version),
        prints_json=json,
    )


def _at_engine(model: str) -> str:
    path = Path(model)
    return str(path.absolute()) if path.exists() else model


def _control(
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

    async def call() -> EngineStatus:
        async with connected(daemon, command) as llm:
            return await change(llm)

    status = run(call())
    text = f"{status.state}, weights version {status.weights_version}"
    text += f", {status.num_requests} unfinished requests"
    if prints_json:
        text = json_module.dumps(msgspec.structs.asdict(status))
    sys.stdout.write(text + "\n")
    return 0
