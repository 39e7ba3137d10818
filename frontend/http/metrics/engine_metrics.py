"""What an engine counts, as metrics: the same from every server of that engine."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from operator import attrgetter
from typing import Literal

from protocol.calls import EngineState, EngineStatistics

Samples = Iterable[tuple[tuple[str, ...], float]]
"""Values of labels, and the number."""


@dataclass(frozen=True, slots=True)
class EngineMetric:
    """
    Args:
        name: without prefix; a counter's also without its suffix, `_total`.
        labels: beside the model and the engine.
        vllm: the name and labels that vLLM has for the same numbers, if it has.
    """

    kind: Literal["counter", "gauge"]
    name: str
    text: str
    samples: Callable[[EngineStatistics], Samples]
    labels: tuple[str, ...] = ()
    vllm: tuple[str, ...] | None = None


def _number(
    kind: Literal["counter", "gauge"], name: str, text: str, field: str, *, in_vllm: bool = False
) -> EngineMetric:
    """A field of the statistics.

    Args:
        in_vllm: under the same name.
    """
    read = attrgetter(field)
    return EngineMetric(
        kind, name, text, lambda now: [((), read(now))], vllm=(name,) if in_vllm else None
    )


_gauge = partial(_number, "gauge")
_counter = partial(_number, "counter")


def _split(
    name: str,
    text: str,
    samples: Callable[[EngineStatistics], Samples],
    label: str,
    vllm: tuple[str, ...] | None = None,
) -> EngineMetric:
    """A counter by one label."""
    return EngineMetric("counter", name, text, samples, (label,), vllm)


def _one(value: Callable[[EngineStatistics], float]) -> Callable[[EngineStatistics], Samples]:
    return lambda now: [((), value(now))]


def _by_name(
    counts: Callable[[EngineStatistics], Mapping[str, float]],
) -> Callable[[EngineStatistics], Samples]:
    return lambda now: [((name,), count) for name, count in counts(now).items()]


def _lookups(now: EngineStatistics) -> Samples:
    for ended, count in now.num_lookups_by_end.items():
        num_hits = now.num_lookup_hits_by_end.get(ended, 0)
        yield ("hit", ended), num_hits
        yield ("miss", ended), count - num_hits


def _drafts(now: EngineStatistics) -> Samples:
    for method, number in now.num_draft_tokens_by_method.items():
        num_accepted = now.num_accepted_tokens_by_method.get(method, 0)
        yield (method, "accepted"), num_accepted
        yield (method, "rejected"), number - num_accepted


def _by(**counts: float) -> Samples:
    return [((name,), count) for name, count in counts.items()]


def _pool(num_blocks: int, in_use: int, cached: int) -> Samples:
    return _by(in_use=in_use, cached=cached, empty=max(0, num_blocks - in_use - cached))


def _cached_tokens(now: EngineStatistics) -> Samples:
    host, disk = now.num_host_cached_prompt_tokens, now.num_disk_cached_prompt_tokens
    return _by(device=now.num_cached_prompt_tokens - host - disk, host=host, disk=disk)


ENGINE_METRICS = [
    _gauge("num_requests_running", "Requests that have KV blocks.", "num_running", in_vllm=True),
    _gauge("num_requests_waiting", "Requests in the queue.", "num_waiting", in_vllm=True),
    _gauge(
        "num_requests_swapped",
        "Of the waiting requests, those whose KV blocks are in host memory.",
        "num_swapped",
    ),
    _gauge("num_queued_tokens", "Tokens of the waiting requests.", "num_queued_tokens"),
    _gauge("max_wait_seconds", "Seconds since the oldest waiting request arrived.", "max_wait_s"),
    _gauge("num_clients", "Clients, of which a server is one.", "num_clients"),
    EngineMetric(
        "gauge",
        "kv_cache_usage_perc",
        "KV cache in use. 1 means 100 percent.",
        _one(lambda now: now.num_blocks_in_use / max(1, now.num_blocks)),
        vllm=("kv_cache_usage_perc",),
    ),
    EngineMetric(
        "gauge",
        "kv_cache_blocks",
        "KV blocks by state.",
        lambda now: _pool(now.num_blocks, now.num_blocks_in_use, now.num_blocks_cached),
        labels=("state",),
    ),
    _gauge("kv_cache_shared_references", "Block references saved by sharing.", "num_blocks_shared"),
    EngineMetric(
        "gauge",
        "host_blocks",
        "Blocks of host memory by state.",
        lambda now: _pool(
            now.num_host_blocks, now.num_host_blocks_in_use, now.num_host_blocks_cached
        ),
        labels=("state",),
    ),
    _gauge("disk_blocks", "KV blocks on disk.", "num_disk_blocks"),
    EngineMetric(
        "gauge",
        "engine_state",
        "1 for the state that the engine is in.",
        lambda now: [((state.value,), float(state is now.state)) for state in EngineState],
        labels=("state",),
    ),
    _gauge("uptime_seconds", "Seconds since the engine started.", "uptime_s"),
    _gauge("weights_version", "How often weights were updated.", "weights_version"),
    _counter(
        "prompt_tokens",
        "Prompt tokens of started requests, cached ones included.",
        "num_prompt_tokens",
        in_vllm=True,
    ),
    _split(
        "prompt_tokens_cached_by_source",
        "Prompt tokens found in the prefix cache: on the device, in host memory, on disk.",
        _cached_tokens,
        "source",
        vllm=("prompt_tokens_cached_by_source", "source"),
    ),
    _counter("generation_tokens", "Generated tokens.", "num_generated_tokens", in_vllm=True),
    _split(
        "scheduled_tokens",
        "Tokens computed in steps: prefill, several of a sequence; decode, one.",
        lambda now: _by(prefill=now.num_prefill_tokens, decode=now.num_decode_tokens),
        "phase",
    ),
    _counter(
        "spec_decode_num_drafts",
        "Times that a sequence had drafts to verify.",
        "num_drafts",
        in_vllm=True,
    ),
    _counter(
        "spec_decode_num_draft_tokens",
        "Drafts that were verified.",
        "num_draft_tokens",
        in_vllm=True,
    ),
    _counter(
        "spec_decode_num_accepted_tokens",
        "Drafts that are in an output.",
        "num_accepted_tokens",
        in_vllm=True,
    ),
    EngineMetric(
        "counter",
        "spec_decode_draft_tokens",
        "Drafts that were verified, by what made them and what became of them.",
        _drafts,
        labels=("method", "result"),
    ),
    _counter("step_seconds", "Seconds in steps.", "step_time_s"),
    _counter("model_seconds", "Of step_seconds, those of the model runner.", "model_time_s"),
    _gauge("workers", "Processes that run the model.", "num_workers"),
    _split(
        "collective_bytes",
        "Sent by rank 0 to the other ranks.",
        _by_name(lambda now: now.num_collective_bytes),
        "part",
    ),
    _split(
        "collective_seconds",
        "Of model_seconds, those in which rank 0 exchanged data with other ranks, or waited.",
        _by_name(lambda now: now.collective_time_s),
        "part",
    ),
    _counter("first_tokens", "Requests that got their first token.", "num_first_tokens"),
    _split(
        "first_token_seconds",
        "Seconds of those to their first token: in the queue, and computing the prompt.",
        lambda now: _by(queue=now.queue_time_s, prefill=now.ttft_s - now.queue_time_s),
        "phase",
    ),
    _split(
        "kv_transfer_blocks",
        "KV blocks that moved from engine to engine.",
        lambda now: _by(sent=now.num_kv_blocks_sent, received=now.num_kv_blocks_received),
        "direction",
    ),
    _split(
        "kv_transfer_bytes",
        "Bytes of those blocks.",
        lambda now: _by(sent=now.num_kv_bytes_sent, received=now.num_kv_bytes_received),
        "direction",
    ),
    _counter(
        "kv_transfer_seconds",
        "Seconds from the begin of each transfer of a prompt's blocks to its end.",
        "kv_receive_s",
    ),
    _split(
        "kv_transfer_failures",
        "KV blocks that were asked for and did not move, by reason; they are computed.",
        _by_name(lambda now: now.num_kv_blocks_failed),
        "reason",
    ),
    _split(
        "requests_finished",
        "Finished requests by reason.",
        _by_name(lambda now: now.num_finished),
        "reason",
        vllm=("request_success", "finished_reason"),
    ),
    _counter("requests_refused", "Requests refused because the queue was full.", "num_refused"),
    _split(
        "preemptions",
        "Preemptions by cause.",
        _by_name(lambda now: now.num_preemptions_by_cause),
        "cause",
    ),
    _counter(
        "preemptions_by_swap",
        "Preemptions with blocks copied to host memory.",
        "num_preemptions_by_swap",
    ),
    EngineMetric(
        "counter",
        "prefix_cache_lookups",
        "First look-ups of prompts, by result and by why they ended.",
        _lookups,
        labels=("result", "ended"),
    ),
    _counter(
        "deduplicated_blocks",
        "Full blocks freed because an equal one was cached.",
        "num_deduplicated_blocks",
    ),
    _split(
        "encoder_inputs",
        "Images and sounds, by whether they were encoded or found in the encoder cache.",
        lambda now: _by(encoded=now.num_encoder_inputs, cached=now.num_encoder_cache_hits),
        "result",
    ),
    EngineMetric(
        "gauge",
        "encoder_cache_tokens",
        "Tokens in the encoder cache.",
        _one(lambda now: now.num_encoder_cache_tokens),
    ),
    _split(
        "slo_requests",
        "Finished requests measured against SLOs, by whether they met all.",
        lambda now: _by(met=now.num_slo_met, missed=now.num_slo_requests - now.num_slo_met),
        "result",
    ),
    _split(
        "slo_violations",
        "Violations by SLO; a request may have both.",
        lambda now: _by(ttft=now.num_slo_ttft_violations, tpot=now.num_slo_tpot_violations),
        "slo",
    ),
    _counter(
        "refused_messages", "Messages of clients that could not be read.", "num_refused_messages"
    ),
    _counter(
        "compilations_after_ready",
        "Kernels compiled while serving.",
        "num_compilations_after_ready",
    ),
]

VLLM_ONLY = [
    _counter(
        "prefix_cache_queries",
        "Prompt tokens that were looked up in the prefix cache.",
        "num_prompt_tokens",
        in_vllm=True,
    ),
    EngineMetric(
        "counter",
        "prefix_cache_hits",
        "Of those, tokens found on the device.",
        _one(lambda now: dict(_cached_tokens(now))["device",]),
        vllm=("prefix_cache_hits",),
    ),
    EngineMetric(
        "counter",
        "external_prefix_cache_hits",
        "Prompt tokens found in host memory and on disk.",
        _one(lambda now: now.num_cached_prompt_tokens - dict(_cached_tokens(now))["device",]),
        vllm=("external_prefix_cache_hits",),
    ),
    _counter(
        "prompt_tokens_cached",
        "Prompt tokens found in the prefix cache.",
        "num_cached_prompt_tokens",
        in_vllm=True,
    ),
    _counter("num_preemptions", "Preemptions.", "num_preemptions", in_vllm=True),
]
"""Sums of ours, served under vLLM's names only."""
