"""Inverse frequencies against transformers' own functions."""

import pytest
import torch
import transformers
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from engine_core.layers.rotary import RotaryTable, rotary_rows
from engine_core.models.config_fields import ConfigFields
from engine_core.models.rotary_config import read_rotary
from tests.covering import covering_pairs


@covering_pairs(
    theta=[10_000.0, 500_000.0, 1_000_000.0],
    scaling=[
        {"rope_type": "linear", "factor": 4.0},
        {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 8192},
        {
            "rope_type": "yarn",
            "factor": 40.0,
            "original_max_position_embeddings": 4096,
            "mscale": 1.0,
            "mscale_all_dim": 0.7,
            "beta_fast": 16,
            "beta_slow": 2,
        },
        {"rope_type": "yarn", "factor": 1.0, "truncate": False},
        {"rope_type": "yarn", "factor": None, "original_max_position_embeddings": 2048},
        {
            "rope_type": "llama3",
            "factor": 32.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        },
    ],
    head_size=[6, 64, 128],
)
def test_frequencies_and_factor_equal_those_of_transformers(theta, scaling, head_size):
    parameters = {"rope_theta": theta, **scaling}
    config = transformers.LlamaConfig(
        hidden_size=4 * head_size,
        num_attention_heads=4,
        max_position_embeddings=32_768,
        rope_parameters=dict(parameters),
    )
    expected, expected_factor = ROPE_INIT_FUNCTIONS[scaling["rope_type"]](config, None)
    fields = ConfigFields({"max_position_embeddings": 32_768, "rope_parameters": parameters})
    resolved = read_rotary(fields, head_size=head_size)
    frequencies = torch.tensor(resolved.inverse_frequencies)
    torch.testing.assert_close(frequencies, expected, rtol=1e-6, atol=0)
    assert resolved.factor == pytest.approx(expected_factor)


def test_table_equals_transformers_rotary_embedding_far_out():
    config = transformers.LlamaConfig(hidden_size=64, num_attention_heads=1)
    module = transformers.models.llama.modeling_llama.LlamaRotaryEmbedding(config)
    positions = torch.tensor([[0, 1, 4095, 99_999]])
    cos, sin = module(torch.zeros(1), positions)
    resolved = read_rotary(ConfigFields(config.to_dict()), head_size=64)
    table = rotary_rows(resolved, 0, 100_000, torch.float32)[positions[0]]
    torch.testing.assert_close(table[:, :32], cos[0, :, :32])
    torch.testing.assert_close(table[:, 32:], sin[0, :, :32])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_table_grows_with_the_positions_that_are_used_and_keeps_its_rows(dtype):
    config = read_rotary(ConfigFields({"max_position_embeddings": 10**9}), head_size=8)
    table = RotaryTable(config, limit=100_000, dtype=dtype, device=torch.device("cpu"))
    held = table.cos_sin_PD  # as layers hold it
    assert len(held) <= 2**14
    assert not table.cover(len(held))
    assert table.cover(len(held) + 1)
    assert len(held) == 2**15
    assert table.cover(99_999)
    assert len(held) == 100_000
    assert not table.cover(100_001)
    assert torch.equal(held, rotary_rows(config, 0, 100_000, dtype))
