"""Batches of a server: files of requests that are answered while it serves others, and after it was
started again."""

import asyncio
import io
import logging
import time
from collections.abc import Callable, Sequence
from typing import Any, Literal

import msgspec

from frontend.batch.answer_file import AnswerFile
from frontend.batch.answerer import Answerer
from frontend.batch.files import FileStore, new_id
from frontend.batch.lines import BatchAnswer, BatchInput, Error, read_question
from frontend.errors import EngineUnavailable, InvalidInput

logger = logging.getLogger(__name__)

ENDPOINTS = ("/v1/chat/completions", "/v1/completions", "/v1/embeddings", "/v1/responses")
WINDOW_S = 24 * 3600
_MOST_JOBS, _MOST_KEPT, _MOST_ERRORS = 1024, 10_000, 100
_RETRY_S = 2.0

Status = Literal[
    "validating", "failed", "in_progress", "finalizing", "completed", "expired", "cancelling",
    "cancelled",
]  # fmt: skip
ENDED = ("failed", "completed", "expired", "cancelled")


class RequestCounts(msgspec.Struct):
    total: int = 0
    completed: int = 0
    failed: int = 0


class BatchError(msgspec.Struct, frozen=True):
    code: str
    message: str
    line: int | None = None
    param: str | None = None


class BatchErrors(msgspec.Struct, frozen=True):
    data: Sequence[BatchError]
    object: Literal["list"] = "list"


class Batch(msgspec.Struct, kw_only=True):
    """A batch as OpenAI has it. Times in seconds since the epoch."""

    id: str
    object: Literal["batch"] = "batch"
    endpoint: str
    errors: BatchErrors | None = None
    input_file_id: str
    completion_window: str = "24h"
    status: Status = "validating"
    output_file_id: str | None = None
    error_file_id: str | None = None
    created_at: int
    in_progress_at: int | None = None
    expires_at: int
    finalizing_at: int | None = None
    completed_at: int | None = None
    failed_at: int | None = None
    expired_at: int | None = None
    cancelling_at: int | None = None
    cancelled_at: int | None = None
    request_counts: RequestCounts
    metadata: dict[str, str] | None = None


class Job(msgspec.Struct):
    """A batch, whose it is (see `FileStore.path`), and as whom its requests are sent."""

    batch: Batch
    owner: str | None
    caller: str
    min_priority: int | None


class _Answered(msgspec.Struct):
    error: Error | None


class Jobs:
    """
    Args:
        answerer: asks as a job's caller.
    """

    def __init__(self, store: FileStore, answerer: Callable[[Job], Answerer]) -> None:
        self._store = store
        self._answerer = answerer
        self._jobs: dict[str, tuple[Job, asyncio.Task[None]]] = {}
        """Those that have not ended."""
        self._is_closing = False

    def resume(self) -> None:
        """Go on with what a server before this one began."""
        for job in self._store.everyones("batch_", Job):
            if job.batch.status not in ENDED:
                self._start(job)

    def create(
        self, endpoint: str, input_file_id: str, metadata: dict[str, str] | None, **whose: Any
    ) -> Batch:
        """`whose`: the other fields of Job.
        Raises InvalidInput: there are too many, or no room for what it gives."""
        if len(self._jobs) >= _MOST_JOBS:
            raise InvalidInput(f"{_MOST_JOBS} batches run, the limit; wait for one of them")
        self._store.check_room()
        self._store.forget_oldest("batch_", _MOST_KEPT, self._jobs)
        now = int(time.time())
        batch = Batch(
            id=new_id("batch_"),
            endpoint=endpoint,
            input_file_id=input_file_id,
            created_at=now,
            expires_at=now + WINDOW_S,
            request_counts=RequestCounts(),
            metadata=metadata,
        )
        self._save(job := Job(batch, **whose))
        self._start(job)
        return batch

    def find(self, owner: str | None, batch_id: str) -> Batch:
        """Raises KeyError: the owner has none of this id."""
        job, _ = self._jobs.get(batch_id, (None, None))
        if job is None or job.owner != owner:
            job = self._store.load(owner, batch_id, Job)
        return job.batch

    def all_of(self, owner: str | None) -> list[Batch]:
        return [self.find(owner, job.batch.id) for job in self._store.all_of(owner, "batch_", Job)]

    def reads(self, owner: str | None, file_id: str) -> str | None:
        """The batch that still needs this file."""
        for name, (job, _) in self._jobs.items():
            if (job.owner, job.batch.input_file_id) == (owner, file_id):
                return name
        return None

    def cancel(self, owner: str | None, batch_id: str) -> Batch:
        """Raises KeyError: see `find`; InvalidInput: it has ended."""
        batch = self.find(owner, batch_id)
        job, task = self._jobs.get(batch_id, (None, None))
        if job is None or task is None or batch.status == "finalizing":
            raise InvalidInput(f"{batch_id} is {batch.status}, and cannot be cancelled any more")
        if batch.status != "cancelling":
            self._set(job, "cancelling")
            task.cancel()
        return batch

    async def close(self) -> None:
        self._is_closing = True
        tasks = [task for _, task in self._jobs.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    # ------------------------------------------------------------------ one of them

    def _start(self, job: Job) -> None:
        name = job.batch.id
        task = asyncio.create_task(self._run(job))
        self._jobs[name] = job, task
        task.add_done_callback(lambda _: self._jobs.pop(name, None))

    async def _run(self, job: Job) -> None:
        batch, path = job.batch, self._store.path(job.owner, job.batch.input_file_id)
        try:
            source = await asyncio.to_thread(BatchInput.read, path)
            if errors := await asyncio.to_thread(_errors_of, source, batch.endpoint):
                self._fail(job, errors)
                return
            parts = self._store.path(job.owner, batch.id)
            with AnswerFile(parts, source, batch.endpoint) as answers:
                end = await self._answer(job, answers)
                await asyncio.to_thread(self._give, job, answers, end)
                answers.remove()
            self._set(job, end)
        except asyncio.CancelledError:
            if not self._is_left(job):  # the server stops: the next one goes on
                raise
            self._set(job, "cancelled")
        except InvalidInput as error:
            message = str(error).replace(str(path), batch.input_file_id)
            self._fail(job, [BatchError("invalid_file", message)])
        except Exception as error:
            logger.exception("%s failed", batch.id)
            self._fail(job, [BatchError("server_error", f"{type(error).__name__}; see the log")])

    async def _answer(self, job: Job, answers: AnswerFile) -> Status:
        """Every line, unless something ends it before. Returns what its status becomes."""
        batch, counts = job.batch, RequestCounts(answers.num_lines)
        for line in answers.lines():
            _count(counts, line)
        batch.request_counts = counts
        if batch.status == "cancelling":
            return "cancelled"
        self._set(job, "in_progress")

        def on_answer(answer: BatchAnswer) -> None:
            line = answer.line()
            if answers.add(answer.custom_id, line):
                _count(counts, line)

        answerer = self._answerer(job)
        try:
            async with asyncio.timeout(batch.expires_at - time.time()):
                while counts.completed + counts.failed < counts.total:
                    try:
                        await answerer.answer_all(answers.unanswered(), on_answer)
                    except EngineUnavailable:
                        await asyncio.sleep(_RETRY_S)
        except TimeoutError:
            return "expired"
        except asyncio.CancelledError:
            if not self._is_left(job):
                raise
            return "cancelled"
        self._set(job, "finalizing")
        return "completed"

    def _is_left(self, job: Job) -> bool:
        """Whether its caller cancelled it, and not the server's end."""
        return job.batch.status == "cancelling" and not self._is_closing

    def _give(self, job: Job, answers: AnswerFile, end: Status) -> None:
        """Write the files that its caller gets."""
        found: dict[str, list[bytes]] = {"output": [], "error": []}
        for line in answers.lines():
            found["output" if _is_success(line) else "error"].append(line)
        if end == "expired":
            why = Error("batch_expired", "the batch expired before this request was answered")
            for number, line in answers.unanswered():
                custom_id = read_question(number, line).custom_id
                expired = BatchAnswer(new_id("batch_req_"), custom_id, None, why)
                found["error"].append(expired.line())
        for kind, lines in found.items():
            if lines:
                name, file_id = f"{job.batch.id}_{kind}.jsonl", f"file-{job.batch.id[6:]}{kind[0]}"
                data = io.BytesIO(b"".join(lines))
                self._store.add(job.owner, name, "batch_output", data, file_id)
                setattr(job.batch, f"{kind}_file_id", file_id)

    def _fail(self, job: Job, errors: list[BatchError]) -> None:
        job.batch.errors = BatchErrors(errors)
        self._set(job, "failed")

    def _set(self, job: Job, status: Status) -> None:
        batch = job.batch
        batch.status = status
        if getattr(batch, f"{status}_at") is None:
            setattr(batch, f"{status}_at", int(time.time()))
        self._save(job)

    def _save(self, job: Job) -> None:
        self._store.save(job.owner, job.batch.id, job)


def _errors_of(source: BatchInput, endpoint: str) -> list[BatchError]:
    """The faults for which a batch fails before anything of it is asked."""
    if not source.lines:
        return [BatchError("empty_file", "the input file has no lines; give one at least")]
    errors = []
    for number, line in source.lines.values():
        question = read_question(number, line)
        why = question.refusal
        if why is None and question.url != endpoint:
            why = f"url of line {number} is {question.url}, the batch's endpoint is {endpoint}"
        if why is not None:
            errors.append(BatchError("invalid_request", why, number))
        if len(errors) == _MOST_ERRORS:
            break
    return errors


def _is_success(line: bytes) -> bool:
    return msgspec.json.decode(line, type=_Answered).error is None


def _count(counts: RequestCounts, line: bytes) -> None:
    if _is_success(line):
        counts.completed += 1
    else:
        counts.failed += 1
