"""Encoder-decoder models over the paged cache against transformers' plain forward."""

import json
import sys
from pathlib import Path

import pytest
import torch

from engine_core.models import UnsupportedArchitecture
from engine_core.models.encoder_decoder.loading import load_encoder_decoder
from kernels.interface.operations import AttentionSpec

sys.path.insert(0, str(Path(__file__).parent))
from encoder_decoder_folders import CONFIGS, encoder_input, make_folder

from tests.engine_core.conftest import PagedRun, in_awkward_steps

LENGTHS = (1, 9, 37)
"""Of encoder inputs."""


class EncodedRun(PagedRun):
    """As its base; each sequence attends to an encoder's output, in blocks of its own."""

    def __init__(self, model, ops, sequences, inputs, block_size=4):
        hidden = [
            model.encode({name: tensor.numpy() for name, tensor in tensors.items()})
            for tensors in inputs
        ]
        width = max(-(-len(states) // block_size) for states in hidden)
        num_more = width * len(hidden)
        super().__init__(model, ops, sequences, block_size, torch.float32, num_more)
        first = self.caches[0][0].shape[0] - num_more
        ids = torch.randperm(num_more, generator=torch.Generator().manual_seed(1)) + first
        self.encoder_tables = ids.view(-1, width).int()
        self.encoder_lens = torch.tensor([len(states) for states in hidden]).int()
        for table, states in zip(self.encoder_tables.long(), hidden, strict=True):
            at = torch.arange(len(states))
            slots = table[at // block_size] * block_size + at % block_size
            model.write_encoded(states, slots, self.caches, ops)
        spec = model.kv_cache_spec
        num_tokens = sum(map(len, sequences))
        self.encoder_planner = ops.make_attention_planner(
            AttentionSpec(
                num_query_heads=spec.num_query_heads,
                num_kv_heads=spec.num_kv_heads,
                head_size=spec.head_size,
                block_size=block_size,
                sliding_window=None,
                max_num_seqs=num_tokens,
                max_num_batched_tokens=num_tokens,
                max_model_len=model.max_encoder_tokens,
                dtype=torch.float32,
                kv_dtype=torch.float32,
            )
        )

    def encoded(self, row_T):
        num_tokens = len(row_T)
        return self.encoder_planner.plan(
            query_start_loc_R1=torch.arange(num_tokens + 1).int(),
            seq_lens_R=self.encoder_lens[row_T],
            block_table_RM=self.encoder_tables[row_T],
            slot_mapping_T=torch.zeros(num_tokens, dtype=torch.int64),
            num_decodes=num_tokens,
            num_decode_tokens=num_tokens,
        )


@pytest.mark.parametrize("family", CONFIGS)
def test_logits_in_pieces_are_transformers_at_once(family, ops, tmp_path):
    """Proves S144."""
    folder, reference = make_folder(family, tmp_path)
    config = json.loads((folder / "config.json").read_text())
    model = load_encoder_decoder(folder, config, dtype=torch.float32)
    inputs = [encoder_input(family, length) for length in LENGTHS]
    generator = torch.Generator().manual_seed(5)
    sequences = [
        torch.randint(3, 131, (length,), generator=generator).tolist() for length in (23, 1, 40)
    ]
    found = in_awkward_steps(EncodedRun(model, ops, sequences, inputs))
    for tensors, tokens, logits in zip(inputs, sequences, found, strict=True):
        batch = {name: tensor[None] for name, tensor in tensors.items()}
        with torch.no_grad():
            expected = reference(**batch, decoder_input_ids=torch.tensor([tokens])).logits[0]
        assert (logits - expected).abs().max() < 1e-4 * max(1.0, float(expected.abs().max()))


def test_another_architecture_is_refused_by_name(tmp_path):
    config = {"architectures": ["LongT5ForConditionalGeneration"], "is_encoder_decoder": True}
    with pytest.raises(UnsupportedArchitecture, match=r"LongT5.*supported: Bart"):
        load_encoder_decoder(tmp_path, config, dtype=torch.float32)
