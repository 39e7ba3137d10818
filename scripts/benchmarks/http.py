"""CPU time of a streamed token: in the client library, and in the HTTP server before an engine
without a model."""

import asyncio
import os
import random
import sys
import tempfile
import time
from pathlib import Path
from typing import Annotated, Any

from frontend.cli.options import option
from frontend.event_loop import Clock, run
from frontend.input_processor import InputProcessor
from frontend.load.clients import OpenLoop, run_clients
from frontend.load.http_streams import ENDPOINTS, Server
from frontend.load.records import span_s
from frontend.load.requests import PlannedRequest
from frontend.output_processor import OutputProcessor
from frontend.outputs import RequestOutput
from frontend.request_state import RequestState
from frontend.sampling_params import RequestOutputKind, SamplingParams
from frontend.text.tokenizer import Tokenizer
from protocol.codec import decode_engine_message, encode
from protocol.outputs import EngineCoreOutputs
from scripts.benchmarks import START_TIMEOUT_S, Json, Repeat, cpu_seconds, report
from scripts.benchmarks import fake_engine as engine
from scripts.comparison.processes import EngineProcess

_ENGINE = Path(engine.__file__)
_STEP_S = 0.0256
"""10,000 steps' tokens a second of 256 streams."""


async def _library_us(num_streams: int, num_steps: int, tokens_each: int) -> dict[str, float]:
    """Microseconds of CPU a token. Each stream has a task that takes its outputs; `tokens_each`
    arrive before it is run."""
    info = engine.welcome(document := engine.tokenizer_document()).model
    assert info.tokenizer is not None
    tokenizer = Tokenizer.from_welcome(info.tokenizer, document)
    clock = Clock()
    inputs = InputProcessor(info, tokenizer, seeds=random.Random(0), now=clock.now)
    processor = OutputProcessor(clock.now)
    params = SamplingParams(
        max_tokens=num_steps * tokens_each + 1, output_kind=RequestOutputKind.DELTA
    )
    requests = [inputs.make_request([65], params, str(index)) for index in range(num_streams)]
    unfinished: dict[str, list[int]] = {}
    for request in requests:
        processor.add_request(request)
        for wire in processor.wire_requests(request):
            unfinished[wire.request_id] = [0, params.max_tokens or 0]

    async def take(request: RequestState) -> int:
        output: RequestOutput | None = None
        count = 0
        while output is None or not output.finished:
            output = await request.next_output()
            count += 1
        return count

    tasks = [asyncio.create_task(take(request)) for request in requests]
    await asyncio.sleep(0)
    frames = [encode(engine.step(unfinished)) for _ in range(params.max_tokens or 0)]
    messages = [decode_engine_message(frame) for frame in frames]
    deliver_s, start_s = 0.0, time.process_time()
    for position, message in enumerate(messages):
        assert isinstance(message, EngineCoreOutputs)
        before_s = time.process_time()
        processor.process_outputs(message)
        deliver_s += time.process_time() - before_s
        if position % tokens_each == 0:
            await asyncio.sleep(0)
            await asyncio.sleep(0)
    counts = await asyncio.gather(*tasks)
    total_s = time.process_time() - start_s
    num_tokens = num_streams * len(messages)
    return {
        "deliver_us": round(deliver_s / num_tokens * 1e6, 2),
        "take_us": round((total_s - deliver_s) / num_tokens * 1e6, 2),
        "total_us": round(total_s / num_tokens * 1e6, 2),
        "tokens_an_output": round(num_tokens / sum(counts), 2),
    }


def _stream(port: int, num_streams: int, num_tokens: int) -> tuple[int, float]:
    """The events of all streams, and seconds from the first request to the last event.
    Raises RuntimeError: a request failed."""
    server = Server.at(
        f"http://127.0.0.1:{port}",
        api="openai-chat",
        endpoint=ENDPOINTS["openai-chat"],
        extra_body={"model": None},
    )
    requests = tuple(
        PlannedRequest(index, [{"role": "user", "content": "x"}], num_tokens)
        for index in range(num_streams)
    )
    records = run_clients(server, OpenLoop(requests), num_processes=1, timeout_s=60).records
    if failed := [record.detail for record in records if record.error is not None]:
        raise RuntimeError(f"{len(failed)} of {num_streams} streams failed: {failed[0]}")
    start_s, end_s = span_s(records)
    return sum(1 + len(record.gaps_s) for record in records), end_s - start_s


def _http(num_streams: int, num_tokens: int, step_s: float, burst: int) -> dict[str, float]:
    """Through a server process; its CPU time, that of the requests' beginnings taken off."""
    with tempfile.TemporaryDirectory() as folder:
        address = f"ipc://{folder}/engine"
        environment = {**os.environ, "PYTHONPATH": str(_ENGINE.parents[2])}
        fake = [sys.executable, str(_ENGINE), address, str(step_s), str(burst)]
        server = [sys.executable, "-m", "frontend.cli", "http", "--address", address, "--port", "0"]
        log = Path(folder) / "log"
        with (
            EngineProcess(fake, environment, log, answers=True) as first,
            EngineProcess(server, environment, log, answers=True) as second,
        ):
            first.ready_answer(START_TIMEOUT_S)
            port = int(second.next_answer(START_TIMEOUT_S)["url"].split(":")[-1])
            _stream(port, 4, 4)
            before_s = cpu_seconds(second.pid)
            _stream(port, num_streams, 2)
            beginning_s = cpu_seconds(second.pid) - before_s
            before_s = cpu_seconds(second.pid)
            num_events, seconds = _stream(port, num_streams, num_tokens)
            used_s = cpu_seconds(second.pid) - before_s
    all_tokens = num_streams * num_tokens
    return {
        "tokens_an_event": round(all_tokens / num_events, 2),
        "cpu_us_an_event": round((used_s - beginning_s) / num_events * 1e6, 1),
        "cpu_us_a_token": round((used_s - beginning_s) / all_tokens * 1e6, 1),
        "events_a_second_of_cpu": round(num_events / (used_s - beginning_s)),
        "events_a_second": round(num_events / seconds),
        "beginning_us_a_request": round(beginning_s / num_streams * 1e6),
    }


def http(
    *,
    streams: Annotated[int, option("At once.", gte=1)] = 256,
    tokens: Annotated[int, option("Of each stream.", gte=8)] = 200,
    repeat: Repeat = 3,
    json: Json = None,
) -> int:
    """CPU time of a streamed token: in the library, and over HTTP, without a model."""
    rows: list[dict[str, Any]] = []
    for number in range(repeat):
        for each in (1, 4):
            figures = run(_library_us(streams, tokens, each))
            rows.append({"what": "library", "arriving": each, "run": number} | figures)
            over_http = _http(streams, tokens * each, _STEP_S * each, each)
            rows.append({"what": "http", "arriving": each, "run": number} | over_http)
    lines = [" ".join(f"{key}={value}" for key, value in row.items()) for row in rows]
    report(
        {"benchmark": "http", "streams": streams, "tokens": tokens, "rows": rows},
        json,
        "\n".join(lines),
    )
    return 0
