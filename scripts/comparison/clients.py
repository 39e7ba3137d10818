"""The processes that send a workload and take down what comes back.

Owns the client processes and their clock. Must not know how the engine was started, or what the
figures are for. Requests are sent when they are due, whatever became of those before.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess

from scripts.comparison.openai_stream import Server, complete, num_new_tokens
from scripts.comparison.workloads import PlannedRequest, Workload
from scripts.load.records import RequestRecord

_START_DELAY_S = 0.3
_READY_S = 60.0


class ClientsFailed(Exception):
    """The clients could not do their work, or not in time."""


@dataclass(frozen=True, slots=True)
class EngineAddress:
    """A daemon of this project."""

    address: str


Target = EngineAddress | Server


def send_workload(
    target: Target, workload: Workload, *, num_processes: int, timeout_s: float
) -> list[RequestRecord]:
    """The requests' records, in the workload's order. Requests go in turn to the processes.

    Raises:
        ClientsFailed: a process died, or not all requests ended within `timeout_s`.
    """
    context = multiprocessing.get_context("spawn")
    indexed = list(enumerate(workload.requests))
    workers: dict[Connection, BaseProcess] = {}
    try:
        for part in range(min(num_processes, len(indexed))):
            ours, theirs = context.Pipe()
            share = indexed[part::num_processes]
            process: BaseProcess = context.Process(
                target=_work, args=(target, share, theirs), daemon=True
            )
            process.start()
            theirs.close()
            workers[ours] = process
        for pipe in workers:
            _receive(pipe, _READY_S, "a client process is not ready")
        start = time.monotonic() + _START_DELAY_S
        for pipe in workers:
            pipe.send(start)
        return _gather(list(workers), start + timeout_s, timeout_s)
    finally:
        for pipe, process in workers.items():
            process.terminate()
            process.join()
            pipe.close()


def _gather(pipes: list[Connection], deadline: float, timeout_s: float) -> list[RequestRecord]:
    records: list[RequestRecord] = []
    while pipes:
        readable = wait(pipes, timeout=max(0.0, deadline - time.monotonic()))
        if not readable:
            raise ClientsFailed(f"not all requests ended within {timeout_s:g} s")
        for pipe in pipes.copy():
            if pipe in readable:
                records += _receive(pipe, 0.0, "a client process fell silent")
                pipes.remove(pipe)
    return sorted(records, key=lambda record: record.index)


def _receive(pipe: Connection, timeout_s: float, fault: str) -> list[RequestRecord]:
    try:
        if not pipe.poll(timeout_s):
            raise ClientsFailed(f"{fault} after {timeout_s:g} s")
        received = pipe.recv()
    except EOFError:
        raise ClientsFailed("a client process died") from None
    if isinstance(received, str):
        raise ClientsFailed(f"a client process failed: {received}")
    return list(received)


# ---------------------------------------------------------------------- in the client process


def _work(target: Target, share: Sequence[tuple[int, PlannedRequest]], pipe: Connection) -> None:
    from frontend import run

    try:
        run(_send_share(target, share, pipe))
    except KeyboardInterrupt:
        return
    # the parent ends the workload with this text
    except Exception as error:
        pipe.send(f"{type(error).__name__}: {error}")
    finally:
        pipe.close()


async def _send_share(
    target: Target, share: Sequence[tuple[int, PlannedRequest]], pipe: Connection
) -> None:
    if isinstance(target, Server):
        await _send_on_time(_OpenAISender(target), share, pipe)
        return
    from frontend import AsyncLLM

    async with AsyncLLM(target.address, client_name="comparison") as llm:
        await _send_on_time(_EngineSender(llm), share, pipe)


async def _send_on_time(
    sender: _EngineSender | _OpenAISender,
    share: Sequence[tuple[int, PlannedRequest]],
    pipe: Connection,
) -> None:
    pipe.send([])  # ready
    start = await asyncio.to_thread(pipe.recv)
    async with asyncio.TaskGroup() as group:
        tasks = []
        for index, request in share:
            await asyncio.sleep(start + request.arrival_s - time.monotonic())
            tasks.append(group.create_task(_one(sender, index, request, start)))
    pipe.send([task.result() for task in tasks])


async def _one(
    sender: _EngineSender | _OpenAISender, index: int, request: PlannedRequest, start: float
) -> RequestRecord:
    record = RequestRecord(
        index,
        request.arrival_s,
        sent_s=time.monotonic() - start,
        num_prompt_tokens=len(request.prompt_token_ids),
    )
    try:
        async for num_tokens in sender.send(request, record):
            now_s = time.monotonic() - start
            if record.last_token_s is None:
                record.first_token_s = now_s
            else:
                record.gaps_s.append(now_s - record.last_token_s)
            record.last_token_s = now_s
            record.num_output_tokens += num_tokens
    # a request may fail in any way: it is told, and the others go on
    except Exception as error:
        record.error = f"{type(error).__name__}: {error}"[:300]
    record.finished_s = time.monotonic() - start
    return record


class _EngineSender:
    def __init__(self, llm: object) -> None:
        from frontend import AsyncLLM

        assert isinstance(llm, AsyncLLM)
        self._llm = llm

    async def send(self, request: PlannedRequest, record: RequestRecord) -> AsyncIterator[int]:
        """Numbers of new tokens, as they come."""
        from frontend import RequestOutputKind, SamplingParams

        params = SamplingParams(
            temperature=0.0,
            max_tokens=request.num_output_tokens,
            ignore_eos=True,
            output_kind=RequestOutputKind.DELTA,
        )
        async for output in self._llm.generate(request.prompt_token_ids, params):
            record.num_cached_tokens = output.num_cached_tokens or 0
            if num_tokens := sum(len(part.token_ids) for part in output.outputs):
                yield num_tokens
            reason = output.outputs[0].finish_reason if output.outputs else None
            if reason in ("error", "abort"):
                record.error = f"finish reason {reason}: {output.outputs[0].detail}"


class _OpenAISender:
    def __init__(self, server: Server) -> None:
        self._server = server

    async def send(self, request: PlannedRequest, record: RequestRecord) -> AsyncIterator[int]:
        """As `_EngineSender.send`. The server's own count of tokens, where it gives one, is put
        into the record at the end: an event may hold several, or none."""
        counted: int | None = None
        events = complete(self._server, request.prompt_token_ids, request.num_output_tokens)
        async for event in events:
            if num_tokens := num_new_tokens(event):
                yield num_tokens
            usage = event.get("usage") or {}
            counted = usage.get("completion_tokens", counted)
        if counted is not None:
            record.num_output_tokens = counted
