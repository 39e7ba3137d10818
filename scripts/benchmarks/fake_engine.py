"""An engine without a model, as a process of its own: python fake_engine.py ADDRESS STEP_S BURST.
Each STEP_S it sends BURST messages that have one token for each unfinished request."""

import struct
import sys
import time

import zmq
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from protocol import calls
from protocol.base import WIRE_VERSION
from protocol.codec import decode_client_message, encode
from protocol.multimodal import TensorRef
from protocol.outputs import (
    CallResult,
    DecodedTokens,
    EngineCoreOutput,
    EngineCoreOutputs,
    FinishReason,
    ModelInfo,
    TokenizerInfo,
    Welcome,
)
from protocol.requests import Abort, Call, EngineRequest, Hello

MAX_MODEL_LEN = 1 << 16
TEMPLATE = "{% for message in messages %}{{ message.content }}{% endfor %}"


def tokenizer_document() -> bytes:
    """Byte-level, as most models': a token is a byte."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({each: i for i, each in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer.to_str().encode()


def welcome(document: bytes) -> Welcome:
    info = TokenizerInfo(
        fingerprint="bytes",
        tokenizer_json=TensorRef(frame=0, dtype="uint8", shape=(len(document),)),
        chat_template=TEMPLATE,
    )
    model = ModelInfo(
        name="fake", architecture="Fake", fingerprint="fake", max_model_len=MAX_MODEL_LEN,
        vocab_size=256, dtype="float32", num_blocks=64, block_size=16, eos_token_ids=(255,),
        max_logprobs=20, max_num_seqs=64, tokenizer=info,
    )  # fmt: skip
    return Welcome(wire_version=WIRE_VERSION, engine_id="fake", heartbeat_s=1.0, model=model)


def step(unfinished: dict[str, list[int]]) -> EngineCoreOutputs:
    """One token each; the numbers are tokens so far, and the most."""
    others, names, finished = [], [], []
    for name, counts in list(unfinished.items()):
        counts[0] += 1
        is_over = counts[0] >= counts[1]
        if counts[0] > 1 and not is_over:
            names.append(name)
            continue
        others.append(
            EngineCoreOutput(
                request_id=name,
                new_token_ids=[64],
                finish_reason=FinishReason.LENGTH if is_over else None,
                num_cached_tokens=0,
            )
        )
        if is_over:
            finished.append(name)
            del unfinished[name]
    decoded = None
    if names:
        decoded = DecodedTokens(
            request_ids=names, token_ids=struct.pack(f"<{len(names)}i", *[65] * len(names))
        )
    return EngineCoreOutputs(other_outputs=others, finished_req_ids=finished, decoded=decoded)


def main(address: str, step_s: float, burst: int) -> None:
    document = tokenizer_document()
    unfinished: dict[str, list[int]] = {}
    identity = b""
    socket = zmq.Context().socket(zmq.ROUTER)
    socket.bind(address)
    print('{"event": "ready"}', flush=True)
    due_s = time.monotonic()
    while True:
        while socket.poll(max(0.0, due_s - time.monotonic()) * 1000):
            identity, frame = socket.recv_multipart()
            match decode_client_message(frame):
                case Hello():
                    socket.send_multipart([identity, encode(welcome(document)), document])
                case EngineRequest() as request:
                    unfinished[request.request_id] = [0, request.sampling_params.max_tokens]
                case Abort(request_ids):
                    for request_id in request_ids:
                        unfinished.pop(request_id, None)
                case Call(call_id):
                    pong = calls.Pong(uptime_s=1.0, step_id=0, progress_age_s=0.0)
                    answer = CallResult(call_id=call_id, result=pong)
                    socket.send_multipart([identity, encode(answer)])
        due_s = max(due_s + step_s, time.monotonic() - step_s)
        messages = [encode(step(unfinished)) for _ in range(burst if unfinished else 0)]
        for message in messages:  # made before, so that they arrive together
            socket.send_multipart([identity, message])


if __name__ == "__main__":
    main(sys.argv[1], float(sys.argv[2]), int(sys.argv[3]))
