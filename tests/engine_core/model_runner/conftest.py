"""Makes the plans of this folder importable, whatever the import mode, and tiny models for them."""

import sys
from pathlib import Path

import pytest
import torch
import transformers

from engine_core.model_runner.cpu.runner import CPUModelRunner
from kernels.cpu.operations import CpuOperations

sys.path.insert(0, str(Path(__file__).parent))

SHAPE = {
    "vocab_size": 131,
    "hidden_size": 36,
    "intermediate_size": 50,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "max_position_embeddings": 128,
    "initializer_range": 0.3,
    "head_dim": 16,
}
CONFIGS = {
    "one group": transformers.LlamaConfig(**SHAPE, num_hidden_layers=3),
    "four groups": transformers.Gemma3TextConfig(
        **SHAPE,
        num_hidden_layers=8,
        layer_types=(["sliding_attention"] * 3 + ["full_attention"]) * 2,
        sliding_window=6,
        query_pre_attn_scalar=11,
    ),
}


@pytest.fixture(scope="package", autouse=True)
def one_thread():
    """Tiny tensors: torch's other threads would only wait."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def reference(request, ops):
    """A model of transformers, the reference for the tokens: on torch with one group of layers, on
    the native library with four, unless a test names one."""
    named = "four groups" if isinstance(ops, CpuOperations) else "one group"
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(
        CONFIGS[getattr(request, "param", named)], attn_implementation="eager"
    )
    return model.eval()


@pytest.fixture
def make_runner(reference, ops):
    """(options) -> a CPU runner of the reference's weights. What its blocks held before is
    garbage."""
    from runners import load_reference, runner_config, spoiled

    model = load_reference(reference, ops)
    return lambda **options: spoiled(CPUModelRunner(runner_config(model, ops, **options)))
