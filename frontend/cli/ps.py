"""`engine-client ps`: the daemons of this user that run."""

import asyncio
import contextlib
import json as json_module
import sys
import time
from datetime import timedelta
from pathlib import Path
from typing import Annotated, Any

import msgspec
from cyclopts import Parameter

from frontend.cli.options import Json
from frontend.engine.connection import ConnectionOptions
from frontend.engine.session import EngineSession
from frontend.engine.transport import ZmqTransport
from frontend.engine_calls import Engine
from frontend.errors import EngineClientError
from frontend.event_loop import Clock, run
from protocol.calls import EngineStatistics
from protocol.keys import read_client_key
from protocol.memory import process_memory_bytes
from protocol.running_daemons import RunningDaemon, running_daemons

_ANSWER_S = 2.0
"""A daemon answers between two steps."""


def ps(
    *,
    keys: Annotated[Path | None, Parameter(help="Your key's file, for daemons on TCP.")] = None,
    json: Json = False,
) -> int:
    """Print a row or an object for each, oldest first.
    Raises InvalidParameter: the key's file cannot be used."""
    found = run(_all_described(keys))
    if json:
        sys.stdout.write(json_module.dumps(found) + "\n")
    else:
        sys.stdout.writelines(f"{line}\n" for line in _table([_row(each) for each in found]))
    return 0


async def _all_described(keys: Path | None) -> list[dict[str, Any]]:
    return await asyncio.gather(*(_described(each, keys) for each in running_daemons()))


async def _described(daemon: RunningDaemon, keys: Path | None) -> dict[str, Any]:
    """`running` and `waiting` requests are None where it does not answer."""
    now = await statistics_of(daemon.address, keys)
    return {
        **msgspec.structs.asdict(daemon),
        "uptime_s": round(time.time() - daemon.started_s, 1),
        "memory_bytes": process_memory_bytes(daemon.pid),
        "num_running": None if now is None else now.num_running,
        "num_waiting": None if now is None else now.num_waiting,
    }


async def statistics_of(address: str, keys: Path | None = None) -> EngineStatistics | None:
    """None: the daemon there did not answer in time. Raises InvalidParameter: see `ps`."""
    key = None
    if keys is not None and address.startswith("tcp://"):
        key = read_client_key(keys, address)
    with contextlib.suppress(EngineClientError, TimeoutError):
        session = EngineSession(  # and no client, which would build the tokenizer
            transport=ZmqTransport(address, key),
            options=ConnectionOptions(
                address=address,
                client_name="engine-client ps",
                connect_timeout_s=_ANSWER_S,
                reconnect_timeout_s=_ANSWER_S,
                silence_timeout_s=_ANSWER_S,
            ),
            clock=Clock(),
        )
        try:
            async with asyncio.timeout(_ANSWER_S):
                return await Engine(address, session).statistics()
        finally:
            await session.close()
    return None


def _row(daemon: dict[str, Any]) -> list[str]:
    memory, running, keep_alive_s = (
        daemon[name] for name in ("memory_bytes", "num_running", "keep_alive_s")
    )
    kept = "-" if keep_alive_s is None else str(timedelta(seconds=max(0.0, keep_alive_s)))
    return [
        daemon["model"],
        str(daemon["pid"]),
        str(timedelta(seconds=round(daemon["uptime_s"]))),
        f"{running} running, {daemon['num_waiting']} waiting"
        if running is not None
        else "no answer"
        if daemon["is_ready"]
        else "starting",
        "-" if memory is None else f"{memory / 1e6:,.0f} MB",
        "for ever" if keep_alive_s == -1 else kept,
        daemon["address"],
    ]


def _table(rows: list[list[str]]) -> list[str]:
    rows = [["MODEL", "PID", "UPTIME", "REQUESTS", "MEMORY", "KEEP-ALIVE", "ADDRESS"], *rows]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(f"{cell:<{width}}" for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    ]
