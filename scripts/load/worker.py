"""One client process: sends its share of the requests and reports each when it ends.

Open loop: each request is sent at its scheduled time, whatever became of those before it, and
its latency counts from that time; a slow server therefore shows as latency, not as less load.
Closed loop: so many requests at a time; the next is sent when one ends.
"""

import asyncio
import time
from collections.abc import Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection

from frontend import AsyncLLM, RequestOutputKind, RequestRejected, SamplingParams, run
from scripts.load.records import RequestRecord
from scripts.load.workload import PlannedRequest, Workload


@dataclass(frozen=True)
class WorkerPlan:
    """What one of `num_parts` processes does. Exactly one of `arrivals` and `concurrency`.

    `arrivals` are those of the whole run; this process takes every `num_parts`-th.
    """

    address: str
    part: int
    num_parts: int
    workload: Workload
    ignore_eos: bool
    temperature: float
    arrivals: tuple[float, ...] | None = None
    concurrency: int | None = None
    num_requests: int | None = None
    duration_s: float | None = None


def work(plan: WorkerPlan, pipe: Connection) -> None:
    """A process's main: sends "ready", waits for the start time (of `time.monotonic`), sends
    RequestRecords as they end, and None at the end. Text is a fault that ends the process."""
    try:
        run(_work(plan, pipe))
    except KeyboardInterrupt:
        return
    # the parent prints it in one line and ends the run
    except Exception as error:
        pipe.send(f"{type(error).__name__}: {error}")
    finally:
        pipe.close()


async def _work(plan: WorkerPlan, pipe: Connection) -> None:
    async with AsyncLLM(plan.address, client_name=f"load test {plan.part}") as llm:
        client = LoadClient(llm, plan, pipe)
        planned = client.planned_ahead()
        pipe.send("ready")
        start = await asyncio.to_thread(pipe.recv)
        if plan.arrivals is not None:
            await client.run_open(start, planned)
        else:
            await client.run_closed(start)
        pipe.send(None)


class LoadClient:
    """Sends requests over one connection and records what happens to each."""

    def __init__(self, llm: AsyncLLM, plan: WorkerPlan, pipe: Connection | None) -> None:
        self._llm = llm
        self._plan = plan
        self._pipe = pipe
        self._start = time.monotonic()

    def planned_ahead(self) -> list[tuple[float, PlannedRequest]]:
        """Open loop: arrivals and requests of this process, made before the clock starts."""
        plan = self._plan
        return [
            (arrival_s, plan.workload.request(index))
            for index, arrival_s in enumerate(plan.arrivals or ())
            if index % plan.num_parts == plan.part
        ]

    async def run_open(self, start: float, planned: list[tuple[float, PlannedRequest]]) -> None:
        self._start = start
        async with asyncio.TaskGroup() as requests:
            for arrival_s, request in planned:
                await asyncio.sleep(start + arrival_s - time.monotonic())
                requests.create_task(self._one(request, due_s=arrival_s))

    async def run_closed(self, start: float) -> None:
        self._start = start
        plan = self._plan
        assert plan.concurrency is not None, "neither arrivals nor concurrency"
        await asyncio.sleep(start - time.monotonic())
        indices = self._indices()
        async with asyncio.TaskGroup() as lanes:
            for _ in range(share_of(plan.concurrency, part=plan.part, num_parts=plan.num_parts)):
                lanes.create_task(self._lane(indices))

    def _indices(self) -> Iterator[int]:
        plan = self._plan
        index = plan.part
        while (plan.num_requests is None or index < plan.num_requests) and (
            plan.duration_s is None or self._now_s() < plan.duration_s
        ):
            yield index
            index += plan.num_parts

    async def _lane(self, indices: Iterator[int]) -> None:
        for index in indices:
            request = self._plan.workload.request(index)
            await self._one(request, due_s=self._now_s())

    async def _one(self, request: PlannedRequest, *, due_s: float) -> None:
        record = await self.send(request, due_s=due_s)
        if self._pipe is not None:
            self._pipe.send(record)

    async def send(self, request: PlannedRequest, *, due_s: float) -> RequestRecord:
        """One request to its end. A failure is part of the record."""
        record = RequestRecord(
            request.index,
            due_s,
            sent_s=self._now_s(),
            num_prompt_tokens=len(request.prompt_token_ids),
        )
        params = SamplingParams(
            temperature=self._plan.temperature,
            max_tokens=request.num_output_tokens,
            ignore_eos=self._plan.ignore_eos,
            output_kind=RequestOutputKind.DELTA,
        )
        try:
            stream = self._llm.generate({"prompt_token_ids": request.prompt_token_ids}, params)
            async for output in stream:
                self._note(record, sum(len(part.token_ids) for part in output.outputs))
                record.num_cached_tokens = output.num_cached_tokens or 0
                reason = output.outputs[0].finish_reason if output.outputs else None
                if reason in ("error", "abort"):
                    record.error = f"finish reason {reason}"
        except RequestRejected as error:
            record.error = f"rejected: {error.code}"
        # a load test counts failures of any kind and goes on
        except Exception as error:
            record.error = type(error).__name__
        record.finished_s = self._now_s()
        return record

    def _note(self, record: RequestRecord, num_new_tokens: int) -> None:
        if num_new_tokens == 0:
            return
        now_s = self._now_s()
        if record.last_token_s is None:
            record.first_token_s = now_s
        else:
            record.gaps_s.append(now_s - record.last_token_s)
        record.last_token_s = now_s
        record.num_output_tokens += num_new_tokens

    def _now_s(self) -> float:
        return time.monotonic() - self._start


def share_of(total: int, *, part: int, num_parts: int) -> int:
    """How many of `total` fall to one part, the first parts taking what does not divide."""
    return total // num_parts + (part < total % num_parts)
