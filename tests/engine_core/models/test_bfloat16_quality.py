"""Log-probabilities of a text in native bfloat16: as near to float32 as transformers' bfloat16."""

from pathlib import Path

import pytest
import torch
import transformers
from tokenizers import Tokenizer

from engine_core.model_files import open_model_files
from engine_core.options.engine import EngineOptions
from scripts.quality.measurement import LoadedFormat
from tests.native_kernels import native_library_or_skip

MOST_OF_TRANSFORMERS_DISTANCE = 1.5


@pytest.fixture(scope="module", autouse=True)
def native():
    native_library_or_skip()
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


def of_text(logits_TV, tokens):
    """The log-probability of each token but the first, given those before it."""
    return logits_TV[:-1].double().log_softmax(-1)[range(len(tokens) - 1), tokens[1:]]


@torch.inference_mode()
def distances(model, path, tokens, *options):
    """How far our bfloat16, and transformers', lie from `model`, transformers' in float32."""
    exact = of_text(model(torch.tensor([tokens])).logits[0], tokens)
    theirs = of_text(model.to(torch.bfloat16)(torch.tensor([tokens])).logits[0], tokens)
    options = EngineOptions(model=str(path), dtype="bfloat16", num_threads=2)
    ours_in = LoadedFormat(options, max_tokens=len(tokens))
    ours = of_text(ours_in.compute_logits(ours_in.forward(tokens)), tokens)
    return [float((found - exact).abs().mean()) for found in (ours, theirs)]


def test_a_random_model_is_no_farther_from_float32_than_transformers(tmp_path):
    shape = {"vocab_size": 257, "hidden_size": 128, "intermediate_size": 300, "head_dim": 32}
    shape |= {"num_hidden_layers": 6, "num_attention_heads": 4, "num_key_value_heads": 2}
    torch.manual_seed(0)
    config = transformers.LlamaConfig(**shape, initializer_range=0.1)
    model = transformers.LlamaForCausalLM(config).to(torch.bfloat16)
    model.save_pretrained(tmp_path)
    tokens = torch.randint(257, (400,)).tolist()
    ours, theirs = distances(model.float().eval(), tmp_path, tokens)
    assert 0 < ours <= MOST_OF_TRANSFORMERS_DISTANCE * theirs


@pytest.mark.slow
def test_a_real_model_is_no_farther_from_float32_than_transformers():
    """Measured: 0.46 of transformers' distance; of Gemma-3-270M 0.36."""
    files = open_model_files("smollm2-135m-instruct", report=print)
    config = transformers.AutoConfig.for_model(**files.config)
    model = transformers.MODEL_FOR_CAUSAL_LM_MAPPING[type(config)].from_pretrained(
        None,
        config=config,
        state_dict=dict(files.tensors()),
        dtype=torch.float32,
    )
    text = (Path(__file__).parents[3] / "LICENSE").read_text()
    tokenizer = Tokenizer.from_str(files.tokenizer().tokenizer_json.decode())
    tokens = tokenizer.encode(" ".join(text.split())).ids[:192]
    ours, theirs = distances(model.eval(), files.path, tokens)
    assert 0 < ours <= MOST_OF_TRANSFORMERS_DISTANCE * theirs
