"""What a request of the paged model gives when it is alone and never disturbed, and how it, and
a scheduler's limits, are made from a seed."""

import dataclasses
import random

import numpy as np

from engine_core.scheduler import Request, SchedulerConfig
from engine_core.scheduler.records.beam_search import BeamCandidates, BeamSearch
from protocol.pooling import POOLING_SAMPLING, PoolingParams, PoolingTask
from protocol.sampling import BeamSearchParams, SamplingParams, sequence_seed
from tests.engine_core.new_request import new_request
from tests.engine_core.scheduler.paged_model import VOCAB, log_probabilities, next_token

EOS = 0
SHARED = [[1, 2, 3, 4] * 5, [1, 2, 3, 4, 1, 2, 2, 2, 2, 2, 2, 2], [4] * 12]


@dataclasses.dataclass
class Expected:
    """By index of the sequence: all tokens that the client gets."""

    outputs: list[list[int]]
    request: Request


def sampled_answer(request: Request, index: int, max_model_len: int) -> list[int]:
    params = request.sampling_params
    seed = None if params.seed is None else sequence_seed(params.seed, index)
    output = request.output_token_ids
    while True:
        if output:
            if len(output) >= params.min_tokens and (
                (output[-1] == EOS and not params.ignore_eos) or output[-1] in params.stop_token_ids
            ):
                return output
            num_tokens = request.num_prompt_tokens + len(output)
            if len(output) >= params.max_tokens or num_tokens >= max_model_len:
                return output
        output.append(
            next_token(request.prompt_token_ids + output, request.message.cache_salt, seed)
        )


def beam_answer(
    request: Request, beam_search: BeamSearchParams, max_model_len: int
) -> list[list[int]]:
    params = request.sampling_params
    search = BeamSearch(
        beam_search,
        max_tokens=min(params.max_tokens, max_model_len - request.num_prompt_tokens),
        eos_token_ids=() if params.ignore_eos else (EOS,),
        stop_token_ids=params.stop_token_ids,
        min_tokens=params.min_tokens,
    )
    beams: list[list[int]] = [[]]
    while not search.is_over:
        columns = [
            log_probabilities(request.prompt_token_ids + beam, request.message.cache_salt)
            for beam in beams
        ]
        tokens = np.tile(np.arange(VOCAB, dtype=np.int32), (len(beams), 1))
        logprobs = np.array(columns, dtype=np.float32)
        best = np.argsort(-logprobs, axis=1)[:, : search.num_candidates]
        survivors = search.advance(
            BeamCandidates(
                np.take_along_axis(tokens, best, 1), np.take_along_axis(logprobs, best, 1)
            )
        )
        beams = [[*beams[s.parent], s.token_id] for s in survivors]
    return [found.token_ids for found in search.results]


def draw_config(
    draw: random.Random, *, max_steps_in_flight: int, is_pipeline: bool = False
) -> SchedulerConfig:
    """Small limits, and anything that may be chosen."""
    policy = draw.choice(["fcfs", "fcfs", "priority", "fair"])
    batching = draw.choice(["mixed", "mixed", "prefill-first"])
    ageing_s = draw.choice([None, 3.0])
    delay_factor = draw.choice([0.0, 0.5])
    max_long, threshold = draw.choice([(None, None), (1, 6)])
    most_tokens = draw.randint(1, 16)
    return SchedulerConfig(
        max_num_batched_tokens=most_tokens,
        max_num_shared_tokens=draw.choice([None, draw.randint(1, most_tokens)]),
        max_num_seqs=draw.randint(1, 5),
        max_model_len=draw.randint(6, 44),
        max_chunk_size=draw.choice([None, None, draw.randint(1, 6)]),
        scheduling_policy=policy,
        batching=batching,
        prefill_delay_factor=delay_factor if batching == "prefill-first" else 0.0,
        preemption_mode=draw.choice(["default", "recompute", "swap", "auto"]),
        priority_ageing_s=ageing_s if policy == "priority" else None,
        max_num_partial_prefills=draw.choice([None, 1, 2]),
        max_long_partial_prefills=max_long,
        long_prefill_token_threshold=threshold,
        num_lookahead_slots=draw.choice([0, 0, 2]),
        num_decode_steps=draw.choice([1, 3]) if max_steps_in_flight == 1 else 1,
        max_num_adapters=draw.choice([None, 1]),
        max_steps_in_flight=max_steps_in_flight,
        computes_in_order=draw.random() < 0.5,
        pipeline_parallel_size=max_steps_in_flight if is_pipeline else 1,
        min_micro_batch_tokens=draw.choice([1, 3, 256]) if is_pipeline else 256,
    )


def draw_request(
    draw: random.Random,
    name: str,
    *,
    max_model_len: int,
    max_num_seqs: int,
    now: float,
    policy: str,
    has_groups: bool,
) -> Expected:
    """A random request that this scheduler takes, and its right answer."""
    prefix = draw.choice(SHARED)[: draw.choice([0, 3, 8, max_model_len // 2])]
    own = [draw.randint(1, VOCAB - 1) for _ in range(draw.randint(1, 3))]
    max_tokens = draw.randint(1, 16)
    kind = draw.choice(["one", "one", "samples", "beams"]) if has_groups else "one"
    num_sequences = 1 if kind == "one" else draw.randint(1, max_num_seqs + 1)
    params = SamplingParams(
        max_tokens=max_tokens,
        min_tokens=draw.randint(0, max_tokens),
        ignore_eos=draw.random() < 0.7,
        stop_token_ids=draw.choice([(), (), (3,)]),
        seed=draw.choice([5, 77]) if kind == "samples" else None,
        temperature=1.0 if kind == "samples" else 0.0,
    )
    beam_search = None
    if kind == "beams":
        beam_search = BeamSearchParams(
            beam_width=num_sequences,
            length_penalty=draw.choice([0.0, 1.0]),
            early_stopping=draw.choice([True, False, "never"]),
        )
    fields = {
        "request_id": name,
        "prompt_token_ids": prefix + own,
        "sampling_params": params,
        "client_index": draw.randint(0, 2),
        "arrival_time": now,
        "eos_token_ids": (EOS,),
        "cache_salt": draw.choice([None, None, None, "a", "b"]),
        "priority": draw.randint(0, 3) if policy == "priority" else 0,
        "tenant": draw.choice([None, "x", "y"]) if policy == "fair" else None,
        "num_sequences": num_sequences,
        "beam_search": beam_search,
        "adapter": draw.choice([None, None, "l", "m"]),
    }
    if kind == "one" and draw.random() < 0.2:
        params = PoolingParams(task=PoolingTask.EMBED)
        fields |= {"sampling_params": POOLING_SAMPLING, "pooling_params": params}
        return Expected([[]], new_request(**fields, pools_all_states=draw.random() < 0.5))
    request = new_request(**fields)
    if beam_search is not None and request.num_prompt_tokens < max_model_len:
        return Expected(beam_answer(request, beam_search, max_model_len), request)
    outputs = [sampled_answer(request, index, max_model_len) for index in range(num_sequences)]
    if num_sequences == 1:
        delivered = outputs[0][: draw.choice([0, 0, 0, 2])]
        request = new_request(**fields, output_token_ids=delivered)
    return Expected(outputs, request)
