"""What a SchedulerConfig refuses, by the option's name."""

import pytest

from engine_core.scheduler import SchedulerConfig

LIMITS = {"max_num_batched_tokens": 64, "max_num_seqs": 8, "max_model_len": 128}
LONG = {"max_long_partial_prefills": 1, "long_prefill_token_threshold": 9}


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"max_num_seqs": 0}, "max_num_seqs is 0, it must be at least 1; raise --max-num-seqs"),
        ({"max_num_batched_tokens": 0}, "max_num_batched_tokens is 0, it must be at least 1"),
        ({"max_model_len": 1}, "max_model_len is 1, it must be at least 2"),
        ({"max_chunk_size": 0}, "raise --max-chunk-size"),
        ({"num_lookahead_slots": -1}, "it must be at least 0"),
        ({"scheduling_policy": "lottery"}, "'lottery', it must be one of fcfs, priority, fair"),
        ({"batching": "decode-first"}, "'decode-first', it must be one of mixed, prefill-first"),
        ({"preemption_mode": "kill"}, "change --preemption-mode"),
        ({"slo_tpot_ms": float("inf")}, "slo_tpot_ms is inf, it must be above 0"),
        ({"slo_tpot_ms": 50.0, "slo_ttft_ms": -1.0}, "raise --slo-ttft-ms"),
        ({"max_queued_requests": 0}, "is 0, it must be at least 1; raise --max-queued-requests"),
        ({"max_queued_tokens": 0}, "raise --max-queued-tokens"),
        ({"max_num_partial_prefills": 0}, "raise --max-num-partial-prefills"),
        ({"priority_min_gain": 0}, "raise --priority-min-gain"),
        ({"priority_ageing_s": 0.0}, "raise --priority-ageing-s"),
        ({"slo_tpot_ms": 0.0}, "slo_tpot_ms is 0.0, it must be above 0"),
        ({"tenant_weights": {"a": 0.0}, "scheduling_policy": "fair"}, "tenant 'a' is 0.0"),
        ({"prefill_delay_factor": -1.0}, "prefill_delay_factor is -1.0"),
        ({"prefill_delay_factor": 0.5}, "no effect with --batching mixed"),
        ({"priority_ageing_s": 3.0}, "no effect with --scheduling-policy fair"),
        (
            {"tenant_weights": {"a": 2.0}, "scheduling_policy": "fcfs"},
            "use --scheduling-policy fair",
        ),
        ({"force_preemption": False}, "--no-force-preemption has no effect"),
        (
            {"scheduling_policy": "priority", "force_preemption": False, "priority_min_gain": 2},
            "--priority-min-gain has no effect with --no-force-preemption",
        ),
        ({"slo_ttft_ms": 5.0}, "--slo-ttft-ms has no effect without --slo-tpot-ms"),
        ({"max_long_partial_prefills": 1}, "one without the other"),
        ({"max_num_shared_tokens": 0}, "raise --max-num-shared-tokens"),
        ({"max_num_shared_tokens": 65}, "is 65, above --max-num-batched-tokens 64; lower it"),
        ({"max_num_shared_tokens": 9, "slo_tpot_ms": 9.0}, "chooses how many tokens each step"),
        ({"num_decode_steps": 0}, "raise --num-decode-steps"),
        ({"num_decode_steps": 4, "slo_tpot_ms": 9.0}, "--slo-tpot-ms chooses what each step"),
        ({"num_decode_steps": 4, "max_steps_in_flight": 2}, "or run with --device cpu"),
        ({**LONG, "max_long_partial_prefills": 3, "max_num_partial_prefills": 2}, "is 3, above"),
    ],
)
def test_a_value_that_cannot_work_is_refused_by_name(settings, message):
    with pytest.raises(ValueError) as raised:
        SchedulerConfig(**{**LIMITS, **settings})
    assert message in str(raised.value)


def test_what_is_not_given_is_off_and_clients_get_fair_shares():
    config = SchedulerConfig(**LIMITS)
    assert (config.scheduling_policy, config.batching) == ("fair", "mixed")
    assert config.max_chunk == 64
    assert SchedulerConfig(**LIMITS, max_chunk_size=100).max_chunk == 64
    assert SchedulerConfig(**LIMITS, max_chunk_size=10, **LONG).max_chunk == 10
