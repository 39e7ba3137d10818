"""Tiny targets of EAGLE-3 heads, and runners with both. Not a test."""

import torch
import transformers
from runners import runner_config, spoiled

from engine_core.model_runner.config import DraftConfig
from engine_core.model_runner.cpu.runner import CPUModelRunner
from engine_core.models.loading import load_eagle_head
from tests.eagle_heads import head_config, head_tensors

WIDTH = 36
SHAPE = {
    "vocab_size": 131,
    "hidden_size": WIDTH,
    "intermediate_size": 50,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "max_position_embeddings": 128,
    "initializer_range": 0.3,
    "head_dim": 8,
}
TARGETS = {
    "llama": transformers.LlamaConfig(**SHAPE, num_hidden_layers=3),
    "qwen3": transformers.Qwen3Config(**SHAPE, num_hidden_layers=4, tie_word_embeddings=True),
}
HEADS = {
    "llama": {"draft_vocab_size": 90},
    "qwen3": {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 2, 3]}},
}


def eagle_reference(name, *, seed=0):
    """A model of transformers with `head` and `head_tensors`."""
    torch.manual_seed(seed)
    model = transformers.AutoModelForCausalLM.from_config(
        TARGETS[name], attn_implementation="eager"
    )
    model.head = head_config(model.config.to_dict(), **HEADS[name])
    model.head_tensors = head_tensors(model.head, seed=seed, own_embedding=name == "qwen3")
    return model.eval()


def eagle_runner(model, ops, config, tensors, **options):
    """A runner of our model with the head of this config, or with none."""
    draft = None
    if config is not None:
        head = load_eagle_head(config, tensors.items(), model, dtype=torch.float32, ops=ops)
        draft = DraftConfig(head, ops)
    return spoiled(CPUModelRunner(runner_config(model, ops, draft=draft, **options)))
