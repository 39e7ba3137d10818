"""What is refused with several workers, and why."""

import dataclasses

import pytest

from engine_core.errors import ConfigurationError
from engine_core.options.adapters import AdapterOptions
from engine_core.options.checks import check_options
from engine_core.options.engine import EngineOptions
from engine_core.options.pooling import PoolingOptions
from engine_core.options.scheduling import SchedulingOptions
from engine_core.options.speculation import SpeculationOptions
from engine_core.options.workers import ParallelOptions

TWO = ParallelOptions(tensor_parallel_size=2)
STAGES = ParallelOptions(pipeline_parallel_size=2)


@pytest.mark.parametrize(
    ("parallel", "option", "more"),
    [
        (
            TWO,
            "--draft-model",
            {"speculation": SpeculationOptions(speculative="draft", draft_model="d")},
        ),
        (TWO, "--prefix-cache-dir", {"prefix_cache_dir": "/tmp"}),
        (TWO, "--enable-lora", {"adapters": AdapterOptions(enable_lora=True)}),
        (TWO, "--enable-prompt-embeds", {"enable_prompt_embeds": True}),
        (TWO, "--logits-processors", {"logits_processors": ("a:B",)}),
        (TWO, "--model-impl transformers", {"model_impl": "transformers"}),
        (TWO, "--runner pooling", {"pooling": PoolingOptions(runner="pooling")}),
        (STAGES, "--num-decode-steps", {"scheduling": SchedulingOptions(num_decode_steps=4)}),
    ],
)
def test_what_several_workers_cannot_do_is_refused_with_reason_and_advice(parallel, option, more):
    options = EngineOptions(model="m", **more)
    check_options(options)
    with pytest.raises(ConfigurationError) as refused:
        check_options(dataclasses.replace(options, parallel=parallel))
    text = str(refused.value)
    assert text.startswith(f"{option} is not supported with 2 workers: ")
    assert "; " in text


def test_decode_steps_are_no_matter_of_tensor_parallelism():
    scheduling = SchedulingOptions(num_decode_steps=4)
    check_options(EngineOptions(model="m", scheduling=scheduling, parallel=TWO))


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"parallel": ParallelOptions(data_parallel_size=2)}, "this command starts one engine"),
        (
            {"parallel": ParallelOptions(data_parallel_size=2, data_parallel_rank=2)},
            "--data-parallel-rank is 2",
        ),
        ({"parallel": ParallelOptions(num_joining=1)}, "no effect without each other"),
        ({"parallel": ParallelOptions(workers_bind="tcp://h:1")}, "no effect without each other"),
        (
            {
                "parallel": ParallelOptions(
                    tensor_parallel_size=2, num_joining=2, workers_bind="tcp://h:1"
                )
            },
            "--num-joining is 2, and there are 2 workers",
        ),
        (
            {"parallel": ParallelOptions(join="tcp://h:1"), "dtype": "float32"},
            "--dtype has no effect with --join",
        ),
        (
            {"parallel": ParallelOptions(join="tcp://h:1", tensor_parallel_size=2)},
            "--join comes alone",
        ),
    ],
)
def test_options_for_workers_without_effect_are_refused(options, why):
    with pytest.raises(ConfigurationError, match=why):
        check_options(EngineOptions(model="m", **options))
    check_options(EngineOptions(model="m", parallel=ParallelOptions(join="tcp://h:1")))
