"""Model folders with heads and pooling files, through start-up, against transformers' own classes
and sentence-transformers' rules."""

import json

import numpy as np
import pytest
import safetensors.torch
import torch
import transformers
from engine_loop import EngineLoop, make_scheduler
from runners import runner_config

from engine_core.errors import ConfigurationError, StartupError
from engine_core.model_runner.cpu.runner import CPUModelRunner
from engine_core.options.engine import EngineOptions
from engine_core.options.pooling import PoolingOptions
from engine_core.startup.before_torch import open_model
from engine_core.startup.model import load_any_model
from protocol.pooling import POOLING_SAMPLING, PoolingParams, PoolingTask

CPU = torch.device("cpu")
SHAPE = {
    "vocab_size": 131,
    "hidden_size": 36,
    "intermediate_size": 50,
    "num_hidden_layers": 2,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "max_position_embeddings": 64,
    "initializer_range": 0.3,
    "head_dim": 8,
    "pad_token_id": 0,
}
CONFIGS = {
    "llama": transformers.LlamaConfig,
    "qwen2": transformers.Qwen2Config,
    "qwen3": transformers.Qwen3Config,
    "mistral": transformers.MistralConfig,
    "gemma3": transformers.Gemma3TextConfig,
}
PROMPT = [9, 40, 77, 3, 120, 5, 63]
EMBED, CLASSIFY, SCORE = PoolingTask.EMBED, PoolingTask.CLASSIFY, PoolingTask.SCORE


def saved(folder, auto, family="llama", seed=0, **more):
    """A tiny model of transformers' `auto` class, in this folder."""
    shape = {**SHAPE, "head_dim": 4} if family == "qwen2" else SHAPE
    config = CONFIGS[family](**shape, **more)
    torch.manual_seed(seed)
    model = auto.from_config(config, attn_implementation="eager").eval()
    model.save_pretrained(folder)
    return model


def load(folder, **pooling):
    options = EngineOptions(model=str(folder), dtype="float32", pooling=PoolingOptions(**pooling))
    opened = open_model(options)
    return opened.files, load_any_model(options, opened.files, CPU)


def answer(loaded, params, prompt=PROMPT):
    config = runner_config(loaded.model, loaded.ops, pooler=loaded.pooler)
    runner = CPUModelRunner(config)
    sizes = {"num_blocks": 150, "num_host_blocks": 0, "swap": False}
    sizes |= {"max_num_seqs": 8, "max_model_len": 64, "max_num_batched_tokens": 4}
    loop = EngineLoop(make_scheduler(config.layout, **sizes), runner, depth=1)
    params = params if isinstance(params, PoolingParams) else PoolingParams(task=params)
    loaded.pooler.config.check(params, len(prompt))
    whole = loaded.pooler.config.needs_all_states(params)
    more = {"pooling_params": params, "pools_all_states": whole}
    loop.add("r", prompt, POOLING_SAMPLING, **more)
    loop.finish()
    pooled = loop.pooled["r"]
    return torch.from_numpy(np.frombuffer(pooled.data, "<f4").reshape(pooled.shape).copy())


def assert_close(found, wanted):
    torch.testing.assert_close(found, wanted, atol=1e-4, rtol=1e-4)


@torch.inference_mode()
def last_states(model):
    body = getattr(model, "model", model)
    return body(torch.tensor([PROMPT])).last_hidden_state[0]


@pytest.mark.parametrize("family", CONFIGS)
def test_sequence_classification_has_the_labels_of_transformers(tmp_path, family):
    auto = transformers.AutoModelForSequenceClassification
    model = saved(tmp_path, auto, family, num_labels=3)
    files, loaded = load(tmp_path)
    assert not files.generates
    assert PoolingTask.SCORE not in loaded.pooler.config.tasks
    with torch.inference_mode():
        logits = model(torch.tensor([PROMPT])).logits[0]
    assert_close(answer(loaded, CLASSIFY), logits.softmax(-1))
    assert_close(answer(loaded, PoolingParams(task=CLASSIFY, use_activation=False)), logits)


@pytest.mark.parametrize(
    ("more", "activation"),
    [
        ({"num_labels": 1}, torch.sigmoid),
        ({"num_labels": 1, "problem_type": "regression"}, lambda x: x),
        ({"num_labels": 3, "problem_type": "multi_label_classification"}, torch.sigmoid),
        ({"num_labels": 3, "problem_type": "single_label_classification"}, lambda x: x.softmax(-1)),
    ],
)
def test_labels_pass_the_function_of_the_problem_type(tmp_path, more, activation):
    model = saved(tmp_path, transformers.AutoModelForSequenceClassification, **more)
    _, loaded = load(tmp_path)
    with torch.inference_mode():
        wanted = activation(model(torch.tensor([PROMPT])).logits[0])
    assert_close(answer(loaded, SCORE if more["num_labels"] == 1 else CLASSIFY), wanted)


@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_a_body_without_head_embeds_and_generates_nothing(tmp_path, family):
    model = saved(tmp_path, transformers.AutoModel, family)
    files, loaded = load(tmp_path)
    assert (files.generates, loaded.pooler.config.tasks[0]) == (False, EMBED)
    wanted = torch.nn.functional.normalize(last_states(model)[-1], dim=0)
    assert_close(answer(loaded, EMBED), wanted)


def test_a_model_for_text_embeds_beside_it_or_instead_of_it(tmp_path):
    model = saved(tmp_path, transformers.AutoModelForCausalLM)
    files, loaded = load(tmp_path)
    assert (files.generates, loaded.pooler) == (True, None)
    for options, generates in (({"convert": "embed"}, True), ({"runner": "pooling"}, False)):
        pooler = '{"pooling_type": "MEAN", "use_activation": false}'
        files, loaded = load(tmp_path, pooler_config=pooler, **options)
        assert files.generates is generates
        assert_close(answer(loaded, EMBED), last_states(model).mean(0))


@pytest.mark.parametrize(("kind", "num_labels"), [("Reward", 1), ("ProcessReward", 2)])
def test_reward_models_label_each_token_or_each_step(tmp_path, kind, num_labels):
    """The head is two layers; steps end at a token of their own."""
    model = saved(tmp_path, transformers.AutoModel, "qwen2")
    first, second = torch.nn.Linear(36, 36), torch.nn.Linear(36, num_labels)
    tensors = {f"model.{name}": tensor for name, tensor in model.state_dict().items()}
    for number, layer in ((0, first), (2, second)):
        for name, tensor in layer.state_dict().items():
            tensors[f"score.{number}.{name}"] = tensor
    safetensors.torch.save_file(tensors, tmp_path / "model.safetensors")
    change(tmp_path / "config.json", architectures=[f"Qwen2For{kind}Model"])
    _, loaded = load(tmp_path, pooler_config='{"step_tag_id": 77}' if num_labels == 2 else None)
    assert loaded.pooler.config.tasks == (PoolingTask.TOKEN_CLASSIFY,)
    with torch.inference_mode():
        logits = second(first(last_states(model)).relu())
    wanted = logits.sigmoid() if num_labels == 1 else logits[[2]].softmax(-1)
    assert_close(answer(loaded, PoolingTask.TOKEN_CLASSIFY), wanted)


def change(file, **fields):
    config = json.loads(file.read_text()) if file.exists() else {}
    file.write_text(json.dumps(config | fields))


def sentence_model(folder, pooling, *kinds):
    """sentence-transformers' files beside a model's own; `kinds` of modules behind pooling."""
    names = ["Transformer", "Pooling", *kinds]
    modules = [
        {"idx": at, "name": str(at), "path": "" if not at else f"{at}_{name}",
         "type": f"sentence_transformers.models.{name}"}
        for at, name in enumerate(names)
    ]  # fmt: skip
    (folder / "modules.json").write_text(json.dumps(modules))
    for module in modules[1:]:
        (folder / module["path"]).mkdir()
    change(folder / "1_Pooling" / "config.json", **pooling)
    return folder


def test_sentence_transformers_files_say_how_to_pool(tmp_path):
    """Mean, a dense layer with tanh, length 1; Matryoshka dimensions of the config; prompts."""
    model = saved(tmp_path, transformers.AutoModel, "qwen3")
    pooling = {"pooling_mode_cls_token": False, "pooling_mode_mean_tokens": True}
    sentence_model(tmp_path, pooling, "Dense", "Normalize")
    change(
        tmp_path / "2_Dense" / "config.json", activation_function="torch.nn.modules.activation.Tanh"
    )
    weight = torch.randn(12, 36) / 6
    safetensors.torch.save_file(
        {"linear.weight": weight}, tmp_path / "2_Dense" / "model.safetensors"
    )
    change(tmp_path / "config_sentence_transformers.json", prompts={"query": "Q: "})
    change(tmp_path / "tokenizer_config.json", model_max_length=48)
    change(tmp_path / "config.json", matryoshka_dimensions=[4, 8])
    files, loaded = load(tmp_path)
    assert (files.modules.prompts, files.modules.max_seq_length) == ({"query": "Q: "}, 48)
    change(tmp_path / "sentence_bert_config.json", max_seq_length=32)
    assert load(tmp_path)[0].modules.max_seq_length == 32
    vector = (last_states(model).mean(0) @ weight.T).tanh()
    assert_close(answer(loaded, EMBED), torch.nn.functional.normalize(vector, dim=0))
    cut = PoolingParams(task=EMBED, dimensions=8)
    assert_close(answer(loaded, cut), torch.nn.functional.normalize(vector[:8], dim=0))
    with pytest.raises(
        ValueError, match="dimensions is 5, this model's vectors may be cut to 4, 8"
    ):
        answer(loaded, PoolingParams(task=EMBED, dimensions=5))


def test_a_reranker_made_of_a_model_for_text_scores_as_its_two_tokens(tmp_path):
    """As Qwen3-Reranker: the softmax of "no" and "yes" behind the prompt."""
    model = saved(tmp_path, transformers.AutoModelForCausalLM, "qwen3", tie_word_embeddings=True)
    vocab = {f"t{number}": number for number in range(131)} | {"no": 20, "yes": 30}
    tokenizer = {"version": "1.0", "added_tokens": [], "normalizer": None, "pre_tokenizer": None,
                 "post_processor": None, "decoder": None, "truncation": None, "padding": None,
                 "model": {"type": "WordLevel", "vocab": vocab, "unk_token": "t0"}}  # fmt: skip
    (tmp_path / "tokenizer.json").write_text(json.dumps(tokenizer))
    overrides = {
        "architectures": ["Qwen3ForSequenceClassification"],
        "classifier_from_token": ["no", "yes"],
        "is_original_qwen3_reranker": True,
    }
    _, loaded = load(tmp_path, hf_overrides=json.dumps(overrides))
    with torch.inference_mode():
        two = model(torch.tensor([PROMPT])).logits[0, -1, [20, 30]].softmax(-1)
    assert_close(answer(loaded, SCORE), two[1:])


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"convert": "classify"}, StartupError, "no head to classify with.*classifier_from_token"),
        ({"runner": "pooling", "convert": "none"}, ConfigurationError, "serves nothing; omit it"),
        ({"pooler_config": '{"step_tag_id": "x"}'}, ConfigurationError, "Expected `int`"),
        ({"pooler_config": '{"returned_token_ids": [1]}'}, ConfigurationError, "has 0 labels"),
        ({"hf_overrides": '[]'}, ConfigurationError, "Expected `object`, got `array`"),
        ({"pooler_config": "{"}, ConfigurationError, "--pooler-config is not JSON"),
        ({"pooler_config": '{"normalize": true}'}, ConfigurationError, "normalize is not"),
        ({"pooler_config": '{"pooling_type": "MAX"}'}, ConfigurationError, "there is LAST, MEAN"),
        ({"hf_overrides": '{"hidden_size": 4}'}, ConfigurationError, "hidden_size is not"),
    ],
)  # fmt: skip
def test_what_cannot_be_pooled_ends_the_start_by_name(tmp_path, options, error, words):
    saved(tmp_path, transformers.AutoModelForCausalLM)
    with pytest.raises(error, match=words):
        load(tmp_path, **{"convert": "embed"} | options)


def test_modules_that_are_not_known_end_the_start_by_name(tmp_path):
    saved(tmp_path, transformers.AutoModel)
    (tmp_path / "modules.json").write_text('{"a": 1}')
    with pytest.raises(StartupError, match="transformers: not a list of modules: Expected `array`"):
        load(tmp_path)
    sentence_model(tmp_path, {"pooling_mode_lasttoken": True}, "WeightedLayerPooling")
    with pytest.raises(StartupError, match="module WeightedLayerPooling of sentence-transformers"):
        load(tmp_path)
    change(tmp_path / "1_Pooling" / "config.json", pooling_mode_max_tokens=True)
    (tmp_path / "modules.json").write_text(
        (tmp_path / "modules.json").read_text().replace("WeightedLayerPooling", "Normalize")
    )
    with pytest.raises(StartupError, match="pooling by lasttoken and max_tokens is not supported"):
        load(tmp_path)
