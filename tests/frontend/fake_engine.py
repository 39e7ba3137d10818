"""A scripted engine: the wire, a token function, and faults on demand. No model, no torch.

Owns a ROUTER socket in a thread. Each turn of its loop gives every running sequence one token.
"""

import contextlib
import dataclasses
import secrets
import threading
import time
from collections.abc import Callable, Mapping, Sequence

import msgspec
import zmq
from fake_model import (
    CHAT_TEMPLATE,
    EOS_ID,
    HEARTBEAT_S,
    NextToken,
    arithmetic,
    explanation,
    logprobs,
    pooled,
    prompt_logprobs,
    sequence_request,
    snapshot,
    statistics,
    timings,
    welcome,
)
from fake_step import RunningRequest, Step

from protocol import calls
from protocol.base import WIRE_VERSION, Message
from protocol.codec import decode_client_message, encode
from protocol.errors import ErrorCode
from protocol.multimodal import MultiModalInfo
from protocol.outputs import (
    AdaptersUpdated,
    CallFailed,
    CallResult,
    DisaggregationInfo,
    EngineCoreOutput,
    EngineCoreOutputs,
    ErrorMessage,
    FinishReason,
    Heartbeat,
    Logprobs,
    Rejected,
    WeightsUpdated,
)
from protocol.requests import Abort, Call, EngineRequest, Goodbye, Hello


@dataclasses.dataclass(eq=False)
class FakeEngine:
    """Serves from `start` to `stop` or `die`; a new one at the same address is its return."""

    address: str
    _: dataclasses.KW_ONLY
    next_token: NextToken = arithmetic
    fingerprint: str = "model-1"
    engine_id: str = dataclasses.field(default_factory=lambda: secrets.token_hex(8))
    update_after_tokens: int | None = None
    """Then it serves weights of fingerprint "model-2"."""
    step_s: float = 0.001
    with_tokenizer: bool = True
    chat_template: str | dict[str, str] | None = CHAT_TEMPLATE
    wire_version: int = WIRE_VERSION
    refuse: Callable[[EngineRequest], str | None] = lambda _request: None
    refusal_code: ErrorCode = ErrorCode.INVALID_REQUEST
    fail: Callable[[EngineRequest, int], str | None] = lambda _request, _number: None
    die_after_tokens: int | None = None
    mute: bool = False
    max_num_seqs: int = 64
    recommends: bool = True
    instruction_set: str = ""
    model_fields: Mapping[str, object] = dataclasses.field(default_factory=dict)
    multimodal: MultiModalInfo | None = None
    """Its tokenizer knows <image> and <audio> then."""
    more_tokens: Sequence[str] = ()
    """Of its tokenizer, from 257 on."""
    disaggregation: DisaggregationInfo | None = None

    def __post_init__(self) -> None:
        self.weights_version = 0
        self.failure_reason = FinishReason.ERROR
        self.adapters: dict[str, str] = {}
        """Fingerprints by name; LoadAdapter makes them of paths."""
        self.drafts = 0, 0
        """Of each request, verified and accepted."""
        self.is_draining = False
        self.must_end = False
        """With a last message that ends all its requests."""
        self.requests: list[EngineRequest] = []
        self.frames: list[list[bytes]] = []
        """Of each request."""
        self.aborted: list[str] = []
        self.aborted_samples: list[tuple[str, int]] = []
        self.complete: list[str] = []
        """Of `aborted`, those whose answers are complete."""
        self.num_goodbyes = self.num_statistics = self.num_tokens = self.num_watched = 0
        self._running: dict[str, RunningRequest] = {}
        self._identities: set[bytes] = set()
        self._watching: dict[bytes, Call] = {}
        self._stopping = threading.Event()
        self._bound = threading.Event()
        self._thread = threading.Thread(target=self._serve, daemon=True)

    @property
    def num_live(self) -> int:
        return len(self._running)

    def start(self) -> "FakeEngine":
        self._thread.start()
        assert self._bound.wait(5)
        return self

    def stop(self) -> None:
        """As a killed process: the socket closes without a word."""
        self._stopping.set()
        self._thread.join(5)

    def __enter__(self) -> "FakeEngine":
        return self if self._bound.is_set() else self.start()

    def __exit__(self, *_error: object) -> None:
        self.stop()

    def join(self) -> None:
        """Wait until it has died by itself."""
        self._thread.join(5)
        assert not self._thread.is_alive()

    def _serve(self) -> None:
        with zmq.Context() as context, context.socket(zmq.ROUTER) as self._socket:
            self._socket.setsockopt(zmq.LINGER, 0)
            self._socket.bind(self.address)
            self.address = self._socket.getsockopt_string(zmq.LAST_ENDPOINT)
            self._bound.set()
            heartbeat_due = time.monotonic()
            while not self._stopping.is_set():
                if self._socket.poll(self.step_s * 1000):
                    while self._receive():
                        pass
                self.step()
                if self.die_after_tokens is not None and self.num_tokens >= self.die_after_tokens:
                    time.sleep(0.05)  # what was sent is on its way
                    return
                if time.monotonic() >= heartbeat_due and not self.mute:
                    heartbeat_due = time.monotonic() + HEARTBEAT_S
                    self._show()
                    for identity in self._identities:
                        self._send(identity, Heartbeat(draining=self.is_draining))

    def _receive(self) -> bool:
        try:
            identity, frame, *binary = self._socket.recv_multipart(zmq.NOBLOCK)
        except zmq.Again:
            return False
        if self.mute:
            return True
        message = decode_client_message(frame)
        match message:
            case Hello():
                self._greet(identity)
            case EngineRequest():
                self.frames.append(binary)
                self._accept(identity, message)
            case Abort():
                self.aborted += message.request_ids
                self.complete += message.request_ids if message.are_complete else ()
                for request_id in message.request_ids:
                    self._running.pop(request_id, None)
                self.aborted_samples += message.samples
                for request_id, index in message.samples:
                    if request_id in self._running:
                        self._running[request_id].ended.add(index)
            case Call(call=calls.WatchScheduler()):
                self._watching[identity] = message
            case Call():
                self._send(identity, self.answer(message))
            case Goodbye():
                self.num_goodbyes += 1
                self._identities.discard(identity)
        return True

    def _greet(self, identity: bytes) -> None:
        if self.wire_version != WIRE_VERSION:
            text = f"this engine speaks wire version {self.wire_version}"
            self._send(identity, ErrorMessage(code=ErrorCode.WIRE_VERSION, message=text))
            return
        message, frames = welcome(
            self.fingerprint,
            with_tokenizer=self.with_tokenizer,
            chat_template=self.chat_template,
            max_num_seqs=self.max_num_seqs,
            recommends=self.recommends,
            multimodal=self.multimodal,
            more_tokens=self.more_tokens,
        )
        fields = {"instruction_set": self.instruction_set, **self.model_fields}
        fields["adapters"] = self._adapter_infos()
        model = msgspec.structs.replace(message.model, **fields)
        message = msgspec.structs.replace(
            message,
            engine_id=self.engine_id,
            model=model,
            disaggregation=self.disaggregation,
        )
        self._send(identity, message, frames)
        self._identities.add(identity)

    def _accept(self, identity: bytes, request: EngineRequest) -> None:
        self.requests.append(request)
        refusal = self.refuse(request)
        if refusal is not None:
            rejected = Rejected(
                request_id=request.request_id, code=self.refusal_code, message=refusal
            )
            self._send(identity, rejected)
            return
        tokens = [list(request.output_token_ids) for _ in range(request.num_sequences)]
        self._running[request.request_id] = RunningRequest(identity, request, tokens)

    def step(self) -> None:
        if self.must_end:
            self._end_all()
            return
        if self.update_after_tokens is not None and self.num_tokens >= self.update_after_tokens:
            self.update_after_tokens, self.weights_version = None, 1
            for identity in self._identities:
                self._send(identity, WeightsUpdated(weights_version=1, fingerprint="model-2"))
        steps: dict[bytes, Step] = {}
        for running in list(self._running.values()):
            step = steps.setdefault(running.identity, Step())
            if running.request.beam_search is not None:
                self._search(running, step)
            else:
                self._sample(running, step)
            if len(running.ended) == running.request.num_sequences:
                del self._running[running.request.request_id]
                step.finished.append(running.request.request_id)
        for identity, step in steps.items():
            outputs = msgspec.structs.replace(step.message(), weights_version=self.weights_version)
            self._send(identity, outputs)

    def _adapter_infos(self) -> tuple[calls.AdapterInfo, ...]:
        return tuple(
            calls.AdapterInfo(name=name, fingerprint=key) for name, key in self.adapters.items()
        )

    def _announce_adapters(self) -> calls.AdapterList:
        infos = self._adapter_infos()
        for identity in self._identities:
            self._send(identity, AdaptersUpdated(adapters=infos))
        return calls.AdapterList(adapters=infos)

    def _end_all(self) -> None:
        for identity in self._identities:
            ids = [each for each, one in self._running.items() if one.identity == identity]
            outputs = [
                EngineCoreOutput(
                    request_id=each, new_token_ids=[], finish_reason=FinishReason.ABORT
                )
                for each in ids
            ]
            last = EngineCoreOutputs(other_outputs=outputs, finished_req_ids=ids, engine_ends=True)
            self._send(identity, last)
        self._stopping.set()

    def _sample(self, running: RunningRequest, step: Step) -> None:
        for index in range(running.request.num_sequences):
            if index not in running.ended:
                output = self._advance(running, index)
                if output.finished:
                    running.ended.add(index)
                    if len(running.ended) == running.request.num_sequences:
                        drafts, accepted = self.drafts
                        output = msgspec.structs.replace(
                            output,
                            timings=timings(),
                            num_draft_tokens=drafts,
                            num_accepted_tokens=accepted,
                        )
                step.add(output, is_first=output.num_cached_tokens is not None)

    def _search(self, running: RunningRequest, step: Step) -> None:
        """Beam k says k times more of each token; all beams end at once."""
        params = running.request.sampling_params
        for index in range(running.request.num_sequences):
            tokens = [
                (self.next_token(running.request, number) + index) % EOS_ID
                for number in range(params.max_tokens)
            ]
            running.ended.add(index)
            step.others.append(
                EngineCoreOutput(
                    request_id=running.request.request_id,
                    new_token_ids=tokens,
                    finish_reason=FinishReason.LENGTH,
                    index=index,
                    cumulative_logprob=-1.0 - index,
                )
            )

    def _advance(self, running: RunningRequest, index: int) -> EngineCoreOutput:
        request, params = running.request, running.request.sampling_params
        token_ids = running.token_ids[index]
        failure = self.fail(request, len(token_ids))
        if failure is not None:
            return EngineCoreOutput(
                request_id=request.request_id,
                new_token_ids=[],
                finish_reason=self.failure_reason,
                detail=failure,
                index=index,
            )
        if request.pooling_params is not None:
            return EngineCoreOutput(
                request_id=request.request_id,
                new_token_ids=[],
                finish_reason=FinishReason.STOP,
                num_cached_tokens=1,
                pooled=pooled(request),
            )
        token_id = self.next_token(sequence_request(request, index), len(token_ids))
        token_ids.append(token_id)
        self.num_tokens += 1
        reason, stop_reason = None, None
        if token_id == EOS_ID and not params.ignore_eos:
            reason = FinishReason.STOP
        elif token_id in params.stop_token_ids:
            reason, stop_reason = FinishReason.STOP, token_id
        elif len(token_ids) >= params.max_tokens:
            reason = FinishReason.LENGTH
        is_first = len(token_ids) == len(request.output_token_ids) + 1
        return EngineCoreOutput(
            request_id=request.request_id,
            new_token_ids=[token_id],
            finish_reason=reason,
            stop_reason=stop_reason,
            index=index,
            logprobs=None if params.logprobs is None else logprobs(token_id, params.logprobs),
            num_cached_tokens=3 if is_first else None,
            prompt_logprobs=self._prompt_logprobs(request) if is_first and index == 0 else None,
        )

    def _prompt_logprobs(self, request: EngineRequest) -> Logprobs | None:
        wanted = request.sampling_params.prompt_logprobs
        return None if wanted is None else prompt_logprobs(request.prompt_token_ids, wanted)

    def answer(self, call: Call) -> CallResult | CallFailed:
        result = self.do(call)
        if result is None:
            return CallFailed(
                call_id=call.call_id, code=ErrorCode.UNKNOWN_REQUEST, message="who is that?"
            )
        return CallResult(call_id=call.call_id, result=result)

    def _show(self) -> None:
        watching, self._watching = self._watching, {}
        for identity, call in watching.items():
            self.num_watched += 1
            shown = snapshot(self.num_watched, [each.request for each in self._running.values()])
            self._send(identity, CallResult(call_id=call.call_id, result=shown))

    def do(self, call: Call) -> calls.AnyResult | None:
        match call.call:
            case calls.Ping():
                return calls.Pong(uptime_s=1.5, step_id=3, progress_age_s=0.0)
            case calls.LoadAdapter(name, path):
                self.adapters[name] = f"hash of {path}"
                return self._announce_adapters()
            case calls.UnloadAdapter(name):
                if self.adapters.pop(name, None) is None:
                    return None
                return self._announce_adapters()
            case calls.ResetPrefixCache():
                return calls.PrefixCacheReset(num_blocks_evicted=5)
            case calls.Drain():
                return calls.Draining(num_requests_left=len(self._running))
            case calls.GetStatistics():
                self.num_statistics += 1
                return statistics(len(self._running))
            case calls.ListRequests():
                return calls.RequestList(request_ids=list(self._running))
            case calls.GetRequests():
                infos = [
                    explanation(each.request, len(each.token_ids[0]))
                    for each in self._running.values()
                ]
                return calls.RequestInfos(requests=infos, num_unfinished=len(infos))
            case calls.GetRequestInfo(request_id):
                running = self._running.get(request_id)
                return None if running is None else explanation(running.request)

    def _send(self, identity: bytes, message: Message, frames: Sequence[bytes] = ()) -> None:
        with contextlib.suppress(zmq.ZMQError):  # the client may have gone
            self._socket.send_multipart([identity, encode(message), *frames], zmq.NOBLOCK)


async def collect(stream):
    return [output async for output in stream]


def wait_until(condition: Callable[[], bool], within_s: float = 5.0) -> None:
    """Poll until the condition holds."""
    deadline = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < deadline, f"not within {within_s} s"
        time.sleep(0.005)
