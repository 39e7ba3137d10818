"""A run written down and read back."""

import gzip
import signal
import subprocess
import sys
from contextlib import closing

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine_core.kv_cache import CacheCopies
from engine_core.observers.base import FinishedStep
from engine_core.observers.trace import TraceWriter
from engine_core.observers.trace_lines import (
    TraceAbort,
    TraceArrival,
    TraceCacheReset,
    TraceFormatError,
    TracePlan,
    TraceStep,
    read_header,
    read_trace,
)
from engine_core.scheduler import ModelRunnerOutput, NewRequestData, ScheduledBatch, SchedulerOutput
from protocol.outputs import Logprobs
from protocol.requests import EngineRequest
from protocol.sampling import BeamSearchParams, SamplingParams

GREEDY = SamplingParams(max_tokens=9, min_tokens=2, temperature=0.0, stop_token_ids=(3, 4))


def request(name="a", prompt=(1, 2, 3), **more):
    return EngineRequest(
        request_id=name, prompt_token_ids=list(prompt), sampling_params=GREEDY, **more
    )


def plan_of(step_id, ids, *, nums=None, context=None, **more):
    size = len(ids)
    new = [
        NewRequestData(name, [1], [], [], GREEDY, ([1],), 0, None) for name in more.pop("new", [])
    ]
    return SchedulerOutput(
        step_id=step_id,
        batch=ScheduledBatch(
            req_ids=ids,
            rows=np.arange(size, dtype=np.int64),
            num_computed_tokens=np.array(context or [0] * size, np.int32),
            num_scheduled_tokens=np.array(nums or [1] * size, np.int32),
        ),
        scheduled_new_reqs=new,
        resumed_reqs=[],
        block_updates=[],
        copies=more.pop("copies", CacheCopies()),
        total_num_scheduled_tokens=sum(nums or [1] * size),
        scheduled_spec_decode_tokens={},
        num_output_tokens=np.zeros(size, np.int32),
        finished_req_ids=more.pop("finished", []),
        preempted_req_ids=more.pop("preempted", []),
        **more,
    )


def array_of(ids, tokens, **more):
    return ModelRunnerOutput(ids, np.array(tokens, np.int32), **more)


def finish(trace, plan, output, start_s, duration_s, has_outputs=True):
    end_s = start_s + duration_s
    trace.on_step(FinishedStep(plan, output, start_s, end_s, end_s, has_outputs))


@pytest.fixture(params=["run.jsonl", "run.jsonl.gz"])
def path(request, tmp_path):
    return tmp_path / request.param


def test_what_was_asked_and_decided_reads_back_in_order(path):
    config = {"block_size": 4, "watermark": 0.01, "record": None, "tenant_weights": {"x": 2.0}}
    with closing(TraceWriter(path, model="tiny", config=config, started_s=100.0)) as trace:
        trace.on_arrival(
            request(num_sequences=2, priority=-1, tenant="t", cache_salt="s"), 3, 100.5
        )
        ids = ["a", "a#1"]
        copies = CacheCopies(swap_in=[(9, 1)], copy=[(1, 2), (1, 3)])
        plan = plan_of(
            0, ids, nums=[3, 1], context=[0, 8], new=["a"], preempted=["b"], copies=copies
        )
        finish(trace, plan, array_of(ids, [5, 6]), 101.0, 0.25)
        trace.on_cache_reset(102.0)
        trace.on_abort({"a"}, 103.0)
        failed = ModelRunnerOutput(req_ids=[], sampled_token_ids=[])
        finish(trace, plan_of(1, ["a#1"], finished=["a"]), failed, 104.0, 0.5)
    header = read_header(path)
    assert (header.version, header.model, header.config) == (1, "tiny", config)
    arrived, first, reset, aborted, second = read_trace(path)
    assert isinstance(arrived, TraceArrival)
    assert (arrived.at_s, arrived.id, arrived.num_prompt_tokens) == (0.5, "a", 3)
    assert (arrived.max_tokens, arrived.min_tokens, arrived.stop_token_ids) == (9, 2, [3, 4])
    assert (arrived.num_sequences, arrived.priority, arrived.client_index) == (2, -1, 3)
    assert (arrived.tenant, arrived.salt, arrived.prompt) == ("t", "s", [1, 2, 3])
    assert first == TraceStep(
        id=0,
        start_s=1.0,
        duration_s=0.25,
        ids=ids,
        nums=[3, 1],
        context=[0, 8],
        new=["a"],
        preempted=["b"],
        copies=(1, 0, 2),
        sampled=[5, 6],
    )
    assert reset == TraceCacheReset(at_s=2.0)
    assert aborted == TraceAbort(at_s=3.0, ids=["a"])
    assert (second.ids, second.finished, second.start_s) == (["a#1"], ["a"], 4.0)
    assert second.model_output() == failed
    assert (first.was_discarded, second.was_discarded) == (False, True)


def test_a_trace_is_for_its_user_alone_also_in_place_of_an_open_file(path):
    path.write_text("an older one")
    path.chmod(0o644)
    with closing(TraceWriter(path, started_s=100.0)) as trace:
        assert path.stat().st_mode & 0o777 == 0o600
        trace.on_arrival(request(), 0, 100.5)
    assert [event.id for event in read_trace(path)] == ["a"]


def test_a_trace_that_nests_is_none(tmp_path):
    path = tmp_path / "trace.jsonl"
    for text in ("[" * 9999, '{"version":1,"model":"","config":' + '{"a":' * 9999):
        path.write_text(text + "\n")
        with pytest.raises(TraceFormatError, match="does not begin like a trace"):
            read_header(path)


def test_steps_in_flight_say_when_they_were_planned(path):
    plans = [plan_of(step_id, ["a"], context=[step_id]) for step_id in (4, 5)]
    with closing(TraceWriter(path, started_s=100.0, max_steps_in_flight=2)) as trace:
        for number, plan in enumerate(plans):
            trace.on_plan(plan, 101.0 + number)
        finish(trace, plans[0], array_of(["a"], [7]), 101.0, 2.5)
        finish(trace, plans[1], array_of(["a"], [8]), 102.0, 2.0)
    first, second, *steps = read_trace(path)
    assert (first, second) == (TracePlan(at_s=1.0, id=4), TracePlan(at_s=2.0, id=5))
    assert [(step.id, step.start_s, step.sequences, step.sampled) for step in steps] == [
        (4, 1.0, ["a"], [7]),
        (5, 2.0, ["a"], [8]),
    ]


def test_a_step_without_tokens_is_written_if_something_was_sent_or_its_plan_was_written(path):
    nothing = array_of([], [])
    with closing(TraceWriter(path, started_s=0.0, max_steps_in_flight=2)) as trace:
        for step_id, ids in enumerate([[], ["a"], [], []]):
            plan = plan_of(step_id, ids)
            trace.on_plan(plan, 1.0)  # 0 alone in flight; then 1, with 2 behind it
            if step_id in (0, 3):
                finish(trace, plan, nothing, 1.0, 0.1, has_outputs=step_id == 3)
            elif step_id == 2:
                finish(trace, plan_of(1, ["a"]), array_of(["a"], [5]), 1.0, 0.1)
                finish(trace, plan, nothing, 1.0, 0.1, has_outputs=False)
    events = [(type(event).__name__, event.id) for event in read_trace(path)]
    assert events == [
        ("TracePlan", 1), ("TracePlan", 2), ("TraceStep", 1), ("TraceStep", 2), ("TraceStep", 3),
    ]  # fmt: skip


def test_the_reader_fills_in_a_batch_that_did_not_change(path):
    ids = ["a", "b"]
    with closing(TraceWriter(path, started_s=0.0)) as trace:
        for step_id, batch in enumerate([ids, ids, ["b"], ["b"], []]):
            finish(
                trace, plan_of(step_id, batch), array_of(batch, [step_id] * len(batch)), 1.0, 0.1
            )
    steps = list(read_trace(path))
    assert [step.sequences for step in steps] == [ids, ids, ["b"], ["b"], []]
    output = steps[1].model_output()
    assert output.req_ids == ids
    assert output.sampled_token_ids.tolist() == [1, 1]
    assert output.sampled_token_ids.dtype == np.int32


def test_logprobs_are_kept_of_beams_alone_and_come_back_as_they_were(path):
    columns = Logprobs(
        num_positions=1,
        width=3,
        token_ids=np.array([7, 7, 9], "<i4").tobytes(),
        logprobs=np.array([-0.1, -0.1, -2.7], "<f4").tobytes(),
        ranks=[1],
    )
    ids = ["a", "a#1", "x"]
    with closing(TraceWriter(path, started_s=0.0)) as trace:
        beams = BeamSearchParams(beam_width=2)
        trace.on_arrival(request(num_sequences=2, beam_search=beams), 0, 1.0)
        trace.on_arrival(request("x"), 0, 1.0)
        output = array_of(
            ids,
            [7, 8, 9],
            logprobs=dict.fromkeys(ids, columns),
            failures={"x": "why"},
            refused={"x"},
        )
        finish(trace, plan_of(0, ids, new=["a#1"]), output, 1.0, 0.1)
        finish(trace, plan_of(1, [], finished=ids), array_of([], []), 1.0, 0.1)
        finish(trace, plan_of(2, ids), output, 1.0, 0.1)  # others of the same names, no beams
    arrived, _, step, _, later = read_trace(path)
    assert later.beam_logprobs == {}
    assert arrived.beam_search == beams
    assert step.model_output().logprobs == {"a": columns, "a#1": columns}
    assert step.model_output().failures == {"x": "why"}
    assert step.model_output().refused == {"x"}


@given(cut=st.integers(0, 1500))
def test_any_beginning_of_a_trace_reads_as_far_as_it_goes(tmp_path_factory, cut):
    folder = tmp_path_factory.mktemp("cut")
    for name in ("run.jsonl", "run.jsonl.gz"):
        with closing(TraceWriter(folder / name, started_s=0.0)) as trace:
            for number in range(8):
                trace.on_arrival(request(str(number), range(number * 7)), 0, float(2 * number))
        whole = list(read_trace(folder / name))
        data = (folder / name).read_bytes()
        (folder / f"cut-{name}").write_bytes(data[:cut])
        try:
            read = list(read_trace(folder / f"cut-{name}"))
        except TraceFormatError as error:
            assert cut < 200, error
            continue
        assert read == whole[: len(read)]
        if cut >= len(data):
            assert read == whole


def test_a_killed_process_leaves_all_but_the_last_second(tmp_path):
    script = """
import os, signal, sys
from engine_core.observers.trace import TraceWriter
from protocol.requests import EngineRequest
from protocol.sampling import SamplingParams
traces = [TraceWriter(path, started_s=0.0) for path in sys.argv[1:]]
for number in range(20):
    message = EngineRequest(str(number), [1], SamplingParams(max_tokens=1))
    for trace in traces:
        trace.on_arrival(message, 0, number * 0.3)
os.kill(os.getpid(), signal.SIGKILL)
"""
    paths = [tmp_path / "run.jsonl", tmp_path / "run.jsonl.gz"]
    done = subprocess.run([sys.executable, "-c", script, *map(str, paths)], check=False)
    assert done.returncode == -signal.SIGKILL
    assert len(list(read_trace(paths[0]))) == 20
    assert 16 <= len(list(read_trace(paths[1]))) <= 20


def test_other_files_and_other_versions_are_refused_by_name(path):
    opened = gzip.open if path.suffix == ".gz" else open
    for content, why in [
        (b"", "does not begin like a trace"),
        (b'{"a": 1}\n', "does not begin like a trace"),
        (b'{"engine-core trace":2,"model":"","config":{}}\n', "of version 2"),
        (b'{"engine-core trace":1,"model":"","config":{}}\n{"event":"x"}\n', "line 2"),
    ]:
        with opened(path, "wb") as file:
            file.write(content)
        with pytest.raises(TraceFormatError, match=why):
            list(read_trace(path))


def test_a_plain_file_with_a_gzip_name_is_refused(tmp_path):
    path = tmp_path / "run.jsonl.gz"
    path.write_bytes(b'{"engine-core trace":1,"model":"","config":{}}\n')
    with pytest.raises(TraceFormatError, match="is no gzip file"):
        read_header(path)


def test_an_abort_of_one_sample_is_read_back_with_its_index(tmp_path):
    path = tmp_path / "run.jsonl"
    with closing(TraceWriter(path, started_s=0.0)) as trace:
        trace.on_abort(["a"], 1.0, 2)
    assert list(read_trace(path)) == [TraceAbort(at_s=1.0, ids=["a"], index=2)]


def test_a_full_disk_ends_the_trace_and_not_the_engine(tmp_path, caplog):
    trace = TraceWriter(tmp_path / "run.jsonl", started_s=0.0)

    class Full:
        def write(self, line):
            raise OSError(28, "No space left on device")

        def close(self):
            raise OSError(28, "No space left on device")

    trace._file = Full()
    trace.on_abort(["a"], 1.0)
    trace.on_abort(["b"], 2.0)
    trace.close()
    assert caplog.text.count("stops here") == 1


def test_writing_and_reading_need_no_torch():
    code = "import engine_core.observers.trace, sys; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_a_line_of_a_trace_is_a_json_object(tmp_path):
    path = tmp_path / "run.jsonl"
    with closing(TraceWriter(path, started_s=0.0)) as trace:
        trace.on_arrival(request(), 0, 0.5)
    header, line = map(msgspec.json.decode, path.read_bytes().splitlines())
    assert header["engine-core trace"] == 1
    assert line == {
        "event": "arrive",
        "at_s": 0.5,
        "id": "a",
        "num_prompt_tokens": 3,
        "prompt": [1, 2, 3],
        "max_tokens": 9,
        "min_tokens": 2,
        "stop_token_ids": [3, 4],
    }
