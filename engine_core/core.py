"""The engine's loop, on one screen, and what its lines call."""

import logging
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from functools import partial
from typing import assert_never

import msgspec

from engine_core.adapters.host import Adapters, adapters_of, answer_unload, answer_with
from engine_core.block_transfer import TransferStore
from engine_core.control import EngineControl, ModelHost
from engine_core.errors import RequestRefused
from engine_core.executor import InProcessExecutor
from engine_core.kv_cache import KVCacheManager
from engine_core.lifecycle import Lifecycle, Stage
from engine_core.observers.base import (
    ControlMethod,
    Progress,
    RequestTimes,
    StepObserver,
    StepSuspects,
    StepTimes,
    fingerprint,
)
from engine_core.observers.cache_publisher import CachePublisher
from engine_core.observers.live_view import LiveView
from engine_core.process.suspects import Suspects
from engine_core.scheduler import (
    DuplicateRequestId,
    PauseState,
    QueueFull,
    Request,
    RequestStatus,
    Scheduler,
)
from engine_core.server.access import owned_request, permitted_answer, permitted_part
from engine_core.server.clients import Client, ClientRegistry
from engine_core.server.inbox import Inbox, Incoming
from engine_core.server.limited_log import LimitedLog
from engine_core.server.multimodal import MultiModalReader
from engine_core.server.outbox import Outbox
from engine_core.server.prompt_embeds import spelled_out
from engine_core.server.validation import RequestValidator
from engine_core.steps import Steps
from engine_core.structured_output.manager import StructuredOutputs
from kernels.compile_counter import CompileCounter
from protocol import calls
from protocol.errors import ErrorCode
from protocol.outputs import (
    AdaptersUpdated,
    CallFailed,
    CallResult,
    EngineCoreOutput,
    EngineCoreOutputs,
    FinishReason,
    Rejected,
    WeightsUpdated,
)
from protocol.requests import Abort, Call, EngineRequest

logger = logging.getLogger(__name__)


class EngineCore:
    """Serves until its lifecycle ends. See docs/architecture.md for a request's way through it.

    Args:
        model_host: None: this engine cannot sleep and has one set of weights.
        on_weights: called with the version and fingerprint of new weights.
        adapters: one of the observers; None: requests may have none.
        on_adapters: called with those that there are, when that changes.
        observers: follow the loop, beside the two for the requests' and the steps' times.
        isolates_tenants: a tenant finds no prefixes of another in the cache.
        structured_outputs: also the scheduler's; None: the model has no tokenizer.
        transfers: one of the observers; None: it exchanges no blocks with other engines.
        multimodal: reads images and sounds; None: prompts are text.
        cache: the scheduler's, which clients may watch; None: it keeps nothing.
        clock: seconds; the same one that inbox, outbox, executor and lifecycle go by.
    """

    def __init__(
        self,
        *,
        inbox: Inbox,
        outbox: Outbox,
        clients: ClientRegistry,
        scheduler: Scheduler,
        executor: InProcessExecutor,
        lifecycle: Lifecycle,
        validator: RequestValidator,
        eos_token_ids: tuple[int, ...],
        observers: Sequence[StepObserver] = (),
        compilations: CompileCounter | None = None,
        model_host: ModelHost | None = None,
        on_weights: Callable[[int, str], None] = lambda version, fingerprint: None,
        adapters: Adapters | None = None,
        on_adapters: Callable[[tuple[calls.AdapterInfo, ...]], None] = lambda adapters: None,
        isolates_tenants: bool = False,
        structured_outputs: StructuredOutputs | None = None,
        transfers: TransferStore | None = None,
        multimodal: MultiModalReader | None = None,
        cache: KVCacheManager | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._inbox = inbox
        self._outbox = outbox
        self._clients = clients
        self._scheduler = scheduler
        self._executor = executor
        self._lifecycle = lifecycle
        self._validator = validator
        self._eos_token_ids = eos_token_ids
        self._compilations = compilations or CompileCounter()
        self._isolates_tenants = isolates_tenants
        self._structured_outputs = structured_outputs
        self._transfers = transfers
        self._multimodal = multimodal or MultiModalReader(None, max_items={}, max_input_bytes=0)
        self._clock = clock
        self._client_log = LimitedLog(logger, logging.INFO, clock)
        self._started_s = clock()
        self._step_times = StepTimes(self._started_s)
        self._request_times = RequestTimes()
        self.progress = Progress(self._may_progress, self._started_s)
        self._observers = [self._request_times, self._step_times, self.progress, *observers]
        if structured_outputs is not None:
            self._observers.append(structured_outputs)
        self._cache_publisher: CachePublisher | None = None
        if cache is not None:
            self._cache_publisher = CachePublisher(
                cache, outbox.offer, isolates_tenants=isolates_tenants
            )
            self._observers.append(self._cache_publisher)
        self._steps = Steps(scheduler, executor, outbox, self._observers, clock)
        self._live_view = LiveView(
            scheduler,
            self.statistics,
            lambda client, call, answer: outbox.post(client, permitted_part(client, call, answer)),
            self._observers,
            clock,
        )
        self._suspects: Suspects | None = None
        self._on_weights = on_weights
        self._adapters = adapters
        self._on_adapters = on_adapters
        if adapters is not None:
            adapters.announce, adapters.note = self._announce_adapters, self._note_control
        self._control = EngineControl(
            scheduler,
            model_host,
            is_draining=lambda: lifecycle.stage is not Stage.SERVING,
            settle=self._steps.settle,
            announce=self._announce_weights,
            abort_all=self._abort_all,
            note=self._note_control,
        )
        self._pauses: list[tuple[Client, int]] = []
        """Calls that are answered when the pause begins."""
        self._has_resumed = False
        """For a drain; once."""

    def watch_suspects(self, suspects: Suspects) -> None:
        """Run requests that may have killed the engine before alone, and note which run."""
        self._suspects = suspects
        self._observers.append(StepSuspects(suspects))
        if self._structured_outputs is not None:
            self._structured_outputs.watch_suspects(suspects)

    # ------------------------------------------------------------------ the loop

    def run(self) -> None:
        while not self._stopping():
            self._apply(self._inbox.drain(block=not self._may_progress()))
            self._steps.launch()
            while (step := self._steps.to_collect()) is not None:
                self._steps.complete(step)
        self._apply(self._inbox.drain(block=False))  # what came last is refused, not left unread

    # ------------------------------------------------------------------ its lines

    def _stopping(self) -> bool:
        self._lifecycle.poll()
        stage = self._lifecycle.stage
        self._outbox.tell_state(
            draining=stage is not Stage.SERVING,
            paused=self._scheduler.pause_state is not PauseState.UNPAUSED,
        )
        if stage is Stage.ABORTING:
            self.end_all(FinishReason.ABORT, "the engine is stopping")
            return True
        if stage is Stage.DRAINING and not self._has_work():
            return True
        if stage is Stage.DRAINING and not self._has_resumed:
            self._has_resumed = True
            self._control.finish_for_drain()
        return False

    def _has_work(self) -> bool:
        """A step in flight is work, also if all its requests have ended."""
        return bool(self._scheduler.in_flight) or self._scheduler.has_work()

    def _may_progress(self) -> bool:
        """Whether there is work that does not wait for the end of a pause."""
        scheduler = self._scheduler
        if self._adapters is not None and self._adapters.is_busy:
            return True
        return bool(scheduler.in_flight or self._pauses) or scheduler.may_progress()

    def _apply(self, incoming: Iterable[Incoming]) -> None:
        for client, message in incoming:
            match message:
                case EngineRequest():
                    self._add_request(client, message)
                case Abort():
                    self._end(client, message)
                case Call():
                    self._answer(client, message)
                case _:
                    assert_never(message)
        for client in self._clients.take_departed():
            num_requests = len(client.request_ids)
            self._client_log.log("left", f"{client!s:.100} left, {num_requests} requests dropped")
            self._abort(client.request_ids)
            self._live_view.drop(client)
            if self._cache_publisher is not None:
                self._cache_publisher.drop(client)
        if not self._control.is_pausing:
            for client, call_id in self._pauses:
                self._outbox.post(client, self._control.answer_pause(call_id))
            self._pauses.clear()

    def _answer(self, client: Client, message: Call) -> None:
        """A fault of one call is its answer, and the loop goes on; but one of a call that changes
        the engine ends it: in which state the change has left it is not known."""
        try:
            match message.call:
                case calls.WatchScheduler(after_step_id):
                    self._live_view.watch(client, message, after_step_id)
                case calls.LoadAdapter() as load if client.rights.is_admin:
                    answer_later = partial(self._outbox.post, client)
                    answer_with(message.call_id, answer_later, self._adapters, load)
                case calls.WatchCache() if client.rights.is_admin:
                    self._outbox.post(client, self._watch_cache(client, message))
                case call:
                    answer = permitted_answer(client, message, self.answer_call)
                    is_pause = isinstance(call, calls.PauseGeneration)
                    if is_pause and self._control.is_pausing and isinstance(answer, CallResult):
                        self._pauses.append((client, message.call_id))
                    else:
                        self._outbox.post(client, answer)
        except Exception:
            if isinstance(message.call, calls.ADMIN_CALLS):
                raise
            why = self._inbox.refuse_unanswerable(client, type(message.call).__name__)
            failed = CallFailed(call_id=message.call_id, code=ErrorCode.INTERNAL, message=why)
            self._outbox.post(client, failed)

    def _watch_cache(self, client: Client, call: Call) -> CallResult | CallFailed:
        if self._cache_publisher is None:
            why = "WatchCache: this model keeps nothing between steps; there is nothing to watch"
            return CallFailed(call_id=call.call_id, code=ErrorCode.NOT_SUPPORTED, message=why)
        self._cache_publisher.watch(client)
        return CallResult(call_id=call.call_id, result=calls.CacheWatched())

    def _add_request(self, client: Client, message: EngineRequest) -> None:
        now_s, is_read = self._clock(), False
        try:
            if self._lifecycle.stage is not Stage.SERVING:
                raise RequestRefused(
                    ErrorCode.DRAINING, "the engine is draining; send the request to another"
                )
            message, request = self._read_request(client, message, now_s)
            self._admit_grammar(request)
            is_read = True
            self._scheduler.add_request(request)
        except QueueFull as error:
            self._reject(client, message, ErrorCode.QUEUE_FULL, str(error))
        except DuplicateRequestId as error:
            self._reject(client, message, ErrorCode.DUPLICATE_REQUEST_ID, str(error))
        except RequestRefused as error:
            self._reject(client, message, error.code, str(error))
        except ValueError as error:
            self._reject(client, message, ErrorCode.INVALID_REQUEST, str(error))
        except Exception:
            if is_read:  # the scheduler's books may be wrong
                raise
            why = self._inbox.refuse_unanswerable(client, f"request {message.request_id!r:.100}")
            self._reject(client, message, ErrorCode.INTERNAL, why)
        else:
            client.request_ids.add(message.request_id)
            for observer in self._observers:
                observer.on_arrival(message, client.index, now_s)

    def _read_request(
        self, client: Client, message: EngineRequest, now_s: float
    ) -> tuple[EngineRequest, Request]:
        """The request as it is noted, and as it is scheduled. Changes nothing.
        Raises RequestRefused, ValueError: it cannot be served."""
        self._validator.check(message)
        self._control.check_weights(message.weights_fingerprint)
        embeds, spans = self._validator.read_prompt_embeds(message, client.frames)
        if message.adapter is not None:
            fingerprint = adapters_of(self._adapters).resolve(message)
            message = msgspec.structs.replace(message, adapter=fingerprint)
        message = owned_request(client, message, isolates=self._isolates_tenants)
        request = Request.from_engine_core_request(
            message,
            client_index=client.index,
            arrival_time=now_s,
            eos_token_ids=self._eos_token_ids,
            prompt_embeds=embeds,
            content_spans=spans,
            mm_features=self._multimodal.read(message, client.frames),
            pooler=self._validator.pooler,
        )
        if spans:  # what knows prompts again knows them by their tokens
            token_ids = spelled_out(message.prompt_token_ids, spans)
            message = msgspec.structs.replace(message, prompt_token_ids=token_ids)
        if self._suspects is not None:
            request.runs_alone = _runs_alone(message, self._suspects)
        return message, request

    def _admit_grammar(self, request: Request) -> None:
        """Raises RequestRefused: its structured output cannot be had."""
        if self._structured_outputs is not None:
            self._structured_outputs.admit(request)
        elif request.sampling_params.structured_output is not None:
            raise RequestRefused(
                ErrorCode.NOT_SUPPORTED,
                "structured_outputs need the model's tokenizer, which this engine does not have; "
                "omit them, or start it with --tokenizer",
            )

    def _reject(self, client: Client, message: EngineRequest, code: ErrorCode, why: str) -> None:
        name = f"{message.request_id!r:.100} of {client!s:.100}"
        self._client_log.log(code, f"rejected request {name}: {why}")
        self._outbox.post(client, Rejected(request_id=message.request_id, code=code, message=why))

    def _end(self, client: Client, asked: Abort) -> None:
        status = RequestStatus.FINISHED_ABORTED
        if asked.are_complete:
            status = RequestStatus.FINISHED_STOPPED
        self._abort(client.request_ids.intersection(asked.request_ids), status)
        for request_id, index in asked.samples:
            if request_id in client.request_ids:
                self._scheduler.finish_sample(request_id, index, status)
                for observer in self._observers:
                    observer.on_abort((request_id,), self._clock(), index)

    def _abort(
        self,
        request_ids: Collection[str],
        status: RequestStatus = RequestStatus.FINISHED_ABORTED,
    ) -> None:
        if request_ids:
            self._scheduler.finish_requests(request_ids, status)
            for observer in self._observers:
                observer.on_abort(request_ids, self._clock())

    def _abort_all(self) -> None:
        for client in self._clients:
            self._abort(client.request_ids)

    # ------------------------------------------------------------------ for calls and shutdown

    def end_all(self, reason: FinishReason, why: str) -> None:
        """The loop is over: every unfinished request gets one terminal output, for all its
        sequences, without the scheduler, which may be what failed."""
        outputs = {
            client.index: EngineCoreOutputs(
                other_outputs=[
                    EngineCoreOutput(
                        request_id=request_id, new_token_ids=[], finish_reason=reason, detail=why
                    )
                    for request_id in sorted(client.request_ids)
                ],
                finished_req_ids=sorted(client.request_ids),
                engine_ends=True,
            )
            for client in self._clients
            if client.request_ids
        }
        self._steps.send(outputs, self._clock())

    def close(self) -> None:
        """After the loop: nothing runs any more, what could be sent is, and a trace is complete on
        disk."""
        self._outbox.close()
        self._executor.close()
        for observer in self._observers:
            observer.close()

    def answer_call(self, call: Call) -> CallResult | CallFailed:
        """One arm a call of protocol.calls; nothing else can be called."""
        result: calls.AnyResult | None
        match call.call:
            case calls.Ping():
                now_s = self._clock()
                result = calls.Pong(
                    uptime_s=now_s - self._started_s,
                    step_id=self.progress.step_id,
                    progress_age_s=now_s - self.progress.at_s,
                    state=self._control.state,
                )
            case calls.GetStatistics():
                result = self.statistics()
            case calls.ResetPrefixCache():
                for observer in self._observers:
                    observer.on_cache_reset(self._clock())
                result = calls.PrefixCacheReset(
                    num_blocks_evicted=self._scheduler.reset_prefix_cache()
                )
            case calls.Drain():
                self._lifecycle.drain("a client asked for it")
                result = calls.Draining(num_requests_left=sum(self._scheduler.get_request_counts()))
            case calls.GetRequestInfo(request_id):
                result = self._scheduler.explain(request_id)
                if result is None:
                    return CallFailed(
                        call_id=call.call_id,
                        code=ErrorCode.UNKNOWN_REQUEST,
                        message=f"request {request_id!r:.100} is unknown: it is neither "
                        "unfinished nor one of the last that finished; `engine-client info "
                        "--requests` lists the engine's ids of those that are unfinished",
                    )
            case calls.ListRequests():
                names = [name for client in self._clients for name in sorted(client.request_ids)]
                result = calls.RequestList(request_ids=names)
            case calls.GetRequests(tenant):
                result = self._scheduler.explain_all(tenant)
            case (
                calls.PauseGeneration()
                | calls.ResumeGeneration()
                | calls.Sleep()
                | calls.WakeUp()
                | calls.UpdateWeights()
            ) as change:
                return self._control.answer(call.call_id, change)
            case calls.UnloadAdapter(name):
                return answer_unload(call.call_id, self._adapters, name)
            case calls.WatchScheduler() | calls.LoadAdapter() | calls.WatchCache():
                raise AssertionError("live view, adapters and the cache's publisher answer it")
            case _:
                assert_never(call.call)
        return CallResult(call_id=call.call_id, result=result)

    def _announce_weights(self, version: int, fingerprint: str) -> None:
        self._on_weights(version, fingerprint)
        for client in self._clients:
            self._outbox.post(
                client, WeightsUpdated(weights_version=version, fingerprint=fingerprint)
            )

    def _announce_adapters(self) -> None:
        infos = adapters_of(self._adapters).infos
        self._on_adapters(infos)
        for client in self._clients:
            self._outbox.post(client, AdaptersUpdated(adapters=infos))

    def _note_control(self, what: ControlMethod, arguments: tuple[str | int, ...]) -> None:
        for observer in self._observers:
            observer.on_control(what, arguments, self._scheduler.next_step_id, self._clock())

    def statistics(self) -> calls.EngineStatistics:
        numbers = self._scheduler.statistics()
        collectives = self._executor.collectives
        counts = list(collectives.counts.items())  # a stage's thread counts on
        if self._adapters is not None:
            numbers = self._adapters.by_name(numbers)
        if self._transfers is not None:
            numbers = self._transfers.add_statistics(numbers)
        return msgspec.structs.replace(
            numbers,
            uptime_s=self._clock() - self._started_s,
            num_clients=len(self._clients),
            num_refused_messages=self._inbox.num_refused_messages,
            state=self._control.state,
            weights_version=self._control.weights_version,
            step_time_s=self._step_times.total_s,
            model_time_s=self._executor.model_time_s,
            num_workers=collectives.parallel.world_size,
            num_collective_bytes={part: each.num_bytes for part, each in counts},
            collective_time_s={part: each.seconds for part, each in counts},
            num_compilations_after_ready=self._compilations.num_after_ready,
            num_first_tokens=self._request_times.num_first_tokens,
            queue_time_s=self._request_times.queue_s,
            ttft_s=self._request_times.ttft_s,
        )


def _runs_alone(message: EngineRequest, suspects: Suspects) -> bool:
    """Raises RequestRefused: it has killed the engine alone."""
    known_as = fingerprint(message)
    if known_as in suspects.refused:
        raise RequestRefused(
            ErrorCode.KILLED_ENGINE,
            "the engine died in each step that held this request, at last in one that held no "
            "other; change the request, and report its prompt and parameters with the engine's log",
        )
    return suspects.is_suspect(known_as)
