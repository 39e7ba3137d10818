"""Real daemons for tests: tiny random models, and SmolLM2-135M-Instruct where a test needs it."""

import functools
import sys
from pathlib import Path
from unittest import mock

import pytest

sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture(scope="session")
def tiny_llama(tmp_path_factory):
    """A folder with a random Llama of 97 tokens and no tokenizer."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("tiny-llama")
    config = LlamaConfig(
        vocab_size=97,
        hidden_size=48,
        intermediate_size=96,
        num_hidden_layers=3,
        num_attention_heads=6,
        num_key_value_heads=2,
        max_position_embeddings=256,
        eos_token_id=96,
        bos_token_id=0,
        initializer_range=0.3,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def smollm2():
    """The path of SmolLM2-135M-Instruct's GGUF file, fetched if it is not here yet."""
    from engine_core.model_files import open_model_files

    return open_model_files("smollm2-135m-instruct", report=print).path


@pytest.fixture(scope="session")
def read_by_transformers():
    """Call it with a GGUF file and a class of transformers (AutoModelForCausalLM, AutoTokenizer).
    gguf looks at hundreds of thousands of tokens one by one, each time, and makes the table of
    tensors' names for every module: here once, in memory."""
    import gguf
    import numpy as np

    def read(path, kind, **options):
        in_memory = mock.patch.object(np, "memmap", lambda path, **_: np.fromfile(path, np.uint8))
        with mock.patch.multiple(gguf, **once), in_memory:
            return kind.from_pretrained(path.parent, gguf_file=path.name, **options)

    names = ("GGUFReader", "get_tensor_name_map")
    once = {name: functools.cache(getattr(gguf, name)) for name in names}
    return read


@pytest.fixture(scope="session")
def logits_by_transformers(read_by_transformers):
    """Call it with a GGUF file for a function of a prompt and further tokens, tuples of ids: the
    logits of the next token after the prompt and after each of these but the last, in fp32."""
    import torch
    from transformers import AutoModelForCausalLM

    def of_file(path):
        model = read_by_transformers(path, AutoModelForCausalLM, dtype=torch.float32).eval()

        @functools.cache
        def next_logits(prompt, tokens):
            with torch.inference_mode():
                ids = torch.tensor([prompt + tokens])
                return model(ids, logits_to_keep=len(tokens) + 1).logits[0, :-1]

        return next_logits

    return of_file
