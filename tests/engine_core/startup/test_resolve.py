"""The configuration on a GPU, whose memory is numbers and which runs nothing."""

import json
from types import SimpleNamespace

import pytest
import torch
from fake_gpu import GIB, MIB, FakeGpu

from engine_core.errors import ConfigurationError, StartupError
from engine_core.model_files import ConfigOnly
from engine_core.models.loading import load_dummy_model
from engine_core.options.engine import EngineOptions
from engine_core.options.scheduling import SchedulingOptions
from engine_core.startup import build as build_module
from engine_core.startup import resolve as resolve_module
from engine_core.startup.before_torch import open_model
from engine_core.startup.build import build_engine
from engine_core.startup.device import Numbers
from engine_core.startup.model import LoadedModel
from engine_core.startup.phases import StartPhases
from engine_core.startup.resolve import plan_runner, resolve_config
from engine_core.startup.runner_spec import RunnerSpec

CONFIG = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 64,
    "intermediate_size": 40, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": 61, "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5, "eos_token_id": 7,
}  # fmt: skip
BLOCK_BYTES = 2 * 16 * 2 * 2 * 16 * 2  # layers, slots, keys and values, heads, head size, bytes
STEP_BYTES = 1 * GIB


@pytest.fixture
def files(tmp_path):
    (tmp_path / "shape.json").write_text(json.dumps(CONFIG))
    return ConfigOnly(tmp_path / "shape.json")


@pytest.fixture
def loaded(ops):
    """On a GPU, as far as it says."""
    model = load_dummy_model(CONFIG, dtype=torch.bfloat16, ops=ops)
    device = SimpleNamespace(device=torch.device("cuda", 0), num_threads=1, instruction_set="sm_90")
    return LoadedModel(
        model,
        device,
        Numbers("bfloat16", torch.bfloat16),
        "LlamaForCausalLM",
        "native",
        "bfloat16",
        is_packed=False,
    )


@pytest.fixture
def resolve(files, loaded, monkeypatch):
    """(options) -> the configuration on a GPU with 10 GiB, 5.5 of them free."""
    monkeypatch.setattr(resolve_module, "CudaMeter", lambda device: FakeGpu())
    monkeypatch.setattr(RunnerSpec, "measure_step_bytes", lambda self, meter: STEP_BYTES)

    def resolve(**options):
        limits = {n: options.pop(n) for n in ("max_num_seqs",) if n in options}
        options = EngineOptions(model="m", scheduling=SchedulingOptions(**limits), **options)
        return resolve_config(plan_runner(options, files, loaded), files, address="ipc://a")

    return resolve


def test_the_cache_gets_what_the_fraction_leaves_beside_the_measured_step(resolve):
    """Proves S194."""
    config = resolve(max_num_seqs=10**6)
    assert config.num_blocks == (9 * GIB - int(4.5 * GIB) - STEP_BYTES - 256 * MIB) // BLOCK_BYTES
    assert (config.device, config.dtype, config.kv_cache_dtype) == ("cuda", "bfloat16", "bfloat16")
    assert config.scheduler.max_num_batched_tokens == 8192
    assert resolve(memory_fraction=0.6, max_num_seqs=10**6).num_blocks < config.num_blocks // 4


def test_an_8_bit_cache_has_twice_the_blocks_in_the_same_bytes(resolve):
    plain = resolve(kv_cache_memory=GIB)
    small = resolve(kv_cache_memory=GIB, kv_cache_dtype="fp8")
    assert small.kv_cache_dtype == "float8_e4m3fn"
    assert small.num_blocks == 2 * plain.num_blocks
    assert small.kv_cache_bytes == plain.kv_cache_bytes == GIB


def test_options_of_the_device_are_in_the_configuration(resolve):
    config = resolve(batch_invariant=True, capture_at_start=True, max_num_seqs=32)
    assert (config.batch_invariant, config.capture_at_start) == (True, True)
    assert (config.scheduler.max_num_seqs, config.load_format) == (32, "auto")
    assert not config.enforce_eager
    assert resolve(enforce_eager=True).enforce_eager


def test_a_cache_by_hand_that_leaves_no_room_for_a_step_is_refused(resolve):
    resolve(kv_cache_memory=4 * GIB)
    with pytest.raises(
        ConfigurationError, match=r"4,352\.0 MiB are free beside 1,024\.0 MiB for .* step"
    ):
        resolve(kv_cache_memory=5 * GIB)


def test_host_blocks_are_not_taken_from_the_gpu(resolve, monkeypatch):
    monkeypatch.setattr("engine_core.startup.memory.available_memory_bytes", lambda: GIB)
    config = resolve(kv_cache_memory=4 * GIB, host_cache_memory=GIB)
    assert config.host_cache_bytes == GIB


def test_a_gpu_without_room_for_the_weights_is_one_line_for_the_operator(monkeypatch, tmp_path):
    def load(options, files, device, collectives):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 9 GiB. GPU 0 has ...")

    monkeypatch.setattr(build_module, "load_with_draft", load)
    (tmp_path / "shape.json").write_text(json.dumps(CONFIG))
    options = EngineOptions(load_format="dummy", model_config=tmp_path / "shape.json")
    with pytest.raises(StartupError, match=r"not enough memory .*\(CUDA out of memory\); lower"):
        build_engine(
            options, open_model(options), SimpleNamespace(address="ipc://a"), None, StartPhases()
        )
