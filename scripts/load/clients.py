"""Client processes: they send requests to a daemon or a server, and record what comes back."""

import asyncio
import contextlib
import math
import multiprocessing
import time
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, NamedTuple

from frontend import AsyncLLM, RequestOutputKind, RequestRejected, SamplingParams, run
from scripts.load.openai_stream import Server, complete, num_new_tokens
from scripts.load.records import RequestRecord
from scripts.load.workload import PlannedRequest, RequestGenerator

_START_DELAY_S = 0.3
_READY_S = 60.0
_PROGRESS_EVERY_S = 1.0


class Engine(NamedTuple):
    address: str
    keys: Path | None


Target = str | Engine | Server
"""The address of a daemon, or an OpenAI-compatible server."""
GREEDY = SamplingParams(temperature=0.0, ignore_eos=True, output_kind=RequestOutputKind.DELTA)
"""A server is always asked like this."""
Stream = Callable[[PlannedRequest, RequestRecord], AsyncIterator[int]]
"""Sends a request; gives the number of new tokens as they come."""


class ClientsFailed(Exception):
    """The clients could not do their work, or not in time."""


class Client:
    """Sends requests over one stream and records what happens to each.

    Args:
        start: of the measurement, on the clock of `time.monotonic`.
        on_record: gets each record when its request has ended.
    """

    def __init__(
        self,
        stream: Stream,
        start: float | None = None,
        on_record: Callable[[RequestRecord], None] = lambda _record: None,
    ) -> None:
        self._stream = stream
        self._start = time.monotonic() if start is None else start
        self._on_record = on_record

    def now_s(self) -> float:
        return time.monotonic() - self._start

    async def send(self, request: PlannedRequest, due_s: float) -> RequestRecord:
        """One request to its end. A failure is part of the record."""
        record = RequestRecord(
            request.index,
            due_s,
            sent_s=self.now_s(),
            num_prompt_tokens=len(request.prompt_token_ids),
        )
        try:
            async for num_tokens in self._stream(request, record):
                now_s = self.now_s()
                if record.last_token_s is None:
                    record.first_token_s = now_s
                else:
                    record.gaps_s.append(now_s - record.last_token_s)
                record.last_token_s = now_s
                record.num_output_tokens += num_tokens
        except RequestRejected as error:
            record.error, record.detail = f"rejected: {error.code}", str(error)
        # failures of any kind are counted, and the other requests go on
        except Exception as error:
            record.error, record.detail = type(error).__name__, str(error)[:300]
        record.finished_s = self.now_s()
        self._on_record(record)
        return record


@dataclass(frozen=True)
class OpenLoop:
    """Each request is sent at its arrival, whatever became of those before it, and its latency
    counts from then: a slow server shows as latency, not as less load."""

    requests: tuple[PlannedRequest, ...]

    def share(self, part: int, num_parts: int) -> "OpenLoop":
        return OpenLoop(self.requests[part::num_parts])

    async def run(self, client: Client) -> None:
        async with asyncio.TaskGroup() as tasks:
            for request in self.requests:
                await asyncio.sleep(request.arrival_s - client.now_s())
                tasks.create_task(client.send(request, request.arrival_s))


@dataclass(frozen=True)
class ClosedLoop:
    """`concurrency` requests at a time; the next is sent when one ends."""

    generator: RequestGenerator
    concurrency: int
    num_requests: int | None
    duration_s: float | None
    part: int = 0
    num_parts: int = 1

    def share(self, part: int, num_parts: int) -> "ClosedLoop":
        concurrency = share_of(self.concurrency, part=part, num_parts=num_parts)
        return replace(self, concurrency=concurrency, part=part, num_parts=num_parts)

    async def run(self, client: Client) -> None:
        await asyncio.sleep(-client.now_s())
        indices = self._indices(client)
        async with asyncio.TaskGroup() as tasks:
            for _ in range(self.concurrency):
                tasks.create_task(self._send_one_by_one(client, indices))

    def _indices(self, client: Client) -> Iterator[int]:
        index = self.part
        while (self.num_requests is None or index < self.num_requests) and (
            self.duration_s is None or client.now_s() < self.duration_s
        ):
            yield index
            index += self.num_parts

    async def _send_one_by_one(self, client: Client, indices: Iterator[int]) -> None:
        for index in indices:
            await client.send(self.generator.request(index), client.now_s())


def share_of(total: int, *, part: int, num_parts: int) -> int:
    """How many of `total` fall to one part, the first parts taking what does not divide."""
    return total // num_parts + (part < total % num_parts)


def run_clients(
    target: Target,
    loop: OpenLoop | ClosedLoop,
    *,
    num_processes: int,
    sampling: SamplingParams = GREEDY,
    timeout_s: float = math.inf,
    on_progress: Callable[[list[RequestRecord], float], None] = lambda _records, _now_s: None,
) -> list[RequestRecord]:
    """The requests' records by index. The processes start their clocks together.
    `on_progress`: gets the records so far and the time, at least once a second. Raises
    ClientsFailed: a process died, or not all requests ended within `timeout_s`."""
    if isinstance(loop, OpenLoop):
        num_processes = min(num_processes, len(loop.requests))
    context = multiprocessing.get_context("spawn")
    processes: dict[Connection, BaseProcess] = {}
    try:
        for part in range(num_processes):
            ours, theirs = context.Pipe()
            arguments = (target, loop.share(part, num_processes), sampling, theirs)
            process: BaseProcess = context.Process(target=_work, args=arguments, daemon=True)
            process.start()
            theirs.close()
            processes[ours] = process
        for pipe in processes:
            if not pipe.poll(_READY_S):
                raise ClientsFailed(f"a client process is not ready after {_READY_S:g} s")
            _receive(pipe)
        start = time.monotonic() + _START_DELAY_S
        for pipe in processes:
            pipe.send(start)
        records: list[RequestRecord] = []
        running = set(processes)
        while running:
            now_s = time.monotonic() - start
            on_progress(records, max(now_s, 0.0))
            if now_s > timeout_s:
                raise ClientsFailed(f"not all requests ended within {timeout_s:g} s")
            readable = wait(list(running), timeout=min(_PROGRESS_EVERY_S, timeout_s - now_s))
            for pipe in running.intersection(readable):
                record = _receive(pipe)
                if record is None:
                    running.remove(pipe)
                else:
                    records.append(record)
        return sorted(records, key=lambda record: record.index)
    finally:
        for pipe, process in processes.items():
            process.terminate()
            process.join()
            pipe.close()


def _receive(pipe: Connection) -> Any:
    try:
        received = pipe.recv()
    except EOFError:
        raise ClientsFailed("a client process ended before its work was done") from None
    if isinstance(received, str):
        raise ClientsFailed(f"a client process failed: {received}")
    return received


# ---------------------------------------------------------------------- in the client process


def _work(
    target: Target, share: OpenLoop | ClosedLoop, sampling: SamplingParams, pipe: Connection
) -> None:
    """Sends None when ready, waits for the start time, sends a record for each request, and None
    at the end; text is a fault that ends the run."""
    try:
        run(_send_share(target, share, sampling, pipe))
    except KeyboardInterrupt:
        return
    except Exception as error:
        pipe.send(f"{type(error).__name__}: {error}")
    finally:
        pipe.close()


async def _send_share(
    target: Target, share: OpenLoop | ClosedLoop, sampling: SamplingParams, pipe: Connection
) -> None:
    async with contextlib.AsyncExitStack() as stack:
        if isinstance(target, Server):
            stream = openai_stream(target)
        else:
            address, keys = (target, None) if isinstance(target, str) else target
            llm = AsyncLLM(address, client_name="load", keys=keys)
            await stack.enter_async_context(llm)
            stream = engine_stream(llm, sampling)
        pipe.send(None)
        start = await asyncio.to_thread(pipe.recv)
        await share.run(Client(stream, start, pipe.send))
    pipe.send(None)


def engine_stream(llm: AsyncLLM, sampling: SamplingParams) -> Stream:
    async def stream(request: PlannedRequest, record: RequestRecord) -> AsyncIterator[int]:
        params = replace(sampling, max_tokens=request.num_output_tokens)
        async for output in llm.generate({"prompt_token_ids": request.prompt_token_ids}, params):
            if num_tokens := sum(len(part.token_ids) for part in output.outputs):
                yield num_tokens
            record.num_cached_tokens = output.num_cached_tokens or 0
            reason = output.outputs[0].finish_reason if output.outputs else None
            if reason in ("error", "abort"):
                record.error = f"finish reason {reason}"
                record.detail = str(output.outputs[0].detail)

    return stream


def openai_stream(server: Server) -> Stream:
    """The server's own count of tokens, where it gives one, is put into the record at the end: an
    event may hold several, or none."""

    async def stream(request: PlannedRequest, record: RequestRecord) -> AsyncIterator[int]:
        counted: int | None = None
        events = complete(server, request.prompt_token_ids, request.num_output_tokens)
        async for event in events:
            if num_tokens := num_new_tokens(event):
                yield num_tokens
            counted = (event.get("usage") or {}).get("completion_tokens", counted)
        if counted is not None:
            record.num_output_tokens = counted

    return stream
