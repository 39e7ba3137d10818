"""A plan that was sent to a worker is the plan that was made."""

import dataclasses
from array import array
from pathlib import Path

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from engine_core.kv_cache import CacheCopies, DiskMoves
from engine_core.options.engine import EngineOptions
from engine_core.options.scheduling import SchedulingOptions
from engine_core.options.workers import ParallelOptions
from engine_core.scheduler import NewRequestData, ScheduledBatch, SchedulerOutput
from engine_core.scheduler.plan import BlockUpdate, MaskRows, ResumedRequestData
from engine_core.scheduler.records.prompt_content import EmbeddedRows, MultiModalFeature
from engine_core.workers.codec import (
    SentMasks,
    decode_options,
    decode_plan,
    encode_options,
    encode_plan,
    is_empty,
)
from protocol.pooling import PoolingParams, PoolingTask
from protocol.sampling import RepetitionDetection, SamplingParams, ThinkingBudget
from protocol.structured_output import StructuredOutput, StructuredOutputKind
from tests.profiles import examples
from tests.simulation.engine_process import SimRunner
from tests.simulation.schedule import run_schedule


def plain(value):
    """Without arrays and objects that compare by identity."""
    if isinstance(value, np.ndarray):
        return (value.dtype.str, value.shape, value.tolist())
    if dataclasses.is_dataclass(value):
        return {
            field.name: plain(getattr(value, field.name)) for field in dataclasses.fields(value)
        }
    if isinstance(value, dict):
        return {key: plain(each) for key, each in value.items()}
    if isinstance(value, tuple):
        return tuple(plain(each) for each in value)
    if isinstance(value, list | array):
        return [plain(each) for each in value]
    return bytes(value) if isinstance(value, memoryview) else value


def sent(plan):
    received = decode_plan(encode_plan(plan))
    assert plain(received) == plain(plan)
    return received


def test_requests_that_run_by_sent_plans_have_the_models_tokens(monkeypatch):
    submit, num_plans = SimRunner.submit, []

    def submit_what_was_sent(runner, plan):
        num_plans.append(is_empty(plan))
        submit(runner, sent(plan))

    monkeypatch.setattr(SimRunner, "submit", submit_what_was_sent)

    for seed in range(examples(15)):
        run_schedule(seed)
    assert num_plans.count(False) > 100


token_ids = st.lists(st.integers(0, 2**31 - 1), max_size=4)
names = st.text(min_size=1, max_size=6)
counts = st.integers(0, 2**40)
tables = st.lists(token_ids, min_size=1, max_size=2).map(tuple)
pairs = st.lists(st.tuples(counts, counts), max_size=3)
keys = st.tuples(counts, st.binary(min_size=1, max_size=4))
int32s = st.lists(st.integers(0, 2**31 - 1), max_size=4).map(lambda v: np.array(v, np.int32))
int64s = st.lists(counts, max_size=4).map(lambda v: np.array(v, np.int64))

sampling = st.builds(
    SamplingParams,
    max_tokens=st.integers(1, 9),
    temperature=st.floats(0, 2),
    seed=st.none() | st.integers(0, 2**64 - 1),
    stop_token_ids=st.tuples(st.integers(0, 9)),
    logit_bias=st.dictionaries(st.integers(0, 9), st.floats(-100, 100)),
    bad_words=st.just(((1, 2), (3,))),
    repetition_detection=st.none() | st.just(RepetitionDetection(max_pattern_size=3)),
    thinking=st.none() | st.just(ThinkingBudget(max_tokens=1, start_token_id=2, end_token_id=3)),
) | st.just(
    SamplingParams(
        max_tokens=3,
        structured_output=StructuredOutput(kind=StructuredOutputKind.REGEX, text="a+"),
    )
)
features = st.builds(
    MultiModalFeature,
    modality=st.sampled_from(["image", "audio"]),
    start=counts,
    stop=counts,
    num_rows=counts,
    identifier=st.binary(max_size=4),
    runs=st.just(((1, 2), (4, 9))),
    tensors=st.dictionaries(
        names,
        st.sampled_from(
            [
                np.arange(6, dtype=np.float32).reshape(2, 3),
                np.zeros((0, 4), np.uint8),
                np.array(7, np.int64),
                np.arange(12, dtype=np.float16).reshape(3, 4)[:, ::2],
            ]
        ),
    ),
)
embedded = st.builds(
    EmbeddedRows, start=counts, stop=counts, dtype=names, data=st.binary().map(memoryview)
)
new = st.builds(
    NewRequestData,
    req_id=names,
    prompt_token_ids=token_ids.map(lambda ids: array("i", ids)),
    output_token_ids=token_ids,
    mm_features=st.lists(features, max_size=2).map(tuple),
    sampling_params=sampling,
    block_ids=tables,
    num_computed_tokens=counts,
    lora_request=st.none() | names,
    row=counts,
    pooling_params=st.none() | st.just(PoolingParams(task=PoolingTask.EMBED, dimensions=3)),
    prompt_embeds=st.lists(embedded, max_size=2).map(tuple),
)
masks = st.builds(
    SentMasks,
    rows=st.builds(
        MaskRows,
        place_M=int64s,
        offset_M=int64s,
        bits_MW=st.just(np.array([[-1, 5], [0, 2**31 - 1]], np.int32)),
    ),
    failed=st.dictionaries(names, names),
)
plans = st.builds(
    SchedulerOutput,
    step_id=counts,
    batch=st.builds(
        ScheduledBatch,
        req_ids=st.lists(names, max_size=3),
        rows=int64s,
        num_computed_tokens=int32s,
        num_scheduled_tokens=int32s,
    ),
    scheduled_new_reqs=st.lists(new, max_size=2),
    resumed_reqs=st.lists(
        st.builds(
            ResumedRequestData,
            req_id=names,
            row=counts,
            token_ids=token_ids,
            block_ids=tables,
            num_computed_tokens=counts,
        ),
        max_size=2,
    ),
    block_updates=st.lists(
        st.builds(BlockUpdate, req_id=names, row=counts, start=counts, block_ids=tables),
        max_size=2,
    ),
    copies=st.builds(
        CacheCopies,
        swap_in=pairs,
        swap_out=pairs,
        copy=pairs,
        disk=st.none()
        | st.builds(
            DiskMoves,
            load=st.lists(st.tuples(keys, counts), max_size=2),
            save=st.lists(st.tuples(keys, counts, counts), max_size=2),
        ),
    ),
    total_num_scheduled_tokens=counts,
    scheduled_spec_decode_tokens=st.dictionaries(names, token_ids),
    finished_req_ids=st.lists(names, max_size=2),
    preempted_req_ids=st.lists(names, max_size=2),
    num_output_tokens=int32s,
    num_lookahead_slots=counts,
    num_drafts_wanted=st.none() | int64s,
    num_decode_steps=counts,
    token_budget=counts,
    token_masks=st.none() | masks,
    scheduled_encoder_inputs=st.dictionaries(names, token_ids),
    free_encoder_mm_hashes=st.lists(st.binary(max_size=3), max_size=2),
)


@given(plans)
@settings(max_examples=examples(40))
def test_every_field_of_a_plan_comes_back(plan):
    assert {field.name for field in dataclasses.fields(plan)} == set(plain(plan))
    sent(plan)


def test_options_come_back():
    options = EngineOptions(
        model="m",
        trace=Path("/tmp/trace"),
        logits_processors=("a:B",),
        scheduling=SchedulingOptions(max_num_seqs=3),
        parallel=ParallelOptions(tensor_parallel_size=3),
    )
    assert decode_options(encode_options(options)) == options
