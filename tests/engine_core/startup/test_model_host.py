"""Memory that is not there when the model behind a serving engine changes."""

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from engine_core.errors import RequestRefused
from engine_core.executor import InProcessExecutor
from engine_core.model_files import open_model_files
from engine_core.options.engine import EngineOptions
from engine_core.startup.model import load_any_model
from engine_core.startup.model_host import LocalModelHost
from engine_core.startup.resolve import plan_runner, resolve_config
from engine_core.startup.runner_spec import RunnerSpec


@pytest.fixture(scope="module")
def tiny_llama(tmp_path_factory):
    config = LlamaConfig(
        vocab_size=97, hidden_size=48, intermediate_size=96, num_hidden_layers=2,
        num_attention_heads=6, num_key_value_heads=2, max_position_embeddings=128,
    )  # fmt: skip
    folder = tmp_path_factory.mktemp("tiny-llama")
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


@pytest.fixture
def host(tiny_llama):
    options = EngineOptions(model=str(tiny_llama), num_blocks=64)
    files = open_model_files(options.model, report=print)
    spec = plan_runner(options, files, load_any_model(options, files, torch.device("cpu")))
    config = resolve_config(spec, files, address="ipc://a")
    runner = spec.build(
        num_blocks=config.num_blocks,
        num_host_blocks=0,
        max_model_len=config.scheduler.max_model_len,
    )
    return LocalModelHost(spec, config, files, InProcessExecutor(runner), runner, None)


@pytest.fixture
def no_memory(monkeypatch):
    def build(self, **_):
        raise MemoryError("8 GiB")

    with monkeypatch.context() as patch:
        patch.setattr(RunnerSpec, "build", build)
        yield patch.undo


def runner_of(host):
    return host._executor.runner


def test_weights_whose_runner_has_no_room_are_refused_and_the_old_ones_serve_on(
    host, tiny_llama, no_memory
):
    before = runner_of(host)
    host.open(str(tiny_llama))
    with pytest.raises(RequestRefused, match="not enough memory"):
        host.update()
    assert runner_of(host) is before
    no_memory()
    host.open(str(tiny_llama))
    host.update()
    assert runner_of(host) is not before


@pytest.mark.parametrize("weights", [False, True])
def test_an_engine_without_room_to_wake_up_sleeps_on(host, tiny_llama, no_memory, weights):
    host.release(weights=weights)
    with pytest.raises(RequestRefused, match="not enough memory"):
        host.restore()
    assert runner_of(host) is None
    host.open(str(tiny_llama))
    host.update()
    assert runner_of(host) is None, "an update ended the sleep"
    no_memory()
    host.restore()
    assert runner_of(host) is not None
