"""Client processes: they send requests to a daemon or a server, and record what comes back."""

import asyncio
import contextlib
import itertools
import math
import multiprocessing
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sized
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field, replace
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, NamedTuple, Self

from frontend.async_llm import AsyncLLM
from frontend.errors import RequestRejected
from frontend.event_loop import run
from frontend.load.http_streams import Connections, Server, ServerError
from frontend.load.records import RequestRecord, percentile
from frontend.load.requests import PlannedRequest
from frontend.load.traces import TraceError
from frontend.sampling_params import RequestOutputKind, SamplingParams

_START_DELAY_S = 0.3
_READY_S = 60.0
_PROGRESS_EVERY_S = 1.0
_WATCH_EVERY_S = 0.01
_NOT_SENT = "not sent: the turn before it failed"


class Daemon(NamedTuple):
    """Its address. `sampling` of every request, but for its length."""

    address: str
    keys: Path | None = None
    sampling: SamplingParams = SamplingParams(
        temperature=0.0, ignore_eos=True, output_kind=RequestOutputKind.DELTA
    )


Target = Daemon | Server
Pieces = list[Any]
"""Pieces of an answer: token ids, or texts."""
Stream = Callable[[PlannedRequest, RequestRecord], AsyncIterator[tuple[int, Pieces]]]
"""Sends a request; gives the number of new tokens and what they are as they come."""


class ClientsFailed(Exception):
    """The clients could not do their work, or not in time."""


@dataclass
class Client:
    """Sends requests over one stream and records what happens to each. `start` of the measurement
    is on the clock of `time.monotonic`; a request that takes longer than `timeout_s` has failed."""

    stream: Stream
    start: float = field(default_factory=time.monotonic)
    on_record: Callable[[RequestRecord], None] = lambda _record: None
    timeout_s: float | None = None

    def now_s(self) -> float:
        return time.monotonic() - self.start

    async def sleep_until(self, due_s: float) -> None:
        """Never early: the event loop's timers are whole milliseconds and may be."""
        while (left_s := due_s - self.now_s()) > 0:
            await asyncio.sleep(left_s)

    async def send(self, request: PlannedRequest, due_s: float) -> tuple[RequestRecord, Pieces]:
        """One request to its end, and its answer. A failure is part of the record."""
        record = RequestRecord(request.index, due_s, sent_s=self.now_s())
        if isinstance(request.prompt, list) and isinstance(request.prompt[0], int):
            record.num_prompt_tokens = len(request.prompt)
        answer: Pieces = []
        try:
            async with asyncio.timeout(self.timeout_s):
                async for num_tokens, pieces in self.stream(request, record):
                    now_s = self.now_s()
                    if record.last_token_s is None:
                        record.first_token_s = now_s
                    else:
                        record.gaps_s.append(now_s - record.last_token_s)
                    record.last_token_s = now_s
                    record.num_output_tokens += num_tokens
                    if request.later_turns:
                        answer += pieces
        except RequestRejected as error:
            record.error, record.detail = f"rejected: {error.code}", str(error)
        except ServerError as error:
            record.error, record.detail = error.kind, str(error)
        # failures of any kind are counted, and the other requests go on
        except Exception as error:
            record.error, record.detail = type(error).__name__, str(error)[:300]
        record.finished_s = self.now_s()
        self.on_record(record)
        return record, answer

    async def converse(
        self, request: PlannedRequest, due_s: float, slots: AbstractAsyncContextManager[Any]
    ) -> None:
        """A request and the turns after it, each behind a slot. After a failure the turns that
        cannot be sent any more are recorded as failed."""
        while True:
            async with slots:
                record, answer = await self.send(request, due_s)
            if not request.later_turns:
                return
            assert record.finished_s is not None
            if record.error is not None:
                now_s = record.finished_s
                for index in range(request.index + 1, request.index + 1 + len(request.later_turns)):
                    self.on_record(
                        RequestRecord(index, now_s, now_s, finished_s=now_s, error=_NOT_SENT)
                    )
                return
            due_s = record.finished_s + request.later_turns[0].think_s
            request = request.next_turn(answer)
            await self.sleep_until(due_s)


@dataclass(frozen=True)
class Loop:
    """Requests, and how many conversations may be under way at once; None for any number. A process
    sends its part of them."""

    requests: Any
    """An iterable of PlannedRequest."""
    limit: int | None = None
    duration_s: float | None = None
    """A closed loop begins nothing later."""
    part: int = 0
    num_parts: int = 1

    def share(self, part: int, num_parts: int) -> Self:
        limit = self.limit and share_of(self.limit, part=part, num_parts=num_parts)
        return replace(self, limit=limit, part=part, num_parts=num_parts)

    def prepared(self) -> Self:
        """With this part's requests made; with a duration each when it is sent."""
        ours = itertools.islice(self.requests, self.part, None, self.num_parts)
        return replace(self, requests=ours if self.duration_s else tuple(ours))


class OpenLoop(Loop):
    """Each request is sent at its arrival, whatever became of those before it, and its latency
    counts from then: a slow server shows as latency, not as less load. Beyond the limit requests
    wait here, and the wait is part of their latency."""

    async def run(self, client: Client) -> None:
        slots: Any = contextlib.nullcontext()
        if self.limit is not None:
            slots = asyncio.Semaphore(self.limit)
        async with asyncio.TaskGroup() as tasks:
            for request in self.requests:
                await client.sleep_until(request.arrival_s)
                tasks.create_task(client.converse(request, request.arrival_s, slots))


class ClosedLoop(Loop):
    """As many conversations at a time as the limit says; the next one begins when one ends."""

    async def run(self, client: Client) -> None:
        await client.sleep_until(0.0)
        requests = iter(self.requests)
        async with asyncio.TaskGroup() as tasks:
            for _ in range(self.limit or 1):
                tasks.create_task(self._send_one_by_one(client, requests))

    async def _send_one_by_one(self, client: Client, requests: Iterator[PlannedRequest]) -> None:
        for request in requests:
            await client.converse(request, client.now_s(), contextlib.nullcontext())
            if self.duration_s is not None and client.now_s() >= self.duration_s:
                return


def share_of(total: int, *, part: int, num_parts: int) -> int:
    """How many of `total` fall to one part, the first parts taking what does not divide."""
    return total // num_parts + (part < total % num_parts)


class ClientFacts(NamedTuple):
    """Of one client process: its share of a core, and how late its event loop ran what was due."""

    cpu_share: float
    loop_lag_p99_s: float
    loop_lag_max_s: float


class Outcome(NamedTuple):
    """Records by index, and a row for each client process."""

    records: list[RequestRecord]
    clients: list[ClientFacts]


def run_clients(
    target: Target,
    loop: OpenLoop | ClosedLoop,
    *,
    num_processes: int,
    request_timeout_s: float | None = None,
    timeout_s: float = math.inf,
    on_progress: Callable[[list[RequestRecord], float], None] = lambda _records, _now_s: None,
) -> Outcome:
    """Send a load. The processes start their clocks together. `request_timeout_s`: a request that
    takes longer has failed. `on_progress`: gets the records so far and the time, at least once a
    second. Raises ClientsFailed: a process died, or not all ended within `timeout_s`."""
    num_processes = min(num_processes, loop.limit or num_processes)
    if isinstance(loop.requests, Sized):
        num_processes = min(num_processes, len(loop.requests))
    context = multiprocessing.get_context("spawn")
    processes: dict[Connection, BaseProcess] = {}
    try:
        for part in range(num_processes):
            ours, theirs = context.Pipe()
            arguments = (target, loop.share(part, num_processes), request_timeout_s, theirs)
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
        clients: list[ClientFacts] = []
        running = set(processes)
        while running:
            now_s = time.monotonic() - start
            on_progress(records, max(now_s, 0.0))
            if now_s > timeout_s:
                raise ClientsFailed(f"not all requests ended within {timeout_s:g} s")
            readable = wait(list(running), timeout=min(_PROGRESS_EVERY_S, timeout_s - now_s))
            for pipe in running.intersection(readable):
                received = _receive(pipe)
                if isinstance(received, ClientFacts):
                    running.remove(pipe)
                    clients.append(received)
                else:
                    records.append(received)
        return Outcome(sorted(records, key=lambda record: record.index), clients)
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
        raise ClientsFailed(received)
    return received


# ---------------------------------------------------------------------- in the client process


def _work(
    target: Target, share: OpenLoop | ClosedLoop, timeout_s: float | None, pipe: Connection
) -> None:
    """Sends None when ready, waits for the start time, sends a record for each request, and facts
    about itself at the end; text is a fault that ends the run."""
    try:
        run(_send_share(target, share, timeout_s, pipe))
    except KeyboardInterrupt:
        return
    except (ValueError, TraceError) as error:
        pipe.send(str(error))
    except Exception as error:
        pipe.send(f"a client process failed: {type(error).__name__}: {error}")
    finally:
        pipe.close()


async def _send_share(
    target: Target, share: OpenLoop | ClosedLoop, timeout_s: float | None, pipe: Connection
) -> None:
    prepared = share.prepared()
    async with connected(target) as stream:
        pipe.send(None)
        start = await asyncio.to_thread(pipe.recv)
        lags_s: list[float] = []
        watch = asyncio.create_task(_watch_loop(lags_s))
        cpu_s = time.process_time()
        client = Client(stream, start, pipe.send, timeout_s)
        await prepared.run(client)
        cpu_s = time.process_time() - cpu_s
        watch.cancel()
    lags_s = sorted(lags_s) or [0.0]
    share_of_core = cpu_s / max(client.now_s(), 1e-9)
    pipe.send(ClientFacts(share_of_core, percentile(lags_s, 99), lags_s[-1]))


async def _watch_loop(lags_s: list[float]) -> None:
    while True:
        due = time.monotonic() + _WATCH_EVERY_S
        await asyncio.sleep(_WATCH_EVERY_S)
        lags_s.append(time.monotonic() - due)


@contextlib.asynccontextmanager
async def connected(target: Target) -> AsyncIterator[Stream]:
    """Raises EngineUnavailable, EngineRefused: the daemon does not answer, or not this client."""
    if isinstance(target, Server):
        connections = Connections(target)
        try:
            yield _server_stream(connections)
        finally:
            connections.close()
    else:
        async with AsyncLLM(target.address, client_name="load", keys=target.keys) as llm:
            yield _engine_stream(llm, target.sampling)


def _engine_stream(llm: AsyncLLM, sampling: SamplingParams) -> Stream:
    async def stream(
        request: PlannedRequest, record: RequestRecord
    ) -> AsyncIterator[tuple[int, Pieces]]:
        params = replace(sampling, max_tokens=request.num_output_tokens)
        prompt: Any = request.prompt
        has_ids = isinstance(prompt, list) and isinstance(prompt[0], int)
        if isinstance(prompt, list) and not has_ids:
            outputs = llm.chat(prompt, params)
        else:
            outputs = llm.generate({"prompt_token_ids": prompt} if has_ids else prompt, params)
        async for output in outputs:
            record.num_prompt_tokens = len(output.prompt_token_ids)
            for part in output.outputs:
                if part.token_ids:
                    yield len(part.token_ids), part.token_ids if has_ids else [part.text]
            record.num_cached_tokens = output.num_cached_tokens or 0
            reason = output.outputs[0].finish_reason if output.outputs else None
            if reason in ("error", "abort"):
                record.error = f"finish reason {reason}"
                record.detail = str(output.outputs[0].detail)

    return stream


def _server_stream(connections: Connections) -> Stream:
    """The server's own counts of tokens, where it gives them, are put into the record."""

    async def stream(
        request: PlannedRequest, record: RequestRecord
    ) -> AsyncIterator[tuple[int, Pieces]]:
        counted: int | None = None
        async for event in connections.events(request.prompt, request.num_output_tokens):
            if event.num_tokens:
                yield event.num_tokens, [event.text]
            counted = counted if event.num_output_tokens is None else event.num_output_tokens
            record.num_prompt_tokens = event.num_prompt_tokens or record.num_prompt_tokens
            record.num_cached_tokens = event.num_cached_tokens or record.num_cached_tokens
        if counted is not None:
            record.num_output_tokens = counted

    return stream
