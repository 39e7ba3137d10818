"""The daemon's options: read from the command line or a file, and refused by name where they could
have no effect."""

import dataclasses
import os
import subprocess
import sys
from pathlib import Path

import cyclopts
import pytest

from engine_core.cli import app
from engine_core.devices import traits_of
from engine_core.errors import ConfigurationError
from engine_core.options.adapters import AdapterOptions
from engine_core.options.checks import check_device, check_options
from engine_core.options.engine import EngineOptions
from engine_core.options.multimodal import MultiModalOptions
from engine_core.options.pooling import PoolingOptions
from engine_core.options.scheduling import SchedulingOptions
from engine_core.options.security import SecurityOptions
from engine_core.options.speculation import SpeculationOptions
from engine_core.options.values import parse_bytes
from engine_core.options.workers import ParallelOptions
from engine_core.scheduler import SchedulerConfig


def parsed(*arguments) -> EngineOptions:
    _, bound, _ = app.parse_args(
        ["--model", "m", *map(str, arguments)], exit_on_error=False, print_error=False
    )
    return bound.arguments["options"]


def check(options):
    check_options(options)
    options.scheduling.check()


def settings(options):
    return options.scheduling.resolve(max_num_batched_tokens=8, max_num_seqs=2, max_model_len=16)


GIVEN = {
    "scheduling_policy": "fair", "tenant_weight": ("a=2", "b=0.5"), "batching":
    "prefill-first", "prefill_delay_factor": 0.5, "preemption_mode": "swap",
    "slo_tpot_ms": 50.0, "slo_ttft_ms": 900.0,
    "max_queued_requests": 7, "max_queued_tokens": 7000, "max_num_partial_prefills": 4,
    "max_long_partial_prefills": 2, "long_prefill_token_threshold": 100,
}  # fmt: skip


def test_every_scheduling_option_is_read_from_the_command_line():
    arguments = [
        f"--{name.replace('_', '-')}={text}"
        for name, value in GIVEN.items()
        for text in (value if isinstance(value, tuple) else (value,))
    ]
    options = parsed("--host-cache-memory=1GiB", *arguments)
    assert {name: getattr(options.scheduling, name) for name in GIVEN} == GIVEN
    check(options)
    config = dataclasses.asdict(settings(options))
    given = {name: value for name, value in GIVEN.items() if name != "tenant_weight"}
    assert given.items() <= config.items()
    assert config["tenant_weights"] == {"a": 2.0, "b": 0.5}


def test_every_scheduling_option_is_a_setting_of_the_scheduler_of_the_same_name():
    settings = {field.name for field in dataclasses.fields(SchedulerConfig)}
    options = {field.name for field in dataclasses.fields(SchedulingOptions)}
    assert options - settings == {"tenant_weight"}


def test_what_is_not_given_is_what_the_device_says_or_the_scheduler():
    assert settings(parsed()) == SchedulerConfig(
        max_num_batched_tokens=8, max_num_seqs=2, max_model_len=16, max_queued_requests=65_536
    )
    assert settings(parsed("--max-num-seqs=5")).max_num_seqs == 5


def test_sizes_and_switches_are_read():
    options = parsed(
        "--host-cache-memory", "2GiB", "--no-force-preemption", "--scheduling-policy", "priority"
    )
    assert (options.host_cache_memory, options.scheduling.force_preemption) == (2**31, False)
    check(options)


def test_they_may_stand_in_a_toml_file(tmp_path, monkeypatch):
    file = tmp_path / "engine.toml"
    file.write_text(
        'scheduling-policy = "fair"\ntenant_weight = ["a=2", "b=3"]\nmax_queued_requests = 5\n'
        'host_cache_memory = "1MiB"\n'
    )
    monkeypatch.setattr(app, "config", [cyclopts.config.Toml(file, must_exist=True)])
    options = parsed()
    assert settings(options).tenant_weights == {"a": 2.0, "b": 3.0}
    assert (options.scheduling.max_queued_requests, options.host_cache_memory) == (5, 2**20)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--no-force-preemption"], "--no-force-preemption has no effect"),
        (["--scheduling-policy", "fair", "--tenant-weight", "a"], "'a' is not NAME=WEIGHT"),
        (["--scheduling-policy", "fair", "--tenant-weight", "a=0"], "a weight above 0"),
        (["--scheduling-policy", "fair", "--tenant-weight", "a=nan"], "a weight above 0"),
        (
            ["--scheduling-policy", "fair", "--tenant-weight", "a=1", "--tenant-weight", "a=2"],
            "names 'a' twice",
        ),
        (["--preemption-mode", "swap"], "give --host-cache-memory"),
        (["--preemption-mode", "auto"], "give --host-cache-memory"),
        (
            [
                "--host-cache-memory", "1GiB", "--preemption-mode", "recompute",
                "--no-enable-prefix-caching",
            ],
            "--host-cache-memory has no effect",
        ),
        (["--trace", "/no/such/folder/file"], "there is no folder /no/such/folder"),
        (
            ["--device", "cpu", "--kv-cache-dtype", "fp8"],
            "--kv-cache-dtype fp8 needs a GPU: .* use auto, or run with --device cuda",
        ),
        (
            ["--device", "cuda", "--kv-cache-dtype", "int8"],
            "--kv-cache-dtype int8 is for float32 models on a CPU; use auto or fp8",
        ),
        (
            ["--device", "cuda", "--kv-cache-dtype", "bfloat16"],
            "--kv-cache-dtype bfloat16 is for float32 models on a CPU",
        ),
        (["--device", "cpu", "--capture-at-start"], "--capture-at-start has no effect on a CPU"),
        (["--device", "cpu", "--cpu-experts", "3"], "--cpu-experts 3 has no effect on a CPU"),
        (
            ["--device", "cuda", "--cpu-experts", "3", "--capture-at-start"],
            "--capture-at-start has no effect with --cpu-experts",
        ),
        (["--load-format", "dummy"], "--load-format dummy needs a shape"),
        (
            ["--load-format", "dummy", "--model-config", "c.json"],
            "--model m has no effect with --load-format dummy",
        ),
        (["--model-config", "c.json"], "--model-config has no effect without --load-format dummy"),
        (["--slo-tpot-ms", "nan"], "slo_tpot_ms is nan"),
        (["--drain-timeout", "inf"], "--drain-timeout is inf"),
    ],
)  # fmt: skip
def test_what_could_have_no_effect_is_refused_by_name(arguments, words):
    with pytest.raises(ConfigurationError, match=words):
        check(parsed(*arguments))


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("scheduling-policy", "lottery"),
        ("batching", "decode-first"),
        ("preemption-mode", "kill"),
        ("host-cache-memory", "-1"),
        ("memory-fraction", "nan"),
    ],
)
def test_values_outside_their_limits_are_refused(name, value):
    with pytest.raises(cyclopts.CycloptsError, match=name):
        parsed(f"--{name}={value}")


def test_a_model_or_the_shape_of_one_must_be_named():
    with pytest.raises(ConfigurationError, match="--model is missing; name a folder"):
        check_options(EngineOptions())
    shape = {"load_format": "dummy", "model_config": Path("c.json")}
    check_options(EngineOptions(**shape))
    with pytest.raises(ConfigurationError, match="--tokenizer has no effect"):
        check_options(EngineOptions(**shape, tokenizer="folder"))


def test_a_gpus_options_are_read_and_wait_for_the_device_to_be_known():
    options = parsed("--kv-cache-dtype=fp8", "--capture-at-start", "--batch-invariant")
    check_options(options)  # device is auto: not known yet
    check_device(options, traits_of("cuda"))
    with pytest.raises(ConfigurationError, match="run with --device cuda"):
        check_device(options, traits_of("cpu"))
    assert (options.batch_invariant, options.capture_at_start) == (True, True)


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (("--block-size=24",), "--block-size is 24; on a GPU it must be a power of two"),
        (("--pipeline-parallel-size=2",), "--pipeline-parallel-size is 2, .* on CPUs only"),
    ],
)
def test_what_a_gpu_does_not_do_is_refused_there_alone(words, reason):
    check_device(parsed(*words), traits_of("cpu"))
    with pytest.raises(ConfigurationError, match=reason):
        check_device(parsed(*words), traits_of("cuda"))


def test_eager_steps_may_be_asked_for_anywhere_but_not_with_graphs_from_the_start():
    options = parsed("--enforce-eager")
    assert options.enforce_eager
    check_options(options)
    check_device(options, traits_of("cuda"))
    check_device(options, traits_of("cpu"))  # where every step is eager anyway
    with pytest.raises(ConfigurationError, match="has no effect with --enforce-eager"):
        check_device(parsed("--enforce-eager", "--capture-at-start"), traits_of("cuda"))


def test_nothing_given_is_fair_between_clients_without_limits():
    options = parsed()
    check(options)
    assert options == EngineOptions(model="m")
    assert (settings(options).scheduling_policy, settings(options).batching) == ("fair", "mixed")
    assert (settings(options).preemption_mode, options.host_cache_memory) == ("default", 0)


OPTIONS = (
    EngineOptions,
    AdapterOptions,
    MultiModalOptions,
    PoolingOptions,
    SchedulingOptions,
    SpeculationOptions,
    SecurityOptions,
    ParallelOptions,
)
PARTS = ("adapters", "multimodal", "parallel", "pooling", "scheduling", "speculation", "security")


def test_every_option_has_a_help_text_and_a_group():
    arguments = app.assemble_argument_collection(parse_docstring=True)
    options = [each for each in arguments if not each.children]
    assert len(options) >= sum(len(dataclasses.fields(kind)) for kind in OPTIONS) - len(PARTS)
    for option in options:
        assert option.parameter.help, option.name
        assert option.parameter.group, option.name


def shown(capsys, *arguments):
    app.default_parameter = cyclopts.Parameter(show=False)  # as when the program starts
    app.meta(arguments, exit_on_error=False, result_action="return_value")
    return capsys.readouterr().out


def test_help_shows_the_dozen_common_options_and_help_all_every_one(capsys):
    common, everything = shown(capsys, "--help"), shown(capsys, "--help-all")
    names = [
        f"--{field.name.replace('_', '-')}"
        for options in OPTIONS
        for field in dataclasses.fields(options)
        if field.name  # the last one is broken over a line
        not in (*PARTS, "long_prefill_token_threshold", "max_num_encoder_input_tokens")
    ]
    assert len([name for name in names if f" {name} " in common]) == 14
    assert not [name for name in names if name not in everything]
    assert "--help-all" in common
    assert "Advanced scheduling" in everything
    assert "Advanced scheduling" not in common


def test_reading_options_needs_no_torch():
    code = "import sys, engine_core.cli; sys.exit('torch' in sys.modules or 'zmq' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], env=dict(os.environ)).returncode == 0


@pytest.mark.parametrize(
    ("text", "size"), [("2GiB", 2**31), ("512MB", 512 * 10**6), ("1.5k", 1500), ("7", 7)]
)
def test_sizes(text, size):
    assert parse_bytes(text) == size


def test_a_tenants_name_may_hold_an_equals_sign():
    options = parsed("--scheduling-policy", "fair", "--tenant-weight", "a=b=2.5")
    assert settings(options).tenant_weights == {"a=b": 2.5}
