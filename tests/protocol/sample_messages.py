"""One message of every kind, most fields filled. Not a test."""

import struct

from protocol.base import WIRE_VERSION
from protocol.cache_events import BlockNaming, CacheEvents
from protocol.calls import (
    Drain,
    EngineStatistics,
    GetRequestInfo,
    GetRequests,
    GetStatistics,
    ListRequests,
    Ping,
    Pong,
    RequestInfos,
    RequestList,
    ResetPrefixCache,
    SchedulerSnapshot,
    WatchCache,
    WatchScheduler,
)
from protocol.explanations import CacheLookup, LookupEnd, Preemption, RequestInfo, WaitReason
from protocol.multimodal import MultiModalInfo, MultiModalInput, TensorRef
from protocol.outputs import (
    CallFailed,
    CallResult,
    DecodedTokens,
    DisaggregationInfo,
    EngineCoreOutput,
    EngineCoreOutputs,
    ErrorMessage,
    FinishReason,
    Heartbeat,
    Logprobs,
    ModelInfo,
    Rejected,
    RequestTimings,
    TokenizerInfo,
    Welcome,
)
from protocol.pooling import Pooled, PoolingParams, PoolingTask
from protocol.prompt_embeds import EmbeddedSpan
from protocol.requests import Abort, Call, EngineRequest, Goodbye, Hello
from protocol.sampling import BeamSearchParams, SamplingParams
from protocol.snapshots import BlockMap, RequestSummary, SchedulerView, StepSummary

EXPLANATION = RequestInfo(
    request_id="r",
    status="waiting",
    priority=2,
    tenant="team",
    num_sequences=3,
    num_prompt_tokens=30,
    num_output_tokens=4,
    max_tokens=9,
    num_computed_tokens=31,
    waits_for=WaitReason.BLOCKS,
    why="needs 9 blocks, 3 are free",
    num_requests_ahead=0,
    cache_lookup=CacheLookup(
        num_tokens=16, num_host_tokens=8, num_disk_tokens=0, ended=LookupEnd.EVICTED
    ),
    preemptions=[
        Preemption(step_id=7, mode="swap", reason="no block", num_tokens=31, num_blocks=6)
    ],
    finish_reason=None,
)

STATISTICS = EngineStatistics(
    uptime_s=1.5, num_clients=1, num_running=2, num_waiting=3, num_blocks=64, num_blocks_in_use=9,
    num_blocks_cached=8, block_size=16, num_steps=7, num_prompt_tokens=6,
    num_cached_prompt_tokens=5, num_generated_tokens=4, num_preemptions=3,
    num_finished={"length": 2}, step_time_s=0.5, model_time_s=0.25, num_swapped=1,
    num_blocks_shared=4, num_refused=2, service_by_tenant={"team": 12.5},
)  # fmt: skip

SNAPSHOT = SchedulerSnapshot(
    statistics=STATISTICS,
    view=SchedulerView(
        steps=[
            StepSummary(
                step_id=8, token_budget=64, num_decode_tokens=3, prefill_chunks=[(17, 40), (0, 9)],
                num_preempted=1, duration_s=0.25,
            )
        ],
        requests=[
            RequestSummary(
                number=17, request_id="r", tenant="team", status="waiting", num_sequences=2,
                num_prompt_tokens=49, num_cached_tokens=16, num_computed_tokens=40,
                num_output_tokens=0, max_tokens=5, num_preemptions=1, num_blocks=3, why="no block",
            )
        ],
        blocks=BlockMap(
            blocks_per_cell=2, owners=b"\0\0\3\0\0\x80", levels=b"\0\x7f\xff", prefixes=[(2, 5)]
        ),
    ),
)  # fmt: skip

REQUEST = EngineRequest(
    request_id="r",
    prompt_token_ids=[1, 2, 3],
    sampling_params=SamplingParams(max_tokens=5, seed=2**64 - 1, logit_bias={7: -3.5}),
    output_token_ids=[9],
    num_sequences=4,
    beam_search=BeamSearchParams(beam_width=4, length_penalty=0.5, early_stopping="never"),
    priority=-3,
    tenant="team",
    cache_salt="salt",
    timeout_s=2.5,
    kv_source="tcp://10.0.0.1:5700",
    prompt_embeds=(EmbeddedSpan(start=1, data=TensorRef(frame=0, dtype="float32", shape=(2, 4))),),
    multimodal_inputs=(
        MultiModalInput(
            modality="image",
            start=0,
            stop=2,
            tensors={"pixel_values": TensorRef(frame=1, dtype="uint8", shape=(2, 2, 3))},
            runs=((0, 1), (1, 1)),
        ),
    ),
    pooling_params=PoolingParams(task=PoolingTask.EMBED, dimensions=64, second_segment_start=2),
)

CLIENT_MESSAGES = [
    Hello(wire_version=WIRE_VERSION, client_name="test"),
    REQUEST,
    Abort(request_ids=("a", "b"), samples=(("c", 0), ("c", 2)), are_complete=True),
    *(
        Call(call_id=index, call=call)
        for index, call in enumerate(
            [
                Ping(),
                GetStatistics(),
                ResetPrefixCache(),
                Drain(),
                GetRequestInfo(request_id="r"),
                ListRequests(),
                WatchScheduler(after_step_id=7),
                WatchCache(),
                GetRequests(tenant="team"),
            ]
        )
    ),
    Goodbye(),
]

ENGINE_MESSAGES = [
    Welcome(
        wire_version=WIRE_VERSION,
        engine_id="e",
        heartbeat_s=0.25,
        model=ModelInfo(
            name="m",
            architecture="A",
            fingerprint="f",
            max_model_len=8,
            vocab_size=4,
            dtype="float32",
            num_blocks=2,
            block_size=16,
            eos_token_ids=(1,),
            max_logprobs=-1,
            max_num_seqs=8,
            tokenizer=TokenizerInfo(fingerprint="t", tokenizer_json=None),
            instruction_set="i",
            formats="w",
            multimodal=MultiModalInfo(
                model_type="t",
                config_json=b"{}",
                processor_json=b"{}",
                max_items={"image": 2},
                max_input_bytes=9,
            ),
        ),
        disaggregation=DisaggregationInfo("decode", kv_sources=("tcp://10.0.0.1:5700",)),
    ),
    EngineCoreOutputs(
        other_outputs=[
            EngineCoreOutput(
                request_id="r",
                new_token_ids=[4],
                finish_reason=FinishReason.STOP,
                stop_reason=4,
                logprobs=Logprobs(
                    num_positions=1, width=1, token_ids=b"\0" * 4, logprobs=b"\0" * 4, ranks=[1]
                ),
                timings=RequestTimings(
                    first_scheduled_s=0.1, first_token_s=0.2, finished_s=0.3, num_preemptions=0
                ),
            ),
            EngineCoreOutput(
                request_id="p",
                new_token_ids=[],
                finish_reason=FinishReason.STOP,
                pooled=Pooled(shape=(2,), data=struct.pack("<2f", 0.5, -2.0)),
            ),
        ],
        finished_req_ids=["r", "p"],
        step_id=3,
        decoded=DecodedTokens(
            request_ids=["a", "a"], token_ids=struct.pack("<2i", 7, -1), indexes=[0, 3]
        ),
    ),
    EngineCoreOutputs(
        other_outputs=[], decoded=DecodedTokens(request_ids=["a"], token_ids=b"\7\0\0\0")
    ),
    CallResult(call_id=1, result=Pong(uptime_s=1.0, step_id=7, progress_age_s=0.25)),
    CallResult(call_id=2, result=RequestList(request_ids=["a", "b"])),
    CallResult(call_id=3, result=EXPLANATION),
    CallResult(call_id=4, result=STATISTICS),
    CallResult(call_id=5, result=SNAPSHOT),
    CallResult(call_id=6, result=RequestInfos(requests=[EXPLANATION], num_unfinished=300)),
    CallFailed(call_id=5, code="unknown_request", message="no"),
    Rejected(request_id="r", code="queue_full", message="no"),
    Rejected(request_id="r", code="draining", message="no"),
    ErrorMessage(code="wire_version", message="no"),
    Heartbeat(),
    CacheEvents(
        number=3,
        stored=bytes(8),
        removed=bytes(16),
        others_load=128,
        naming=BlockNaming(block_size=16, weights="w", nonce="n", tenant="ann"),
    ),
]
