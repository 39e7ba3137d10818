"""Which models may make drafts, and how they are loaded beside the one that is served; CPU only."""

import dataclasses
import json

import pytest
import torch
import transformers
from safetensors.torch import save_file

from engine_core.errors import ConfigurationError
from engine_core.model_files import ConfigOnly, open_model_files
from engine_core.options.engine import EngineOptions
from engine_core.options.speculation import SpeculationOptions
from engine_core.startup import draft_model, model
from engine_core.startup.draft_model import first_layers_config, load_with_draft
from engine_core.startup.multimodal import with_encoder
from engine_core.startup.prefix_store import store_key
from engine_core.startup.resolve import plan_runner
from kernels.triton.operations import TritonOperations
from tests.eagle_heads import head_config, head_tensors
from tests.engine_core.models.qwen_hybrid_cases import reference_model
from tests.mtp_heads import PublishedMTP

CPU = torch.device("cpu")
SHAPE = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 64,
    "intermediate_size": 96, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": 61, "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "tie_word_embeddings": True, "eos_token_id": 1,
}  # fmt: skip


def options_for(file, draft_model, speculative="draft", **speculation):
    return EngineOptions(
        load_format="dummy",
        model_config=file,
        speculation=SpeculationOptions(
            speculative=speculative,
            draft_model=draft_model,
            num_speculative_tokens=3,
            **speculation,
        ),
    )


@pytest.fixture
def served(tmp_path):
    """(draft model, options) -> options, files and the model with random weights."""
    file = tmp_path / "shape.json"
    file.write_text(json.dumps(SHAPE))

    def load(draft_model, **speculation):
        options, files = options_for(file, draft_model, **speculation), ConfigOnly(file)
        return options, files, load_with_draft(options, files, CPU)

    return load


@pytest.fixture
def saved(tmp_path):
    """(changes of the shape, tokens) -> a folder with a model, and a tokenizer if tokens are
    given."""

    def save(name, **changes):
        torch.manual_seed(0)
        config = transformers.LlamaConfig(**SHAPE | {"num_hidden_layers": 1} | changes)
        transformers.LlamaForCausalLM(config).save_pretrained(tmp_path / name)
        return tmp_path / name

    return save


def test_the_first_layers_share_weights_and_blocks_count_both(served):
    options, files, loaded = served("first-layers:3")
    assert loaded.draft.model.spec.num_layers == 3
    assert loaded.draft.model.vocabulary is loaded.model.vocabulary
    config = plan_runner(options, files, loaded).config
    assert len(config.layout.offsets) == 7
    assert config.draft.model is loaded.draft.model
    plain = load_with_draft(EngineOptions(load_format="dummy", model_config=files.path), files, CPU)
    alone = plan_runner(options, files, plain).config
    assert config.layout.block_bytes * 4 == alone.layout.block_bytes * 7


def test_slots_for_drafts_are_reserved(served):
    assert plan_runner(*served("first-layers:1")).scheduler.num_lookahead_slots == 3


def test_first_layers_of_other_numbers_are_loaded_again(saved):
    """Only those: names of the others come and are dropped."""
    folder = saved("target", num_hidden_layers=3)
    options = EngineOptions(
        model=str(folder),
        speculation=SpeculationOptions(
            speculative="draft", draft_model="first-layers:2", draft_quantization="int8"
        ),
    )
    loaded = load_with_draft(options, open_model_files(str(folder), report=print), CPU)
    assert loaded.draft.model.spec.num_layers == 2
    assert loaded.draft.model.vocabulary is not loaded.model.vocabulary


@pytest.mark.parametrize("name", ["first-layers:4", "first-layers:0", "first-layers:two"])
def test_not_as_many_layers_as_the_model_has(served, name):
    with pytest.raises(ConfigurationError, match="must be from 1 to 3, as the model has 4"):
        served(name)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"vocab_size": 62}, "vocabulary of 62 tokens, the model one of 61"),
        ({"max_position_embeddings": 32}, "made for 32 tokens, requests may have 64"),
    ],
)
def test_a_model_that_cannot_draft_for_this_one_is_refused(served, saved, changes, message):
    with pytest.raises(ConfigurationError, match=message):
        served(str(saved("other", **changes)))


def test_a_model_of_other_heads_drafts_where_each_layer_has_a_tensor(served, saved):
    options, files, loaded = served(str(saved("other", num_attention_heads=2)))
    layers = plan_runner(options, files, loaded).config.layers
    assert [layer.key_size for layer in layers] == [16, 16, 16, 16, 32]


def test_lists_of_layers_are_cut():
    config = {
        "num_hidden_layers": 3,
        "layer_types": ["a", "b", "c"],
        "architectures": ["X"],
        "text_config": {"num_hidden_layers": 2, "layer_types": ["a", "b"]},
    }
    assert first_layers_config(config, 1) == {
        "num_hidden_layers": 1,
        "layer_types": ["a"],
        "architectures": ["X"],
        "text_config": {"num_hidden_layers": 1, "layer_types": ["a"]},
    }


def test_blocks_on_disk_are_those_of_both_models(served):
    """Another draft model finds none of them."""
    keys = set()
    for name in ("first-layers:1", "first-layers:2"):
        options, files, loaded = served(name)
        config = plan_runner(options, files, loaded).config
        keys.add(store_key(options, files, loaded, config))
    assert len(keys) == 2


@pytest.fixture
def head(tmp_path):
    """(options) -> a folder with an EAGLE-3 head."""

    def save(**options):
        folder, config = tmp_path / "head", head_config(SHAPE, draft_vocab_size=30, **options)
        folder.mkdir(exist_ok=True)
        (folder / "config.json").write_text(json.dumps(config))
        save_file(head_tensors(config), folder / "model.safetensors")
        return str(folder)

    return save


STATES = {"eagle_aux_hidden_state_layer_ids": [1, 2, 3]}


def test_a_head_is_loaded_beside_its_target_and_its_layer_counted(served, head):
    options, files, loaded = served(head(**STATES), speculative="eagle")
    assert loaded.draft.model.state_layers == (2, 3, 4)
    plan = plan_runner(options, files, loaded)
    assert len(plan.config.layers) == 4 + 1
    assert plan.scheduler.num_lookahead_slots == 3
    key = store_key(options, files, loaded, plan.config)
    other = served(head(**STATES, rope_theta=7.0), speculative="eagle")
    assert key != store_key(*other, plan.config)


@pytest.mark.parametrize(
    ("models", "given", "heads"),
    [
        ("auto", None, "float32"),
        ("int4", None, "int8"),
        ("auto", "int8", "int8"),
        ("int4", "none", "float32"),
    ],
)
def test_a_head_has_few_bits_if_asked_to_and_beside_a_model_of_few(
    tmp_path, head, models, given, heads
):
    file = tmp_path / "shape.json"
    file.write_text(json.dumps(SHAPE))
    options = options_for(file, head(**STATES), speculative="eagle", draft_quantization=given)
    options = dataclasses.replace(options, quantization=models)
    loaded = load_with_draft(options, ConfigOnly(file), CPU)
    sizes = loaded.draft.ops.weight_packing(torch.float32).bytes_by_format()
    assert heads in max(sizes, key=lambda name: sizes[name])


def test_a_head_need_not_be_batch_invariant_on_a_gpu(tmp_path, head, monkeypatch):
    """As no token depends on it; the model is."""
    for module, is_invariant in ((model, True), (draft_model, False)):
        ops = TritonOperations(CPU, batch_invariant=is_invariant)
        monkeypatch.setattr(module, "select_operations", lambda *_, made=ops, **__: made)
    file = tmp_path / "shape.json"
    file.write_text(json.dumps(SHAPE))
    options = options_for(file, head(**STATES), speculative="eagle")
    loaded = load_with_draft(options, ConfigOnly(file), CPU)
    assert loaded.ops.name == f"{loaded.draft.ops.name}-batch-invariant"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"vocab_size": 62}, "vocabulary of 62 tokens, the model one of 61"),
        ({"target_hidden_size": 32}, "states of 32, the model's have 64; name an EAGLE-3 head"),
        ({"num_hidden_layers": 3}, "heads of 3 layers .* or use --speculative draft"),
    ],
)
def test_a_head_of_another_model_is_refused(served, head, options, message):
    with pytest.raises(ConfigurationError, match=message):
        served(head(**STATES | options), speculative="eagle")


def test_a_head_is_no_draft_model_and_a_model_no_head(served, head, saved):
    with pytest.raises(ConfigurationError, match="is an EAGLE-3 head; use --speculative eagle"):
        served(head(**STATES))
    with pytest.raises(ConfigurationError, match="name an EAGLE-3 head"):
        served(str(saved("other")), speculative="eagle")


@pytest.fixture
def checkpoint(tmp_path):
    """(with its head, options) -> options, files and the model of a checkpoint."""

    def load(has_head, **options):
        reference = reference_model("qwen3.5")
        tensors = reference.state_dict() | (PublishedMTP(reference).tensors if has_head else {})
        folder = tmp_path / "checkpoint"
        reference.config.save_pretrained(folder)
        config = json.loads((folder / "config.json").read_text())
        config["architectures"] = ["Qwen3_5ForCausalLM"]
        (folder / "config.json").write_text(json.dumps(config))
        save_file(
            {name: each.contiguous() for name, each in tensors.items()}, folder / "a.safetensors"
        )
        speculation = SpeculationOptions(speculative="mtp", num_speculative_tokens=3)
        options = EngineOptions(model=str(folder), speculation=speculation, **options)
        files = open_model_files(str(folder), report=print)
        return options, files, load_with_draft(options, files, CPU)

    return load


def test_a_models_own_head_is_loaded_and_its_layer_joins_those_with_keys(checkpoint):
    plan = plan_runner(*checkpoint(True))
    groups = [group.layers for group in plan.config.layout.groups]
    assert (2, 4) in groups  # the one with attention of four, and the head's
    assert plan.scheduler.num_lookahead_slots == 3


def test_a_checkpoint_with_images_serves_text_beside_its_own_head(checkpoint):
    options, files, loaded = checkpoint(True)
    files.config["vision_config"] = {}
    text_alone = with_encoder(options, files, loaded)
    assert text_alone.encoder is None
    assert text_alone.why_text == "--speculative mtp makes drafts for text alone"


def test_a_checkpoint_without_a_head_of_its_own_is_refused(checkpoint):
    message = r"mtp: .*checkpoint: it has no tensors mtp.* and no .*4.*; use --speculative ngram"
    with pytest.raises(ConfigurationError, match=message):
        checkpoint(False)
    with pytest.raises(ConfigurationError, match="--load-format dummy has none; omit it"):
        checkpoint(True, load_format="dummy")
