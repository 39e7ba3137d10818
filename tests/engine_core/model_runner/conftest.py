"""Makes the plans of this folder importable, whatever the import mode, and tiny models for them."""

import sys
from pathlib import Path

import pytest
import torch
import transformers

from engine_core.model_runner.cache_layout import plan_cache_layout
from engine_core.model_runner.runner import ModelRunner
from engine_core.models import load_model

sys.path.insert(0, str(Path(__file__).parent))

SHAPE = {
    "vocab_size": 131,
    "hidden_size": 36,
    "intermediate_size": 50,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "max_position_embeddings": 128,
    "initializer_range": 0.3,
    "head_dim": 8,
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


@pytest.fixture(scope="session", params=CONFIGS)
def reference(request):
    """A model of transformers, which answers for the tokens."""
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(
        CONFIGS[request.param], attn_implementation="eager"
    )
    return model.eval()


@pytest.fixture
def make_runner(reference, ops):
    """(options) -> a runner of the reference's weights. What its blocks held before is garbage."""
    model = load_model(
        reference.config.to_dict(), reference.state_dict().items(), dtype=torch.float32, ops=ops
    )

    from plans import spoil

    def make(**options):
        runner = ModelRunner(
            model=model,
            ops=ops,
            layout=plan_cache_layout(model.kv_cache_spec.sliding_windows),
            **{
                "num_blocks": 150,
                "block_size": 4,
                "max_num_seqs": 8,
                "max_model_len": 64,
                "dtype": torch.float32,
                "eos_token_ids": (7,),
                **options,
            },
        )
        for tensors in (runner.storage.device_tensors, runner.storage.host_tensors):
            spoil(tensors)
        return runner

    return make
