"""Encoder-decoder models over the paged cache against transformers' plain forward."""

import itertools
import json
import sys
from pathlib import Path

import pytest
import torch
import transformers

from engine_core.errors import StartupError
from engine_core.model_files import open_model_files
from engine_core.models.encoder_decoder.loading import load_encoder_decoder
from engine_core.models.errors import UnsupportedArchitecture
from engine_core.options.pooling import PoolingOptions
from engine_core.startup.encoder_decoder import encoder_info
from engine_core.startup.pooled_files import pooled_files
from kernels.interface.operations import AttentionSpec
from protocol.sampling import GenerationRules

sys.path.insert(0, str(Path(__file__).parent))
from encoder_decoder_folders import encoder_input, make_folder
from published_configs import PUBLISHED

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
        first = len(self.caches[0].keys) - num_more
        ids = torch.randperm(num_more, generator=torch.Generator().manual_seed(1)) + first
        self.encoder_tables = ids.view(-1, width).int()
        self.encoder_lens = torch.tensor([len(states) for states in hidden]).int()
        for table, states in zip(self.encoder_tables.long(), hidden, strict=True):
            at = torch.arange(len(states))
            slots = table[at // block_size] * block_size + at % block_size
            model.write_encoded(states, slots, self.caches, ops)
        spec, keys = model.spec, model.spec.keys_of(0)
        num_tokens = sum(map(len, sequences))
        self.encoder_planner = ops.make_attention_planner(
            AttentionSpec(
                num_query_heads=spec.num_query_heads,
                num_kv_heads=keys.num_kv_heads,
                head_size=keys.key_size,
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


@pytest.mark.parametrize("family", PUBLISHED)
def test_logits_in_pieces_are_transformers_at_once(family, ops, tmp_path):
    """Of folders with the very keys of published ones. Proves S144."""
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


@pytest.mark.parametrize("family", PUBLISHED)
def test_what_holds_for_any_answer_is_read_of_a_published_folder_as_transformers_does(
    family, tmp_path
):
    folder, _ = make_folder(family, tmp_path)
    auto = transformers.GenerationConfig.from_pretrained(folder, config_file_name="config.json")
    files = pooled_files(open_model_files(str(folder), report=print), PoolingOptions())
    assert files.generates
    assert files.eos_token_ids == (auto.eos_token_id,)
    model = load_encoder_decoder(folder, files.config, dtype=torch.float32)
    info = encoder_info(model, files.config, files.generation_config)
    assert info.decoder_start_token_ids == (auto.decoder_start_token_id,)
    rules = info.rules or GenerationRules()
    never = [*(auto.suppress_tokens or ()), *itertools.chain(*(auto.bad_words_ids or ()))]
    assert rules.suppressed == tuple(never)
    assert rules.suppressed_first == tuple(auto.begin_suppress_tokens or ())
    assert rules.forced_first == auto.forced_bos_token_id
    assert rules.forced_last == auto.forced_eos_token_id


def test_relative_positions_have_no_end_but_the_one_asked_for(ops, tmp_path):
    """Those of a table have. Distances beyond T5's furthest share a bucket."""
    folder, reference = make_folder("mt5", tmp_path / "mt5")
    config = json.loads((folder / "config.json").read_text())
    usual, short, long = (
        load_encoder_decoder(folder, config, dtype=torch.float32, max_model_len=length)
        for length in (None, 40, 700)
    )
    limits = [each.spec.max_model_len for each in (usual, short, long)]
    assert limits == [512, 512, 700]
    assert [each.max_encoder_tokens for each in (usual, short, long)] == limits
    tensors = encoder_input("mt5", 600)
    assert long.family.num_rows("text", {"input_ids": tensors["input_ids"].numpy()}) == 600
    tokens = torch.randint(3, 131, (200,), generator=torch.Generator().manual_seed(5)).tolist()
    paged = EncodedRun(long, ops, [tokens], [tensors])
    paged.step({0: 150})
    paged.step({0: 50})
    with torch.no_grad():
        expected = reference(
            input_ids=tensors["input_ids"][None], decoder_input_ids=torch.tensor([tokens])
        ).logits[0]
    assert (paged.logits[0] - expected).abs().max() < 1e-4 * float(expected.abs().max())
    folder, _ = make_folder("bart", tmp_path / "bart")
    config = json.loads((folder / "config.json").read_text())
    bart = load_encoder_decoder(folder, config, dtype=torch.float32, max_model_len=700)
    assert bart.spec.max_model_len == bart.max_encoder_tokens == 160


@pytest.mark.parametrize(("family", "name"), [("bart", "BartModel"), ("t5", "T5WithLMHeadModel")])
def test_other_names_of_published_files_are_known(family, name, tmp_path):
    """bart-base and the first T5 files name these; transformers goes by the type."""
    folder, _ = make_folder(family, tmp_path)
    config = json.loads((folder / "config.json").read_text()) | {"architectures": [name]}
    (folder / "config.json").write_text(json.dumps(config))
    files = pooled_files(open_model_files(str(folder), report=print), PoolingOptions())
    assert files.generates
    load_encoder_decoder(folder, files.config, dtype=torch.float32)


@pytest.mark.parametrize("option", [{"runner": "pooling"}, {"convert": "embed"}])
def test_nothing_is_pooled_of_an_encoder_decoder_model(option, tmp_path):
    folder, _ = make_folder("mt5", tmp_path)
    with pytest.raises(StartupError, match="encoder-decoder model, of which nothing is pooled"):
        pooled_files(open_model_files(str(folder), report=print), PoolingOptions(**option))


def test_another_architecture_is_refused_by_name(tmp_path):
    config = {"architectures": ["LongT5ForConditionalGeneration"], "is_encoder_decoder": True}
    with pytest.raises(UnsupportedArchitecture, match=r"LongT5.*supported: Bart"):
        load_encoder_decoder(tmp_path, config, dtype=torch.float32)
