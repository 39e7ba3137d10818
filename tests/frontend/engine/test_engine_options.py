"""vLLM's engine arguments: passed on, taken because they ask for nothing, or refused by name."""

import dataclasses

import pytest
from cyclopts.exceptions import UnknownOptionError

from engine_core.options.engine import EngineOptions
from frontend import LLM
from frontend.engine.engine_options import daemon_arguments
from frontend.errors import EngineStartError, InvalidInput


def parsed(arguments) -> EngineOptions:
    """As the daemon itself would read them."""
    from engine_core.cli import app

    _, bound, _ = app.parse_args(arguments, exit_on_error=False, print_error=False)
    return bound.arguments["options"]


def test_every_option_reaches_the_daemon():
    options = {
        "tokenizer": "folder", "dtype": "float32", "max_model_len": 100, "max_num_seqs": 4,
        "max_num_batched_tokens": 64, "max_chunk_size": 32, "block_size": 8, "num_blocks": 50,
        "kv_cache_memory": 10**9, "memory_fraction": 0.3, "enable_prefix_caching": False,
        "max_logprobs": -1, "num_threads": 1, "log_level": "warning", "model_name": "name",
        "model_impl": "native", "host_cache_memory": 10**8, "preemption_mode": "swap",
        "scheduling_policy": "priority", "force_preemption": False, "priority_ageing_s": 2.5,
        "priority_min_gain": 3, "batching": "prefill-first", "prefill_delay_factor": 0.5,
        "slo_tpot_ms": 50.0, "slo_ttft_ms": 500.0, "max_queued_requests": 9,
        "max_queued_tokens": 999, "max_num_partial_prefills": 3, "max_long_partial_prefills": 1,
        "long_prefill_token_threshold": 64, "device": "cuda", "kv_cache_dtype": "fp8",
        "batch_invariant": True, "capture_at_start": True, "enforce_eager": True,
    }  # fmt: skip
    read = parsed(daemon_arguments("some/model", options))
    assert read.model == "some/model"
    given = dataclasses.asdict(read.scheduling) | dataclasses.asdict(read)
    assert {name: given[name] for name in options} == options


def test_limits_of_inputs_are_a_dictionary():
    read = parsed(daemon_arguments("m", {"limit_mm_per_prompt": {"image": 2}}))
    assert read.multimodal.max_items(("image",)) == {"image": 2}
    assert parsed(daemon_arguments("m", {"limit_mm_per_prompt": {}})) == EngineOptions(model="m")


def test_tenants_weights_are_a_dictionary():
    options = {"scheduling_policy": "fair", "tenant_weights": {"a": 2, "b": 0.5}}
    read = parsed(daemon_arguments("m", options))
    assert read.scheduling.tenant_weight == ("a=2", "b=0.5")
    assert parsed(daemon_arguments("m", {"tenant_weights": None})) == EngineOptions(model="m")


def test_vllms_speculative_config_is_our_options():
    config = {
        "method": "ngram", "num_speculative_tokens": 5, "prompt_lookup_max": 4,
        "prompt_lookup_min": 2, "model": None,
    }  # fmt: skip
    read = parsed(daemon_arguments("m", {"speculative_config": config})).speculation
    assert (read.speculative, read.num_speculative_tokens) == ("ngram", 5)
    assert (read.prompt_lookup_min, read.prompt_lookup_max) == (2, 4)
    legacy = {"model": "[ngram]", "num_speculative_tokens": 3}
    read = parsed(daemon_arguments("m", {"speculative_config": legacy})).speculation
    assert (read.speculative, read.num_speculative_tokens) == ("ngram", 3)
    suffix = parsed(daemon_arguments("m", {"speculative_config": {"method": "suffix"}}))
    assert suffix.speculation.speculative == "suffix"
    own = daemon_arguments("m", {"speculative_config": {"method": "mtp"}})
    assert own[2:] == ["--speculative=mtp"]
    draft = daemon_arguments("m", {"speculative_config": {"model": "small"}})
    assert draft[2:] == ["--speculative=draft", "--draft-model=small"]


@pytest.mark.parametrize(
    ("config", "why"),
    [
        ({"method": "medusa", "model": "x"}, "method is 'medusa'"),
        ({"method": "ngram", "draft_tensor_parallel_size": 2}, "'draft_tensor_parallel_size'"),
        ("ngram", "must be a dictionary"),
    ],
)
def test_a_speculative_config_beyond_ours_is_refused_by_name(config, why):
    with pytest.raises(InvalidInput, match=why):
        daemon_arguments("m", {"speculative_config": config})


def test_none_leaves_the_daemons_default():
    options = dict.fromkeys(["dtype", "max_model_len", "enable_prefix_caching", "num_blocks"])
    assert parsed(daemon_arguments("m", options)) == EngineOptions(model="m")


def test_vllms_other_names_mean_the_same():
    read = parsed(
        daemon_arguments(
            "m",
            {
                "gpu_memory_utilization": 0.5,
                "num_gpu_blocks_override": 9,
                "kv_cache_memory_bytes": 1000,
                "served_model_name": "x",
                "num_scheduler_steps": 4,
            },
        )
    )
    assert read.scheduling.num_decode_steps == 4
    assert (read.memory_fraction, read.num_blocks) == (0.5, 9)
    assert (read.kv_cache_memory, read.model_name) == (1000, "x")
    with pytest.raises(InvalidInput, match="same option"):
        daemon_arguments("m", {"num_blocks": 1, "num_gpu_blocks_override": 2})


def test_logits_processors_are_names():
    names = ["tamed", "my.package:Class"]
    assert parsed(daemon_arguments("m", {"logits_processors": names})).logits_processors == (
        *names,
    )
    assert daemon_arguments("m", {"logits_processors": []}) == ["--model", "m"]
    with pytest.raises(InvalidInput, match="logits_processors holds <class 'int'>, and the engine"):
        daemon_arguments("m", {"logits_processors": [int]})


def test_what_asks_for_nothing_is_accepted():
    neutral = {
        "trust_remote_code": False,
        "disable_log_stats": True, "swap_space": 4, "quantization": None,
        "enable_chunked_prefill": True, "enable_lora": False,
    }  # fmt: skip
    assert daemon_arguments("m", neutral) == ["--model", "m"]


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("tokenizer_mode", "mistral"),
        ("enable_chunked_prefill", False),
        ("load_format", "dummy"),
        ("cpu_offload_gb", 4),
        ("swap_space", 8),
        ("bind", "tcp://127.0.0.1:9"),
        ("exit_on_stdin_eof", True),
        ("parent_pid", 1),
    ],
)
def test_what_it_cannot_do_is_refused_by_name(name, value):
    with pytest.raises(InvalidInput, match=f"does not support {name}="):
        daemon_arguments("m", {name: value})


def test_what_changes_no_answer_is_taken_and_said_once(caplog):
    """vLLM's commonest lines."""
    options = {
        "trust_remote_code": True, "tokenizer_mode": "slow", "async_scheduling": True,
        "distributed_executor_backend": "mp", "compilation_config": {"level": 3},
        "max_seq_len_to_capture": 8192,
    }  # fmt: skip
    assert daemon_arguments("m", options) == ["--model", "m"]
    [record] = caplog.records
    assert all(f"{name}={value!r}" in record.getMessage() for name, value in options.items())


@pytest.mark.parametrize(
    ("name", "value", "meant"),
    [
        ("dtype", "torch.float32", "float32"), ("dtype", "half", "float16"),
        ("dtype", "float", "float32"), ("dtype", "auto", "auto"),
        ("kv_cache_dtype", "fp8_e4m3", "fp8"), ("quantization", None, "auto"),
        ("quantization", "int8", "int8"), ("weight_cache_size", "2GiB", 2**31),
        ("quantization", "awq", "awq"), ("quantization", "awq_marlin", "awq"),
        ("quantization", "gptq_marlin", "gptq"), ("quantization", "gguf", "gguf"),
        ("load_format", "safetensors", "safetensors"), ("load_format", "gguf", "gguf"),
        ("load_format", "auto", "auto"),
    ],
)  # fmt: skip
def test_formats_go_by_all_their_names_and_the_daemon_checks_them(name, value, meant):
    assert getattr(parsed(daemon_arguments("m", {name: value})), name) == meant


def test_an_unknown_option_is_refused_by_the_daemon_with_the_nearest_name():
    with pytest.raises(UnknownOptionError, match="Did you mean --max-num-seqs"):
        parsed(daemon_arguments("m", {"max_nun_seqs": 4}))
    with pytest.raises(EngineStartError, match="Did you mean --max-num-seqs"):
        LLM("m", max_nun_seqs=4)


def test_a_value_that_is_no_text_or_number_is_refused():
    with pytest.raises(InvalidInput, match="max_num_seqs is"):
        daemon_arguments("m", {"max_num_seqs": [4]})
