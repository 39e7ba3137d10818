"""Texts of models that take more: read from the folder of the whole, compared with the whole."""

import json

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from engine_core.model_files import open_model_files
from engine_core.models.errors import UnsupportedArchitecture
from engine_core.models.registry import read_model_config
from engine_core.models.text_part import _PLAIN, _SIZES, TEXT_OF, text_part, text_tensor
from engine_core.options.engine import EngineOptions
from engine_core.options.multimodal import MultiModalOptions
from engine_core.startup.model import load_any_model
from engine_core.startup.multimodal import with_encoder
from tests.engine_core.models.tiny_wholes import OWN, REFUSED, THROUGH_TRANSFORMERS, make_whole

PROMPT = [5, 9, 7, 30, 44, 61, 3, 8, 90, 17, 18]
NEW = 10


def load(path, **more):
    options = EngineOptions(model=str(path), dtype="float32", **more)
    files = open_model_files(str(path), report=print)
    return with_encoder(options, files, load_any_model(options, files, torch.device("cpu")))


def answer_of(whole):
    """Greedy tokens of `generate`."""
    with torch.inference_mode():
        tokens = whole.generate(
            torch.tensor([PROMPT]), do_sample=False, max_new_tokens=NEW, min_new_tokens=NEW
        )
    return tokens[0].tolist()


def assert_answers(loaded, whole, paged_logits):
    tokens = answer_of(whole)
    (logits,) = paged_logits(loaded.model, [tokens[:-1]], on=loaded.ops)
    allowed = logits[len(PROMPT) - 1 :].clone()
    allowed[:, whole.generation_config.eos_token_id] = -torch.inf  # of min_new_tokens
    assert allowed.argmax(-1).tolist() == tokens[len(PROMPT) :]
    with torch.inference_mode():
        expected = whole(input_ids=torch.tensor([tokens[:-1]])).logits[0]
    scale = getattr(whole.config.text_config, "logit_scale", 1.0)  # Aya Vision's class has it not
    assert (logits - scale * expected).abs().max() < 1e-4


@pytest.mark.parametrize("ops", ["torch"], indirect=True)
@pytest.mark.parametrize("stem", [*OWN, *THROUGH_TRANSFORMERS])
def test_the_text_of_a_model_is_run_whatever_is_around_it(stem, tmp_path, paged_logits):
    whole = make_whole(stem, (OWN | THROUGH_TRANSFORMERS)[stem])
    whole.save_pretrained(tmp_path)
    loaded = load(tmp_path, multimodal=MultiModalOptions(language_model_only=True))
    assert loaded.model_impl == ("native" if stem in OWN else "transformers")
    assert (loaded.encoder, loaded.why_text) == (None, "--language-model-only")
    assert_answers(loaded, whole, paged_logits)


def test_experts_with_inputs_first_are_those_of_the_model(tmp_path, paged_logits):
    """As Qwen3-VL is published."""
    whole = make_whole("Qwen3VLMoe", OWN["Qwen3VLMoe"])
    whole.save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    for name, tensor in tensors.items():
        if ".mlp.experts." in name:
            tensors[name] = tensor.transpose(1, 2).contiguous()
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    assert_answers(load(tmp_path), whole, paged_logits)


def test_qwen3_asr_is_read_as_it_is_published(tmp_path, paged_logits):
    """By the names that transformers' own converter takes."""
    whole = make_whole("Qwen3ASR", OWN["Qwen3ASR"])
    whole.save_pretrained(tmp_path / "hf")
    whole.save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    texts = {"model_type": "qwen3_asr_text", "rope_scaling": {"mrope_section": [2, 1, 1],
             "mrope_interleaved": True, "rope_type": "default", "type": "default"}}  # fmt: skip
    thinker = {
        "audio_config": config.pop("audio_config") | {"model_type": "qwen3_asr_audio_encoder"},
        "text_config": config.pop("text_config") | texts,
        "audio_token_id": config.pop("audio_token_id"),
    }
    published = {**config, "thinker_config": thinker}
    (tmp_path / "config.json").write_text(json.dumps(published))
    names = {
        "model.language_model.": "thinker.model.", "lm_head.": "thinker.lm_head.",
        "model.multi_modal_projector.linear_": "thinker.audio_tower.proj", "model.": "thinker.",
    }  # fmt: skip
    tensors = {}
    for name, tensor in load_file(tmp_path / "model.safetensors").items():
        prefix = next(each for each in names if name.startswith(each))
        tensors[names[prefix] + name.removeprefix(prefix)] = tensor
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    loaded, other = load(tmp_path), load(tmp_path / "hf")
    assert_answers(loaded, whole, paged_logits)
    sound = {
        "input_features": torch.randn(1, 16, 200).numpy(),
        "input_features_mask": (torch.arange(200) < 170).int()[None].numpy(),
    }
    assert torch.equal(loaded.encoder.encode(sound), other.encoder.encode(sound))
    assert loaded.encoder.family.num_rows("audio", sound) == 13 + 9


@pytest.mark.parametrize(
    ("stem", "why"),
    [
        ("Gemma3", None),
        ("Gemma4", "the model has no vision_config"),
        ("Llava", "vision_feature_select_strategy 'default' of a 'pixtral' is not supported"),
    ],
)
def test_without_an_encoder_of_ours_prompts_are_text(stem, why, tmp_path, caplog):
    make_whole(stem, OWN[stem]).save_pretrained(tmp_path)
    caplog.set_level("INFO")
    loaded = load(tmp_path)
    lines = [line for line in caplog.messages if line.startswith("prompts are text: ")]
    assert (loaded.encoder is None) == (why is not None)
    assert len(lines) == (why is not None) and all(f"prompts are text: {why}" in x for x in lines)


@pytest.mark.parametrize(
    ("stem", "message"),
    [
        ("Mistral3", "glm_image_text is not a model of transformers' kind CausalLM"),
        ("PaliGemma", "gemma attends in both directions"),
    ],
)
def test_a_text_that_is_not_run_is_refused_by_its_own_name(stem, message, tmp_path):
    make_whole(stem, REFUSED[stem]).save_pretrained(tmp_path)
    with pytest.raises(UnsupportedArchitecture, match=message):
        load(tmp_path)


def test_a_prefix_model_is_one_without_saying_so():
    config = {"model_type": "paligemma", "text_config": {"model_type": "gemma3_text"}}
    assert text_part(config)["use_bidirectional_attention"] is True
    with pytest.raises(UnsupportedArchitecture, match="in both directions"):
        read_model_config(config)


def test_the_names_of_a_whole_say_nothing_of_its_text():
    config = {"architectures": ["MadeUp"], "llm_config": {"model_type": "made_up_text"}}
    with pytest.raises(UnsupportedArchitecture, match=r"'made_up_text' \(the text of MadeUp\) has"):
        read_model_config(config)


@pytest.mark.parametrize(
    ("tied", "heads", "is_tied"),
    [(True, ["language_model.lm_head.weight"], False), (False, [], True)],
)
def test_the_files_say_whether_the_head_is_tied(tied, heads, is_tied, tmp_path):
    """Defaults of the whole's class and of the text's differ."""
    text = {"model_type": "qwen2", "tie_word_embeddings": tied}
    names = ["language_model.model.norm.weight", "talker.lm_head.weight", *heads]
    save_file({name: torch.ones(1) for name in names}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps({"text_config": text}))
    config = open_model_files(str(tmp_path), report=print).config
    assert text_part(config)["tie_word_embeddings"] is is_tied


@pytest.mark.parametrize("whole", TEXT_OF)
def test_a_text_without_a_type_is_of_the_type_of_transformers(whole):
    theirs = transformers.AutoConfig.for_model(whole).text_config.model_type
    text = text_part({"model_type": whole, "text_config": {}})
    assert text["model_type"] == _PLAIN.get(theirs, (theirs,))[0]


@pytest.mark.parametrize("kind", _SIZES)
def test_sizes_that_are_left_out_are_those_of_transformers(kind):
    theirs = transformers.AutoConfig.for_model(kind)
    assert {name: getattr(theirs, name) for name in _SIZES[kind]} == _SIZES[kind]


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("thinker.model.layers.0.mlp.up_proj.weight", "model.layers.0.mlp.up_proj.weight"),
        ("thinker.lm_head.weight", "lm_head.weight"),
        ("model.language_model.norm.weight", "model.norm.weight"),
        ("language_model.embed_tokens.weight", "model.embed_tokens.weight"),
        ("model.text_model.norm.weight", "model.norm.weight"),
        ("mtp.layers.0.norm.weight", "mtp.layers.0.norm.weight"),
        ("thinker.visual.norm.weight", None),
        ("talker.model.layers.0.mlp.up_proj.weight", None),
        ("model.vision_tower.layers.0.norm.weight", None),
        ("vision_language_adapter.weight", None),
    ],
)
def test_tensors_of_the_text_are_known_by_their_first_part(name, text):
    assert text_tensor(name) == text
