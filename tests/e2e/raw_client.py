"""A client of bare frames, to say what a well-behaved one never would. Not a test."""

import collections
import time

import zmq

from protocol.base import WIRE_VERSION
from protocol.calls import GetStatistics
from protocol.codec import decode_engine_message, encode
from protocol.errors import ErrorCode
from protocol.outputs import (
    CallResult,
    EngineCoreOutputs,
    ErrorMessage,
    Heartbeat,
    Rejected,
    Welcome,
)
from protocol.requests import Call, EngineRequest, Hello
from protocol.sampling import SamplingParams
from tests.protocol.all_outputs import all_outputs


class RawClient:
    def __init__(self, address, *, greet=True):
        self._context = zmq.Context()
        self.socket = self._context.socket(zmq.DEALER)
        self.socket.connect(address)
        self.logprobs = collections.defaultdict(bytes)
        """By request id: bytes of all that came."""
        self._backlog = []
        self._next_call_id = 0
        if greet:
            self.send(Hello(wire_version=WIRE_VERSION, client_name="raw"))
            self.welcome = self.wait_for(Welcome)

    def send(self, message, *frames):
        self.socket.send_multipart([encode(message), *frames])

    def receive(self, timeout_s=10.0):
        """The next message that is not a heartbeat."""
        deadline = time.monotonic() + timeout_s
        while (left := deadline - time.monotonic()) > 0:
            if self.socket.poll(left * 1000):
                message = decode_engine_message(self.socket.recv_multipart()[0])
                for output in getattr(message, "other_outputs", ()):
                    if output.logprobs is not None:
                        self.logprobs[output.request_id] += output.logprobs.logprobs
                if not isinstance(message, Heartbeat):
                    return message
        raise TimeoutError("the engine said nothing")

    def wait_for(self, kind, timeout_s=30.0):
        """The next message of a kind; others are kept for later."""
        for index, message in enumerate(self._backlog):
            if isinstance(message, kind):
                return self._backlog.pop(index)
        deadline = time.monotonic() + timeout_s
        while True:
            message = self.receive(max(0.01, deadline - time.monotonic()))
            if isinstance(message, kind):
                return message
            if isinstance(message, ErrorMessage) and message.code == ErrorCode.HELLO_REQUIRED:
                raise ConnectionError("the engine took this client for dead")
            self._backlog.append(message)

    def request(self, request_id, prompt_token_ids, output_token_ids=(), fields=None, **params):
        """Send a request; `fields` are those of EngineRequest, `params` those of SamplingParams."""
        params = {"max_tokens": 8, "temperature": 0.0, "ignore_eos": True} | params
        self.send(
            EngineRequest(
                request_id=request_id,
                prompt_token_ids=list(prompt_token_ids),
                output_token_ids=list(output_token_ids),
                sampling_params=SamplingParams(**params),
                **(fields or {}),
            )
        )

    def collect(self, *request_ids, timeout_s=60.0):
        """Requests of one sequence, until each has ended: {id: (tokens, terminal event)}."""
        sequences = self.collect_sequences(*request_ids, timeout_s=timeout_s)
        return {
            request_id: ([], ended) if isinstance(ended, Rejected) else ended[0]
            for request_id, ended in sequences.items()
        }

    def collect_sequences(self, *request_ids, timeout_s=60.0):
        """All outputs of these requests until each has ended: {id: [(tokens, terminal output) of
        each sequence]}, or {id: Rejected}. Keys are in the order in which the requests ended."""
        tokens, ends = {}, {}
        over = {}
        deadline = time.monotonic() + timeout_s
        while len(over) < len(request_ids):
            message = self.wait_for(
                EngineCoreOutputs | Rejected, max(0.01, deadline - time.monotonic())
            )
            if isinstance(message, Rejected):
                assert message.request_id not in over
                over[message.request_id] = message
                continue
            for output in all_outputs(message):
                name = output.request_id, output.index
                assert name not in ends, "an output after the terminal one"
                assert output.request_id not in over, "an output of a request that is over"
                tokens.setdefault(name, []).extend(output.new_token_ids)
                if output.finished:
                    ends[name] = output
            for request_id in message.finished_req_ids:
                assert request_id not in over, "a request is over once"
                indexes = sorted(index for name, index in ends if name == request_id)
                assert indexes, "a request is over without a terminal output"
                over[request_id] = [
                    (tokens[request_id, index], ends[request_id, index]) for index in indexes
                ]
        return over

    def complete(self, prompt_token_ids, request_id="only", **params):
        self.request(request_id, prompt_token_ids, **params)
        return self.collect(request_id)[request_id]

    def call(self, call):
        self._next_call_id += 1
        self.send(Call(call_id=self._next_call_id, call=call))
        answer = self.wait_for(CallResult)
        assert answer.call_id == self._next_call_id
        return answer.result

    def statistics(self):
        return self.call(GetStatistics())

    def close(self):
        self._context.destroy(linger=0)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()
