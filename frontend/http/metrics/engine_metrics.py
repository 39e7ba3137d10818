"""What an engine counts, as metrics: the same from every server of that engine."""

import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

from protocol.calls import EngineState, EngineStatistics

Values = float | Mapping[Any, float]
"""A number, or several: by the value of their label, or by a tuple of values."""


@dataclass(frozen=True, slots=True)
class EngineMetric:
    """
    Args:
        name: without prefix; a counter's also without its suffix, `_total`.
        values: a field of the statistics, or what is made of them.
        labels: beside the model and the engine.
        in_vllm: whether vLLM has the same numbers under this name and these labels.
    """

    kind: Literal["counter", "gauge"]
    name: str
    text: str
    values: str | Callable[[EngineStatistics], Values]
    labels: tuple[str, ...] = ()
    in_vllm: bool = False

    def samples(self, now: EngineStatistics) -> Iterable[tuple[tuple[str, ...], float]]:
        """Values of labels, and the number."""
        found = getattr(now, self.values) if isinstance(self.values, str) else self.values(now)
        numbers = found if isinstance(found, Mapping) else {(): found}
        for key, number in numbers.items():
            yield key if isinstance(key, tuple) else (key,), number


_gauge = partial(EngineMetric, "gauge")
_counter = partial(EngineMetric, "counter")


def _lookups(now: EngineStatistics) -> Values:
    hits = now.num_lookup_hits_by_end
    parts = {}
    for ended, count in now.num_lookups_by_end.items():
        parts["hit", ended] = hits.get(ended, 0)
        parts["miss", ended] = count - hits.get(ended, 0)
    return parts


def _drafts(now: EngineStatistics) -> Values:
    accepted = now.num_accepted_tokens_by_method
    parts = {}
    for method, count in now.num_draft_tokens_by_method.items():
        parts[method, "accepted"] = accepted.get(method, 0)
        parts[method, "rejected"] = count - accepted.get(method, 0)
    return parts


def _pool(num_blocks: int, in_use: int, cached: int) -> Values:
    return {"in_use": in_use, "cached": cached, "empty": max(0, num_blocks - in_use - cached)}


def _cached_tokens(now: EngineStatistics) -> dict[str, int]:
    host, disk = now.num_host_cached_prompt_tokens, now.num_disk_cached_prompt_tokens
    return {"device": now.num_cached_prompt_tokens - host - disk, "host": host, "disk": disk}


def _adapters(now: EngineStatistics) -> Values:
    by_state = (now.num_running_by_adapter, now.num_waiting_by_adapter)
    names = (",".join(sorted(each)) for each in by_state)
    return {(str(now.max_loras), *names): time.time()} if now.max_loras else {}


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
    _gauge(
        "kv_cache_usage_perc",
        "KV cache in use. 1 means 100 percent.",
        lambda now: now.num_blocks_in_use / max(1, now.num_blocks),
        in_vllm=True,
    ),
    _gauge(
        "kv_cache_blocks",
        "KV blocks by state.",
        lambda now: _pool(now.num_blocks, now.num_blocks_in_use, now.num_blocks_cached),
        labels=("state",),
    ),
    _gauge("kv_cache_shared_references", "Block references saved by sharing.", "num_blocks_shared"),
    _gauge(
        "host_blocks",
        "Blocks of host memory by state.",
        lambda now: _pool(
            now.num_host_blocks, now.num_host_blocks_in_use, now.num_host_blocks_cached
        ),
        labels=("state",),
    ),
    _gauge("disk_blocks", "KV blocks on disk.", "num_disk_blocks"),
    _gauge(
        "engine_state",
        "1 for the state that the engine is in.",
        lambda now: {state.value: float(state is now.state) for state in EngineState},
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
    _counter(
        "prompt_tokens_cached_by_source",
        "Prompt tokens found in the prefix cache: on the device, in host memory, on disk.",
        _cached_tokens,
        ("source",),
        in_vllm=True,
    ),
    _counter("generation_tokens", "Generated tokens.", "num_generated_tokens", in_vllm=True),
    _counter(
        "scheduled_tokens",
        "Tokens computed in steps: prefill, several of a sequence; decode, one.",
        lambda now: {"prefill": now.num_prefill_tokens, "decode": now.num_decode_tokens},
        ("phase",),
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
    _counter(
        "spec_decode_draft_tokens",
        "Drafts that were verified, by what made them and what became of them.",
        _drafts,
        labels=("method", "result"),
    ),
    _counter("step_seconds", "Seconds in steps.", "step_time_s"),
    _counter("model_seconds", "Of step_seconds, those of the model runner.", "model_time_s"),
    _gauge("workers", "Processes that run the model.", "num_workers"),
    _counter(
        "collective_bytes",
        "Sent by rank 0 to the other ranks.",
        "num_collective_bytes",
        ("part",),
    ),
    _counter(
        "collective_seconds",
        "Of model_seconds, those in which rank 0 exchanged data with other ranks, or waited.",
        "collective_time_s",
        ("part",),
    ),
    _counter("first_tokens", "Requests that got their first token.", "num_first_tokens"),
    _counter(
        "first_token_seconds",
        "Seconds of those to their first token: in the queue, and computing the prompt.",
        lambda now: {"queue": now.queue_time_s, "prefill": now.ttft_s - now.queue_time_s},
        ("phase",),
    ),
    _counter(
        "kv_transfer_blocks",
        "KV blocks that moved from engine to engine.",
        lambda now: {"sent": now.num_kv_blocks_sent, "received": now.num_kv_blocks_received},
        ("direction",),
    ),
    _counter(
        "kv_transfer_bytes",
        "Bytes of those blocks.",
        lambda now: {"sent": now.num_kv_bytes_sent, "received": now.num_kv_bytes_received},
        ("direction",),
    ),
    _counter(
        "kv_transfer_seconds",
        "Seconds from the begin of each transfer of a prompt's blocks to its end.",
        "kv_receive_s",
    ),
    _counter(
        "kv_transfer_failures",
        "KV blocks that were asked for and did not move, by reason; they are computed.",
        "num_kv_blocks_failed",
        ("reason",),
    ),
    _counter("requests_finished", "Finished requests by reason.", "num_finished", ("reason",)),
    _counter("requests_refused", "Requests refused because the queue was full.", "num_refused"),
    _counter("preemptions", "Preemptions by cause.", "num_preemptions_by_cause", ("cause",)),
    _counter(
        "preemptions_by_swap",
        "Preemptions with blocks copied to host memory.",
        "num_preemptions_by_swap",
    ),
    _counter(
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
    _counter(
        "encoder_inputs",
        "Images and sounds, by whether they were encoded or found in the encoder cache.",
        lambda now: {"encoded": now.num_encoder_inputs, "cached": now.num_encoder_cache_hits},
        ("result",),
    ),
    _gauge("encoder_cache_tokens", "Tokens in the encoder cache.", "num_encoder_cache_tokens"),
    _counter(
        "slo_requests",
        "Finished requests measured against SLOs, by whether they met all.",
        lambda now: {"met": now.num_slo_met, "missed": now.num_slo_requests - now.num_slo_met},
        ("result",),
    ),
    _counter(
        "slo_violations",
        "Violations by SLO; a request may have both.",
        lambda now: {"ttft": now.num_slo_ttft_violations, "tpot": now.num_slo_tpot_violations},
        ("slo",),
    ),
    _counter(
        "refused_messages", "Messages of clients that could not be read.", "num_refused_messages"
    ),
    _counter(
        "compilations_after_ready",
        "Kernels compiled while serving.",
        "num_compilations_after_ready",
    ),
    _gauge(
        "cache_config_info",
        "1, with the size of the KV cache on the device as labels.",
        lambda now: {(str(now.block_size), str(now.num_blocks)): 1},
        labels=("block_size", "num_gpu_blocks"),
        in_vllm=True,
    ),
    _gauge(
        "lora_requests_info",
        "Unix time now, with the adapters of unfinished requests as labels.",
        _adapters,
        labels=("max_lora", "running_lora_adapters", "waiting_lora_adapters"),
        in_vllm=True,
    ),
]

VLLM_ONLY = [
    _counter(
        "prefix_cache_queries",
        "Prompt tokens that were looked up in the prefix cache.",
        "num_prompt_tokens",
        in_vllm=True,
    ),
    _counter(
        "prefix_cache_hits",
        "Of those, tokens found on the device.",
        lambda now: _cached_tokens(now)["device"],
        in_vllm=True,
    ),
    _counter(
        "external_prefix_cache_hits",
        "Prompt tokens found in host memory and on disk.",
        lambda now: now.num_cached_prompt_tokens - _cached_tokens(now)["device"],
        in_vllm=True,
    ),
    _counter(
        "prompt_tokens_cached",
        "Prompt tokens found in the prefix cache.",
        "num_cached_prompt_tokens",
        in_vllm=True,
    ),
    _counter("num_preemptions", "Preemptions.", "num_preemptions", in_vllm=True),
    _counter(
        "request_success",
        "Finished requests by reason.",
        "num_finished",
        ("finished_reason",),
        in_vllm=True,
    ),
]
"""Numbers of ours, served under vLLM's names and labels only."""
