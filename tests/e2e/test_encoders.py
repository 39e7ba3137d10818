"""Encoders as a user runs them: a real one, a cross-encoder, and a folder with vocab.txt alone."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers
from daemons import running_daemon

from engine_core.model_files import open_model_files
from frontend import LLM, PoolingParams

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

AWKWARD = ["", "a", "Grüße: naïve café", "世界你好", "مرحبا", "🎉🎉", "a\tb\n\nc", "[CLS] x [SEP]"]
AWKWARD += ["word " * number for number in (14, 15, 62, 63, 253, 254, 255, 600)]


@pytest.fixture(scope="module")
def minilm():
    return open_model_files("all-minilm-l6-v2", report=print).path


def texts():
    """Sentences of this project's licence, and awkward ones."""
    words = (Path(__file__).parents[2] / "LICENSE").read_text().split()
    return [" ".join(words[at : at + at % 40 + 2]) for at in range(0, 400, 17)] + AWKWARD


def vectors(outputs):
    return torch.tensor([output.outputs.embedding for output in outputs])


def test_a_real_models_vectors_are_those_of_its_authors_recipe(minilm):
    """Tokenised, run and pooled by transformers: the mean of at most 256 tokens, of length 1. There
    are no blocks: proves S131, S176."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(minilm)
    model = transformers.BertModel.from_pretrained(minilm).eval()
    expected = []
    with torch.inference_mode():
        for text in texts():
            ids = tokenizer(text, truncation=True, max_length=256, return_tensors="pt")
            mean = model(**ids).last_hidden_state[0].mean(0)
            expected.append(mean / mean.norm())
    with running_daemon("all-minilm-l6-v2") as daemon, LLM(address=daemon.address) as llm:
        cut = PoolingParams(truncate_prompt_tokens=-1)
        found = vectors(llm.embed(texts(), cut, use_tqdm=False))
        assert daemon.ready["max_model_len"] == 256 and daemon.ready["num_blocks"] == 0
        command = [sys.executable, "-m", "frontend.cli", "embed", "a", "--address", daemon.address]
        line = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert ((found * torch.stack(expected)).sum(1) > 0.99999).all()
    torch.testing.assert_close(found, torch.stack(expected), atol=1e-4, rtol=0)
    assert np.allclose(json.loads(line), found[texts().index("a")], atol=1e-6)


def test_a_cross_encoder_and_a_tokenizer_made_of_its_vocabulary(minilm, tmp_path):
    tokenizer = transformers.AutoTokenizer.from_pretrained(minilm)
    torch.manual_seed(0)
    config = transformers.BertConfig(
        vocab_size=len(tokenizer),
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=64,
        num_labels=1,
        initializer_range=0.3,
    )
    model = transformers.BertForSequenceClassification(config).eval()
    model.save_pretrained(tmp_path)
    by_id = sorted(tokenizer.get_vocab(), key=tokenizer.get_vocab().get)
    (tmp_path / "vocab.txt").write_text("\n".join(by_id) + "\n")
    query, documents = "Who may copy this?", [text for text in texts() if len(text) < 1000]
    with torch.inference_mode():
        expected = [
            float(model(**tokenizer([query], [text], return_tensors="pt")).logits.sigmoid())
            for text in documents
        ]
    with running_daemon(tmp_path) as daemon, LLM(address=daemon.address) as llm:
        found = [each.outputs.score for each in llm.score(query, documents, use_tqdm=False)]
    wrong = [
        text for text, a, b in zip(documents, found, expected, strict=True) if abs(a - b) > 1e-4
    ]
    assert not wrong
    assert np.ptp(expected) > 0.2
