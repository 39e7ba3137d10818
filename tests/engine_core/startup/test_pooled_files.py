"""Which architectures have a head for text, and how wide hidden states are, by any spelling."""

from pathlib import Path
from types import SimpleNamespace

import pytest

from engine_core.models.config_names import SPELLINGS, size_in
from engine_core.options.pooling import PoolingOptions
from engine_core.startup.pooled_files import PooledFiles

LENGTH = "max_position_embeddings"


def pooled(architecture, **config):
    files = SimpleNamespace(
        name="m", path=Path("m"), generation_config={}, weight_files=(), given_tokenizer=None,
        mmproj=None,
        quantised_types=frozenset(), config={"architectures": [architecture], **config},
    )  # fmt: skip
    return PooledFiles(files, PoolingOptions(), None)


@pytest.mark.parametrize(
    "architecture",
    [
        "GPT2LMHeadModel", "GPT2DoubleHeadsModel", "OpenAIGPTLMHeadModel", "XLMWithLMHeadModel",
        "MarianMTModel", "LlamaForCausalLM", "T5ForConditionalGeneration",
    ],
)  # fmt: skip
def test_a_model_with_a_head_for_text_generates_whatever_its_name_ends_in(architecture):
    assert pooled(architecture).generates
    assert pooled(architecture).convert == "none"


@pytest.mark.parametrize("architecture", ["GPT2Model", "Qwen3Model", "BertModel"])
def test_a_model_without_a_head_is_pooled(architecture):
    assert not pooled(architecture).generates


@pytest.mark.parametrize("spelling", SPELLINGS["hidden_size"])
def test_hidden_states_are_as_wide_as_the_config_says_by_any_name(spelling):
    model = SimpleNamespace(spec=SimpleNamespace(hidden_size=20))
    assert pooled("GPT2Model", **{spelling: 36}).pooler(model).config.hidden_size == 36
    inner = {"text_config": {spelling: 36}, "hidden_size": 7}
    assert pooled("GPT2Model", **inner).pooler(model).config.hidden_size == 36
    assert pooled("GPT2Model").pooler(model).config.hidden_size == 20


def test_sizes_that_are_none_are_not_there():
    assert size_in({"n_positions": 128, "max_position_embeddings": None}, LENGTH) == 128
    for wrong in (0, -1, True, "128", [128], 1.5):
        assert size_in({"n_positions": wrong}, LENGTH) is None
