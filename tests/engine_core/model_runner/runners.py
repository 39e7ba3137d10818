"""Configurations of runners around tiny models, and the weights of models of transformers."""

import torch

from engine_core.model_runner.config import RunnerConfig
from engine_core.models.loading import load_model

DEFAULTS = {
    "num_blocks": 150,
    "block_size": 4,
    "max_num_seqs": 8,
    "max_model_len": 64,
    "max_num_batched_tokens": 512,
    "dtype": torch.float32,
    "kv_dtype": torch.float32,
    "eos_token_ids": (7,),
}


def load_reference(reference, ops, tensors=None):
    """The weights of a model of transformers in ours. `tensors`: None: by their names there."""
    tensors = reference.state_dict() if tensors is None else tensors
    return load_model(reference.config.to_dict(), tensors.items(), dtype=torch.float32, ops=ops)


def runner_config(model, ops, **options):
    return RunnerConfig(model=model, ops=ops, **DEFAULTS | options)


def spoiled(runner):
    """The runner, with garbage in all its blocks, which it may not read."""
    for pool in runner.storage.pools:
        spoil(pool.device_blocks)
        spoil(pool.host_blocks)
    if torch.cuda.is_initialized():  # a queue's stream waits for no other
        torch.cuda.synchronize()
    return runner


def spoil(blocks, ids=slice(None)):
    """Garbage into blocks of bytes: 2e8 in float32, a scale of 5e33 among bytes."""
    blocks[ids] = 77
