"""The largest step, planned and run on a real runner."""

import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from engine_core.kv_cache import KVCacheGroupSpec, PoolIds
from engine_core.model_runner.gpu.step_buckets import StepBuckets
from engine_core.models.loading import load_dummy_model
from engine_core.options.engine import EngineOptions
from engine_core.scheduler import SchedulerConfig
from engine_core.startup import runner_spec
from engine_core.startup.device import Numbers
from engine_core.startup.model import LoadedModel
from engine_core.startup.runner_spec import RunnerSpec, profile_steps, prompt_lengths
from kernels.interface.device_steps import SamplingMode

sys.path.insert(0, str(Path(__file__).parents[1] / "model_runner"))
sys.path.insert(0, str(Path(__file__).parents[1] / "model_runner" / "gpu"))
from fake_device import PaddedOperations, SynchronousQueue
from fake_gpu import FakeGpu
from runners import runner_config

from tests.kernels.torch_device_steps import TorchDeviceSteps

MIB = 1024**2
GROUPS = [KVCacheGroupSpec(), KVCacheGroupSpec(2, pool=1)]
CONFIG = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 24,
    "intermediate_size": 40, "num_hidden_layers": 2, "num_attention_heads": 3,
    "num_key_value_heads": 1, "vocab_size": 61, "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
}  # fmt: skip


def limits(**changes):
    values = {
        "max_num_batched_tokens": 100, "max_num_seqs": 8, "max_model_len": 64, "block_size": 4,
        "max_num_drafts": 0, "layout": SimpleNamespace(group_specs=GROUPS),
        "block_ids": PoolIds([1, 1]),
    }  # fmt: skip
    return SimpleNamespace(**values | changes)


@pytest.mark.parametrize(
    ("changes", "lengths"),
    [
        ({}, [63, 31, 1, 1, 1, 1, 1, 1]),
        ({"max_num_batched_tokens": 5}, [1, 1, 1, 1, 1]),
        ({"max_num_batched_tokens": 8}, [1] * 8),
        ({"max_num_seqs": 1}, [63]),
        ({"max_model_len": 2}, [1] * 8),
    ],
)
def test_the_step_has_all_rows_and_as_many_tokens_as_they_can_hold(changes, lengths):
    """Proves S194: the load is the largest."""
    assert prompt_lengths(limits(**changes)) == lengths


def test_every_row_samples_and_tables_hold_one_token_more():
    first, second, last = profile_steps(limits(), num_logprobs=5)
    assert first.total_num_scheduled_tokens == 100
    assert second.total_num_scheduled_tokens == 8
    assert (last.total_num_scheduled_tokens, len(last.finished_req_ids)) == (0, 8)
    for new in first.scheduled_new_reqs:
        assert new.sampling_params.logprobs == 5
        assert new.sampling_params.prompt_logprobs == 5
        assert new.sampling_params.has_penalties
        keys, states = new.block_ids
        assert len(keys) * 4 > len(new.prompt_token_ids)
        assert len(states) == len(keys)
        assert set(keys) == {1} and set(states) == {2}, "each pool's first block"


@pytest.mark.parametrize(
    ("changes", "number"),
    [({}, 20), ({"max_num_batched_tokens": 12}, 4), ({"max_model_len": 4, "max_num_seqs": 3}, 0)],
)
def test_the_largest_decode_verifies_as_many_drafts_as_there_may_be(changes, number):
    config = limits(max_num_drafts=20, **changes)
    first, second, _ = profile_steps(config, num_logprobs=5)
    drafts = second.scheduled_spec_decode_tokens
    assert not first.scheduled_spec_decode_tokens
    assert sum(map(len, drafts.values())) == number
    num_tokens = second.batch.num_computed_tokens + second.batch.num_scheduled_tokens
    for new, length in zip(first.scheduled_new_reqs, num_tokens.tolist(), strict=True):
        assert length <= config.max_model_len
        assert len(new.block_ids[0]) * config.block_size >= length


class Meter:
    """Counts; the memory that it shows is constant."""

    def __init__(self):
        self.num_releases = 0

    def release(self):
        self.num_releases += 1

    def total_bytes(self):
        return 1000

    def free_bytes(self):
        return 400

    def held_bytes(self):
        return 500

    def peak_held_bytes(self):
        return 500


@pytest.fixture(autouse=True)
def device_is_this_cpu(monkeypatch):
    monkeypatch.setattr(runner_spec, "device_step_operations", lambda device: TorchDeviceSteps())
    monkeypatch.setattr(runner_spec, "CudaQueue", lambda device: SynchronousQueue())


@pytest.mark.parametrize("on_device", [False, True])
@pytest.mark.parametrize("max_num_batched_tokens", [3, 40])
def test_a_runner_of_one_block_carries_the_plans_out(ops, max_num_batched_tokens, on_device):
    ops = PaddedOperations() if on_device else ops
    spec = make_spec(
        ops, max_num_batched_tokens=max_num_batched_tokens, max_num_drafts=9, on_device=on_device
    )
    plans = spec.profile_steps()
    runner = spec.build(num_blocks=1, num_host_blocks=0, max_model_len=64)
    spec.warm_up(runner)
    num_rows = min(7, max_num_batched_tokens)
    for plan in plans[:2]:
        answer = runner.execute(plan)
        assert len(answer.sampled_token_ids) == num_rows
        assert not answer.failures
        assert len(answer.logprobs) == num_rows
        assert answer.verified_token_ids.keys() == plan.scheduled_spec_decode_tokens.keys()
        assert len(answer.prompt_logprobs) == sum(
            length > 1 for length in plan.batch.num_scheduled_tokens
        ) * (plan is plans[0])
    assert not runner.execute(plans[2]).req_ids
    assert not runner.rows.row_of
    meter = Meter()
    if on_device:
        num_graphs = num_graphs_of(min(7 + 9, max_num_batched_tokens), max_num_batched_tokens)
        assert spec.measure_step_bytes(meter) == num_graphs * 12 * MIB  # nothing else grew
        assert meter.num_releases == 2


def num_graphs_of(num_sequences, num_tokens):
    """Decodes in each mode of sampling and only up to the logits; mixed steps in two modes."""
    buckets = StepBuckets.up_to(num_sequences, num_tokens)
    return (len(SamplingMode) + 1) * len(buckets.decodes) + 2 * len(buckets.mixed)


def test_what_is_measured_is_a_step_beside_the_graphs(monkeypatch):
    """Proves S194: while serving, both have their memory at once."""
    gpu, queue = FakeGpu(), SynchronousQueue()

    def launch(work):
        work()
        gpu.take(600 * MIB)
        gpu.drop(600 * MIB)
        return lambda: None

    pool = [300 * MIB]  # of all graphs, as the first is the largest

    def capture(work):
        gpu.held += pool.pop() if pool else 0
        gpu.peak = max(gpu.peak, gpu.held)
        return work

    queue.launch, queue.capture = launch, capture
    monkeypatch.setattr(runner_spec, "CudaQueue", lambda device: queue)
    spec = make_spec(PaddedOperations(), on_device=True)
    gpu.release()
    num_graphs = num_graphs_of(7, spec.config.max_num_batched_tokens)
    cache = 2 * spec.config.layout.block_bytes
    assert spec.measure_step_bytes(gpu) == (900 + num_graphs * 12) * MIB - cache


def test_eager_steps_use_no_graph_and_no_memory_for_any(caplog):
    caplog.set_level("INFO")
    for enforce_eager in (False, True):
        spec = make_spec(PaddedOperations(), on_device=True, enforce_eager=enforce_eager)
        runner = spec.build(num_blocks=8, num_host_blocks=0, max_model_len=64)
        spec.warm_up(runner)
        for plan in spec.profile_steps():  # the second one only decodes
            assert not runner.execute(plan).failures
        assert (len(runner.graphs) == 0) is enforce_eager
        assert ("no CUDA graphs" in caplog.text) is enforce_eager
    assert spec.measure_step_bytes(Meter()) == 0


def make_spec(
    ops, *, max_num_batched_tokens=40, max_num_drafts=0, enforce_eager=False, on_device=False
):
    model = load_dummy_model(CONFIG, dtype=torch.float32, ops=ops)
    values = dict(  # noqa: C408
        loaded=LoadedModel(
            model,
            ops,
            Numbers("float32", torch.float32),
            "LlamaForCausalLM",
            "native",
            "float32",
            is_packed=False,
        ),
        config=runner_config(
            model,
            ops,
            num_blocks=1,
            max_num_seqs=7,
            max_num_batched_tokens=max_num_batched_tokens,
            max_num_drafts=max_num_drafts,
            eos_token_ids=(),
        ),
        scheduler=SchedulerConfig(
            max_num_seqs=7, max_num_batched_tokens=max_num_batched_tokens, max_model_len=64
        ),
        options=EngineOptions(enforce_eager=enforce_eager),
    )
    return RunnerSpec(**values, on_device=on_device)
