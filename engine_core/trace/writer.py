"""Writes what a daemon's run was asked and decided, so that it can be replayed (`--trace FILE`).

A file of JSON lines, gzip if its name ends in ".gz": a header, then events in the order in which
they happened to the scheduler. Times are seconds since the recorder's start. What has been written
stays readable if the process dies. Owns the writing; `recorded_run` has the lines' meaning and
reads them back. Must not know torch, sockets, or who decides.
"""

import gzip
import logging
import time
from collections.abc import Iterable, Mapping
from hashlib import blake2b
from pathlib import Path
from typing import Any, BinaryIO, cast

import msgspec
import numpy as np

from engine_core.scheduler.plan import ModelRunnerOutput, SchedulerOutput
from engine_core.trace.reader import (
    FORMAT_VERSION,
    Aborted,
    Arrived,
    CacheReset,
    Event,
    Header,
    Planned,
    RecordedLogprobs,
    Step,
)
from protocol.requests import EngineRequest

logger = logging.getLogger(__name__)

_FLUSH_INTERVAL_S = 1.0


class TraceWriter:
    """
    Args:
        path: of the file, replaced if it is there.
        model: its name, for the reader's eyes.
        config: all settings of scheduler and cache, "block_size" among them if prompts are not
            included.
        include_tokens: write prompts as token ids; a replay is exact then. Else each block of a
            prompt is written as a number that stands for its content: a smaller file in which
            prompts that begin alike still do, but one that goes on from an earlier answer (the next
            turn of a chat) is not recognised as such.
        started_s: what the clock showed at 0.
    """

    def __init__(
        self,
        path: str | Path,
        *,
        model: str = "",
        config: Mapping[str, Any] | None = None,
        include_tokens: bool = True,
        started_s: float | None = None,
    ) -> None:
        self._path = Path(path)
        self._started_s = time.monotonic() if started_s is None else started_s
        self._include_tokens = include_tokens
        settings = dict(config or {})
        block_size = settings.get("block_size")
        if not include_tokens and not isinstance(block_size, int):
            raise ValueError(
                f"block_size in config is {block_size!r}, it must be a number when prompts are "
                "written by block; give it or include the tokens"
            )
        self._block_size = block_size if isinstance(block_size, int) else 0
        self._encoder = msgspec.json.Encoder()
        self._beams: dict[str, set[str]] = {}
        self._last_ids: list[str] = []
        self._planned: set[int] = set()
        self._file: BinaryIO | None = _open_for_writing(self._path)
        self._flushed_s = self._started_s
        # a line at a time, but for gzip, which each flush makes larger
        self._flush_interval_s = _FLUSH_INTERVAL_S if self._path.suffix == ".gz" else 0.0
        self._write(Header(FORMAT_VERSION, model, settings), self._started_s)

    def __enter__(self) -> "TraceWriter":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def arrived(self, message: EngineRequest, now_s: float, *, client_index: int = 0) -> None:
        """A request entered the scheduler. Requests that were refused are not told."""
        params = message.sampling_params
        prompt = message.prompt_token_ids
        if message.beam_search is not None:
            self._beams[message.request_id] = {message.request_id}
        event = Arrived(
            at_s=now_s - self._started_s,
            id=message.request_id,
            num_prompt_tokens=len(prompt),
            prompt=prompt if self._include_tokens else None,
            prompt_blocks=None if self._include_tokens else _content_ids(prompt, self._block_size),
            max_tokens=params.max_tokens,
            min_tokens=params.min_tokens,
            ignore_eos=params.ignore_eos,
            stop_token_ids=list(params.stop_token_ids),
            output_token_ids=message.output_token_ids,
            num_sequences=message.num_sequences,
            beam_search=message.beam_search,
            priority=message.priority,
            tenant=message.tenant,
            client_index=client_index,
            salt=message.cache_salt,
            adapter=message.adapter,
        )
        self._write(event, now_s)

    def aborted(self, request_ids: Iterable[str], now_s: float) -> None:
        """Requests were given up by their client."""
        ids = list(request_ids)
        if ids:
            self._write(Aborted(at_s=now_s - self._started_s, ids=ids), now_s)

    def cache_reset(self, now_s: float) -> None:
        """The prefix cache was emptied on demand."""
        self._write(CacheReset(at_s=now_s - self._started_s), now_s)

    def planned(self, plan: SchedulerOutput, now_s: float) -> None:
        """A step was planned at `now_s`, and others may be planned before its result is told with
        `step`. Not told of where each step is taken in before the next is planned."""
        self._planned.add(plan.step_id)
        self._write(Planned(at_s=now_s - self._started_s, id=plan.step_id), now_s)

    def is_planned(self, plan: SchedulerOutput) -> bool:
        """Whether `planned` was told of it, and `step` was not."""
        return plan.step_id in self._planned

    def step(
        self,
        plan: SchedulerOutput,
        sampled: ModelRunnerOutput,
        start_s: float,
        duration_s: float,
    ) -> None:
        """A step was planned at `start_s` and its results were known `duration_s` later."""
        self._planned.discard(plan.step_id)
        batch = plan.batch
        same = batch.req_ids == self._last_ids
        self._last_ids = batch.req_ids
        tokens = sampled.sampled_token_ids
        is_array = isinstance(tokens, np.ndarray)
        self._follow_beams(plan)
        event = Step(
            id=plan.step_id,
            start_s=start_s - self._started_s,
            duration_s=duration_s,
            ids=None if same else batch.req_ids,
            nums=batch.num_scheduled_tokens.tolist(),
            context=batch.num_computed_tokens.tolist(),
            new=[new.req_id for new in plan.scheduled_new_reqs],
            resumed=[again.req_id for again in plan.resumed_reqs],
            preempted=plan.preempted_req_ids,
            finished=plan.finished_req_ids,
            copies=(
                len(plan.copies.swap_in),
                len(plan.copies.swap_out),
                len(plan.copies.copy),
            ),
            sampled=tokens.tolist() if isinstance(tokens, np.ndarray) else None,
            sampled_by_id=None if is_array else dict(zip(sampled.req_ids, tokens, strict=True)),
            beam_logprobs=self._beam_logprobs(sampled) if self._beams else {},
            failures=sampled.failures,
        )
        self._write(event, start_s + duration_s)

    def close(self) -> None:
        """Write what is left. The recorder writes nothing after."""
        file, self._file = self._file, None
        if file is not None:
            try:
                file.close()
            except OSError as error:
                logger.error("the end of the record %s is lost: %s", self._path, error)

    # ------------------------------------------------------------------ lines

    def _follow_beams(self, plan: SchedulerOutput) -> None:
        """Beams get new names as a search goes on; a search is over when none is left."""
        if not self._beams:
            return
        ended = {_request_of(name) for name in plan.finished_req_ids} & self._beams.keys()
        for request_id in ended:
            self._beams[request_id].difference_update(plan.finished_req_ids)
        for new in plan.scheduled_new_reqs:
            if (names := self._beams.get(_request_of(new.req_id))) is not None:
                names.add(new.req_id)
        for request_id in ended:
            if not self._beams[request_id]:
                del self._beams[request_id]

    def _beam_logprobs(self, sampled: ModelRunnerOutput) -> dict[str, RecordedLogprobs]:
        """What beams are chosen by."""
        return {
            req_id: RecordedLogprobs(
                width=columns.width,
                token_ids=np.frombuffer(columns.token_ids, "<i4").tolist(),
                logprobs=columns.logprobs,
                ranks=columns.ranks,
            )
            for req_id, columns in (sampled.logprobs or {}).items()
            if req_id in self._beams.get(_request_of(req_id), ())
        }

    def _write(self, line: Header | Event, now_s: float) -> None:
        """A full disk ends the record, never the engine."""
        if self._file is None:
            return
        try:
            self._file.write(self._encoder.encode(line) + b"\n")
            if now_s - self._flushed_s >= self._flush_interval_s:
                self._flushed_s = now_s
                self._file.flush()
        except OSError as error:
            logger.error("the record %s stops here: %s", self._path, error)
            self.close()


def _open_for_writing(path: Path) -> BinaryIO:
    if path.suffix == ".gz":
        return cast(BinaryIO, gzip.open(path, "wb", compresslevel=1))
    return path.open("wb")


def _request_of(sequence_id: str) -> str:
    """ "ID" and "ID#1" are sequences of request "ID"; no request's id ends like the latter."""
    request_id, _, serial = sequence_id.rpartition("#")
    return request_id if request_id and serial.isdecimal() else sequence_id


def _content_ids(token_ids: list[int], block_size: int) -> list[str]:
    """8 bytes of hash for each block, the last partial one included."""
    data = np.array(token_ids, "<i4").tobytes()
    stride = 4 * block_size
    return [
        blake2b(data[start : start + stride], digest_size=8).hexdigest()
        for start in range(0, len(data), stride)
    ]
